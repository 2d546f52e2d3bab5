"""The server that nodes call: the manager's end of ``manager.notices.call``, and the files for booting VMs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from manager.controller.state.events import NoticeGiven, NoticeWithdrawn, WorkerLost
from manager.engine.loop.event_queue import EventQueue
from manager.journal.records import Fact
from manager.notices.call import AGENT, ROLES
from manager.notices.watch import Given, Trouble, Withdrawn
from manager.providers.boot.first_boot import MAX_WHY_CHARACTERS
from morph.contract.vm_names import MAX_DEVICES, is_name, vm_of, workers_of
from morph.link.authority import credential_of
from morph.link.listener import HELLO_TIMEOUT_S, Caller, Listener
from morph.link.session import LinkSession
from morph.link.wire import Wire

if TYPE_CHECKING:
    from manager.engine.joining.enrolment_desk import EnrolmentDesk

SILENT_S = 30.0
SEND_TIMEOUT_S = 60.0


class NoticeServer:
    """Listens for nodes; notices go to ``event_queue`` as events, and recommendations and failures as facts.

    An agent speaks for its VM: a notice is reported for each of the VM's workers. The nodes' credential is derived from
    ``secret``; callers without it are refused. ``port``: 0: any free one. ``desk``: signs certificates for VMs if Ray's
    traffic is encrypted; None: such requests are refused. ``wheel``: Morph's wheel, for VMs that boot. ``lock``: makes
    the list of packages for booting VMs that lack some.
    """

    def __init__(
        self,
        event_queue: EventQueue,
        secret: str,
        host: str = "127.0.0.1",
        port: int = 0,
        desk: EnrolmentDesk | None = None,
        wheel: bytes = b"",
        lock: Callable[[], bytes] = lambda: b"",
    ) -> None:
        self._event_queue, self._desk = event_queue, desk
        self._unfit: set[tuple[str, str]] = set()
        self._credential = credential_of(secret)
        self._files: dict[str, bytes | Callable[[], bytes]] = {"wheel": wheel, "lock": lock}
        self._agents: dict[str, LinkSession] = {}
        self._lock = threading.Lock()
        self._listener = Listener.at(host, port, self._serve, "morph-notices")
        self.host, self.port = self._listener.address

    def close(self) -> None:
        """Stop listening, and disconnect all nodes."""
        self._listener.close()

    def left(self, worker: str, notice: str) -> bool:
        """Tell a worker's VM that it holds nothing of value, so that it acknowledges; False: it is not connected."""
        with self._lock:
            session = self._agents.get(vm_of(worker))
        if session is None:
            return False
        try:
            session.tell({"left": notice})
        except OSError:
            return False
        return True

    def _take_unfit(self, node: str, workers: tuple[str, ...], why: str) -> None:
        """Give up a VM that booted but cannot be used; it repeats this until it is ended: its grant may come later."""
        with self._lock:
            is_new = (node, why) not in self._unfit
            self._unfit.add((node, why))
        if is_new:
            self._event_queue.put(Fact(name="vm_unfit", worker=node, detail=why))
        for worker in workers:
            self._event_queue.put(WorkerLost(worker=worker, cause=why, unfit=True))

    def _serve(self, caller: Caller) -> None:
        """Serve one node, until it is gone or silent; an agent connects again if it can."""
        session = LinkSession(caller.connection, Wire(self._credential, listens=True))
        name, num_devices, role = session.welcome(3, HELLO_TIMEOUT_S)
        if not is_name(name.partition("/")[0]):  # the name is journalled, and shown to a user
            raise ConnectionError("no node has such a name")
        if role not in ROLES or not 1 <= int(num_devices) <= MAX_DEVICES:
            raise ConnectionError("the caller breaks the protocol")
        caller.known()
        session.let_in()
        if role == AGENT:
            with self._lock:
                before, self._agents[name] = self._agents.get(name), session
            if before is not None:
                before.close()
        try:
            while True:
                message = session.hear(SILENT_S)
                answer = self._files.get(str(message.get("kind")))
                if callable(answer):
                    answer = answer()
                if answer is None:
                    content = self._take(name, int(num_devices), caller.source, message)
                    answer = json.dumps({"heard": True, **content}).encode()
                session.send(answer, SEND_TIMEOUT_S)
        finally:
            with self._lock:
                if self._agents.get(name) is session:
                    del self._agents[name]

    def _take(self, node: str, num_devices: int, address: str, message: dict[str, Any]) -> dict[str, Any]:
        """Handle a message of the node that calls itself ``node``, from ``address``; return the answer's content.

        A ValueError ends the session.
        """
        kind, workers = message.pop("kind"), workers_of(node, num_devices)
        if kind == "given":
            given = Given.model_validate(message)
            if given.certain:
                for worker in workers:
                    self._event_queue.put(NoticeGiven(worker=worker, lead_s=given.lead_s or 0.0, notice=given.notice))
            else:
                self._event_queue.put(Fact(name="notice_recommended", worker=node, detail=given.notice))
        elif kind == "withdrawn":
            withdrawn = Withdrawn.model_validate(message)
            self._event_queue.put(Fact(name="notice_withdrawn", worker=node, detail=withdrawn.notice))
            if withdrawn.certain:
                for worker in workers:
                    self._event_queue.put(NoticeWithdrawn(worker=worker))
        elif kind == "unfit":
            self._take_unfit(node, workers, str(message["why"])[:MAX_WHY_CHARACTERS])
        elif kind == "trouble":
            trouble = Trouble.model_validate(message)
            self._event_queue.put(
                Fact(name="notice_trouble", worker=node, detail=f"{trouble.source}: {trouble.sentence}")
            )
        elif kind == "certificate" and self._desk is not None:
            return self._desk.answer(node, message.get("request"), address)
        elif kind != "beat":
            raise ConnectionError(f"no node sends a message of kind {kind!r}")
        return {}
