"""Rehearsals: possible jobs, emulated devices, and results from the manager's decisions."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from manager.controller.state.actions import Reason, ReasonCode
from manager.controller.state.events import WorkerAnswered
from manager.controller.state.state import ControllerState, Decision, Phase
from manager.engine.loop.driver import Observed
from manager.rehearsal.device import EmulationOptions, emulated_device, known_units, stretched
from manager.rehearsal.measurements import Measured, Rehearsed
from manager.rehearsal.planning import STATE_BYTES, choose_scales, hosts_of, plan_rehearsal
from manager.rehearsal.run import controller_config_of
from manager.rehearsal.spec import RehearsalSpec
from morph.contract.emulation import EmulatedDevice
from morph.contract.errors import PlanError
from morph.contract.messages import Prepared, ReshapeOrder, Slot
from morph.contract.plan import Plan
from morph.contract.profile import LinkProfile, Profile, Timing
from morph.contract.timeline import ComputeTimes
from morph.contract.trace import Trace, TraceEvent
from simulator import simulate, synthetic_profile
from simulator.costs.stage_costs import SectionCosts
from simulator.inputs.synthetic import with_type
from simulator.inputs.transfer import AllReduce, bandwidth_bytes_per_s

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


def test_messages_and_all_reduces_between_zones_take_the_time_that_the_simulator_expects(profile: Profile) -> None:
    zoned = profile.model_copy(update={"between_zones": LinkProfile.of(0.01, 1e7)})
    device, costs, reduce = (
        emulated_device(zoned, 4, RINGS, EmulationOptions()),
        SectionCosts(zoned, 4),
        AllReduce(zoned),
    )
    assert device.between_zones is not None
    assert costs.between_zones is not None
    expected_s = costs.between_zones.gradient_ns[:-1] / 1e9
    assert [time.median_s for time in device.between_zones.gradient] == pytest.approx(expected_s.tolist(), rel=1e-6)
    sizes = np.array([10.0, 1e6, 4e9])
    for ring in RINGS:
        curve = device.all_reduce_over_zones[ring]
        ours = np.interp(sizes, curve.sizes_bytes, curve.times_s)
        assert ours == pytest.approx(reduce.over_zones(ring, sizes) / 1e9, rel=1e-5, abs=2e-9)
    assert emulated_device(profile, 4, RINGS, EmulationOptions()).all_reduce_over_zones == {}


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
def test_a_device_spec_is_strict_about_numbers(profile: Profile, name: str, value: object) -> None:
    told = json.loads(emulated_device(profile, 4, RINGS, EmulationOptions()).model_dump_json())
    with pytest.raises(ValidationError, match=name):
        EmulatedDevice.model_validate_json(json.dumps({**told, name: value}))


SLOTS = (Slot(worker="vm0", stage=0, replica=0), Slot(worker="vm1", stage=1, replica=0))
PLANNED = plan_rehearsal(
    RehearsalSpec(
        profile=synthetic_profile(num_sections=4, micro_batch_size=4, commit_s=0.5),
        num_stages=2,
        num_hosts=2,
        time_scale=1.0,
    )
)
CONFIG = controller_config_of(PLANNED)


def test_a_rehearsal_of_one_shape_has_no_followers_and_one_with_losses_does() -> None:
    """The time until sums are on a second VM is not in the simulation of a mini-batch."""
    trace = Trace(events=(TraceEvent(time_s=0, event="add", node_id="a"),))
    spec = replace(PLANNED.spec, num_stages=None, num_hosts=1, trace=trace)
    assert CONFIG.policy.redundancy == "off"
    assert controller_config_of(plan_rehearsal(spec)).policy.redundancy == "auto"


def prepared(worker: str, step: int, step_s: float, late_s: float = 0.0) -> Prepared:
    times = ComputeTimes(
        forward_s=0.1, recompute_s=0.2, backward_s=0.3, reduce_s=0.0, wait_s=0.4, step_s=step_s, late_s=late_s
    )
    return Prepared(worker=worker, generation=1, step=step, times=times)


def observed(time_s: float, version: int, answer: Prepared) -> Observed:
    order = ReshapeOrder(generation=1, version=0, plan=PLANNED.plan, slots=SLOTS, sources=())
    state = ControllerState(config=CONFIG, phase=Phase.TRAINING, version=version, reshape=order)
    decision = Decision(state=state, reason=Reason(code=ReasonCode.STEP_DECIDED, sentence="said"))
    return Observed(time_s, WorkerAnswered(worker=answer.worker, answer=answer), decision, lambda _: None)


def three_steps() -> Measured:
    """Return steps of 2 s after a longer first one; the first stage begins 0.25 s after each decision."""
    measured = Measured()
    for step, (decided_s, late_s) in enumerate(((105.0, 9.0), (107.0, 0.001), (109.0, 0.003))):
        measured(observed(decided_s - 0.05, step, prepared("vm0", step, step_s=1.70, late_s=1.0)))
        measured(observed(decided_s, step + 1, prepared("vm1", step, step_s=1.9, late_s=late_s)))
    return measured


def test_the_first_step_is_not_counted() -> None:
    measured = three_steps()
    assert measured.mini_batches_s == pytest.approx((2.0, 2.0))
    assert list(measured.counted_steps) == [1, 2]
    assert measured.late_s == pytest.approx(0.002), "the median of 1 and 3 ms"


def test_the_commit_lasts_from_a_decision_until_the_last_pipeline_begins_less_its_optimizer_step() -> None:
    assert three_steps().commit_s({0: 0.05}) == pytest.approx(0.2)
    assert three_steps().commit_s({0: 0.05, 1: 0.01}) == pytest.approx(0.2), "the other began 0.1 s after the decision"
    assert three_steps().commit_s({0: 0.15, 1: 0.01}) == pytest.approx(0.1)
    assert three_steps().commit_s({0: 0.5}) == 0.0


def test_parts_are_means_over_workers_and_counted_steps() -> None:
    parts = three_steps().parts_s()
    assert parts == pytest.approx({"forward": 0.1, "recompute": 0.2, "backward": 0.3, "reduce": 0.0, "wait": 0.4})


def test_the_measured_commit_takes_the_place_of_the_profiles() -> None:
    rehearsed = Rehearsed(
        planned=PLANNED,
        mini_batches_s=(2.0, 3.0, 9.0),
        commit_s=0.1,
        parts_s={},
        late_s=0.0,
        busy_share=0.5,
        others_share=0.1,
    )
    simulated_s = PLANNED.simulation.expected.mini_batch_s
    assert rehearsed.expected_s == pytest.approx(simulated_s - 0.5 + 0.1)
    assert rehearsed.measured_s == 3.0
    assert rehearsed.error == pytest.approx(rehearsed.expected_s / 3.0 - 1)
    assert not rehearsed.host_too_busy
    assert not replace(rehearsed, late_s=0.029).host_too_busy
    assert replace(rehearsed, late_s=0.031).host_too_busy


def test_steps_count_for_the_plan_that_ran_them_twice_in_a_row() -> None:
    measured = three_steps()
    stages = tuple(stage.model_copy(update={"window": stage.window + 1}) for stage in PLANNED.plan.stages)
    other = PLANNED.plan.model_copy(update={"stages": stages})

    def turn(time_s: float, version: int, generation: int, step: int, plan: Plan) -> None:
        answer = prepared("vm0", step, step_s=1.0).model_copy(update={"generation": generation})
        seen = observed(time_s, version, answer)
        order = ReshapeOrder(generation=generation, version=0, plan=plan, slots=SLOTS, sources=())
        state = seen.decision.state.model_copy(update={"reshape": order})
        measured(replace(seen, decision=seen.decision.model_copy(update={"state": state})))

    turn(115.0, 3, 1, 3, PLANNED.plan)  # given up: one worker answered, another was lost
    turn(120.0, 4, 2, 3, other)
    turn(123.0, 5, 2, 4, other)
    turn(140.0, 6, 3, 5, PLANNED.plan)
    assert measured.counted_steps == [1, 2, 4]
    first, second = measured.by_plan()
    assert (first.only, first.mini_batches_s) == (PLANNED.plan, pytest.approx((2.0, 2.0)))
    assert (second.only, second.mini_batches_s) == (other, pytest.approx((3.0,)))
    assert second.commit_s({0: 0.0}) == pytest.approx(123.0 - 1.0 - 120.0)


OWN = "synthetic"


def trace_of(*changes: tuple[float, str, str, str]) -> Trace:
    return Trace(
        events=tuple(
            TraceEvent(time_s=time_s, event="add" if event == "add" else "remove", node_id=name, instance_type=kind)
            for time_s, event, name, kind in changes
        )
    )


def test_a_trace_is_planned_for_every_pool_and_stretched_with_the_profile() -> None:
    trace = trace_of((5, "add", "a", OWN), (5, "add", "b", "slow"), (9, "remove", "a", OWN))
    profile = with_type(synthetic_profile(num_sections=4), "slow", 2.0)
    planned = plan_rehearsal(spec_of(profile=profile, num_stages=None, num_replicas=1, trace=trace, time_scale=2.0))
    assert planned.spec.trace is not None
    assert [event.time_s for event in planned.spec.trace.events] == [0, 0, 8]
    assert {str(pool) for pool in planned.plans} == {f"{OWN}=1", "slow=1", f"slow=1,{OWN}=1"}
    assert planned.plan.num_workers == 2
    config = controller_config_of(planned)
    assert config.expected_nodes == 2
    assert config.type_compute_s["slow"] == pytest.approx([2 * time_s for time_s in config.type_compute_s[OWN]])


def test_instance_types_count_only_where_the_profile_has_types() -> None:
    trace = trace_of((0, "add", "a", "p3"), (0, "add", "b", "g4"))
    planned = plan_rehearsal(spec_of(num_stages=None, num_replicas=1, trace=trace))
    assert {str(pool) for pool in planned.plans} == {"1", "2"}


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
        ({"slow": {3: 1.5}}, ["slow", "got 3", "stages 0 to 2"]),
        ({"slow": {(1, 2): 1.5}}, ["slow", "got (1, 2)", "replicas 0 to 1"]),
        ({"trace": trace_of((0, "add", "a", "p3"))}, ["num_stages", "is for one shape", "leave it out"]),
        (
            {"trace": trace_of((0, "add", "a", "p3")), "num_stages": None, "num_replicas": 1, "slow": {0: 1.5}},
            ["slow", "is for one shape"],
        ),
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


def test_large_rings_are_slowed_down_until_the_last_backward_covers_their_reductions() -> None:
    profile = synthetic_profile(num_sections=12, forward_s=0.001, overhead_s=0.0, batch_size=64)
    slow = with_type(profile, "slow", 2.0)
    scales = []
    for job, node_type, replicas in ((profile, "", 2), (profile, "", 8), (slow, "slow", 8)):
        plan = simulate(profile, num_stages=1, num_replicas=replicas, micro_batch_size=1).plan
        stages = tuple(stage.model_copy(update={"node_type": node_type}) for stage in plan.stages)
        plan = plan.model_copy(update={"stages": stages})
        scales.append(choose_scales(spec_of(profile=job), plan, num_cores=8).time)
    assert scales[0] == 1.0
    assert scales[1] > 1.0
    assert scales[2] == pytest.approx(scales[1] / 2, rel=0.3), "slow GPUs take twice as long over a backward"


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
