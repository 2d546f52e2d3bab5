"""Units of an emulated model: the same in every process, and an optimizer step that takes its time."""

from __future__ import annotations

import pytest
import torch

from manager.rehearsal.device import EmulationOptions, emulated_device
from morph.contract.emulation import EmulatedDevice, EmulatedUnit
from morph.runtime.emulation.clock import DeviceClock
from morph.runtime.emulation.reduction import all_reduce_s
from morph.runtime.emulation.unit import gradient_patterns, make_unit
from morph.runtime.state.accumulators import Reduced
from simulator import synthetic_profile
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
