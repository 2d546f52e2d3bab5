"""The job of a simulated spot cluster: its shapes, its state, and its durations."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from manager.controller.state.config import ExpectedLosses
from morph.contract.base import Value
from morph.contract.cluster import Policy
from morph.contract.errors import PlanError
from morph.contract.messages import UnitId
from morph.contract.plan import Expectation, Plan, PlanTable, StagePlan, by_need, by_pool
from morph.contract.pool import Pool
from morph.contract.profile import Profile
from morph.contract.vm_names import MAX_DEVICES
from simulator import PlanRequest, Simulation, pipeline_times, plan, plan_table, pool_plan_table, simulate_plan
from simulator.inputs.conditions import RedundantName
from simulator.inputs.node_types import of_pool_type

FINGERPRINT = "simulated"
_Seconds = Annotated[float, Field(ge=0, le=1e7)]
_Positive = Annotated[float, Field(gt=0, le=1e7)]


class Durations(Value):
    """Durations of everything except steps, in seconds, and speeds in bytes per second; a real run measures some of
    these.

    The defaults come from this project's measurements and from the papers, as noted.
    """

    noticed_s: float = Field(default=0.1, ge=0, description="from a VM's end until the manager detects it")
    aborted_s: float = Field(default=0.05, ge=0, description="until workers have given up a step")
    groups_s: float = Field(default=0.2, ge=0, description="forming the groups of another shape")
    setup_s: float = Field(default=30.0, ge=0, description="from when a VM is up to its ready worker")
    order_s: float = Field(default=0.002, ge=0, description="the manager's round at a step's boundary")
    link_bytes_per_s: float = Field(default=1.25e9, gt=0, description="speed of state between workers; 10 Gb/s")
    storage_bytes_per_s: float = Field(default=2.5e8, gt=0, description="speed of one worker from or to storage")
    copy_bytes_per_s: float = Field(
        default=5e9, gt=0, description="speed of state to host memory, while training waits"
    )
    stall_s: float | None = Field(default=None, ge=0, description="stall of a save, if not the copy's time")
    durable_s: float | None = Field(default=None, ge=0, description="time of a save, instead of the upload's time")
    manifest_s: float = Field(default=0.5, ge=0, description="writing a manifest")
    restart_s: float = Field(
        default=60.0, ge=0, description="until processes can load a checkpoint, if a policy restarts all of them"
    )
    slowness: float = Field(default=1.0, gt=0, description="a step's time over the planned time, because of waiting")
    spread: float = Field(default=0.0, ge=0, lt=1, description="standard deviation of a step's time, as a share of it")

    def save_stall_s(self, num_bytes: float) -> float:
        """Return how long a save stalls training (seconds) if one worker copies this number of bytes."""
        return num_bytes / self.copy_bytes_per_s if self.stall_s is None else self.stall_s

    def save_upload_s(self, num_bytes: float) -> float:
        """Return how long a worker then writes this number of bytes to storage (seconds)."""
        return num_bytes / self.storage_bytes_per_s if self.durable_s is None else self.durable_s


class RedundantCost(Value):
    """The time of redundant computation, as shares of a step without it (Bamboo; simulator/costs/redundant.py)."""

    overhead: float = Field(ge=0, description="share in every step")
    pause: float = Field(ge=0, description="share when a VM is lost, on average")


PUBLISHED = {"lflb": RedundantCost(overhead=0.0701, pause=1 / 2), "eflb": RedundantCost(overhead=0.1977, pause=1 / 3)}
"""BERT's costs in Bamboo's table 4. A loss repeats half the backwards on average; with ``lflb`` their forwards too."""


class SpotJob(Value):
    """A job. ``plans[n]`` is the best plan of n workers, or of a pool; numbers that fit no plan are absent.

    ``gpus_per_vm``: of each VM.

    ``unit_bytes``: parameters and optimizer state; ``section_compute_s``: forward and backward of one micro-batch.
    ``redundant``: the costs of policies with redundant computation, by "eflb" or "lflb". ``pipelines``: for each depth,
    the time of a mini-batch by the micro-batches of one replica, for any number of workers
    (``simulator.pipeline_times``).
    """

    name: str
    batch_size: int = Field(ge=1)
    gpus_per_vm: int = Field(default=1, ge=1, le=MAX_DEVICES)
    plans: PlanTable
    units: dict[UnitId, tuple[int, ...]]
    unit_bytes: dict[UnitId, int]
    state_copies: int = Field(default=3, ge=1, description="unit_bytes over the parameters' bytes: 3 for Adam")
    section_compute_s: tuple[float, ...] = ()
    node_types: dict[str, str] = Field(default={}, description="GPU types by a trace's instance types; empty if one")
    type_compute_s: dict[str, tuple[float, ...]] = Field(default={}, description="section_compute_s by type")
    durations: Durations = Durations()
    policy: Policy = Policy()
    expected_losses: ExpectedLosses = ExpectedLosses()
    redundant: dict[str, RedundantCost] = PUBLISHED
    equal_plans: PlanTable | None = Field(
        default=None, description="plans of equal pipelines, for policies without others; None: in ``plans``"
    )
    pipelines: dict[int, tuple[tuple[int, float], ...]] = Field(default_factory=dict)

    @property
    def fewest_workers(self) -> int:
        """The smallest number of workers that has a plan."""
        return by_pool(self.plans)[0][0].num_gpus

    @property
    def state_bytes(self) -> int:
        """The bytes of parameters and optimizer state of the whole model."""
        return sum(self.unit_bytes.values())

    def sum_bytes(self, unit: UnitId) -> int:
        """Return the bytes of one sum of a unit's gradients: 8 for each parameter."""
        return 2 * self.unit_bytes[unit] // self.state_copies if unit in self.unit_bytes else 0

    def best_plan(self, there: Pool | int, *, equal: bool = False) -> Plan | None:
        """Return the fastest plan for these GPUs, with ``equal`` pipelines if requested; None: none fits."""
        there = Pool.of(there) if isinstance(there, int) else there
        table = by_pool(self.equal_plans if equal and self.equal_plans else self.plans)
        fitting = [plan for pool, plan in table if pool.fits_in(there) and not (equal and plan.kinds)]
        return max(fitting, key=lambda plan: (plan.expected.examples_per_s, -plan.num_workers), default=None)


def job_from_profile(
    profile: Profile,
    most: int | Pool,
    request: PlanRequest = PlanRequest(),  # noqa: B008 (frozen)
    *,
    node_types: Mapping[str, str] = MappingProxyType({}),
    durations: Durations = Durations(),  # noqa: B008 (frozen)
    policy: Policy = Policy(),  # noqa: B008 (frozen)
) -> SpotJob:
    """Plan for every number of workers, or every pool, up to ``most``, as a run would.

    ``request`` says how many workers a VM has. ``node_types``: GPU types by a trace's instance types, for a pool.
    Raises PlanError if no plan fits even the largest number.
    """
    plans: Mapping[Any, Plan]
    if isinstance(most, int):
        plans = plan_table(profile, most, request, unequal=True)
    else:
        plans = by_need(pool_plan_table(profile, most, request).values())
    if not plans:
        if isinstance(most, int):
            plan(profile, request, num_gpus=most)  # raises, and says what is allowed
        raise PlanError("no plan fits", field="pool", value=str(most))
    micro_batch_size = next(iter(plans.values())).micro_batch_size
    assert request.num_gpus_per_node is None or isinstance(request.num_gpus_per_node, int), "VMs are alike"
    state_copies = 3 if any(section.optimizer_bytes for section in profile.sections) else 1
    return SpotJob(
        name=profile.job.name,
        batch_size=profile.job.batch_size,
        gpus_per_vm=request.num_gpus_per_node or 1,
        plans=plans,
        equal_plans=_equal_plans(profile, most, replace(request, micro_batch_size=micro_batch_size), plans),
        pipelines=pipeline_times(profile, most, micro_batch_size, request) if isinstance(most, int) else {},
        units={unit.id: unit.sections for unit in profile.units},
        unit_bytes={unit.id: unit.parameter_bytes * state_copies for unit in profile.units},
        state_copies=state_copies,
        section_compute_s=profile.section_compute_s(micro_batch_size),
        node_types=dict(node_types),
        type_compute_s={
            name: of_pool_type(profile, name).section_compute_s(micro_batch_size) for name in set(node_types.values())
        },
        durations=durations,
        policy=policy,
    )


def _equal_plans(
    profile: Profile, most: int | Pool, request: PlanRequest, plans: Mapping[Any, Plan]
) -> dict[int, Plan] | None:
    """Return the best plans of equal pipelines, if a table has unequal ones; None: not needed."""
    if not isinstance(most, int) or not any(plan.kinds for plan in plans.values()):
        return None
    return plan_table(profile, most, replace(request, unequal=False)) or None


def with_redundant_costs(job: SpotJob, profile: Profile, num_workers: int) -> SpotJob:
    """Return the job with the cost of redundant computation in the best shape of these workers; see ``simulate_plan``.

    If that shape has a single stage, no neighbour can compute for it, and the job is unchanged.
    """
    plan = job.best_plan(num_workers, equal=True)
    if plan is None or plan.pipeline_depth == 1:
        return job

    def step(redundant: RedundantName) -> Simulation:
        return simulate_plan(profile, plan, redundant_computation=redundant)

    plain_s = step("off").expected.mini_batch_s
    modes: tuple[RedundantName, ...] = ("lflb", "eflb")
    steps = {mode: step(mode) for mode in modes}
    costs = {
        mode: RedundantCost(
            overhead=max(0.0, simulated.expected.mini_batch_s / plain_s - 1), pause=simulated.mean_pause_s / plain_s
        )
        for mode, simulated in steps.items()
    }
    return job.model_copy(update={"redundant": costs})


def _bounds(value: object) -> object:
    """Return both bounds: a file gives one number for both, or a list of two."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (value, value)
    if isinstance(value, list | tuple) and len(value) == 2:
        return tuple(value)
    raise ValueError("is neither a number of seconds nor a list of two bounds")


def _in_order(bounds: tuple[float, float]) -> tuple[float, float]:
    if bounds[0] > bounds[1]:
        raise ValueError("the first of the two numbers is above the second")
    return bounds


Between = Annotated[tuple[_Seconds, _Seconds], BeforeValidator(_bounds), AfterValidator(_in_order)]
PositiveBetween = Annotated[tuple[_Positive, _Positive], BeforeValidator(_bounds), AfterValidator(_in_order)]


class OneVmJob(Value):
    """A job that one VM trains, described by durations (the thesis on Spotify, 6.2.2): seconds, or two bounds of them.

    The thesis draws each latency every time it occurs, from a uniform distribution; here it is drawn once for each
    trace, so that the uncertainty shows in the spread of the traces' outcomes.
    """

    name: str = Field(default="job", min_length=1)
    step_s: PositiveBetween = Field(description="time of one iteration, without a save")
    save_s: Between = Field(description="time that training waits for a save")
    upload_s: Between = Field(description="from a save until it outlives the VM")
    preparation_s: Between = Field(description="from when a VM is up until it trains")
    batch_size: int = Field(default=1, ge=1, description="examples of one iteration")

    def drawn(self, seed: int) -> SpotJob:
        """Draw one job with numbers between the bounds."""
        rng = random.Random(seed)
        step_s, save_s, upload_s, preparation_s = (
            rng.uniform(*bounds) for bounds in (self.step_s, self.save_s, self.upload_s, self.preparation_s)
        )
        plan = Plan(
            fingerprint=FINGERPRINT,
            schedule="varuna",
            micro_batch_size=self.batch_size,
            num_micro_batches=1,
            num_replicas=1,
            stages=(StagePlan(first_section=0, end_section=1, window=1, recompute=False),),
            orders={1: ("FB",)},
            expected=Expectation(
                mini_batch_s=step_s,
                examples_per_s=self.batch_size / step_s,
                lower_bound_s=step_s,
                peak_memory_bytes=0,
                parts_s={},
            ),
        )
        return SpotJob(
            name=self.name,
            batch_size=self.batch_size,
            plans={1: plan},
            units={"all": (0,)},
            unit_bytes={"all": 1},
            durations=Durations(
                stall_s=save_s, durable_s=upload_s, setup_s=preparation_s, manifest_s=0.0, order_s=0.0, restart_s=0.0
            ),
        )
