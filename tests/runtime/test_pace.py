"""Times of micro-batches that a worker collects for the next heartbeat."""

from __future__ import annotations

from morph.contract.timeline import MicroBatchTimes
from morph.runtime.step.stopwatch import MOST_KEPT, Pace


def test_noted_times_are_collected_once_with_their_parts() -> None:
    pace = Pace()
    pace.note(3, 1.0, 0.5, 2.0)
    pace.note(3, 1.1, 0.0, 2.1)
    assert pace.collect() == MicroBatchTimes(
        generation=3, forward_s=(1.0, 1.1), recompute_s=(0.5, 0.0), backward_s=(2.0, 2.1)
    )
    assert pace.collect() is None


def test_without_collection_only_the_newest_micro_batches_are_kept() -> None:
    pace = Pace()
    for number in range(10 * MOST_KEPT):
        pace.note(1, float(number), 0.0, 0.0)
    found = pace.collect()
    assert found is not None
    assert found.forward_s == tuple(map(float, range(9 * MOST_KEPT, 10 * MOST_KEPT)))


def test_times_of_an_older_generation_are_dropped() -> None:
    pace = Pace()
    pace.note(1, 9.0, 9.0, 9.0)
    pace.note(2, 1.0, 0.0, 2.0)
    assert pace.collect() == MicroBatchTimes(generation=2, forward_s=(1.0,), recompute_s=(0.0,), backward_s=(2.0,))
