"""Where and how a shape runs, as far as the profile does not say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from morph.contract import ranges
from morph.contract.errors import PlanError
from morph.contract.plan import Plan

AllReduceStart = Literal["overlapped", "late"]
RedundantName = Literal["off", "lflb", "eflb", "efeb"]
OverlapName = Literal["full", "none"]
Slow = Mapping[int | tuple[int, int], float]
NUM_DRAWS = 20


@dataclass(frozen=True)
class Conditions:
    """See the fields of the same names of :class:`simulator.inputs.request.PlanRequest`.

    ``node_sizes``: GPUs of each node; None: every worker has a node of its own. ``slow`` holds (stage, replica or
    None for all of them, factor).
    """

    compute_slots: int | None = None
    node_sizes: tuple[int, ...] | None = None
    share_links: bool = True
    slow: tuple[tuple[int, int | None, float], ...] = ()
    all_reduce: AllReduceStart = "overlapped"
    jitter_seed: int | None = None
    num_draws: int = NUM_DRAWS
    redundant_computation: RedundantName = "off"
    overlap: OverlapName = "full"

    def __post_init__(self) -> None:
        for field, known in (("redundant_computation", RedundantName), ("overlap", OverlapName)):
            if (name := getattr(self, field)) not in get_args(known):
                raise PlanError("is unknown", field=field, value=name, allowed=", ".join(get_args(known)))
        if not self.overlaps and (self.compute_slots is not None or self.eager):
            allowed = "full with shared cores or eager redundant computation"
            raise PlanError("is for workers with a device each", field="overlap", value=self.overlap, allowed=allowed)
        if self.compute_slots is not None:
            ranges.SLOTS.check("compute_slots", self.compute_slots)
        if self.compute_slots is not None and self.node_sizes is not None:
            raise PlanError(
                "puts all workers on one machine, so there are no nodes to place them on",
                field="compute_slots",
                value=self.compute_slots,
                allowed="without nodes of several GPUs",
            )
        if self.compute_slots is not None and self.eager:
            raise PlanError(
                "is for workers with a device each",
                field="redundant_computation",
                value=self.redundant_computation,
                allowed="off or lflb with shared cores",
            )
        ranges.DRAWS.check("num_draws", self.num_draws)
        if self.jitter_seed is not None:
            ranges.SEED.check("jitter_seed", self.jitter_seed)
        for stage, replica, factor in self.slow:
            if factor not in ranges.FACTOR:
                where = stage if replica is None else (stage, replica)
                raise PlanError("is not a factor", field="slow", value={where: factor}, allowed=str(ranges.FACTOR))

    @property
    def overlaps(self) -> bool:
        """Whether workers compute while their messages are sent."""
        return self.overlap == "full"

    @property
    def eager(self) -> bool:
        """Whether workers run redundant tasks in every mini-batch."""
        return self.redundant_computation in ("eflb", "efeb")

    @property
    def uneven(self) -> bool:
        """Whether windows must be judged by full simulation.

        That is so if cores or the links of several GPUs are shared, a worker is slow, times vary, redundant tasks are
        run, or messages delay their workers.
        """
        sizes = self.node_sizes or (1,)
        crowded = self.share_links and max(sizes) > 1 and len(sizes) > 1  # no message leaves a single node
        hindered = crowded or self.eager or not self.overlaps or self.compute_slots is not None
        return hindered or bool(self.slow) or self.jitter_seed is not None


def slow_workers(slow: Slow | None) -> tuple[tuple[int, int | None, float], ...]:
    """Return slow workers as tuples, from ``{stage: factor, (stage, replica): factor}``."""
    entries: list[tuple[int, int | None, float]] = []
    for where, factor in (slow or {}).items():
        stage, replica = (where, None) if isinstance(where, int) else where
        entries.append((stage, replica, factor))
    return tuple(entries)


def check_slow(slow: Sequence[tuple[int, int | None, float]], num_stages: int, num_replicas: int) -> None:
    """Refuse slow workers that the shape does not have; a PlanError names such a worker."""
    for stage, replica, _ in slow:
        if not 0 <= stage < num_stages or not 0 <= (replica or 0) < num_replicas:
            raise PlanError(
                "the shape has no such worker",
                field="slow",
                value=stage if replica is None else (stage, replica),
                allowed=f"stages 0 to {num_stages - 1}, replicas 0 to {num_replicas - 1}",
            )


def check_slow_of_plan(slow: Sequence[tuple[int, int | None, float]], plan: Plan) -> None:
    """Refuse a worker that a plan does not have, with its own numbers of stages and replicas; a PlanError names it."""
    for stage, replica, _ in slow:
        replicas = plan.replicas_of(stage) if 0 <= stage < len(plan.stages) else range(0)
        if not replicas or (replica is not None and replica not in replicas):
            of_stage = f", replicas {replicas[0]} to {replicas[-1]} of this one" if replicas else ""
            raise PlanError(
                "the plan has no such worker",
                field="slow",
                value=stage if replica is None else (stage, replica),
                allowed=f"stages 0 to {len(plan.stages) - 1}{of_stage}",
            )
