"""From a profile to the emulated device."""

from __future__ import annotations

import json

import numpy as np
import pytest
from pydantic import ValidationError

from manager.rehearsal.device import EmulationOptions, emulated_device, known_units, stretched
from morph.contract.emulation import EmulatedDevice
from morph.contract.profile import Profile, Timing
from simulator import simulate, synthetic_profile
from simulator.costs.stage_costs import SectionCosts
from simulator.inputs.transfer import AllReduce

RINGS = (2, 3, 4, 6, 12)


@pytest.fixture
def profile() -> Profile:
    return synthetic_profile(num_sections=4, forward_s=[0.001, 0.002, 0.003, 0.004], tied=True)


def test_sections_take_the_profiles_times_at_m(profile: Profile) -> None:
    device = emulated_device(profile, 4, RINGS, EmulationOptions())
    assert [section.forward.median_s for section in device.sections] == pytest.approx([0.0045, 0.0085, 0.0125, 0.0165])
    assert [section.backward.median_s for section in device.sections] == pytest.approx([0.009, 0.017, 0.025, 0.033])


def test_messages_take_the_time_that_the_simulator_expects(profile: Profile) -> None:
    device, costs = emulated_device(profile, 4, RINGS, EmulationOptions()), SectionCosts(profile, 4)
    expected_s = costs.inter_node.activation_ns[:-1] / 1e9
    assert [time.median_s for time in device.inter_node.activation] == pytest.approx(expected_s.tolist(), rel=1e-6)


def test_all_reduces_take_the_time_that_the_simulator_expects(profile: Profile) -> None:
    device, reduce = emulated_device(profile, 4, RINGS, EmulationOptions()), AllReduce(profile)
    sizes = np.array([10.0, 1e3, 5e5, 1e6, 3e7, 4e9])
    for ring in RINGS:
        curve = device.all_reduce[ring]
        ours = np.interp(sizes, curve.sizes_bytes, curve.times_s)
        assert ours == pytest.approx(reduce.times_ns(ring, sizes) / 1e9, rel=1e-5, abs=2e-9)


def test_every_byte_that_the_simulator_reduces_is_reduced(profile: Profile) -> None:
    device = emulated_device(profile, 4, RINGS, EmulationOptions())
    costs = simulate(profile, num_stages=2, num_replicas=2, micro_batch_size=4).costs
    expected = float(costs.reduced.sum_bytes[-1]) + sum(size for _, size in costs.reduced.tied)
    assert sum(unit.reduced_bytes for unit in device.units) == pytest.approx(expected)


def test_an_optimizer_step_of_a_section_is_taken_once(profile: Profile) -> None:
    device = emulated_device(profile, 4, RINGS, EmulationOptions())
    assert {unit.id: unit.optimizer_s for unit in device.units} == pytest.approx(
        {"s0": 0.001, "s1": 0.001, "s2": 0.001, "s3": 0.001, "s0+s3": 0.0}
    )


def test_scales_shrink_what_is_real_and_no_time_or_counted_size(profile: Profile) -> None:
    full = emulated_device(profile, 4, RINGS, EmulationOptions())
    small = emulated_device(profile, 4, RINGS, EmulationOptions(message_scale=0.01, state_scale=0.001))
    assert full.sections[0].real_message_bytes == 4 * 65_536
    assert small.sections[0].real_message_bytes == round(4 * 65_536 * 0.01)
    assert [unit.real_values for unit in small.units] == [1000] * 5
    assert small.sections[0].held_bytes == full.sections[0].held_bytes
    assert small.inter_node == full.inter_node
    assert small.units[0].reduced_bytes == full.units[0].reduced_bytes


def test_stretching_multiplies_every_time_and_nothing_else() -> None:
    profile = synthetic_profile(num_sections=2)
    spread = Timing(median_s=0.01, mad_s=0.002, num_samples=9, mean_s=0.011, quantiles_s=(0.009, 0.01, 0.02))
    section = profile.sections[0].model_copy(update={"forward": dict.fromkeys(profile.micro_batch_sizes, spread)})
    long = stretched(profile.model_copy(update={"sections": (section, profile.sections[1])}), 3.0)
    found = long.sections[0].forward[1]
    assert (found.median_s, found.mad_s, found.mean_s) == pytest.approx((0.03, 0.006, 0.033))
    assert found.quantiles_s == pytest.approx((0.027, 0.03, 0.06))
    assert found.num_samples == 9
    assert long.inter_node.activation[0].time.median_s == pytest.approx(
        3 * profile.inter_node.activation[0].time.median_s
    )
    assert long.sections[0].parameter_bytes == profile.sections[0].parameter_bytes
    assert long.job == profile.job
    assert long.checkpoint_write_bytes_per_s == profile.checkpoint_write_bytes_per_s


def test_a_stretched_profile_is_simulated_so_many_times_as_long() -> None:
    profile = synthetic_profile(num_sections=6)
    shape = {"num_stages": 3, "num_replicas": 2, "micro_batch_size": 4}
    once, thrice = (simulate(stretched(profile, factor), **shape) for factor in (1.0, 3.0))  # type: ignore[arg-type]
    assert thrice.expected.mini_batch_s == pytest.approx(3 * once.expected.mini_batch_s, rel=1e-6)


def test_a_profile_that_names_no_units_has_one_for_each_section() -> None:
    profile = synthetic_profile(num_sections=3).model_copy(update={"units": ()})
    assert [unit.id for unit in known_units(profile)] == ["s0", "s1", "s2"]
    assert [unit.id for unit in emulated_device(profile, 1, RINGS, EmulationOptions()).units] == ["s0", "s1", "s2"]


@pytest.mark.parametrize(("name", "value"), [("memory_bytes", True), ("seed", "1"), ("forgiven_s", "0.5")])
def test_what_a_worker_is_told_of_its_device_is_strict_about_numbers(
    profile: Profile, name: str, value: object
) -> None:
    told = json.loads(emulated_device(profile, 4, RINGS, EmulationOptions()).model_dump_json())
    with pytest.raises(ValidationError, match=name):
        EmulatedDevice.model_validate_json(json.dumps({**told, name: value}))
