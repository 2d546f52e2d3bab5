"""From what was asked for to an objective over the shapes of a sweep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from morph.contract.errors import PlanError
from simulator.objectives import (
    Cheapest,
    Fastest,
    MostProgress,
    Objective,
    ObjectiveName,
    Price,
    Revocations,
    Shape,
    usd_per_h_of,
)
from simulator.sweep import Sweep


@dataclass(frozen=True)
class Aim:
    """An objective and its figures; see the arguments of :func:`simulator.plan`.

    Raises:
        PlanError: figures that are missing, or that the objective does not use.
    """

    objective: ObjectiveName
    usd_per_gpu_hour: Price | None
    revocations_per_hour: float | None
    pause_s: float
    replacement_s: float
    revoked_together: int = 1

    def __post_init__(self) -> None:
        needs = {"usd_per_example": "usd_per_gpu_hour", "progress": "revocations_per_hour"}
        if self.objective not in ("examples_per_s", *needs):
            allowed = ", ".join(("examples_per_s", *needs))
            raise PlanError("is unknown", field="objective", value=self.objective, allowed=allowed)
        needed = needs.get(self.objective)
        if needed is not None and getattr(self, needed) is None:
            raise PlanError(f"is missing; the objective {self.objective} needs it", field=needed, allowed="a number")


def objective_for(aim: Aim, sweep: Sweep, num_gpus: int) -> Objective:
    """What to make small."""
    batch_size = sweep.profile.job.batch_size
    if aim.usd_per_gpu_hour is not None and aim.objective == "usd_per_example":
        price = aim.usd_per_gpu_hour
        return Cheapest(batch_size, lambda shape: usd_per_h_of(price, used_sizes(sweep, shape)))
    if aim.revocations_per_hour is not None and aim.objective == "progress":
        revocations = Revocations(aim.revocations_per_hour, aim.pause_s, aim.replacement_s, aim.revoked_together)
        sizes = sweep.rehearsal.conditions.node_sizes
        num_nodes = num_gpus if sizes is None else len(sizes)
        return MostProgress(
            batch_size,
            revocations,
            num_nodes,
            lambda shape: sum(used_sizes(sweep, shape).values()),
            _fallback(sweep, num_gpus, num_nodes),
        )
    return Fastest(batch_size)


def used_sizes(sweep: Sweep, shape: Shape) -> dict[int, int]:
    """How many nodes of each size a shape uses; without nodes each worker is one of 1 GPU."""
    placement = sweep.layouts(shape)[0].placement
    if placement is None:
        return {1: shape[0] * shape[1]}
    counts: dict[int, int] = {}
    for node in placement.used:
        size = placement.node_sizes[node]
        counts[size] = counts.get(size, 0) + 1
    return counts


def _fallback(sweep: Sweep, num_gpus: int, num_nodes: int) -> Callable[[int], float]:
    """Examples per second of the best shape when so many nodes of average size are missing."""
    rates: dict[int, float] = {}

    def rate(missing: int) -> float:
        left = num_gpus - round(missing * num_gpus / num_nodes)
        if left not in rates:
            best = sweep.fastest(left, sweep.depths(left), 1)
            rates[left] = sweep.profile.job.batch_size / (best[0].mini_batch_ns / 1e9) if best else 0.0
        return rates[left]

    return rate
