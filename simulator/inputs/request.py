"""Requests to the planner and the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from morph.contract import ranges
from morph.contract.cluster import LinkSetting, RingSetting
from morph.contract.errors import PlanError
from morph.contract.plan import Schedule
from morph.contract.profile import LinkProfile, Profile
from simulator.inputs.conditions import (
    NUM_DRAWS,
    AllReduceStart,
    Conditions,
    OverlapName,
    RedundantName,
    Slow,
    slow_workers,
)

_NEEDS = {"examples_per_s": None, "usd_per_example": "usd_per_gpu_hour", "progress": "revocations_per_hour"}


@dataclass(frozen=True)
class MemoryRules:
    """What a run holds in memory besides the needs of a step.

    Workers keep their own sums when a step is given up (``keeps_sums``), and copies of others' (``copies_sums``).
    ``follows``: with one replica, another worker keeps each stage's state in step. ``changes``: the shape changes.
    ``saves``: checkpoints are copied to host memory and kept there. ``rings_on_device``: NCCL reduces, with its own
    buffers for each ring of a worker. ``mailboxes``: stages send through slots in their device's memory, which a worker
    keeps during its whole life.
    """

    keeps_sums: bool = False
    copies_sums: bool = False
    follows: bool = False
    changes: bool = True
    saves: bool = True
    mailboxes: bool = False
    rings_on_device: bool = False
    redundant_computation: RedundantName = "off"


ObjectiveName = Literal["examples_per_s", "usd_per_example", "progress"]
RedundancyName = Literal["off", "state", "salvage", "auto"]
NodeSizes = int | Sequence[int] | Mapping[str, int | Sequence[int]]
Price = float | Mapping[int, float] | Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """How plans are searched, and under which conditions. Not every function uses all fields.

    Attributes:
        memory_bytes: Memory of one device, bytes; None: that of the profile, or no limit if it has none.
        host_memory_bytes: Host memory for each device that has its own memory, bytes; None: that of the profile.
        redundancy: ``policy.redundancy`` of the run, which decides whether workers keep copies of sums and of other
            workers' state. With "auto" no plan is refused for others' state, which is then held only where it fits.
        changes: Whether the shape changes during the run; workers then hold old and new units together.
        links: ``vms.links`` of the run; all but "staged" take device memory.
        rings: ``vms.rings`` of the run; all but "gloo" take device memory.
        schedule: "varuna", "gpipe" or "1f1b"; None: the best one.
        micro_batch_size: m; None: the job's, or else the best of the measured ones.
        pipeline_depth: The only P to consider; None: all.
        num_replicas: The only D to consider; None: all.
        unequal: Whether pipelines may differ in depth, cuts and shares of micro-batches (see
            :mod:`simulator.search.pools`).
        recompute: Whether stages recompute the forward, in groups of sections where a plan does not fit otherwise; if
            not, each stage keeps the activations of micro-batches in flight. None: the better of the two.
        compute_slots: Number of tasks that can run at once on all workers, which then share one machine; None: one
            device per worker.
        num_gpus_per_node: GPUs of every node, or a list with the GPUs of each node; for a pool one number for all
            types, or a number or a list for each type. None: every GPU is its own node.
        share_links: Whether messages that leave or enter one node at the same time share its bandwidth.
        slow: Factor of the times of a worker's tasks, by (stage, replica), or by stage for all replicas of the stage.
        all_reduce: "overlapped": a stage reduces each unit once the unit's gradient is complete, beside the rest of its
            last backward, as the executor does; "late": all units after the last backward of all stages, as in Varuna's
            paper.
        jitter_seed: Seed with which task and message times are drawn from the profile's quantiles; the best shapes are
            then compared by their means over the draws. None: times are medians.
        num_draws: Number of mini-batches drawn for each shape.
        redundant_computation: Bamboo's: each worker also holds the layers of the next stage and computes for that
            stage; "lflb": only when that stage's worker is lost; "eflb": forwards always, backwards when that worker is
            lost; "efeb": both always (see :mod:`simulator.costs.redundant`). Only for :func:`simulate`.
        overlap: "full": a worker computes while its messages are sent, as Morph's workers do; "none": a worker does not
            compute while it sends or receives, for comparisons with frameworks with blocking sends (DeepSpeed).
        objective: "examples_per_s", "usd_per_example" or "progress" (see :mod:`simulator.search.objectives`).
        usd_per_gpu_hour: Price, USD: one for all nodes, or by GPUs per node, or for a pool by type; for
            "usd_per_example" and for a budget.
        zone_gbit_per_s: Bandwidth between two zones of a pool, Gbit/s; None: that of the profile's links between zones,
            or, without them, between nodes.
        zone_latency_ms: Latency of these links, milliseconds, with ``zone_gbit_per_s``.
        zone_usd_per_gb: Price of data from one zone to another, USD for 10^9 bytes.
        budget_usd_per_h: The highest price of all GPUs in use together, USD per hour; only for :func:`plan`. The
            whole price of a node of several GPUs counts.
        tolerance: The gain, as a share of the time or price, that is worth a plan with more kinds of pipelines.
        revocations_per_hour: Revocations of each node per hour; for "progress".
        pause_s: Seconds for which a morph stops training; for "progress".
        replacement_s: Seconds from the revocation of a node until its replacement is in use; for "progress".
        revoked_together: Number of nodes that one revocation takes; for "progress".

    Raises:
        PlanError: the objective is unknown, or its parameter is missing.
    """

    memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    redundancy: RedundancyName = "auto"
    changes: bool = True
    links: LinkSetting = "staged"
    rings: RingSetting = "gloo"
    schedule: Schedule | None = None
    micro_batch_size: int | None = None
    pipeline_depth: int | None = None
    num_replicas: int | None = None
    unequal: bool = False
    recompute: bool | None = None
    compute_slots: int | None = None
    num_gpus_per_node: NodeSizes | None = None
    share_links: bool = True
    slow: Slow | None = None
    all_reduce: AllReduceStart = "overlapped"
    jitter_seed: int | None = None
    num_draws: int = NUM_DRAWS
    redundant_computation: RedundantName = "off"
    overlap: OverlapName = "full"
    objective: ObjectiveName = "examples_per_s"
    usd_per_gpu_hour: Price | None = None
    zone_gbit_per_s: float | None = None
    zone_latency_ms: float = 1.0
    zone_usd_per_gb: float = 0.0
    budget_usd_per_h: float | None = None
    tolerance: float = 0.001
    revocations_per_hour: float | None = None
    pause_s: float = 1.0
    replacement_s: float = 120.0
    revoked_together: int = 1

    def __post_init__(self) -> None:
        if self.objective not in _NEEDS:
            raise PlanError("is unknown", field="objective", value=self.objective, allowed=", ".join(_NEEDS))
        needed = _NEEDS[self.objective]
        if needed is not None and getattr(self, needed) is None:
            raise PlanError(f"is missing; the objective {self.objective} needs it", field=needed, allowed="a number")
        ranges.TOLERANCE.check("tolerance", self.tolerance)
        ranges.USD_PER_GB.check("zone_usd_per_gb", self.zone_usd_per_gb)
        if self.budget_usd_per_h is not None:
            ranges.USD_PER_HOUR_AT_MOST.check("budget_usd_per_h", self.budget_usd_per_h)
            if self.usd_per_gpu_hour is None:
                raise PlanError("is missing; a budget needs it", field="usd_per_gpu_hour", allowed="a number")
            if self.objective == "progress":
                raise PlanError(
                    "is not possible with the objective progress",
                    field="budget_usd_per_h",
                    value=self.budget_usd_per_h,
                    allowed="the objectives examples_per_s and usd_per_example",
                )

    @property
    def worth(self) -> float:
        """The share of a simpler plan's time or price that a more complex plan may have at most."""
        return 1 - self.tolerance

    @property
    def memory_rules(self) -> MemoryRules:
        """Return what a run holds in memory besides the needs of a step."""
        sums = self.redundancy == "salvage"  # with auto, a change of shape drops those for which there is no room
        return MemoryRules(
            keeps_sums=sums,
            copies_sums=sums,
            follows=self.redundancy in ("state", "salvage"),
            changes=self.changes,
            mailboxes=self.links != "staged",
            rings_on_device=self.rings != "gloo",
            redundant_computation=self.redundant_computation,
        )

    def applied_to(self, profile: Profile) -> Profile:
        """Return the profile with the requested host memory and links between zones.

        Raises PlanError if the requested memory is not a size, or the bandwidth or latency is out of range.
        """
        update: dict[str, object] = {}
        if self.host_memory_bytes is not None:
            ranges.MEMORY_BYTES.check("host_memory_bytes", self.host_memory_bytes)
            memory = {"host_memory_bytes": self.host_memory_bytes}
            update["environment"] = profile.environment.model_copy(update=memory)
        if self.zone_gbit_per_s is not None:
            ranges.GBIT_PER_S.check("zone_gbit_per_s", self.zone_gbit_per_s)
            ranges.LATENCY_MS.check("zone_latency_ms", self.zone_latency_ms)
            update["between_zones"] = LinkProfile.of(self.zone_latency_ms / 1e3, self.zone_gbit_per_s * 1e9 / 8)
        return profile.model_copy(update=update) if update else profile

    def conditions(self, sizes: tuple[int, ...] | None) -> Conditions:
        """Return where and how shapes run; ``sizes``: GPUs of each node."""
        return Conditions(
            compute_slots=self.compute_slots,
            node_sizes=sizes,
            share_links=self.share_links,
            slow=slow_workers(self.slow),
            all_reduce=self.all_reduce,
            jitter_seed=self.jitter_seed,
            num_draws=self.num_draws,
            redundant_computation=self.redundant_computation,
            overlap=self.overlap,
        )
