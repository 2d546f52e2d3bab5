"""One simulated shape as an answer: a plan with its expectation, a time breakdown and an explanation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from morph.contract.plan import Expectation, Plan, StagePlan
from simulator.costs.bounds import lower_bound_ns, pipes_of, total_ns
from simulator.costs.finish import optimizer_ns, optimizer_steps_ns
from simulator.costs.outcome import Outcome, ShapeSimulator
from simulator.costs.redundant import mean_pause_ns, note, redundant_host_bytes, total_redundant_ns
from simulator.costs.stage_costs import StageCosts
from simulator.costs.time_breakdown import breakdown_s, explain
from simulator.costs.worker_times import worker_times
from simulator.inputs.conditions import Conditions
from simulator.inputs.jitter import MeanJitter, Spread

if TYPE_CHECKING:
    import pandas as pd


def deal(num_micro_batches: int, num_replicas: int) -> tuple[int, ...]:
    """Micro-batches of each replica; the first N mod D get one more (as ``Plan.micro_batches_per_replica``)."""
    share, extra = divmod(num_micro_batches, num_replicas)
    return tuple(share + (replica < extra) for replica in range(num_replicas))


def bound_ns(costs: StageCosts, counts: Sequence[int], conditions: Conditions) -> int:
    """Lower bound of the whole mini-batch on these workers and links; of its mean, where times are drawn."""
    num_replicas = len(counts)
    pipes = pipes_of(costs, counts, conditions, _mean_jitter(costs, conditions))
    if conditions.jitter_seed is not None:
        pipes = [(pipe.less_one_ns(), count, number) for pipe, count, number in pipes]
    busiest = {id(pipe): (pipe, count) for pipe, count, _ in sorted(pipes, key=lambda entry: entry[1])}
    bound = max(lower_bound_ns(pipe, costs.times.window, count) for pipe, count in busiest.values())
    if conditions.compute_slots is not None:
        work = sum(int(total_ns(pipe.work_ns, count).sum()) * number for pipe, count, number in pipes)
        bound = max(bound, work // conditions.compute_slots)
    return bound + costs.sections.commit_ns + optimizer_ns(costs, num_replicas, conditions)


def _mean_jitter(costs: StageCosts, conditions: Conditions) -> MeanJitter | None:
    seed = conditions.jitter_seed
    return None if seed is None else costs.sections.mean_jitter(seed, conditions.num_draws)


@dataclass(frozen=True)
class Simulation:
    """The answer for one shape. ``plan`` is complete: it can be written to a file and run.

    ``breakdown_s`` goes from pure work to the simulated mini-batch; its steps add up to ``expected.mini_batch_s``.
    ``jitter`` has the spread of the mini-batch where draws were requested; ``expected`` then has their mean.
    """

    plan: Plan
    explanation: str
    breakdown_s: dict[str, float]
    costs: StageCosts
    shape_simulator: ShapeSimulator
    jitter: Spread | None = None

    @property
    def expected(self) -> Expectation:
        """What the plan expects: time, rate, bound, memory and parts."""
        return self.plan.expected

    def with_note(self, sentence: str) -> Simulation:
        """The same, with a sentence more in its explanation."""
        return replace(self, explanation=f"{self.explanation} {sentence}") if sentence else self

    @property
    def compute_slots(self) -> int | None:
        """Tasks that can run at once on all workers together; None: one device per worker."""
        return self.shape_simulator.conditions.compute_slots

    @cached_property
    def timeline(self) -> pd.DataFrame:
        """One row per task: replica, stage, task, micro_batch, start_s, end_s; without jitter.

        Tasks are forward, recompute, backward, all_reduce, commit and optimizer; the last three have micro_batch -1.
        """
        from simulator.costs.timeline import timeline_frame  # pandas is slow to import, and few ask

        counts, conditions = self.plan.micro_batches_per_replica, self.shape_simulator.conditions
        played = self.shape_simulator.played(self.costs, counts, keep_times=True)
        after = self.shape_simulator.finished(self.costs, counts, played)
        return timeline_frame(self.costs, counts, conditions, played, after)

    @cached_property
    def mean_pause_s(self) -> float:
        """How long pipelines wait for a lost worker's predecessor to have what that had computed.

        The mean over workers, and over when in the mini-batch one is lost; without jitter, and without noticing it
        (:mod:`simulator.costs.redundant`).

        Raises:
            PlanError: without redundant computation.
        """
        counts = self.plan.micro_batches_per_replica
        played = self.shape_simulator.played(self.costs, counts, keep_times=True)
        whole_ns = self.shape_simulator.finished(self.costs, counts, played).mini_batch_ns
        return mean_pause_ns(self.costs, counts, self.shape_simulator.conditions, played, whole_ns) / 1e9


def describe(outcome: Outcome, shape_simulator: ShapeSimulator) -> Simulation:
    """Turn one simulated shape into a plan with its orders, expectation and explanation."""
    costs, counts, conditions = outcome.costs, outcome.counts, shape_simulator.conditions
    sections, times, placement = costs.sections, costs.times, costs.layout.placement
    total_s = outcome.mini_batch_ns / 1e9
    moment, memory_parts = costs.memory_parts(int(costs.memory_bytes.argmax()))
    ends = (*costs.boundaries[1:], sections.num_sections)
    plan = Plan(
        fingerprint=sections.profile.job.fingerprint,
        schedule=costs.schedule,
        micro_batch_size=sections.micro_batch_size,
        num_micro_batches=sum(counts),
        num_replicas=len(counts),
        stages=tuple(
            StagePlan(
                first_section=first,
                end_section=end,
                window=int(times.window[stage]),
                recompute=bool(times.recompute[stage]),
                live_sections=int(costs.live[stage]) or None,
            )
            for stage, (first, end) in enumerate(zip(costs.boundaries, ends, strict=True))
        ),
        orders=dict(zip(counts, shape_simulator.orders(costs, counts), strict=True)),
        expected=Expectation(
            mini_batch_s=total_s,
            examples_per_s=sections.profile.job.batch_size / total_s,
            lower_bound_s=bound_ns(costs, counts, conditions) / 1e9,
            peak_memory_bytes=int(costs.memory_bytes.max()),
            memory_moment=moment,
            followed_memory_bytes=costs.followed_bytes if costs.single and costs.times.num_stages > 1 else 0,
            memory_parts_bytes=memory_parts,
            host_memory_bytes=int((costs.host_bytes + redundant_host_bytes(costs, max(counts))).max()),
            parts_s=_parts_s(outcome, conditions),
        ),
        node_sizes=placement.node_sizes if placement else (),
        placement=placement.nodes if placement else (),
    )
    breakdown = breakdown_s(outcome, conditions)
    explanation = explain(breakdown, plan)
    return Simulation(plan, explanation, breakdown, costs, shape_simulator, outcome.spread).with_note(
        note(costs, conditions)
    )


def _parts_s(outcome: Outcome, conditions: Conditions) -> dict[str, float]:
    """Seconds per worker, averaged over the P x D workers; what is left of the mini-batch is bubble."""
    costs, counts = outcome.costs, outcome.counts
    workers = len(counts) * costs.times.num_stages
    pipes = pipes_of(costs, counts, conditions, _mean_jitter(costs, conditions))

    def task_ns(kind: str) -> float:
        total = sum(int(total_ns(getattr(pipe, kind), count).sum()) * number for pipe, count, number in pipes)
        return total / workers

    parts_ns = {kind: task_ns(f"{kind}_ns") for kind in ("forward", "recompute", "backward")}
    parts_ns |= {
        "all_reduce": float(outcome.after.exposed_ns.mean()),
        "optimizer": float(optimizer_steps_ns(costs, len(counts), conditions).mean()),
        "commit": float(costs.sections.commit_ns),
    }
    if conditions.eager:
        lanes = worker_times(costs, counts, conditions, _mean_jitter(costs, conditions))
        parts_ns["redundant"] = sum(total_redundant_ns(lanes, counts)) / workers
    parts_ns["bubble"] = max(0.0, outcome.mini_batch_ns - sum(parts_ns.values()))
    return {part: value / 1e9 for part, value in parts_ns.items()}
