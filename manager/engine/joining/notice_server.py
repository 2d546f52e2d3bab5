"""Handles the messages that nodes send to the manager of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from manager.controller.state.events import NoticeGiven, NoticeWithdrawn, WorkerLost
from manager.engine.loop.event_queue import EventQueue
from manager.journal.records import Fact
from manager.notices.server import CallingNode, VmServer
from manager.notices.watch import Given, Trouble, Withdrawn
from manager.providers.boot.first_boot import MAX_WHY_CHARACTERS
from morph.contract.vm_names import vm_of, workers_of

if TYPE_CHECKING:
    from manager.engine.joining.enrolment_desk import EnrolmentDesk


class NoticeServer(VmServer):
    """Listens for agents; notices go to ``event_queue`` as events, and recommendations and failures as facts.

    An agent speaks for its VM: a notice is reported for each of the VM's workers. ``secret``, ``port``: see
    ``VmServer``. ``desk``: signs certificates for VMs if Ray's traffic is encrypted; None: such requests are refused.
    ``wheel``: Morph's wheel, for VMs that boot. ``lock``: makes the list of packages for booting VMs that lack some.
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
        super().__init__(secret, host, port, {"wheel": wheel, "lock": lock})

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

    def _take(self, caller: CallingNode, message: dict[str, Any]) -> dict[str, Any]:
        node, kind = caller.node, message.pop("kind")
        workers = workers_of(node, caller.num_devices)
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
            return self._desk.answer(node, message.get("request"), caller.address)
        elif kind != "beat":
            raise ConnectionError(f"no node sends a message of kind {kind!r}")
        return {}
