"""The objective that a request names, for a number of GPUs."""

from __future__ import annotations

from collections.abc import Callable

from simulator.inputs.request import PlanRequest
from simulator.search.objectives import Cheapest, Fastest, MostProgress, Objective, Revocations, Shape
from simulator.search.sweep import Sweep


def objective_for(request: PlanRequest, sweep: Sweep, num_gpus: int, usd_per_h: float = 0.0) -> Objective:
    """Return the objective of a request; ``usd_per_h``: the price of a GPU that is a node of its own."""
    batch_size = sweep.profile.job.batch_size
    if request.objective == "usd_per_example":
        return Cheapest(batch_size, usd_per_h)
    if request.revocations_per_hour is not None and request.objective == "progress":
        revocations = Revocations(
            request.revocations_per_hour, request.pause_s, request.replacement_s, request.revoked_together
        )
        sizes = sweep.shape_simulator.conditions.node_sizes
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
    """Return how many nodes of each size a shape uses. Without nodes each worker counts as a node of 1 GPU."""
    placement = sweep.layouts(shape)[0].placement
    if placement is None:
        return {1: shape[0] * shape[1]}
    counts: dict[int, int] = {}
    for node in placement.used:
        size = placement.node_sizes[node]
        counts[size] = counts.get(size, 0) + 1
    return counts


def _fallback(sweep: Sweep, num_gpus: int, num_nodes: int) -> Callable[[int], float]:
    """Return a function: the best shape's examples per second when this many nodes of average size are missing."""
    rates: dict[int, float] = {}

    def rate(missing: int) -> float:
        left = num_gpus - round(missing * num_gpus / num_nodes)
        if left not in rates:
            best = sweep.fastest(left, sweep.depths(left), 1)
            rates[left] = sweep.profile.job.batch_size / (best[0].mini_batch_ns / 1e9) if best else 0.0
        return rates[left]

    return rate
