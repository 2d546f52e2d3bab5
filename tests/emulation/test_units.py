"""Units of an emulated model: the same in every process, and an optimizer step that takes its time."""

from __future__ import annotations

import pytest
import torch

from manager.rehearsal.device import EmulationOptions, emulated_device
from morph.contract.emulation import EmulatedDevice, EmulatedUnit
from morph.runtime.emulation.clock import DeviceClock
from morph.runtime.emulation.reduction import EmulatedRing, all_reduce_s, left_s
from morph.runtime.emulation.unit import gradient_patterns, make_unit
from morph.runtime.state.accumulators import Reduced
from simulator import simulate, synthetic_profile
from tests.emulation.fakes import FakeTime


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
    alone, of_two, of_four = (all_reduce_s(device, ring, 1_000_000) for ring in (1, 2, 4))
    assert alone == 0.0
    assert of_two == pytest.approx(2 * (0.0002 + 1_000_000 / 2 / 1e9))
    assert of_four > of_two


def test_what_is_left_of_a_reduction_is_what_the_simulator_expects(device: EmulatedDevice) -> None:
    profile = synthetic_profile(num_sections=3, tied=True, parameter_bytes=400, optimizer_step_s=0.25)
    reduced = simulate(profile, num_stages=1, num_replicas=2, micro_batch_size=1).costs.reduced
    num_bytes = {min(unit.sections): 0 for unit in device.units}
    for unit in device.units:  # in one stage, the tied one is complete with its first section
        num_bytes[min(unit.sections)] += unit.reduced_bytes
    expected_s = dict(enumerate((reduced.behind_ns(2) / 1e9).tolist()))
    assert left_s(device, 2, num_bytes) == pytest.approx(expected_s, abs=2e-9)


class MeetingRing:
    """A ring whose other member is ready at ``others_s``."""

    def __init__(self, *others_s: float) -> None:
        self._others = torch.tensor(others_s, dtype=torch.float64)

    def reduce(self, tensor: torch.Tensor, _op: object) -> MeetingRing:
        torch.maximum(tensor, self._others, out=tensor)
        return self

    def wait(self, what: str) -> None:
        """Nothing is under way."""


@pytest.mark.parametrize(
    ("others_s", "through_s"),
    [((1.0, 1.0), 10.5), ((9.0, 1.0), 12.0), ((1.0, 12.0), 12.5)],
    ids=["own last section", "other's first section", "other's last section"],
)
def test_a_ring_is_through_when_the_slowest_suffix_is(others_s: tuple[float, ...], through_s: float) -> None:
    """Sections 1 and 0, of which 3 and 0.5 s are left when all have passed them; this worker did at 6 and 10 s."""
    ring = EmulatedRing(MeetingRing(*others_s), {1: 3.0, 0: 0.5})  # type: ignore[arg-type]
    assert ring.run(10.0, {1: 6.0, 0: 10.0}) == pytest.approx(through_s)


def test_rings_that_span_stages_wait_for_the_whole_stage_and_idle_workers_for_nobody() -> None:
    assert EmulatedRing(MeetingRing(4.0), {None: 2.0}).run(5.0, {0: 1.0}) == pytest.approx(7.0)  # type: ignore[arg-type]
    idle = EmulatedRing(MeetingRing(4.0), {0: 2.0}).run(float("-inf"), {})  # type: ignore[arg-type]
    assert idle == pytest.approx(6.0)
