"""What cannot be rehearsed is refused before anything starts, and scales suit the machine."""

from __future__ import annotations

from typing import Any

import pytest

from manager.rehearsal.planning import STATE_BYTES, choose_scales, hosts_of, plan_rehearsal
from manager.rehearsal.spec import RehearsalSpec
from morph.contract.errors import PlanError
from simulator import simulate, synthetic_profile
from simulator.inputs.transfer import bandwidth_bytes_per_s


def spec_of(**fields: Any) -> RehearsalSpec:
    given = {
        "profile": synthetic_profile(num_sections=12, forward_s=0.01),
        "num_stages": 3,
        "num_replicas": 2,
        "num_hosts": 6,
        "micro_batch_size": 4,
    }
    return RehearsalSpec(**(given | fields))


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"num_hosts": 5}, ["num_hosts", "3 x 2 needs 6 workers", "room for 5", "got 5", "6 or more"]),
        ({"num_hosts": 2, "workers_per_host": 2}, ["room for 4", "3 or more"]),
        ({"num_hosts": 0}, ["num_hosts", "from 1 to 100000"]),
        ({"num_stages": 13, "num_hosts": 99}, ["pipeline_depth", "got 13", "1 to 12"]),
        ({"num_replicas": 0}, ["num_replicas", "from 1 to"]),
        ({"num_replicas": 17, "num_hosts": 99}, ["num_replicas", "got 17", "1 to 16"]),
        ({"num_stages": 12, "num_replicas": 64, "num_hosts": 1000}, ["num_workers", "at most"]),
        ({"micro_batch_size": 3}, ["micro_batch_size", "got 3"]),
        ({"batch_size": 0}, ["batch_size", "got 0", "from 1 to"]),
        ({"batch_size": 30}, ["batch_size", "not a whole number of micro-batches", "got 30", "multiples of 4"]),
        ({"batch_size": 8, "num_replicas": 3, "num_hosts": 9}, ["num_replicas", "got 3", "1 to 2"]),
        ({"time_scale": 0.0}, ["time_scale", "got 0.0", "above 0"]),
        ({"time_scale": float("nan")}, ["time_scale", "nan"]),
        ({"message_scale": 1.5}, ["message_scale", "at most 1"]),
        ({"state_scale": -1.0}, ["state_scale", "above 0"]),
        ({"slow": {3: 1.5}}, ["slow", "stage 3", "stages 0 to 2"]),
        ({"slow": {(1, 2): 1.5}}, ["slow", "replica 2", "replicas 0 to 1"]),
    ],
)
def test_what_cannot_be_is_one_error_that_names_it(fields: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        plan_rehearsal(spec_of(**fields))
    for part in parts:
        assert part in str(caught.value)


def test_another_batch_changes_the_number_of_micro_batches_and_not_their_size() -> None:
    full = plan_rehearsal(spec_of(micro_batch_size=None))
    m = full.plan.micro_batch_size
    small = plan_rehearsal(spec_of(micro_batch_size=None, batch_size=5 * m))
    assert (small.plan.micro_batch_size, small.plan.num_micro_batches) == (m, 5)
    assert small.profile.job.batch_size == 5 * m
    assert full.plan.num_micro_batches * m == full.profile.job.batch_size == 64
    assert small.simulation.expected.mini_batch_s < full.simulation.expected.mini_batch_s


def test_a_good_spec_is_planned_and_simulated_at_its_scale() -> None:
    planned = plan_rehearsal(spec_of(time_scale=2.0))
    alone = simulate(
        synthetic_profile(num_sections=12, forward_s=0.01), num_stages=3, num_replicas=2, micro_batch_size=4
    )
    assert planned.plan.shape == "3x2"
    assert planned.scales.time == 2.0
    assert planned.simulation.expected.mini_batch_s == pytest.approx(2 * alone.expected.mini_batch_s, rel=1e-6)


def test_neighbouring_stages_share_a_host_where_hosts_have_room_for_several() -> None:
    alone, shared = (plan_rehearsal(spec_of(num_hosts=hosts, workers_per_host=6 // hosts)).plan for hosts in (6, 2))
    assert hosts_of(alone) == [0, 1, 2, 3, 4, 5]
    assert hosts_of(shared) == [0, 1, 0, 1, 0, 1]


def test_more_workers_than_the_cores_carry_are_slowed_down_and_fewer_are_not() -> None:
    spec = spec_of(profile=synthetic_profile(num_sections=12, forward_s=0.0001, overhead_s=0.0))
    plan = simulate(spec.profile, num_stages=3, num_replicas=2, micro_batch_size=4).plan
    few, many = choose_scales(spec, plan, num_cores=64), choose_scales(spec, plan, num_cores=1)
    assert few.time == 1.0
    assert many.time > 1.0


def test_big_messages_and_states_are_shrunk_and_what_is_given_stays() -> None:
    profile = synthetic_profile(num_sections=12, boundary_bytes_per_sample=40_000_000, parameter_bytes=10**9)
    spec = spec_of(profile=profile)
    plan = simulate(profile, num_stages=3, num_replicas=2, micro_batch_size=4).plan
    scales = choose_scales(spec, plan, num_cores=2)
    assert scales.message < 0.2
    assert scales.state == pytest.approx(STATE_BYTES / 12e9)
    given = choose_scales(spec_of(profile=profile, message_scale=1.0, state_scale=0.5, time_scale=9.0), plan, 2)
    assert (given.time, given.message, given.state) == (9.0, 1.0, 0.5)


def test_bandwidth_is_that_of_the_largest_messages() -> None:
    profile = synthetic_profile(latency_s=0.01, bandwidth_bytes_per_s=5e8)
    assert bandwidth_bytes_per_s(profile.inter_node) == pytest.approx(5e8)
