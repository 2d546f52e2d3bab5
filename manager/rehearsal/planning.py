"""Checks and plans a rehearsal before anything is started."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, fields, replace

from manager.engine.local_vms.namespaces import check_permitted
from manager.rehearsal.device import known_units, stretched
from manager.rehearsal.spec import WARM_UP_STEPS, RehearsalSpec
from manager.run.controller_config import most_of_types
from morph.contract.errors import PlanError
from morph.contract.plan import Plan, by_need, by_pool
from morph.contract.pool import Pool
from morph.contract.profile import Profile
from morph.contract.trace import Trace
from simulator import PlanRequest, Simulation, plan_table, pool_plan_table, simulate, simulate_plan
from simulator import plan as best_plan
from simulator.inputs.node_types import check_made_for, of_pool_type
from simulator.search.micro_batch import knee_micro_batch_size

TASK_CPU_S = 0.003
"""The CPU seconds of one task of the executor with its messages, among many other processes.

It was measured with 4 to 36 workers on two cores: 2.5 to 4.5 ms, mostly waiting for memory that other processes have
displaced from the caches; 1 ms if nothing else runs.
"""

ADD_CPU_S = 0.00015
"""The CPU seconds of adding one section's gradient to its sum, measured likewise."""

REDUCE_CPU_S = 0.00035
"""The CPU seconds of reducing one unit, for each member and each of the members to which it sends.

It was measured with rings of 7 to 16 workers on two cores: 0.31 to 0.47 ms, for the unit's three operations together.
"""

BUSY_SHARE = 0.35
"""The largest share of the cores that workers should keep busy: beyond it they wait for each other."""

REDUCE_BUSY_SHARE = 0.5
"""The same share while the last backward runs, during which everything is reduced."""

MESSAGE_BYTES_PER_S = 100e6
"""The limit for all messages together, in bytes per second."""

STATE_BYTES = 128 * 1024
"""Bytes of the whole model's parameters, the same in every shape, so that final weights can be compared."""


@dataclass(frozen=True)
class Scales:
    """See ``RehearsalSpec``."""

    time: float
    message: float
    state: float


def choose_scales(spec: RehearsalSpec, plan: Plan, num_cores: int) -> Scales:
    """Return the given scales, and suitable values for the others; the plan's times are the profile's."""
    tasks = sum(
        len(plan.orders[count][stage])
        for replica, count in enumerate(plan.micro_batches_per_replica)
        for stage in plan.stages_of(replica)
    )
    mini_batch_s = max(plan.expected.mini_batch_s, 1e-6)
    busy_s = tasks * TASK_CPU_S + plan.num_micro_batches * spec.profile.num_sections * ADD_CPU_S
    needed = busy_s / (BUSY_SHARE * num_cores * mini_batch_s)
    needed = max(needed, _reduce_cpu_s(spec.profile, plan) / (REDUCE_BUSY_SHARE * num_cores * _drain_s(spec, plan)))
    time_scale = spec.time_scale if spec.time_scale is not None else max(1.0, _rounded_up(needed))
    m, sections = plan.micro_batch_size, spec.profile.sections
    sent_bytes = sum(
        2 * sections[stage.end_section - 1].output_bytes_per_sample * m * plan.micro_batches_per_replica[replica]
        for replica in range(plan.num_replicas)
        for stage in plan.stages[plan.stages_of(replica).start : plan.stages_of(replica).stop - 1]
    )
    allowed_bytes = MESSAGE_BYTES_PER_S * mini_batch_s * time_scale
    message = spec.message_scale
    if message is None:
        message = 1.0 if sent_bytes <= allowed_bytes else allowed_bytes / sent_bytes
    state = spec.state_scale
    if state is None:
        state = min(1.0, STATE_BYTES / max(1, sum(section.parameter_bytes for section in sections)))
    return Scales(time_scale, message, state)


def _reduce_cpu_s(profile: Profile, plan: Plan) -> float:
    """Return the CPU time of all workers for the reductions of a mini-batch, whatever the units' size."""
    cpu_s = 0.0
    for unit in known_units(profile):
        holders = {stage for stage, each in enumerate(plan.stages) if set(each.sections).intersection(unit.sections)}
        members = sum(len(holders.intersection(plan.stages_of(replica))) for replica in range(plan.num_replicas))
        cpu_s += REDUCE_CPU_S * members**2 * (members > 1)
    return cpu_s


def _drain_s(spec: RehearsalSpec, plan: Plan) -> float:
    """Return the time of a backward through the whole model, on the fastest type of node in the plan."""
    types = {stage.node_type for stage in plan.stages}
    profiles = [of_pool_type(spec.profile, name) for name in types]
    m = plan.micro_batch_size
    return max(1e-6, min(sum(each.backward[m].median_s for each in profile.sections) for profile in profiles))


def _rounded_up(value: float) -> float:
    """Round up to one and a half digits: 1, 1.5, 2, 2.5 .. 9.5, 10, 15, 20 .."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** math.floor(math.log10(value)) / 2
    return math.ceil(value / unit) * unit


@dataclass(frozen=True)
class Planned:
    """A checked and planned rehearsal that was not started; the profile is stretched by ``scales.time``.

    ``table``: plans for every number or pool of VMs that a trace may have; empty: there is one plan.
    """

    spec: RehearsalSpec
    scales: Scales
    profile: Profile
    simulation: Simulation
    table: dict[Pool, Plan] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        """The plan to begin with."""
        return self.simulation.plan

    @property
    def plans(self) -> dict[Pool, Plan]:
        """Every plan that may be run."""
        return self.table or {self.plan.pool: self.plan}


def plan_rehearsal(spec: RehearsalSpec) -> Planned:
    """Check and plan a rehearsal; InputError names a wrong value."""
    spec.check()
    spec = _with_batch(spec)
    if spec.network == "namespaces":
        check_permitted()
    if spec.plan is not None:
        check_made_for(spec.profile, spec.plan)
    num_cores = os.cpu_count() or 1
    if spec.trace is None:
        scales = choose_scales(spec, plan_shape(spec, spec.profile).plan, num_cores)
        profile = stretched(spec.profile, scales.time)
        return Planned(spec, scales, profile, plan_shape(spec, profile))
    trace = spec.trace.from_first_event()
    chosen = [choose_scales(spec, plan, num_cores) for plan in _plans_for(spec, trace, spec.profile).values()]
    scales = Scales(max(each.time for each in chosen), min(each.message for each in chosen), chosen[0].state)
    spec, profile = replace(spec, trace=trace.scaled(scales.time)), stretched(spec.profile, scales.time)
    plans = _plans_for(spec, trace, profile)
    return Planned(spec, scales, profile, plan_shape(spec, profile, _first_of(spec, trace, plans)), plans)


def _plans_for(spec: RehearsalSpec, trace: Trace, profile: Profile) -> dict[Pool, Plan]:
    """Plan for every number or pool of VMs that the trace may have; PlanError if all together cannot run the job."""
    own = {each.name for each in fields(PlanRequest)}
    given = {name: getattr(spec, name) for name in own} | {"num_replicas": None, "unequal": True}
    request = PlanRequest(**given)
    most = Pool.of(spec.num_workers)
    if spec.types:
        most = most_of_types([trace], {name: name for name in spec.types}, "node_types")
        plans = by_need(pool_plan_table(profile, most, request).values())
    else:
        plans = by_need(plan_table(profile, spec.num_workers, request).values())
    return plans or by_need([best_plan(profile, request, pool=most).best])  # raises an error on why none fits


def _first_of(spec: RehearsalSpec, trace: Trace, plans: dict[Pool, Plan]) -> Plan:
    """Return the best of the plans for the VMs that come first, or the smallest plan if none fits these."""
    there = [event for event in trace.events if event.event == "add" and event.time_s == 0]
    pool = Pool.counting(event.instance_type if spec.types else "" for event in there)
    fitting = [plan for needed, plan in plans.items() if needed.fits_in(pool)]
    if not fitting:
        return by_pool(plans)[0][1]
    return max(fitting, key=lambda plan: plan.expected.examples_per_s)


def _with_batch(spec: RehearsalSpec) -> RehearsalSpec:
    """Return the spec with the requested batch in the profile, m as before; PlanError unless it is a multiple of m."""
    if spec.batch_size is None:
        return spec
    m = knee_micro_batch_size(spec.profile, spec.micro_batch_size)
    if spec.batch_size % m:
        raise PlanError(
            "is not a whole number of micro-batches",
            field="batch_size",
            value=spec.batch_size,
            allowed=f"multiples of {m}",
        )
    job = spec.profile.job.model_copy(update={"batch_size": spec.batch_size})
    profile = spec.profile.model_copy(update={"job": job})
    return replace(spec, profile=profile, micro_batch_size=m, batch_size=None)


def plan_shape(spec: RehearsalSpec, profile: Profile, plan: Plan | None = None) -> Simulation:
    """Simulate on this profile the given plan, else the spec's, else one of the spec's shape."""
    share_links, num_draws = spec.network == "namespaces", WARM_UP_STEPS + spec.steps
    plan = plan or spec.plan
    if plan is not None:
        return simulate_plan(profile, plan, spec, share_links=share_links, num_draws=num_draws)
    return simulate(
        profile,
        spec,
        num_stages=spec.num_stages,
        boundaries=spec.boundaries,
        window_slope=spec.window_slope,
        num_gpus_per_node=spec.workers_per_host if spec.workers_per_host > 1 else None,
        share_links=share_links,
        num_draws=num_draws,
    )


def hosts_of(plan: Plan) -> list[int]:
    """Return the host of each worker, in the order in which the controller assigns stages: by stage, then replica."""
    nodes = (plan.node_at(stage, replica) for stage, replica in plan.places)
    return [number if node is None else node for number, node in enumerate(nodes)]
