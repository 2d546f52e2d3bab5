"""Compute times in the live loop: one event per interval, while no other event waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from manager.controller.state.events import ComputeTimesSeen, WorkerAnswered
from manager.engine.loop import driver as driver_module
from manager.engine.loop.driver import Observed
from manager.journal.replay import replay
from morph.contract.timeline import MicroBatchTimes
from tests.engine.driver_scene import Run


def seconds(generation: int) -> MicroBatchTimes:
    return MicroBatchTimes(generation=generation, forward_s=(1.0,), recompute_s=(0.0,), backward_s=(2.0,))


def note_times(run: Run) -> None:
    """Let heartbeats of both workers bring times whenever a step is decided."""

    def react(observed: Observed) -> None:
        if isinstance(observed.event, WorkerAnswered):
            for worker in ("vm0", "vm1"):
                run.event_queue.paces.add(worker, seconds(observed.decision.state.generation))

    run.react = react


@pytest.mark.slow
def test_compute_times_reach_the_controller_as_one_event_an_interval(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "TIMES_EVERY_S", 0.0)
    monkeypatch.setattr(driver_module, "TIMES_PATIENCE_S", 0.0)
    # otherwise a look that the machine delayed would delay the next one
    monkeypatch.setattr(driver_module, "TIMES_SHARE", 1.0)
    run = make_run(num_steps=100)
    note_times(run)
    run.driver.run()
    seen = [observed.event for observed in run.observed if isinstance(observed.event, ComputeTimesSeen)]
    assert len(seen) > 2
    assert all([times.worker for times in event.times] == ["vm0", "vm1"] for event in seen)
    assert replay(run.journal) == run.driver.state


def test_compute_times_wait_while_anything_else_does(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "TIMES_EVERY_S", 0.0)
    run = make_run()
    run.event_queue.paces.add("vm0", seconds(1))
    run.driver._hand_on_times()
    assert run.observed == []
    while run.event_queue.get(0.0):
        pass
    run.driver._hand_on_times()
    assert [type(observed.event) for observed in run.observed] == [ComputeTimesSeen]


def test_compute_times_of_many_workers_come_less_often(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    run = make_run()
    while run.event_queue.get(0.0):
        pass
    monkeypatch.setattr(driver_module.time, "monotonic", lambda: clock[0])
    run.driver._times_at_s = clock[0]

    def be_slow(_: Observed) -> None:
        clock[0] += 0.5

    run.react = be_slow
    for wait_s, num_told in ((0.0, 1), (9.0, 1), (1.0, 2)):
        clock[0] += wait_s
        run.event_queue.paces.add("vm0", seconds(1))
        run.driver._hand_on_times()
        assert len(run.observed) == num_told
