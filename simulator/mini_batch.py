"""One mini-batch of one shape: how long, where the time goes, and what limits it (Varuna, section 4.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from morph.contract.errors import PlanError
from morph.contract.plan import Expectation, Plan, Schedule, StagePlan
from morph.contract.profile import Profile
from simulator.bounds import lower_bound_ns, stage_time_ns
from simulator.costs import SectionCosts, StageCosts, stage_costs
from simulator.engine import Ints, run_pipeline
from simulator.ladder import explain, ladder_s
from simulator.micro_batch import choose_micro_batch_size, num_micro_batches
from simulator.orders import WINDOW_SLOPES, stage_windows
from simulator.partition import partition_table

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Finish:
    """What follows the pipelines, in ns from the start of the mini-batch.

    ``private_start_ns[s]`` is when stage s begins to reduce; ``tied`` holds (stages, start, duration) of each
    ring that spans stages; ``prepared_ns`` is when every worker has its gradients.
    """

    private_start_ns: Ints
    private_reduce_ns: Ints
    tied: tuple[tuple[tuple[int, ...], int, int], ...]
    prepared_ns: int
    optimizer_ns: int
    mini_batch_ns: int

    @property
    def reduce_ns(self) -> Ints:
        """AR_s: all the all-reduces of each stage together."""
        total = self.private_reduce_ns.copy()
        for stages, _, duration in self.tied:
            total[list(stages)] += duration
        return total


def finish(costs: StageCosts, last_backward_ns: Ints, compute_slots: int | None = None) -> Finish:
    """Reduce, commit and apply once the pipelines are through.

    A stage reduces as soon as its last backward has ended on every replica; rings that span stages follow
    when all their stages are there. The commit barrier waits for everybody, and the slowest optimizer step
    ends the mini-batch; with fewer ``compute_slots`` than workers those steps queue for the cores.

    Args:
        costs: Of the stages.
        last_backward_ns: int64 of shape [P, D].
        compute_slots: See :func:`simulator.engine.run_pipeline`.
    """
    num_replicas = last_backward_ns.shape[1]
    start = last_backward_ns.max(axis=1)
    private = costs.private_reduce_ns(num_replicas)
    free = start + private
    tied = []
    for stages, duration in costs.tied_reduce_ns(num_replicas):
        begin = int(free[list(stages)].max())
        free[list(stages)] = begin + duration
        tied.append((stages, begin, duration))
    prepared = int(free.max())
    optimizer = int(costs.optimizer_ns.max())
    if compute_slots is not None:
        optimizer = max(optimizer, -(-int(costs.optimizer_ns.sum()) * num_replicas // compute_slots))
    return Finish(
        private_start_ns=start,
        private_reduce_ns=private,
        tied=tuple(tied),
        prepared_ns=prepared,
        optimizer_ns=optimizer,
        mini_batch_ns=prepared + costs.sections.commit_ns + optimizer,
    )


def rings_at_once(num_stages: int, compute_slots: int | None) -> int:
    """All-reduces that share one machine: one ring per stage when the workers share its cores."""
    return 1 if compute_slots is None else num_stages


def deal(num_micro_batches: int, num_replicas: int) -> tuple[int, ...]:
    """Micro-batches of each replica; the first N mod D get one more (as ``Plan.micro_batches_per_replica``)."""
    share, extra = divmod(num_micro_batches, num_replicas)
    return tuple(share + (replica < extra) for replica in range(num_replicas))


def bound_ns(costs: StageCosts, counts: Sequence[int], compute_slots: int | None = None) -> int:
    """Lower bound of the whole mini-batch."""
    num_replicas = len(counts)
    reduce = costs.private_reduce_ns(num_replicas)
    for stages, duration in costs.tied_reduce_ns(num_replicas):
        reduce[list(stages)] += duration
    bound = lower_bound_ns(costs.times, max(counts), reduce)
    optimizer = int(costs.optimizer_ns.max())
    if compute_slots is not None:
        bound = max(bound, int(stage_time_ns(costs.times).sum()) * sum(counts) // compute_slots)
        optimizer = max(optimizer, -(-int(costs.optimizer_ns.sum()) * num_replicas // compute_slots))
    return bound + costs.sections.commit_ns + optimizer


@dataclass(frozen=True)
class Simulation:
    """The answer for one shape. ``plan`` is complete: it can be written to a file and run.

    ``ladder_s`` goes from pure work to the simulated mini-batch; its steps add up to ``expected.mini_batch_s``.
    """

    plan: Plan
    explanation: str
    ladder_s: dict[str, float]
    costs: StageCosts
    compute_slots: int | None = None

    @property
    def expected(self) -> Expectation:
        """What the plan expects: time, rate, bound, memory and parts."""
        return self.plan.expected

    @cached_property
    def timeline(self) -> pd.DataFrame:
        """One row per task: replica, stage, task, micro_batch, start_s, end_s.

        Tasks are forward, recompute, backward, all_reduce, commit and optimizer; the last three have micro_batch -1.
        """
        from simulator.timeline import timeline_frame  # pandas is slow to import, and few ask

        counts = self.plan.micro_batches_per_replica
        played = run_pipeline(
            self.costs.times,
            counts,
            schedule=self.plan.schedule,
            compute_slots=self.compute_slots,
            keep_times=True,
        )
        return timeline_frame(self.costs, played, finish(self.costs, played.last_backward_ns, self.compute_slots))


def simulate(
    profile: Profile,
    *,
    boundaries: Sequence[int] | None = None,
    num_stages: int | None = None,
    num_replicas: int = 1,
    micro_batch_size: int | None = None,
    schedule: Schedule = "varuna",
    window_slope: int | None = None,
    compute_slots: int | None = None,
    recompute: bool = True,
) -> Simulation:
    """Simulate one mini-batch of one shape.

    Args:
        profile: What calibration measured.
        boundaries: First section of each stage, beginning with 0; or give ``num_stages``.
        num_stages: P; the stages are then balanced exactly.
        num_replicas: D.
        micro_batch_size: m; None: fixed by the job, else chosen (see :mod:`simulator.micro_batch`).
        schedule: "varuna", "gpipe" or "1f1b".
        window_slope: In-flight window slope; None: the smallest of 1, 2, 4 that is within 1 % of the fastest.
        compute_slots: Tasks that can run at once on all workers together; None: one device per worker.
        recompute: False: no stage runs the forward again; each keeps the activations in flight.

    Raises:
        PlanError: naming the argument, its value and what is allowed.
    """
    m = choose_micro_batch_size(profile, schedule, None, micro_batch_size)
    total = num_micro_batches(profile, m)
    _check_shape(profile, boundaries, num_stages, num_replicas, total, compute_slots)
    sections, counts = SectionCosts(profile, m, recompute=recompute), deal(total, num_replicas)
    slopes = WINDOW_SLOPES if window_slope is None and schedule == "varuna" else (window_slope or 1,)
    candidates = []
    for slope in slopes:
        cuts = boundaries
        if cuts is None:
            table = partition_table(sections, schedule, num_micro_batches=max(counts), slope=slope)
            cuts = table.boundaries(num_stages or 1)
        windows = stage_windows(schedule, len(cuts), max(counts), slope)
        candidates.append(stage_costs(sections, cuts, windows, schedule, rings_at_once(len(cuts), compute_slots)))
    chosen = fastest_window(candidates, counts, schedule, compute_slots)
    return describe(chosen[0], chosen[1], counts, schedule, compute_slots)


def fastest_window(
    candidates: Sequence[StageCosts], counts: tuple[int, ...], schedule: Schedule, compute_slots: int | None
) -> tuple[StageCosts, Finish]:
    """Of stages with growing windows, the smallest windows whose mini-batch is within 1 % of the fastest."""
    results: list[tuple[StageCosts, Finish]] = []
    for costs in candidates:
        if results and np.array_equal(costs.times.window, results[-1][0].times.window):
            continue
        played = run_pipeline(costs.times, counts, schedule=schedule, compute_slots=compute_slots)
        results.append((costs, finish(costs, played.last_backward_ns, compute_slots)))
    fastest = min(after.mini_batch_ns for _, after in results)
    return next(result for result in results if result[1].mini_batch_ns * 100 <= fastest * 101)


def describe(
    costs: StageCosts, after: Finish, counts: tuple[int, ...], schedule: Schedule, compute_slots: int | None
) -> Simulation:
    """Turn one simulated shape into a plan with its orders, expectation and explanation."""
    sections, times = costs.sections, costs.times
    profile = sections.profile
    total_s = after.mini_batch_ns / 1e9
    orders = {}
    for count in sorted(set(counts)):
        played = run_pipeline(times, (count,), schedule=schedule, keep_orders=True)
        orders[count] = played.orders[0]
    ends = (*costs.boundaries[1:], sections.num_sections)
    plan = Plan(
        fingerprint=profile.job.fingerprint,
        schedule=schedule,
        micro_batch_size=sections.micro_batch_size,
        num_micro_batches=sum(counts),
        num_replicas=len(counts),
        stages=tuple(
            StagePlan(
                first_section=first,
                end_section=end,
                window=int(times.window[stage]),
                recompute=bool(times.recompute[stage]),
            )
            for stage, (first, end) in enumerate(zip(costs.boundaries, ends, strict=True))
        ),
        orders=orders,
        expected=Expectation(
            mini_batch_s=total_s,
            examples_per_s=profile.job.batch_size / total_s,
            lower_bound_s=bound_ns(costs, counts, compute_slots) / 1e9,
            peak_memory_bytes=int(costs.memory_bytes.max()),
            parts_s=_parts_s(costs, after, counts),
        ),
    )
    ladder = ladder_s(costs, after.mini_batch_ns, after.prepared_ns, counts, compute_slots)
    return Simulation(plan, explain(ladder, plan), ladder, costs, compute_slots)


def _parts_s(costs: StageCosts, after: Finish, counts: tuple[int, ...]) -> dict[str, float]:
    """Seconds per worker, averaged over the P x D workers; what is left of the mini-batch is bubble."""
    times = costs.times
    per_replica = sum(counts) / len(counts)
    parts_ns = {
        "forward": per_replica * float(times.forward_ns.mean()),
        "recompute": per_replica * float(np.where(times.recompute, times.recompute_ns, 0).mean()),
        "backward": per_replica * float(times.backward_ns.mean()),
        "all_reduce": float(after.reduce_ns.mean()),
        "optimizer": float(costs.optimizer_ns.mean()),
        "commit": float(costs.sections.commit_ns),
    }
    parts_ns["bubble"] = max(0.0, after.mini_batch_ns - sum(parts_ns.values()))
    return {part: value / 1e9 for part, value in parts_ns.items()}


def _check_shape(
    profile: Profile,
    boundaries: Sequence[int] | None,
    num_stages: int | None,
    num_replicas: int,
    total: int,
    compute_slots: int | None,
) -> None:
    sections = profile.num_sections
    if (boundaries is None) == (num_stages is None):
        raise PlanError("give either boundaries or num_stages", field="num_stages", value=num_stages)
    if num_stages is not None and not 1 <= num_stages <= sections:
        raise PlanError(
            "the model cannot be cut so",
            field="pipeline_depth",
            value=num_stages,
            allowed=f"1 to {sections} (its sections)",
        )
    if boundaries is not None:
        cuts = list(boundaries)
        if not cuts or cuts[0] != 0 or cuts != sorted(set(cuts)) or cuts[-1] >= sections:
            allowed = f"first sections of the stages, growing, from 0 to at most {sections - 1}"
            raise PlanError("is not a cut", field="boundaries", value=cuts, allowed=allowed)
    if not 1 <= num_replicas <= total:
        raise PlanError(
            "replicas cannot share the micro-batches",
            field="num_replicas",
            value=num_replicas,
            allowed=f"1 to {total} (micro-batches in a mini-batch)",
        )
    if compute_slots is not None and compute_slots < 1:
        raise PlanError("is too small", field="compute_slots", value=compute_slots, allowed="1 or more")
