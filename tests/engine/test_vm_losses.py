"""The workers of a VM that is lost are told of together."""

from __future__ import annotations

from collections import deque

from manager.controller.events import StopRequested, Tick, WorkerLost
from manager.engine.inbox import Stamped
from manager.engine.vm_losses import GATHER_S, with_its_vm
from morph.contract.vm_names import workers_of

KNOWN = (*workers_of("a", 3), *workers_of("b", 2), "c")


def lost(worker: str) -> WorkerLost:
    return WorkerLost(worker=worker, cause="its connection closed")


class Line:
    """What comes, and after how many seconds."""

    def __init__(self, *coming: tuple[float, object]) -> None:
        self.coming, self.now_s = deque(coming), 0.0

    def take(self, wait_s: float) -> Stamped | None:
        if not self.coming or self.coming[0][0] > wait_s:
            self.now_s += wait_s
            return None
        after_s, item = self.coming.popleft()
        self.now_s += after_s
        return Stamped(self.now_s, item)  # type: ignore[arg-type]

    def gather(self, first: WorkerLost) -> tuple[tuple[str, ...], list[object]]:
        event, others = with_its_vm(first, KNOWN, self.take, lambda: self.now_s)
        assert event.cause == first.cause
        return event.workers, [stamped.item for stamped in others]


def test_all_workers_of_a_vm_are_lost_in_one_event_and_nobody_waits_for_more() -> None:
    line = Line((0.01, lost("a.d2")), (0.02, lost("a.d1")), (0.0, Tick()))
    assert line.gather(lost("a.d0")) == (("a.d0", "a.d2", "a.d1"), [])
    assert line.now_s == 0.03
    assert len(line.coming) == 1


def test_what_else_comes_meanwhile_is_kept_in_its_order() -> None:
    other, stop = lost("b.d0"), StopRequested(reason="enough")
    line = Line((0.0, other), (0.01, lost("a.d1")), (0.01, stop), (0.01, lost("a.d2")))
    assert line.gather(lost("a.d0")) == (("a.d0", "a.d1", "a.d2"), [other, stop])


def test_a_worker_that_died_alone_is_told_of_after_a_bounded_time() -> None:
    line = Line((0.1, Tick()), (0.1, Tick()), (0.1, lost("a.d1")))
    assert line.gather(lost("a.d0")) == (("a.d0",), [Tick(), Tick()])
    assert line.now_s == GATHER_S


def test_the_only_worker_of_a_vm_is_waited_for_by_nobody() -> None:
    line = Line((0.0, lost("a.d0")))
    assert line.gather(lost("c")) == (("c",), [])
    assert line.now_s == 0.0
    assert len(line.coming) == 1
