"""The time breakdown from pure work to the simulated mini-batch, and one sentence on what limits a shape."""

from __future__ import annotations

from dataclasses import replace

from morph.contract.plan import Plan
from simulator.costs.bounds import lower_bound_ns, pipes_of, total_ns
from simulator.costs.outcome import ShapeOutcome
from simulator.inputs.conditions import Conditions

_CAUSES = {
    "imbalance": "uneven stages or replicas: the slowest worker sets the pace",
    "fill_and_drain": "filling and draining the pipeline: {n} micro-batches per replica are few for {p} stages",
    "latency": "network latency and the in-flight windows",
    "bandwidth": "network bandwidth: messages between two stages take longer than these compute",
    "schedule": "waiting that the {schedule} schedule adds to the bound for these stages",
    "all_reduce": "the gradient all-reduce over {d} replicas",
    "commit_and_optimizer": "the commit barrier and the optimizer step",
    "shared_cores": "the cores that the workers share",
    "shared_links": "messages that share the nodes' links",
    "redundant": "computing for the next stage too (redundant computation), as far as waits do not hide it",
    "messages": "messages, during which their workers compute nothing",
    "slow_workers": "slow workers, for whom everybody waits",
    "jitter": "task and message times that vary",
}
"""Causes of lost time. Advice is not part of them: it is simulated (:func:`simulator.search.planner.advice`)."""
_TIED = "summing the gradients of weights that several stages share"


def breakdown_s(outcome: ShapeOutcome, conditions: Conditions) -> dict[str, float]:
    """Return steps in seconds that add up to the mini-batch.

    work: all work / workers; imbalance: up to n * max t_s; fill_and_drain: up to the bound without latency, windows,
    wires and all-reduce; latency: up to the bound with latency and windows; bandwidth: up to the bound with wires, too;
    schedule: up to the pipelines as planned; then the time that slow workers, redundant tasks, shared cores, shared
    links or messages without overlap add; all_reduce: its exposed part; commit_and_optimizer; jitter.
    """
    costs, counts = outcome.costs, outcome.counts
    quick = tuple(entry for entry in conditions.slow if entry[2] < 1)
    pipes = pipes_of(costs, counts, replace(conditions, slow=quick, overlap="full"))
    busiest = {id(pipe): (pipe, count) for pipe, count, _ in sorted(pipes, key=lambda entry: entry[1])}.values()
    work = [(total_ns(pipe.work_ns, count), number) for pipe, count, number in pipes]

    def bound(*, reduction: bool = False, **without: bool) -> int:
        return max(
            lower_bound_ns(pipe, costs.times.window, count, reduction=reduction, **without) for pipe, count in busiest
        )

    pipelines = bound()
    exposed = max(0, bound(reduction=True) - pipelines)
    levels: list[tuple[str, float]] = [
        ("work", sum(float(ns.mean()) * number for ns, number in work) / len(counts)),
        ("imbalance", float(max(ns.max() for ns, _ in work))),
        ("fill_and_drain", float(bound(latency=False, window=False))),
        ("latency", float(bound(bandwidth=False))),
        ("bandwidth", float(pipelines)),
        ("schedule", float(outcome.planned.prepared_ns - exposed)),
        (_hindrance(conditions), float(outcome.after.prepared_ns - exposed)),
        ("all_reduce", float(outcome.after.prepared_ns)),
        ("commit_and_optimizer", float(outcome.after.mini_batch_ns)),
        ("jitter", float(outcome.mini_batch_ns)),
    ]
    steps, reached = {}, 0.0
    for name, level in levels:
        steps[name] = max(0.0, min(level, outcome.mini_batch_ns) - reached) / 1e9
        reached = max(reached, min(level, outcome.mini_batch_ns))
    return steps


def _hindrance(conditions: Conditions) -> str:
    if conditions.slow:
        return "slow_workers"
    if conditions.eager:
        return "redundant"
    if not conditions.overlaps:
        return "messages"
    return "shared_links" if conditions.compute_slots is None else "shared_cores"


def explain(steps_s: dict[str, float], depth: int, most: int, plan: Plan) -> str:
    """Return one sentence: the share of work in the mini-batch, and the main cause of the rest.

    ``depth``, ``most``: stages and micro-batches of the pipeline that is through last.
    """
    total = sum(steps_s.values())
    name, lost = max(((key, value) for key, value in steps_s.items() if key != "work"), key=lambda item: item[1])
    share = steps_s["work"] / total
    if lost < 0.02 * total:
        return f"{share:.0%} of the mini-batch is work; nothing else takes more than 2 %."
    cause = _TIED if name == "all_reduce" and plan.num_replicas == 1 else _CAUSES[name]
    cause = cause.format(
        n=most,
        p=depth,
        d=plan.num_replicas,
        schedule=plan.schedule,
    )
    return f"{share:.0%} of the mini-batch is work; most of the rest ({lost / total:.0%}) is {cause}."
