"""Tasks of a device that works through a queue are timed by its events, not by the duration of their launch."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from morph.contract.errors import WaitTimeout
from morph.contract.timeline import MicroBatchTimes
from morph.runtime.device.task_clock import CoreTimes, EventClock, HostClock, TaskClock, clock_of, core_clock, linger
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.step.executor import Executor
from morph.runtime.step.schedule_cursor import Task
from morph.runtime.step.stopwatch import MOST_KEPT, Pace, Stopwatch
from tests.runtime.queued_device import QueuedDevice, QueuedEvent
from tests.runtime.test_executor import COUNT, FakeStage, Wire, first_stage, run
from tests.waiting import BOUND_S

FORWARD, RECOMPUTE, BACKWARD = 40.0, 40.0, 80.0
TICKS = {"F": FORWARD, "R": RECOMPUTE, "B": BACKWARD}


def step_of(device: QueuedDevice, clock: TaskClock, slowness: float = 1.0) -> tuple[Pace, Stopwatch]:
    """Run a step of a first stage whose neighbour answers at once, on a device that is slower by this factor."""
    pace, watch = Pace(), Stopwatch(clock)
    watch.finished = partial(pace.note, 1)
    out, back = Wire(instant=True), Wire(instant=True)
    stage = FakeStage(lambda task: device.launch(slowness * TICKS[task]))

    def begin(executor: Executor) -> None:
        executor.stopwatch = watch

    run("varuna", 0, stage, first_stage(out, back), lambda: None, begin)
    return pace, watch


def median_s(pace: Pace) -> float:
    """Return the median of forward and backward in seconds, as the manager judges them."""
    times = pace.collect()
    return statistics.median(f + b for f, b in zip(times.forward_s, times.backward_s, strict=True))


def test_a_slow_device_is_found_by_its_time_not_by_launches() -> None:
    found_s = []
    for slowness in (1.0, 1.0, 1.5):
        device = QueuedDevice()
        pace, _ = step_of(device, EventClock(device.recorded), slowness)
        found_s.append(median_s(pace))
    assert found_s == [pytest.approx(0.12), pytest.approx(0.12), pytest.approx(0.18)]


def test_forwards_that_a_backward_runs_again_do_not_make_a_device_look_slow() -> None:
    device, pace = QueuedDevice(), Pace()
    watch = Stopwatch(EventClock(device.recorded))
    watch.finished, watch.in_groups = partial(pace.note, 1), True
    ticks = {"F": FORWARD, "R": FORWARD / 4, "B": BACKWARD + 3 * FORWARD / 4}  # the last of four groups is in R

    def begin(executor: Executor) -> None:
        executor.stopwatch = watch

    stage = FakeStage(lambda task: device.launch(ticks[task]))
    run("varuna", 0, stage, first_stage(Wire(instant=True), Wire(instant=True)), lambda: None, begin)
    assert median_s(pace) == pytest.approx(0.12)
    assert watch.times().backward_s == pytest.approx(COUNT * ticks["B"] / 1e3)


def test_the_host_waits_once_per_step_and_every_task_is_counted() -> None:
    device = QueuedDevice()
    times = step_of(device, EventClock(device.recorded))[1].times()
    assert device.synced == 1
    assert times.forward_s == pytest.approx(
        COUNT * FORWARD / 1e3, abs=0.0011
    )  # the first task is launched on an idle device
    assert times.backward_s == pytest.approx(COUNT * BACKWARD / 1e3)
    assert times.wait_s == 0.0


def test_a_timeline_has_tasks_where_the_device_did_them() -> None:
    device = QueuedDevice()
    device.launch(25.0, host_ticks=0.0)  # the step before is applied
    watch = Stopwatch(EventClock(device.recorded), recording=True)
    for task in (Task.FORWARD, Task.RECOMPUTE, Task.BACKWARD):
        start = watch.mark()
        device.launch(TICKS[task.value], host_ticks=0.0)
        watch.task_given(task, 0, start)
    watch.settle(Interrupt(1))
    assert [span.kind for span in watch.spans] == ["forward", "recompute", "backward"]
    assert [span.end_s - span.start_s for span in watch.spans] == pytest.approx([0.04, 0.04, 0.08])
    for before, after in itertools.pairwise(watch.spans):
        assert after.start_s == pytest.approx(before.end_s)


def test_a_wait_counts_as_long_as_the_device_stands_idle() -> None:
    device = QueuedDevice()
    watch = Stopwatch(EventClock(device.recorded))
    device.launch(30.0)
    start = watch.mark()
    device.now += 20.0  # the host waits, and the device works
    watch.stood("wait", start)
    start = watch.mark()
    device.now += 60.0  # it works for 10 of these
    watch.stood("wait", start)
    watch.settle(Interrupt(1))
    assert watch.spent_s["wait"] == pytest.approx(0.05)


def test_reductions_count_as_far_as_the_device_has_nothing_to_do_meanwhile() -> None:
    device = QueuedDevice()
    watch = Stopwatch(EventClock(device.recorded))
    device.launch(30.0, host_ticks=0.0)
    start = watch.mark()
    device.now += 45.0
    watch.stood("reduce", start)
    watch.settle(Interrupt(1))
    assert watch.times().reduce_s == pytest.approx(0.015)


def test_a_micro_batch_is_reported_only_when_the_device_has_finished_it() -> None:
    device = QueuedDevice()
    watch, told = Stopwatch(EventClock(device.recorded)), []
    watch.finished = lambda *times: told.append(times)
    for task, ticks in ((Task.FORWARD, 40.0), (Task.BACKWARD, 80.0)):
        start = watch.mark()
        device.launch(ticks, host_ticks=0.0)
        watch.task_given(task, 3, start)
    assert (told, device.synced) == ([], 0)
    device.now += 120.0
    watch.stood("wait", watch.mark())
    assert told == [(pytest.approx(0.04), 0.0, pytest.approx(0.08), None)]
    assert device.synced == 0


def test_a_slow_task_lingers_for_its_own_work_not_earlier_queued_work(monkeypatch: pytest.MonkeyPatch) -> None:
    device, slept_s = QueuedDevice(), []
    monkeypatch.setattr("morph.runtime.device.task_clock.time", SimpleNamespace(sleep=slept_s.append))
    clock = EventClock(device.recorded)
    device.launch(500.0)
    start = clock.mark()
    device.launch(FORWARD, host_ticks=0.0)
    linger(clock, start, 1.5)
    assert slept_s == [pytest.approx(0.5 * FORWARD / 1e3)]


def test_a_processor_is_timed_by_the_host_and_another_device_by_its_events() -> None:
    clock = clock_of(torch.device("cpu"))
    start = clock.mark()
    end = clock.mark()
    assert clock.is_over(end)
    assert clock.seconds(start, end) == end - start >= 0.0
    assert isinstance(clock_of(torch.device("cuda")), EventClock)


def told_of_tasks(in_groups: bool, *tasks: tuple[Task, CoreTimes]) -> MicroBatchTimes | None:
    """Return what a worker reports of one micro-batch with these tasks on a processor."""
    watch, pace = Stopwatch(HostClock()), Pace()
    watch.finished, watch.in_groups = partial(pace.note, 1), in_groups
    for task, cores in tasks:
        watch.task_given(task, 0, watch.mark(), cores)
    return pace.collect()


@pytest.mark.parametrize(("in_groups", "queued_s"), [(False, 0.5), (True, 0.6)])
def test_a_micro_batch_is_reported_with_its_wait_for_cores(in_groups: bool, queued_s: float) -> None:
    tasks = [(Task.FORWARD, 0.2), (Task.RECOMPUTE, 0.3), (Task.BACKWARD, 0.3)]
    told = told_of_tasks(in_groups, *((task, CoreTimes(2 * waited_s, waited_s)) for task, waited_s in tasks))
    assert (told.queued_s, told.processor_s) == ((queued_s,), (2 * queued_s,))
    silent = told_of_tasks(in_groups, *((task, CoreTimes(waited_s, None)) for task, waited_s in tasks))
    assert silent.queued_s == ()


def test_the_clock_of_cores_counts_neither_sleep_nor_what_the_kernel_does_not_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with core_clock() as core_times:
        begun, begun_s = core_times(), time.perf_counter()
        threading.Event().wait(0.2)
        spent, whole_s = core_times().since(begun), time.perf_counter() - begun_s
    assert spent.processor_s + (spent.queued_s or 0.0) <= whole_s - 0.15
    monkeypatch.setattr("morph.runtime.device.task_clock.os.open", lambda *_: (_ for _ in ()).throw(OSError()))
    with core_clock() as core_times:
        assert core_times().queued_s is None


def test_a_device_that_hangs_is_not_waited_for_without_a_bound() -> None:
    released = threading.Event()

    class Hanging(QueuedEvent):
        """An event that is never reached."""

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            released.wait(BOUND_S)

    device = QueuedDevice()
    watch = Stopwatch(EventClock(lambda: Hanging(device, 1.0)))
    with pytest.raises(WaitTimeout, match="the device to finish its work"):
        watch.settle(Interrupt(1, limit_s=0.01))
    released.set()


def test_noted_times_of_the_newest_generation_are_collected_once() -> None:
    pace = Pace()
    pace.note(2, 9.0, 9.0, 9.0)
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
    assert found.forward_s == tuple(map(float, range(9 * MOST_KEPT, 10 * MOST_KEPT)))
