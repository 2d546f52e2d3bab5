"""Compute times on their way from heartbeats to the controller."""

from __future__ import annotations

from manager.controller.state.events import ComputeTimesSeen, WorkerTimes
from manager.engine.loop.event_queue import MOST_KEPT, Paces
from morph.contract.timeline import MicroBatchTimes


def times(generation: int, *forward_s: float) -> MicroBatchTimes:
    return MicroBatchTimes(
        generation=generation,
        forward_s=forward_s,
        recompute_s=tuple(50.0 for _ in forward_s),
        backward_s=tuple(2.0 for _ in forward_s),
        queued_s=tuple(each / 2 for each in forward_s),
    )


def test_all_heartbeats_of_an_interval_make_one_event_without_recompute() -> None:
    paces = Paces()
    paces.add("a", times(1, 1.0))
    paces.add("b", times(1, 2.0))
    paces.add("a", times(1, 3.0))
    assert paces.take() == ComputeTimesSeen(
        times=(
            WorkerTimes(worker="a", generation=1, compute_s=(3.0, 5.0), queued_s=(0.5, 1.5)),
            WorkerTimes(worker="b", generation=1, compute_s=(4.0,), queued_s=(1.0,)),
        )
    )
    assert paces.take() is None


def test_a_new_generation_begins_anew() -> None:
    paces = Paces()
    paces.add("a", times(1, 1.0))
    paces.add("a", times(2, 2.0))
    seen = WorkerTimes(worker="a", generation=2, compute_s=(4.0,), queued_s=(1.0,))
    assert paces.take() == ComputeTimesSeen(times=(seen,))


def test_uncollected_times_stay_bounded() -> None:
    paces = Paces()
    for number in range(10 * MOST_KEPT):
        paces.add("a", times(1, float(number)))
    seen = paces.take()
    assert len(seen.times[0].compute_s) == MOST_KEPT
    assert len(seen.times[0].queued_s) == MOST_KEPT
    assert seen.times[0].compute_s[-1] == 10 * MOST_KEPT + 1.0
