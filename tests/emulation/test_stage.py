"""Emulated devices and links on a clock that the test moves: times, memory and numbers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from manager.rehearsal.device import EmulationOptions, emulated_device
from morph.contract.emulation import Duration, EmulatedDevice, EmulatedUnit
from morph.contract.profile import Profile, Timing
from morph.runtime.emulation.clock import DeviceClock, JitterDraw
from morph.runtime.emulation.message import Head, border, read_head, write_head
from morph.runtime.emulation.reduction import EmulatedRing, all_reduce_s, left_s, run_rings
from morph.runtime.emulation.stage import EmulatedStage, SectionUnits, TaskTimes
from morph.runtime.emulation.unit import DeviceMemory, gradient_patterns, make_unit
from morph.runtime.state.accumulators import Reduced
from simulator import simulate, synthetic_profile
from simulator.inputs.jitter import JitterDraw as SimulatedJitter
from tests.emulation.fakes import FakeTime

MICRO_BATCHES = (4, 5)
STEP = 3


def message() -> Tensor:
    return torch.zeros(border(0).shape, dtype=torch.float64)


def section(index: int, weights: float = 0.01) -> SectionUnits:
    return SectionUnits(index, weights, {f"s{index}": torch.tensor([1.0, -2.0])})


def backward_s(num_sections: int) -> NDArray[np.float64]:
    """Return the seconds of a section's backward: one second for each section but the first; 3 or 4 in all."""
    rest_s = np.array([3.0, 4.0]) - (num_sections - 1)
    return np.array([rest_s, *([[1.0, 1.0]] * (num_sections - 1))])


def stage_of(
    sections: range,
    num_sections: int,
    time: FakeTime,
    *,
    recompute: bool = True,
    memory: DeviceMemory | None = None,
    weights: float = 0.01,
    slowness: float = 1.0,
) -> EmulatedStage:
    clock = DeviceClock(0.0, time.now, time.sleep)
    clock.slowness = slowness
    return EmulatedStage(
        [section(index, weights) for index in sections],
        TaskTimes(np.array([1.0, 2.0]), np.array([1.5, 2.5]), backward_s(len(sections))),
        MICRO_BATCHES,
        recompute=recompute,
        clock=clock,
        memory=memory or DeviceMemory(None, 0, 0, 0, 0),
        key=(7, STEP),
        message=None if sections.stop == num_sections else message(),
        gradient=message() if sections.start else None,
    )


class Sums:
    def __init__(self) -> None:
        self.by_name: dict[str, list[list[float]]] = {}
        self.through: list[int] = []

    def add(self, section: int, name: str, gradient: Tensor) -> None:
        self.by_name.setdefault(name, []).append(gradient.tolist())

    def done(self, section: int) -> None:
        self.through.append(section)


def train(
    cuts: list[int], num_sections: int, weights: float = 0.01
) -> tuple[list[float], dict[str, list[list[float]]]]:
    """Return losses and gradients of two micro-batches through stages that begin at ``cuts``."""
    bounds = [*cuts, num_sections]
    ranges = [range(first, end) for first, end in itertools.pairwise(bounds)]
    stages = [stage_of(part, num_sections, FakeTime(), weights=weights) for part in ranges]
    losses, sums = [], Sums()
    for micro_batch in MICRO_BATCHES:
        values: tuple[Tensor, ...] = ()
        for stage in stages:
            values = tuple(value.clone() for value in stage.forward(micro_batch, values))
        losses.append(float(values[0]))
        gradients: tuple[Tensor | None, ...] = (torch.ones(()),)
        for stage in reversed(stages):
            stage.recompute(micro_batch)
            gradients = tuple(
                gradient if gradient is None else gradient.clone()
                for gradient in stage.backward(micro_batch, gradients, sums)
            )
    return losses, sums.by_name


def test_each_task_takes_its_micro_batchs_time() -> None:
    time = FakeTime()
    stage = stage_of(range(2), 2, time)
    took = []
    for micro_batch in MICRO_BATCHES:
        for task in (
            lambda micro_batch=micro_batch: stage.forward(micro_batch, ()),
            lambda micro_batch=micro_batch: stage.recompute(micro_batch),
            lambda micro_batch=micro_batch: stage.backward(micro_batch, (torch.ones(()),), Sums()),
        ):
            before_s = time.now_s
            task()
            took.append(time.now_s - before_s)
    assert took == pytest.approx([1.0, 1.5, 3.0, 2.0, 2.5, 4.0])


def test_a_backward_goes_through_its_sections_one_after_the_other() -> None:
    time = FakeTime()
    stage = stage_of(range(3), 3, time, slowness=2.0)
    for micro_batch in MICRO_BATCHES:
        stage.forward(micro_batch, ())
        stage.recompute(micro_batch)
        begun_s = time.now_s
        stage.backward(micro_batch, (torch.ones(()),), Sums())
    assert stage.ends_s == pytest.approx({2: begun_s + 2.0, 1: begun_s + 4.0, 0: begun_s + 8.0})
    assert time.now_s == pytest.approx(begun_s + 8.0)


@pytest.mark.parametrize("cuts", [[0, 1], [0, 2], [0, 1, 2]])
def test_losses_and_gradients_do_not_depend_on_the_stages(cuts: list[int]) -> None:
    assert train(cuts, 3) == train([0], 3)


def test_losses_and_gradients_depend_on_the_weights() -> None:
    losses, gradients = train([0], 2)
    other_losses, other_gradients = train([0], 2, weights=0.02)
    assert losses != other_losses
    assert gradients != other_gradients


def test_losses_and_gradients_depend_on_the_micro_batch() -> None:
    losses, gradients = train([0], 2)
    assert losses[0] != losses[1]
    assert all(first != second for first, second in gradients.values())


def test_a_message_for_another_step_or_micro_batch_is_refused() -> None:
    stage = stage_of(range(1), 2, FakeTime())
    (sent,) = stage.forward(5, ())
    assert 0 <= read_head(sent, STEP, 5) < 1
    behind = stage_of(range(1, 2), 2, FakeTime())
    wrong = message()
    write_head(wrong, Head(STEP, 4, 0.5))
    with pytest.raises(AssertionError, match="micro-batch 4 came for 3, 5"):
        behind.forward(5, (wrong,))


def test_stored_and_live_micro_batches_are_counted() -> None:
    stage = stage_of(range(2), 2, FakeTime())
    stage.forward(4, ())
    stage.forward(5, ())
    assert (stage.num_stored, stage.num_live) == (2, 0)
    stage.recompute(4)
    assert (stage.num_stored, stage.num_live) == (1, 1)
    stage.backward(4, (torch.ones(()),), Sums())
    assert (stage.num_stored, stage.num_live) == (1, 0)


def test_more_than_the_device_holds_is_out_of_memory() -> None:
    memory = DeviceMemory(150, held_bytes=100, input_bytes=10, activation_bytes=20, extra_bytes=5)
    stage = stage_of(range(2), 2, FakeTime(), memory=memory)
    stage.forward(4, ())
    assert memory.peak_bytes == 135
    stage.forward(5, ())
    assert memory.peak_bytes == 145
    small = DeviceMemory(140, held_bytes=100, input_bytes=10, activation_bytes=20, extra_bytes=5)
    full = stage_of(range(2), 2, FakeTime(), memory=small)
    full.forward(4, ())
    with pytest.raises(torch.OutOfMemoryError, match=r"145 bytes are needed .* 2 stored inputs"):
        full.forward(5, ())


def test_without_recompute_activations_of_all_in_flight_are_held() -> None:
    memory = DeviceMemory(None, held_bytes=100, input_bytes=10, activation_bytes=20, extra_bytes=0)
    stage = stage_of(range(2), 2, FakeTime(), recompute=False, memory=memory)
    stage.forward(4, ())
    stage.forward(5, ())
    assert memory.peak_bytes == 160


def test_a_state_that_does_not_fit_is_out_of_memory_at_once() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="100 of state"):
        DeviceMemory(99, held_bytes=100, input_bytes=0, activation_bytes=0, extra_bytes=0)


def clock_of(time: FakeTime, forgiven_s: float = 0.02) -> DeviceClock:
    return DeviceClock(forgiven_s, time.now, time.sleep)


def test_a_task_blocks_for_its_time() -> None:
    time = FakeTime()
    clock = clock_of(time)
    clock.end(clock.begin(), 2.0)
    assert time.now_s == pytest.approx(102.0)
    assert clock.free_s == pytest.approx(102.0)


def test_oversleeping_does_not_add_up() -> None:
    time = FakeTime(oversleep_s=0.005)
    clock = clock_of(time)
    for _ in range(100):
        clock.end(clock.begin(), 0.1)
    assert time.now_s == pytest.approx(110.005)
    assert clock.late_s == 0.0


def test_work_done_within_a_task_is_part_of_its_time() -> None:
    time = FakeTime()
    clock = clock_of(time)
    begun_s = clock.begin()
    time.now_s += 0.3
    clock.end(begun_s, 1.0)
    assert time.slept == pytest.approx([0.7])


def test_only_a_small_delay_of_the_host_is_forgiven() -> None:
    time = FakeTime()
    clock = clock_of(time, forgiven_s=0.02)
    clock.end(clock.begin(), 1.0)
    time.now_s += 0.015
    assert clock.begin() == pytest.approx(101.0)
    assert clock.late_s == 0.0
    time.now_s += 0.010
    assert clock.begin() == pytest.approx(101.025)
    assert clock.late_s == pytest.approx(0.025)


def test_nothing_is_forgiven_where_nothing_is_to_be() -> None:
    time = FakeTime()
    clock = clock_of(time, forgiven_s=0.0)
    clock.end(clock.begin(), 1.0)
    time.now_s += 0.001
    assert clock.begin() == pytest.approx(101.001)


def test_a_task_that_waited_begins_when_its_input_arrived() -> None:
    time = FakeTime()
    clock = clock_of(time)
    clock.end(clock.begin(), 1.0)
    time.now_s = 105.003
    clock.arrived(105.0)
    assert clock.begin() == pytest.approx(105.0)


def test_an_early_arrival_does_not_move_a_task_before_its_predecessor() -> None:
    time = FakeTime()
    clock = clock_of(time)
    clock.end(clock.begin(), 1.0)
    clock.arrived(100.7)
    time.now_s += 0.002
    assert clock.begin() == pytest.approx(101.0)


def test_a_task_is_as_late_as_what_it_waited_for() -> None:
    time = FakeTime()
    clock = clock_of(time, forgiven_s=0.02)
    clock.end(clock.begin(), 1.0)
    time.now_s = 102.0
    clock.arrived(102.0, late_s=0.4)
    clock.end(clock.begin(), 1.0)
    assert clock.late_s == pytest.approx(0.4), "without delays, it would have begun at 101.6"
    time.now_s += 0.1
    clock.end(clock.begin(), 1.0)
    assert clock.late_s == pytest.approx(0.5)
    clock.arrived(time.now_s + 0.3, late_s=0.2)
    time.now_s += 0.3
    clock.begin()
    assert clock.late_s == pytest.approx(0.2), "waiting hides what is less late"


def test_after_a_rest_a_task_begins_when_the_worker_comes_to_it() -> None:
    time = FakeTime()
    clock = clock_of(time)
    clock.end(clock.begin(), 1.0)
    clock.rest()
    time.now_s += 0.002
    assert clock.begin() == pytest.approx(101.002)
    assert clock.late_s == 0.0


def test_a_slow_device_takes_longer_over_everything() -> None:
    time = FakeTime()
    clock = clock_of(time)
    clock.slowness = 1.5
    clock.end(clock.begin(), 2.0)
    assert clock.free_s == pytest.approx(103.0)


NUM_SECTIONS, NUM_MICRO_BATCHES = 3, 16
SPREAD = (0.5, 1.0, 4.0)


def spread_profile() -> Profile:
    profile = synthetic_profile(num_sections=NUM_SECTIONS, micro_batch_sizes=(1,), batch_size=NUM_MICRO_BATCHES)
    timing = Timing(median_s=1.0, mad_s=0.1, num_samples=9, quantiles_s=SPREAD)
    link = tuple(entry.model_copy(update={"time": timing}) for entry in profile.inter_node.activation)
    sections = tuple(
        section.model_copy(update={"forward": {1: timing}, "backward": {1: timing}}) for section in profile.sections
    )
    inter_node = profile.inter_node.model_copy(update={"activation": link, "gradient": link})
    return profile.model_copy(update={"sections": sections, "inter_node": inter_node})


def jitter(seed: int | None, step: int = 4) -> JitterDraw:
    return JitterDraw(seed, step, NUM_SECTIONS, NUM_MICRO_BATCHES)


def test_without_a_seed_every_time_is_the_sum_of_medians() -> None:
    durations = {0: Duration(median_s=1.0, quantiles_s=SPREAD), 2: Duration(median_s=2.0)}
    assert jitter(None).times_s("forward", durations, range(3)) == pytest.approx([3.0, 3.0, 3.0])


@pytest.mark.parametrize("kind", ["forward", "recompute", "backward"])
def test_tasks_are_drawn_as_the_simulator_draws_them(kind: str) -> None:
    simulated = SimulatedJitter(spread_profile(), 1, NUM_MICRO_BATCHES, 7, 4).task_sums_ns(kind)
    durations = {section: Duration(median_s=1.0, quantiles_s=SPREAD) for section in (1, 2)}
    drawn = jitter(7).times_s(kind, durations, range(5, 9))
    assert drawn == pytest.approx((simulated[3] - simulated[1])[5:9] / 1e9)


@pytest.mark.parametrize("kind", ["activation", "gradient"])
def test_messages_are_drawn_as_the_simulator_draws_them(kind: str) -> None:
    profile = spread_profile()
    simulated = SimulatedJitter(profile, 1, NUM_MICRO_BATCHES, 7, 4).message_ns(kind, 1, profile.inter_node, 1e5)
    drawn = jitter(7).times_s(kind, {1: Duration(median_s=1.0, quantiles_s=SPREAD)}, range(NUM_MICRO_BATCHES))
    assert drawn == pytest.approx(simulated / 1e9)


def test_another_step_and_another_seed_draw_other_times() -> None:
    durations = {0: Duration(median_s=1.0, quantiles_s=SPREAD)}
    first = jitter(7).times_s("forward", durations, range(9))
    assert not np.array_equal(first, jitter(8).times_s("forward", durations, range(9)))
    assert not np.array_equal(first, jitter(7, step=5).times_s("forward", durations, range(9)))


@pytest.fixture
def device() -> EmulatedDevice:
    profile = synthetic_profile(num_sections=3, tied=True, parameter_bytes=400, optimizer_step_s=0.25)
    return emulated_device(profile, 1, [2, 4], EmulationOptions())


def unit_of(device: EmulatedDevice, name: str) -> EmulatedUnit:
    return next(unit for unit in device.units if unit.id == name)


def test_units_begin_alike_in_every_process_and_unlike_each_other(device: EmulatedDevice) -> None:
    clock = DeviceClock(0.0)
    first, again = (make_unit(device, unit_of(device, "s1"), clock, 4).parameters["s1"] for _ in range(2))
    other = make_unit(device, unit_of(device, "s2"), clock, 4).parameters["s2"]
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.numel() == 100


def test_every_unit_has_a_pattern_of_its_size(device: EmulatedDevice) -> None:
    assert {name: pattern.numel() for name, pattern in gradient_patterns(device).items()} == {
        "s0": 100,
        "s1": 100,
        "s2": 100,
        "s0+s2": 100,
    }


def test_an_update_is_really_made_and_takes_the_profiles_time(device: EmulatedDevice) -> None:
    time = FakeTime()
    state = make_unit(device, unit_of(device, "s1"), DeviceClock(0.0, time.now, time.sleep), 4)
    before = state.parameters["s1"].detach().clone()
    state.reduced = Reduced({"s1": torch.ones(100)}, state.exponents, overflowed=False)
    state.apply()
    assert time.now_s == pytest.approx(100.25)
    assert state.version == 1
    assert not torch.equal(before, state.parameters["s1"])


def test_the_all_reduce_takes_what_the_profile_says_and_nothing_alone(device: EmulatedDevice) -> None:
    alone, of_two, of_four = (all_reduce_s(device.all_reduce, ring, 1_000_000) for ring in (1, 2, 4))
    assert alone == 0.0
    assert of_two == pytest.approx(2 * (0.0002 + 1_000_000 / 2 / 1e9))
    assert of_four > of_two


def test_the_exposed_reduction_is_what_the_simulator_expects(device: EmulatedDevice) -> None:
    profile = synthetic_profile(num_sections=3, tied=True, parameter_bytes=400, optimizer_step_s=0.25)
    reduced = simulate(profile, num_stages=1, num_replicas=2, micro_batch_size=1).costs.reduced
    num_bytes = {min(unit.sections): 0 for unit in device.units}
    for unit in device.units:  # in one stage, the tied unit is complete with its first section
        num_bytes[min(unit.sections)] += unit.reduced_bytes
    expected_s = dict(enumerate((reduced.remaining_ns(2) / 1e9).tolist()))
    assert left_s(device.all_reduce, 2, num_bytes) == pytest.approx(expected_s, abs=2e-9)


class MeetingRing:
    """A ring whose other member is ready at ``others_s``, and would be ``late_s`` earlier but for its busy host."""

    def __init__(self, *others_s: float, late_s: float = 0.0) -> None:
        self._others = torch.tensor([others_s, [ready_s - late_s for ready_s in others_s]], dtype=torch.float64)

    def reduce(self, tensor: torch.Tensor, _op: object) -> MeetingRing:
        torch.maximum(tensor, self._others, out=tensor)
        return self

    def wait(self, what: str) -> None:
        """Do nothing: no operation is under way."""


@pytest.mark.parametrize(
    ("others_s", "through_s"),
    [((1.0, 1.0), 10.5), ((9.0, 1.0), 12.0), ((1.0, 12.0), 12.5)],
    ids=["own last section", "other's first section", "other's last section"],
)
def test_a_ring_is_through_when_the_slowest_suffix_is(others_s: tuple[float, ...], through_s: float) -> None:
    """When all members have passed sections 1 and 0, 3 s and 0.5 s of reduction are left.

    This worker does so at 6 s and 10 s.
    """
    ring = EmulatedRing(MeetingRing(*others_s), {1: 3.0, 0: 0.5})  # type: ignore[arg-type]
    assert run_rings([ring], 10.0, {1: 6.0, 0: 10.0}) == pytest.approx((through_s, through_s))


def rings_with(*met: tuple[float, dict[int | None, float]]) -> list[EmulatedRing]:
    """Return rings whose other members are ready at this time."""
    return [EmulatedRing(MeetingRing(*(len(left_s) * [others_s])), left_s) for others_s, left_s in met]  # type: ignore[arg-type]


def test_rings_across_stages_wait_for_the_whole_stage() -> None:
    assert run_rings(rings_with((4.0, {None: 2.0})), 5.0, {0: 1.0}) == pytest.approx((7.0, 7.0))
    assert run_rings(rings_with((4.0, {0: 2.0})), float("-inf"), {}) == pytest.approx((6.0, 6.0))


def test_a_link_carries_one_ring_after_the_other() -> None:
    """With different cuts a stage is in several rings, of which the second waits for the first, not for compute."""
    rings = rings_with((4.0, {1: 3.0}), (0.0, {0: 1.0}))
    assert run_rings(rings, 6.0, {1: 2.0, 0: 6.0}) == pytest.approx((8.0, 8.0))
    assert run_rings(rings, 9.0, {1: 2.0, 0: 9.0}) == pytest.approx((10.0, 10.0))
    assert run_rings(rings_with((4.0, {1: 3.0}), (0.0, {None: 1.0})), 9.0, {1: 2.0}) == pytest.approx((10.0, 10.0))


def test_a_ring_says_when_it_would_be_through_without_delays_by_busy_hosts() -> None:
    left_s: dict[int | None, float] = {1: 3.0, 0: 0.5}
    ring = EmulatedRing(MeetingRing(9.0, 9.5, late_s=2.0), left_s)  # type: ignore[arg-type]
    assert run_rings([ring], 10.0, {1: 6.0, 0: 10.0}, late_s=1.0) == pytest.approx((12.0, 10.0))
    assert run_rings([ring], 10.0, {1: 6.0, 0: 10.0}, late_s=0.0) == pytest.approx((12.0, 10.5))
