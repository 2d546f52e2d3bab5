"""Simulates one shape's mini-batch: first as planned, then under the conditions in which it will run.

Orders are planned with the rules of :mod:`simulator.engine.pipeline`, for workers with their own devices and links.
Shared links and cores, slow workers and varying times are then simulated by executing those orders
(:mod:`simulator.engine.execution`), as an executor does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from morph.contract.errors import PlanError
from simulator.costs.finish import Ended, Finish, finish, finish_together
from simulator.costs.reductions import rings
from simulator.costs.stage_costs import StageCosts
from simulator.costs.worker_times import is_plain, to_come_ns, worker_times
from simulator.engine.execution import execute_orders
from simulator.engine.pipeline import run_pipeline
from simulator.engine.times import Played
from simulator.inputs.conditions import Conditions
from simulator.inputs.jitter import JitterDraw, Spread, has_jitter, spread_of

EngineName = Literal["compiled", "reference"]


@dataclass(frozen=True)
class Engine:
    """Functions that play mini-batches: orders by the rules, their execution, and the end after the last backwards.

    ``skips``: whether equal parts are played only once.
    """

    run_pipeline: Callable[..., Played]
    execute_orders: Callable[..., Played]
    finish: Callable[..., Finish]
    finish_together: Callable[..., tuple[Finish, ...]]
    skips: bool = False


COMPILED = Engine(run_pipeline, execute_orders, finish, finish_together, skips=True)


def engine_of(name: EngineName) -> Engine:
    """Return the compiled loops, or the SimPy processes that serve as their reference."""
    if name not in get_args(EngineName):
        raise PlanError("is unknown", field="engine", value=name, allowed=", ".join(get_args(EngineName)))
    if name == "compiled":
        return COMPILED
    from simulator.costs import reference_finish  # only where it is requested, as SimPy is
    from simulator.engine import reference

    return Engine(
        reference.run_pipeline, reference.execute_orders, reference_finish.finish, reference_finish.finish_together
    )


@dataclass(frozen=True)
class ShapeOutcome:
    """One shape with one window.

    ``planned``: each worker with its own device and links. ``after``: under the conditions, without jitter. ``spread``:
    with jitter, where it was requested.
    """

    costs: StageCosts
    counts: tuple[int, ...]
    planned: Finish
    after: Finish
    spread: Spread | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(P, D)."""
        return self.costs.times.num_stages, len(self.counts)

    @property
    def mini_batch_ns(self) -> int:
        """The expected time of the mini-batch; the mean under jitter, if that was drawn."""
        return self.after.mini_batch_ns if self.spread is None else round(self.spread.mean_s * 1e9)


@dataclass(frozen=True)
class ShapeSimulator:
    """Plays shapes of a job under conditions; PlanError: jitter is requested and the profile has no quantiles."""

    conditions: Conditions
    engine: Engine = COMPILED
    _latest: list[tuple[StageCosts, dict[int, tuple[str, ...]]]] = field(default_factory=list, compare=False)

    def planned(self, costs: StageCosts, counts: tuple[int, ...]) -> Finish:
        """Return the end of the mini-batch as planned: each worker with its own device and links."""
        ended = self.planned_end(costs, counts)
        return self.engine.finish(costs, ended.last_backward_ns, ended.to_come_ns, self.conditions)

    def planned_end(self, costs: StageCosts, counts: tuple[int, ...]) -> Ended:
        """Return the end of the pipelines as planned, before reduction and optimizer step."""
        sizes = _sizes(counts)
        played = self.engine.run_pipeline(costs.times, sizes, schedule=costs.schedule)
        replicas = [0] * len(counts) if len(sizes) == 1 else [sizes.index(count) for count in counts]
        return Ended(costs, played.last_backward_ns[:, replicas], costs.to_come_ns[:, None])

    def full(self, costs: StageCosts, counts: tuple[int, ...], planned: Finish | None = None) -> ShapeOutcome:
        """Return the outcome under the conditions."""
        planned = planned or self.planned(costs, counts)
        seed = self.conditions.jitter_seed
        if self.engine.skips and is_plain(costs, counts, self.conditions):
            after = planned
        else:
            after = self.finished(costs, counts, self._executed(costs, counts))
        spread = None if seed is None else self._spread(costs, counts, seed)
        return ShapeOutcome(costs, counts, planned, after, spread)

    def _executed(self, costs: StageCosts, counts: tuple[int, ...]) -> Played:
        """Execute the orders under the conditions, playing equal parts only once."""
        even = costs.layout.placement is None and not self.conditions.slow
        alike = self.engine.skips and even and self.conditions.compute_slots is None
        sizes = _sizes(counts) if alike else counts
        replicas = [sizes.index(count) for count in counts] if alike else list(range(len(counts)))
        return self.played(costs, sizes).of_replicas(replicas)

    def ended(self, costs: StageCosts, counts: tuple[int, ...]) -> Ended:
        """Return the end of these pipelines under the conditions, before reduction and optimizer step."""
        if self.engine.skips and is_plain(costs, counts, self.conditions):
            return self.planned_end(costs, counts)
        played = self._executed(costs, counts)
        redone_ns = 0 if played.redone_ns is None else int(played.redone_ns.max())
        return Ended(costs, played.last_backward_ns, to_come_ns(costs, counts, self.conditions), redone_ns)

    def played(
        self, costs: StageCosts, counts: tuple[int, ...], jitter: JitterDraw | None = None, *, keep_times: bool = False
    ) -> Played:
        """Execute the planned orders under the conditions."""
        return self.engine.execute_orders(
            worker_times(costs, counts, self.conditions, jitter),
            self.orders(costs, counts),
            costs.times.window,
            strict=costs.schedule != "varuna",
            compute_slots=self.conditions.compute_slots,
            keep_times=keep_times,
        )

    def finished(
        self, costs: StageCosts, counts: tuple[int, ...], played: Played, jitter: JitterDraw | None = None
    ) -> Finish:
        """Return the end of a played mini-batch; workers are prepared only after their redundant tasks."""
        redone_ns = 0 if played.redone_ns is None else int(played.redone_ns.max())
        to_come = to_come_ns(costs, counts, self.conditions, jitter)
        return self.engine.finish(costs, played.last_backward_ns, to_come, self.conditions, redone_ns)

    def orders(self, costs: StageCosts, counts: tuple[int, ...]) -> list[tuple[str, ...]]:
        """The planned order of each stage of each replica; the latest are kept, to describe what was played."""
        sizes = _sizes(counts)
        by_size = next((known for latest, known in self._latest if latest is costs), {})
        if not by_size.keys() >= set(sizes):
            played = self.engine.run_pipeline(costs.times, sizes, schedule=costs.schedule, keep_orders=True)
            by_size = dict(zip(sizes, played.orders, strict=True))
            self._latest[:] = [(costs, by_size)]
        return [by_size[count] for count in counts]

    def _spread(self, costs: StageCosts, counts: tuple[int, ...], seed: int) -> Spread:
        sections = costs.sections
        if not has_jitter(sections.profile, sections.micro_batch_size):
            raise PlanError(
                "the profile has no quantiles to draw jitter from; calibrate again, or leave it out",
                field="jitter_seed",
                value=seed,
            )
        sections.mean_jitter(seed, self.conditions.num_draws)  # raises if there are too many draws
        orders, total = self.orders(costs, counts), sum(counts)
        draws_s = []
        for draw in range(self.conditions.num_draws):
            jitter = JitterDraw(sections.profile, sections.micro_batch_size, total, seed, draw)
            played = self.engine.execute_orders(
                worker_times(costs, counts, self.conditions, jitter),
                orders,
                costs.times.window,
                strict=costs.schedule != "varuna",
                compute_slots=self.conditions.compute_slots,
            )
            draws_s.append(self.finished(costs, counts, played, jitter).mini_batch_ns / 1e9)
        return spread_of(draws_s)


@dataclass(frozen=True)
class Kind:
    """Equal pipelines in a mix, with workers of one type of node."""

    simulator: ShapeSimulator
    costs: StageCosts
    counts: tuple[int, ...]


def together(kinds: Sequence[Kind]) -> tuple[ShapeOutcome, ...]:
    """Play pipelines of several kinds at once, which interact only when they reduce; one engine plays all.

    The costs in each kind's outcome have the reductions of all kinds.
    """
    sections = kinds[0].costs.sections
    formed = rings(
        [(kind.costs.reduced, len(kind.counts)) for kind in kinds],
        sections.own_reduced_sum_bytes,
        sections.shared_units,
    )
    costs = [
        replace(kind.costs, reduced=reduced, single=kind.costs.single and len(kinds) == 1)
        for kind, reduced in zip(kinds, formed.of_kind, strict=True)
    ]
    numbers, conditions = [len(kind.counts) for kind in kinds], [kind.simulator.conditions for kind in kinds]

    def finished(*, planned: bool) -> tuple[Finish, ...]:
        ended = [
            (kind.simulator.planned_end if planned else kind.simulator.ended)(own, kind.counts)
            for kind, own in zip(kinds, costs, strict=True)
        ]
        return kinds[0].simulator.engine.finish_together(ended, formed, conditions, numbers)

    both = zip(finished(planned=True), finished(planned=False), strict=True)
    return tuple(
        ShapeOutcome(own, kind.counts, planned, after)
        for kind, own, (planned, after) in zip(kinds, costs, both, strict=True)
    )


def _sizes(counts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(set(counts)))
