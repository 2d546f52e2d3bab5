"""The controller's configuration, given once before the first event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType

import numpy as np
from pydantic import Field, model_validator

from morph.contract.base import Value
from morph.contract.checkpoint import Manifest
from morph.contract.cluster import Policy
from morph.contract.messages import UnitId
from morph.contract.plan import Plan, PlanTable, StagePlan, by_pool
from morph.contract.pool import Pool


class ExpectedLosses(Value):
    """The rate of losses of a run's kind of VMs, and the time to replace one, from earlier runs or published traces.

    ``per_vm_h``: losses of one VM per hour; ``weight_vm_h``: the VM-hours of observation by which this rate is weighed
    against this run's own (a Gamma prior of a Poisson rate). ``bulk_share``: the share of losses that come together
    with others; ``bulk_fraction``: the share of the present VMs that such an event takes.

    The defaults of these four are computed by ``benchmarks/trace_statistics.py`` from the four traces published with
    Bamboo (AWS p3 and g4dn, Google V100 and A100, 11 to 27 hours each; Google's losses are decreases of the number of
    VMs, a lower bound). The two times are those of GPT-117M in the thesis on Spotify, inferred from its table 6.2.
    """

    per_vm_h: float = Field(default=0.39, ge=0)
    weight_vm_h: float = Field(default=7.2, gt=0)
    bulk_share: float = Field(default=0.81, ge=0, le=1)
    bulk_fraction: float = Field(default=0.15, ge=0, le=1)
    cluster_h: float = Field(default=168.0, gt=0, description="mean hours until all VMs are gone at once")
    allocation_s: float = Field(default=132.0, ge=0, description="seconds from a request to a VM that is up")
    preparation_s: float = Field(default=153.0, ge=0, description="seconds from a VM that is up to a ready worker")
    source: str = Field(default="published traces", description="the source of these numbers, for readers")


class _Ranked:
    """Plans, the fastest first, then by smallest pool; ``needs``: each pool's GPUs of each named type, and of all."""

    def __init__(self, table: list[tuple[Pool, Plan]]) -> None:
        ranked = sorted(table, key=lambda entry: _rank(entry[1]), reverse=True)
        self.names = tuple(sorted({name for pool, _ in table for name in pool.types if name}))
        self.plans = [plan for _, plan in ranked]
        self.needs = np.array([self._counts(pool) for pool, _ in ranked], np.int64)
        self.found: dict[Pool, Plan | None] = {}

    def first_that_fits(self, pool: Pool) -> Plan | None:
        if pool not in self.found:
            fits = np.all(self.needs <= np.array(self._counts(pool)), axis=1)
            first = int(fits.argmax())
            self.found[pool] = self.plans[first] if fits[first] else None
        return self.found[pool]

    def _counts(self, pool: Pool) -> list[int]:
        return [*(pool[name] for name in self.names), pool.num_gpus]


class Offer(Value):
    """GPUs of one type that can be requested."""

    node_type: str = Field(min_length=1)
    usd_per_h: float | None = Field(default=None, ge=0, description="price of one GPU; None: not known")
    most: int | None = Field(default=None, ge=1, description="largest number; None: not known")


class ControllerConfig(Value):
    """The job as the controller sees it; ``units``: by parameter unit, the sections that use it.

    ``plans[G]`` is the best plan for GPUs of pool G (it may leave some idle); pools without a plan are absent.
    """

    job: str = "job"
    fingerprint: str = Field(description="fingerprint of the cut model")
    plans: PlanTable
    units: dict[UnitId, tuple[int, ...]] = Field(min_length=1)
    unit_bytes: dict[UnitId, int] = Field(description="parameters and optimizer state, bytes")
    state_copies: int = Field(default=1, ge=1, description="``unit_bytes`` over the bytes of the parameters alone")
    constant_bytes: tuple[int, ...] = Field(
        default=(), description="frozen weights by section, which workers read from their source; absent: none"
    )
    num_steps: int = Field(ge=1, description="the run ends when this version is committed")
    policy: Policy = Policy()
    initial_version: int = Field(default=0, ge=0)
    initial_checkpoint: Manifest | None = Field(
        default=None, description="newest complete checkpoint; absent: from the seed"
    )
    expected_nodes: int = Field(ge=1, description="VMs requested at the start")
    timeline_step: int | None = Field(default=None, ge=0, description="the workers record a timeline of this step")
    target_nodes: int = Field(default=0, ge=0, description="VMs to keep requesting; 0: they come by themselves")
    idle_vm_h: float | None = Field(
        default=None, gt=0, description="VM-hours without a trained step after which the run ends; absent: no limit"
    )
    requests: str = Field(default="", description="prefix of the names of requests; empty: the job's name")
    section_compute_s: tuple[float, ...] = Field(
        default=(), description="forward and backward of one micro-batch, by section; absent: not known"
    )
    type_compute_s: dict[str, tuple[float, ...]] = Field(
        default={}, description="``section_compute_s`` by type of GPU, if there are several"
    )
    offers: tuple[Offer, ...] = Field(
        default=(), description="GPUs that can be requested, if they may be of several types; absent: any"
    )
    num_cores: int | None = Field(
        default=None, ge=1, description="this machine's, if workers compute on them; absent: they have other devices"
    )
    device_memory_bytes: int | None = Field(
        default=None, ge=1, description="memory of one worker's device, as used for the plans; absent: no limit"
    )
    host_memory_bytes: int | None = Field(
        default=None, ge=1, description="host memory of one worker, if devices have their own; absent: none to spare"
    )
    link_bytes_per_s: float | None = Field(
        default=None, gt=0, description="speed from VM to VM, as profiled, until this run has measured it; absent: slow"
    )
    expected_losses: ExpectedLosses = Field(
        default=ExpectedLosses(), description="losses of VMs, until this run has observed its own"
    )
    factors: tuple[float, ...] = Field(
        default=(),
        description="by section, learned factors of the profile's times, by which shapes are chosen; absent: 1",
    )

    node_type: str = Field(
        default="",
        exclude_if=lambda given: not given,
        description="the type of GPU of all VMs, as the profile names it; empty: there are several, or none has a name",
    )
    type_factors: dict[str, tuple[float, ...]] = Field(
        default={}, description="these factors by type of GPU, if there are several"
    )

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_journals(cls, given: object) -> object:
        """Drop ``shared_mini_batch_s``: earlier versions expected times of shapes whose workers share cores."""
        if isinstance(given, dict) and "shared_mini_batch_s" in given:
            return {name: value for name, value in given.items() if name != "shared_mini_batch_s"}
        return given

    @model_validator(mode="after")
    def _consistent(self) -> ControllerConfig:
        if set(self.unit_bytes) != set(self.units):
            raise ValueError("unit_bytes and units do not name the same units")
        for count, plan in by_pool(self.plans):
            if not plan.pool.fits_in(count):
                raise ValueError(f"plans[{count}] needs {plan.pool} workers")
            if plan.fingerprint != self.fingerprint:
                raise ValueError(f"plans[{count}] was made for another model ({plan.fingerprint})")
            if self.section_compute_s and plan.num_sections != len(self.section_compute_s):
                raise ValueError(f"section_compute_s has {len(self.section_compute_s)} sections, plans[{count}] others")
        checkpoint = self.initial_checkpoint
        if checkpoint is None:
            if self.initial_version:
                raise ValueError(f"initial_version is {self.initial_version} but there is no checkpoint to start from")
        elif checkpoint.version != self.initial_version:
            raise ValueError(f"initial_version is {self.initial_version}, the checkpoint's is {checkpoint.version}")
        elif {file.unit for file in checkpoint.units} != set(self.units):
            raise ValueError("initial_checkpoint and units do not name the same units")
        return self

    @cached_property
    def _ranked(self) -> _Ranked:
        return _Ranked([(pool, self._corrected(plan)) for pool, plan in by_pool(self.plans)])

    def best_plan(self, pool: Pool | int) -> Plan | None:
        """Return the fastest plan that workers on these GPUs can run, the smaller of equals; None if no plan fits."""
        return self._ranked.first_that_fits(Pool.of(pool) if isinstance(pool, int) else pool)

    def speed_on(self, pool: Pool) -> float:
        """Return the best speed of these GPUs, examples/s; 0 if no plan fits them."""
        plan = self.best_plan(pool)
        return 0.0 if plan is None else plan.expected.examples_per_s

    def corrected(
        self, factors: tuple[float, ...], type_factors: Mapping[str, tuple[float, ...]] = MappingProxyType({})
    ) -> ControllerConfig:
        """Return this configuration with shapes chosen by these factors."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return ControllerConfig.model_construct(**fields | {"factors": factors, "type_factors": dict(type_factors)})

    def _corrected(self, plan: Plan) -> Plan:
        """Return the plan, slowed down by the factor of the stage that takes longest in a step."""
        if not self.factors or self.shares_cores:
            return plan
        shares = [kind.longest_share for kind in plan.pipeline_kinds for _ in range(kind.num_stages)]
        weights = [share / max(shares) for share in shares]
        as_profiled_s = max(
            weight * (self.expected_compute_s(stage) or 1.0) for weight, stage in zip(weights, plan.stages, strict=True)
        )
        now_s = max(
            weight * sum(self._times_of(stage)[section] * factors[section] for section in stage.sections)
            for weight, stage in zip(weights, plan.stages, strict=True)
            if (factors := self.type_factors.get(stage.node_type, self.factors))
        )
        ratio, expected = now_s / as_profiled_s, plan.expected
        update = {"mini_batch_s": expected.mini_batch_s * ratio, "examples_per_s": expected.examples_per_s / ratio}
        return plan.model_copy(update={"expected": expected.model_copy(update=update)})

    @cached_property
    def state_bytes(self) -> int:
        """The bytes of the state of all units."""
        return sum(self.unit_bytes.values())

    @cached_property
    def largest_unit_bytes(self) -> int:
        """The bytes of the state of the largest unit."""
        return max(self.unit_bytes.values())

    @cached_property
    def _by_stage(self) -> dict[tuple[int, ...], tuple[tuple[tuple[UnitId, ...], ...], int]]:
        return {}

    def _stages_of(self, plan: Plan) -> tuple[tuple[tuple[UnitId, ...], ...], int]:
        ends = tuple(stage.end_section for stage in plan.stages)  # the last stage of each kind of pipeline ends at K
        known = self._by_stage.get(ends)
        if known is None:
            needed = units_by_stage(plan, self.units)
            most_bytes = max(sum(self.unit_bytes[unit] for unit in units) for units in needed)
            known = self._by_stage[ends] = needed, most_bytes
        return known

    def units_of(self, plan: Plan) -> tuple[tuple[UnitId, ...], ...]:
        """Return the units that each stage of a plan needs, in the order of ``units``."""
        return self._stages_of(plan)[0]

    def stage_bytes(self, plan: Plan) -> int:
        """Return the bytes of the largest stage's units."""
        return self._stages_of(plan)[1]

    def written_bytes(self, plan: Plan) -> int:
        """Return the largest number of bytes of a checkpoint that one worker writes; see ``placement.share_units``."""
        key = plan.shape, tuple(stage.end_section for stage in plan.stages)
        if key not in self._written:
            loads = dict.fromkeys(plan.places, 0)
            of_stage = [frozenset(units) for units in self.units_of(plan)]
            for unit in sorted(self.unit_bytes, key=lambda unit: -self.unit_bytes[unit]):
                writer = min((place for place in loads if unit in of_stage[place[0]]), key=loads.__getitem__)
                loads[writer] += self.unit_bytes[unit]
            self._written[key] = max(loads.values())
        return self._written[key]

    @cached_property
    def _written(self) -> dict[tuple[str, tuple[int, ...]], int]:
        return {}

    @property
    def fewest_workers(self) -> int:
        """The smallest number of workers for which there is a plan."""
        return by_pool(self.plans)[0][0].num_gpus

    @cached_property
    def shares_cores(self) -> bool:
        """Whether the most workers of the run and its manager are more processes than there are cores for them.

        Then no time of a worker is its own, in a shape of few workers too: others start, and end, beside it.
        """
        return self.num_cores is not None and by_pool(self.plans)[-1][0].num_gpus >= self.num_cores

    def expected_compute_s(self, stage: StagePlan) -> float | None:
        """Return the compute seconds that the profile expects for one micro-batch on a stage; None if not known."""
        times_s = self._times_of(stage)
        return sum(times_s[section] for section in stage.sections) or None if times_s else None

    @cached_property
    def compute_s(self) -> dict[str, tuple[float, ...]]:
        """The profiled seconds of compute of each section by type of GPU; the type is "" for GPUs without one."""
        return {"": self.section_compute_s, **self.type_compute_s}

    def _times_of(self, stage: StagePlan) -> tuple[float, ...]:
        return self.type_compute_s.get(stage.node_type, self.section_compute_s)


def units_by_stage(plan: Plan, units: Mapping[UnitId, Sequence[int]]) -> tuple[tuple[UnitId, ...], ...]:
    """Return the units that each stage needs, in the order of ``units``."""
    return tuple(
        tuple(unit for unit, sections in units.items() if any(section in stage.sections for section in sections))
        for stage in plan.stages
    )


def _rank(plan: Plan) -> tuple[float, int]:
    return plan.expected.examples_per_s, -plan.num_workers
