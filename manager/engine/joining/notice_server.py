"""Where the nodes' agents tell the manager of notices: the manager's end of ``manager.notices.line``.

VMs get Morph's own wheel at the same port, and their certificates, where the run's Ray is encrypted.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from manager.controller.state.events import NoticeGiven, NoticeWithdrawn, WorkerLost
from manager.engine.loop.event_queue import EventQueue
from manager.journal.records import Fact
from manager.notices.line import Handshake, Lines
from manager.notices.watch import Given, Trouble, Withdrawn
from manager.providers.boot.first_boot import MAX_WHY_CHARACTERS
from morph.contract.proof import new_secret
from morph.contract.vm_names import MAX_DEVICES, vm_of, workers_of
from morph.runtime.groups.listener import HELLO_TIMEOUT_S, Caller, Listener

if TYPE_CHECKING:
    from manager.engine.joining.enrolment_desk import EnrolmentDesk

SILENT_S = 30.0
SEND_TIMEOUT_S = 60.0


class NoticeServer:
    """Listens for agents; notices go to ``event_queue`` as events, recommendations and troubles as facts.

    An agent speaks for its VM: a notice is told of each of the VM's workers.

    Args:
        event_queue: Where they go.
        secret: Shared with the nodes; whoever does not prove it is sent away.
        host: Address to listen on.
        port: 0: any free one.
        desk: Signs for VMs that ask for a certificate; None: they are sent away.
        wheel: Morph's own, for VMs that boot.
    """

    def __init__(
        self,
        event_queue: EventQueue,
        secret: str,
        host: str = "127.0.0.1",
        port: int = 0,
        desk: EnrolmentDesk | None = None,
        wheel: bytes = b"",
    ) -> None:
        self._event_queue = event_queue
        self._desk, self._wheel = desk, wheel
        self._unfit: set[tuple[str, str]] = set()
        self._secret = secret
        self._lines: dict[str, Lines] = {}
        self._lock = threading.Lock()
        self._listener = Listener.at(host, port, self._serve, "morph-notices")
        self.host, self.port = self._listener.address

    def left(self, worker: str, notice: str) -> bool:
        """Tell a worker's VM that nothing of value is left on it, so that it acknowledges; False: it is not there."""
        with self._lock:
            lines = self._lines.get(vm_of(worker))
        if lines is None:
            return False
        try:
            lines.write(left=notice)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Listen no more, and send everybody away."""
        self._listener.close()

    def _serve(self, caller: Caller) -> None:
        """Hear one agent, until it is gone or silent (it comes again if it can), or sign for one node."""
        lines, nonce = Lines(caller.connection), new_secret()
        lines.write(nonce=nonce)
        hello = lines.read(HELLO_TIMEOUT_S)
        if self._desk is not None and "request" in hello:
            self._desk.serve(lines, nonce, hello, caller.source)
            return
        handshake = self._greeted(nonce, hello)
        caller.known()
        node, workers = handshake.node, workers_of(handshake.node, handshake.num_devices)
        lines.seal(handshake.key, "manager", "agent")
        lines.write(welcome=True)
        with self._lock:
            before, self._lines[node] = self._lines.get(node), lines
        if before is not None:
            before.close()
        try:
            while True:
                line = lines.read(SILENT_S)
                if line.get("kind") == "wheel":
                    lines.write(bytes=len(self._wheel))
                    lines.write_bytes(self._wheel, SEND_TIMEOUT_S)
                    continue
                self._take(node, workers, line)
                lines.write(heard=True)
        finally:
            with self._lock:
                if self._lines.get(node) is lines:
                    del self._lines[node]

    def _greeted(self, nonce: str, hello: dict[str, Any]) -> Handshake:
        """Return which VM speaks, with how many devices."""
        handshake = Handshake(self._secret, nonce, hello["fresh"], hello["node"], hello["devices"])
        fit = all(isinstance(part, str) for part in (handshake.fresh, handshake.node, hello["proof"]))
        number = handshake.num_devices
        is_number = isinstance(number, int) and not isinstance(number, bool) and 1 <= number <= MAX_DEVICES
        if not (fit and is_number and handshake.is_proven(hello["proof"])):
            raise ConnectionError("not one of ours")
        return handshake

    def _take_unfit(self, node: str, workers: tuple[str, ...], why: str) -> None:
        """Give up a VM that booted and cannot be used; it says so until it is ended, for its grant may come later."""
        with self._lock:
            is_new = (node, why) not in self._unfit
            self._unfit.add((node, why))
        if is_new:
            self._event_queue.put(Fact(name="vm_unfit", worker=node, detail=why))
        for worker in workers:
            self._event_queue.put(WorkerLost(worker=worker, cause=why, unfit=True))

    def _take(self, node: str, workers: tuple[str, ...], line: dict[str, Any]) -> None:
        kind = line.pop("kind")
        if kind == "given":
            given = Given.model_validate(line)
            if given.certain:
                for worker in workers:
                    self._event_queue.put(NoticeGiven(worker=worker, lead_s=given.lead_s or 0.0, notice=given.notice))
            else:
                self._event_queue.put(Fact(name="notice_recommended", worker=node, detail=given.notice))
        elif kind == "withdrawn":
            withdrawn = Withdrawn.model_validate(line)
            self._event_queue.put(Fact(name="notice_withdrawn", worker=node, detail=withdrawn.notice))
            if withdrawn.certain:
                for worker in workers:
                    self._event_queue.put(NoticeWithdrawn(worker=worker))
        elif kind == "unfit":
            self._take_unfit(node, workers, str(line["why"])[:MAX_WHY_CHARACTERS])
        elif kind == "trouble":
            trouble = Trouble.model_validate(line)
            self._event_queue.put(
                Fact(name="notice_trouble", worker=node, detail=f"{trouble.source}: {trouble.sentence}")
            )
