"""One stage with scripted neighbours: tasks that it runs ahead, its memory, and transfers, which delay no compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from morph.contract.plan import Plan, Schedule
from morph.cutting.cuts.cut_model import BoundaryTensor
from morph.runtime.device.links import HostLink
from morph.runtime.groups.channels import Channel, Pending
from morph.runtime.groups.faults import FaultPlan
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.step.executor import Executor
from morph.runtime.step.generation import Links, StageWork
from morph.runtime.step.stage import Stage
from morph.runtime.step.sums import Rings, StepSums
from simulator import plan, synthetic_profile

DEPTH, COUNT = 4, 16
SCHEDULES: tuple[Schedule, ...] = ("varuna", "gpipe", "1f1b")
BORDER = (BoundaryTensor("hidden", (3,), torch.float32, requires_grad=True),)


class Transfer(Pending):
    """A transfer that is done when the script says so."""

    def __init__(self) -> None:
        self.done = False
        self.done_at_s = 0.0

    def wait(self, what: str, timeout_s: float = 0.0) -> float:
        self.done = True  # only flush waits for transfers: the step is over
        return 0.0


class Wire(Channel):
    """One direction; with ``instant``, everything that is posted arrives at once."""

    def __init__(self, *, instant: bool = False) -> None:
        self.instant = instant
        self.started = 0
        self.under_way: deque[Transfer] = deque()

    def transfer(self, tensor: Tensor) -> Pending:
        tensor.zero_()
        self.started += 1
        transfer = Transfer()
        self.under_way.append(transfer)
        if self.instant:
            self.complete()
        return transfer

    def complete(self) -> None:
        self.under_way.popleft().done = True


class FakeStage(Stage):
    """A stage without computation, which records its tasks, and calls ``watch`` at each."""

    def __init__(self, watch: Callable[[str], None] = lambda task: None, *, recompute: bool = True) -> None:
        self._recompute = recompute
        self._watch = watch
        self._stored = {}
        self._runs = {}
        self.ran: list[str] = []

    def _run_now(self, task: str) -> None:
        self.ran.append(task)
        self._watch(task)

    def forward(self, micro_batch: int, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self._run_now("F")
        if self._recompute:
            self._stored[micro_batch] = tuple(inputs)
        else:
            self._runs[micro_batch] = []
        return (torch.zeros(()),)

    def recompute(self, micro_batch: int) -> None:
        self._run_now("R")
        del self._stored[micro_batch]
        self._runs[micro_batch] = []

    def backward(self, micro_batch: int, output_gradients: object, add: object) -> tuple[Tensor | None, ...]:
        self._run_now("B")
        del self._runs[micro_batch]
        return (torch.zeros(3),)


class Script(Interrupt):
    """Replaces blocking: lets the neighbours act one after another until the stage can continue."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__(1)
        self._act = act

    def wait_for(self, ready: Callable[[], bool], what: str, timeout_s: float | None = None) -> float:
        for _ in range(100):
            if ready():
                return 0.0
            self._act()
        raise AssertionError(f"stands still, waiting for {what}")

    def call(self, work: Callable[[], Any], what: str, timeout_s: float | None = None) -> Any:
        return work()


def no_sums() -> StepSums:
    """Return the sums of a worker without units."""
    rings = Rings({}, frozenset(), range(9), lambda _: None, Interrupt(1), FaultPlan([]))
    return StepSums({}, range(0), range(COUNT), COUNT, 0, rings)


@lru_cache(maxsize=64)
def planned(schedule: Schedule, recompute: bool) -> Plan:
    profile = synthetic_profile(num_sections=DEPTH, batch_size=COUNT, micro_batch_sizes=(1,), latency_s=0.001)
    return plan(
        profile,
        num_gpus=DEPTH,
        pipeline_depth=DEPTH,
        num_replicas=1,
        schedule=schedule,
        micro_batch_size=1,
        recompute=recompute,
    ).best


def run(
    schedule: Schedule,
    stage_index: int,
    stage: FakeStage,
    links: Links,
    act: Callable[[], None],
    begin: Callable[[Executor], None] = lambda executor: None,
) -> Executor:
    best = planned(schedule, stage._recompute)
    work = StageWork(
        micro_batches=range(COUNT),
        order=best.orders[COUNT][stage_index],
        window=best.stages[stage_index].window,
        opportunistic=schedule == "varuna",
        inputs=BORDER if links[0] else (),
        outputs=BORDER,
        links=links,
    )
    executor = Executor(stage, work, Script(act), FaultPlan([]), torch.device("cpu"))
    begin(executor)
    executor.run(no_sums())
    executor.finish()
    if schedule != "varuna":
        assert "".join(stage.ran) == work.order
    assert sorted(stage.ran) == sorted("FRB" * COUNT if stage._recompute else "FB" * COUNT)
    return executor


def first_stage(out: Wire, back: Wire) -> Links:
    return None, None, HostLink(out), HostLink(back)


def last_stage(into: Wire, back: Wire) -> Links:
    return HostLink(into), HostLink(back), None, None


@pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "stored"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_fast_stage_runs_ahead_by_no_more_than_its_window(schedule: Schedule, recompute: bool) -> None:
    out, back = Wire(), Wire()
    ahead: list[int] = []

    def slow_neighbour() -> None:
        """Take one activation and give one gradient, only when the stage can do nothing more."""
        ahead.append(stage.ran.count("F") - stage.ran.count("B"))
        out.complete()
        back.complete()

    stage = FakeStage(recompute=recompute)
    executor = run(schedule, 0, stage, first_stage(out, back), slow_neighbour)
    best = planned(schedule, recompute)
    window, peaks = best.stages[0].window, executor.peaks
    assert window < COUNT or schedule == "gpipe"
    assert len(ahead) >= COUNT - window
    assert max(ahead) == peaks.in_flight
    assert peaks.unsent_activations <= window
    assert peaks.in_flight == window
    assert peaks.live_graphs == (1 if recompute else window)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_unsent_gradients_are_bounded_by_the_previous_stages_window(schedule: Schedule) -> None:
    stage, into, back = FakeStage(recompute=schedule == "gpipe"), Wire(), Wire()
    window = planned(schedule, stage._recompute).stages[DEPTH - 2].window
    sent = taken = 0

    def neighbour_with_a_full_window() -> None:
        """Take a gradient only when a full window prevents the neighbour from sending more."""
        nonlocal sent, taken
        if into.under_way and sent - taken < window:
            into.complete()
            sent += 1
        else:
            back.complete()
            taken += 1

    executor = run(schedule, DEPTH - 1, stage, last_stage(into, back), neighbour_with_a_full_window)
    assert sent == COUNT
    assert 0 < executor.peaks.unsent_gradients <= window


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_receiver_has_room_for_two_micro_batches_however_fast_they_come(schedule: Schedule) -> None:
    into, back = Wire(instant=True), Wire()

    def watch(task: str) -> None:
        assert into.started - stage.ran.count("F") <= 2

    stage = FakeStage(watch, recompute=schedule == "gpipe")
    executor = run(schedule, DEPTH - 1, stage, last_stage(into, back), lambda: pytest.fail("nothing is late"))
    assert executor.peaks.untaken_activations == 2
    assert executor.peaks.in_flight == planned(schedule, stage._recompute).stages[-1].window


def test_sends_in_progress_do_not_hold_up_the_next_forward() -> None:
    out, back = Wire(), Wire()
    seen: list[tuple[int, int]] = []

    def watch(task: str) -> None:
        if task == "F":
            seen.append((out.started, len(out.under_way)))

    def neighbour() -> None:
        assert len(out.under_way) >= COUNT - stage.ran.count("B") - 1
        out.complete()
        back.complete()

    stage = FakeStage(watch)
    executor = run("gpipe", 0, stage, first_stage(out, back), neighbour)
    # each forward ran while all earlier sends were under way
    assert seen == [(number, number) for number in range(COUNT)]
    assert executor.peaks.unsent_activations == COUNT


def test_gradients_on_their_way_hold_up_neither_the_next_backward_nor_the_reductions() -> None:
    into, back = Wire(instant=True), Wire()
    stage, links = FakeStage(recompute=False), last_stage(into, back)
    work = StageWork(range(COUNT), planned("1f1b", False).orders[COUNT][-1], 1, False, BORDER, BORDER, links)
    interrupt = Script(lambda: pytest.fail("nothing is late"))
    executor = Executor(stage, work, interrupt, FaultPlan([]), torch.device("cpu"))
    executor.run(no_sums())
    assert "".join(stage.ran) == "FB" * COUNT
    assert executor.peaks.unsent_gradients == len(back.under_way) == COUNT
    assert not any(transfer.done for transfer in back.under_way)
    executor.finish()
    assert all(transfer.done for transfer in back.under_way)


def test_the_next_activation_travels_while_this_one_is_computed() -> None:
    into, back = Wire(), Wire()

    def watch(task: str) -> None:
        if task == "F" and stage.ran.count("F") < COUNT:
            assert into.under_way, "the receive of the next micro-batch is posted"

    stage = FakeStage(watch, recompute=False)
    executor = run("1f1b", DEPTH - 1, stage, last_stage(into, back), into.complete)
    assert executor.peaks.untaken_activations == 1


@pytest.mark.parametrize("recompute", [True, False])
def test_each_micro_batch_reports_forward_recompute_and_backward_once(recompute: bool) -> None:
    out, back = Wire(instant=True), Wire(instant=True)
    stage = FakeStage(recompute=recompute)
    told: list[tuple[float | None, ...]] = []
    clock = {"F": 1.0, "R": 2.0, "B": 4.0}

    def begin(executor: Executor) -> None:
        executor.stopwatch.finished = lambda *times: told.append(times)
        executor.stopwatch.device_took_s = lambda: clock[stage.ran[-1]]

    run("varuna", 0, stage, first_stage(out, back), lambda: None, begin)
    assert told == [(1.0, 2.0 if recompute else 0.0, 4.0, None)] * COUNT
