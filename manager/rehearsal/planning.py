"""A rehearsal checked and planned, before anything is started."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from manager.engine.local_vms.namespaces import check_permitted
from manager.rehearsal.device import stretched
from manager.rehearsal.measured import WARM_UP_STEPS
from manager.rehearsal.scales import Scales, choose_scales
from manager.rehearsal.spec import RehearsalSpec
from morph.contract.errors import PlanError
from morph.contract.plan import Plan
from morph.contract.profile import Profile
from simulator import Simulation, simulate
from simulator.search.micro_batch import knee_micro_batch_size


@dataclass(frozen=True)
class Planned:
    """A rehearsal that was checked and planned: nothing is started yet.

    ``profile`` is stretched by ``scales.time``; ``simulation`` is of it, with the commit that the profile has.
    """

    spec: RehearsalSpec
    scales: Scales
    profile: Profile
    simulation: Simulation

    @property
    def plan(self) -> Plan:
        """The plan to run."""
        return self.simulation.plan


def plan_rehearsal(spec: RehearsalSpec) -> Planned:
    """Check and plan.

    Raises:
        InputError: naming what is wrong.
    """
    spec.check()
    spec = _with_batch(spec)
    if spec.network == "namespaces":
        check_permitted()
    unstretched = plan_shape(spec, spec.profile).plan
    scales = choose_scales(spec, unstretched, os.cpu_count() or 1)
    profile = stretched(spec.profile, scales.time)
    simulation = plan_shape(spec, profile)
    return Planned(spec, scales, profile, simulation)


def _with_batch(spec: RehearsalSpec) -> RehearsalSpec:
    """The same with the batch that is wanted in the profile; m stays as the job's own batch gives it.

    Raises:
        PlanError: the batch is not a whole number of micro-batches.
    """
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


def plan_shape(spec: RehearsalSpec, profile: Profile) -> Simulation:
    """Simulate the rehearsal's shape on this profile."""
    return simulate(
        profile,
        spec,
        num_stages=spec.num_stages,
        boundaries=spec.boundaries,
        window_slope=spec.window_slope,
        num_gpus_per_node=spec.workers_per_host if spec.workers_per_host > 1 else None,
        share_links=spec.network == "namespaces",
        num_draws=WARM_UP_STEPS + spec.steps,
    )


def hosts_of(plan: Plan) -> list[int]:
    """Host of each worker, in the order in which the controller gives them stages: by stage, then replica."""
    if not plan.placement:
        return list(range(plan.num_workers))
    return [
        plan.placement[replica][stage] for stage in range(plan.pipeline_depth) for replica in range(plan.num_replicas)
    ]
