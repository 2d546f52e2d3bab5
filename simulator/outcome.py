"""How one shape's mini-batch goes: first as planned, then under the conditions in which it will run.

The orders are planned with the rules of :mod:`simulator.engine`, for workers that have a device of their own and
links that only their own messages use. What shares links and cores, is slow or varies is then played by following
those orders (:mod:`simulator.following`), as an executor does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from morph.contract.errors import PlanError
from morph.contract.plan import Schedule
from simulator.conditions import Conditions
from simulator.costs import StageCosts
from simulator.engine import run_pipeline
from simulator.finish import Finish, finish
from simulator.following import follow
from simulator.jitter import Luck, Spread, has_jitter, spread_of
from simulator.lanes import is_plain, worker_times
from simulator.times import Played

EntryT = TypeVar("EntryT")


@dataclass(frozen=True)
class Outcome:
    """One shape with one window.

    ``planned``: with devices and links of one's own. ``after``: under the conditions, without jitter.
    ``spread``: with jitter, where it was asked for.
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
        """What to expect of the mini-batch: the mean under jitter, if that was drawn."""
        return self.after.mini_batch_ns if self.spread is None else round(self.spread.mean_s * 1e9)


@dataclass(frozen=True)
class Rehearsal:
    """Plays shapes of one job under one schedule and set of conditions.

    Raises:
        PlanError: jitter is asked for and the profile has no quantiles to draw it from.
    """

    schedule: Schedule
    conditions: Conditions

    def planned(self, costs: StageCosts, counts: tuple[int, ...]) -> Finish:
        """As planned: devices and links of one's own."""
        sizes = _sizes(counts)
        played = run_pipeline(costs.times, sizes, schedule=self.schedule)
        replicas = [sizes.index(count) for count in counts]
        return finish(costs, played.last_backward_ns[:, replicas], self.conditions)

    def full(self, costs: StageCosts, counts: tuple[int, ...], planned: Finish | None = None) -> Outcome:
        """Under the conditions."""
        planned = planned or self.planned(costs, counts)
        seed = self.conditions.jitter_seed
        if is_plain(costs, counts, self.conditions):
            after = planned
        else:
            after = finish(costs, self.played(costs, counts).last_backward_ns, self.conditions)
        spread = None if seed is None else self._spread(costs, counts, seed)
        return Outcome(costs, counts, planned, after, spread)

    def played(
        self, costs: StageCosts, counts: tuple[int, ...], luck: Luck | None = None, *, keep_times: bool = False
    ) -> Played:
        """Follow the planned orders under the conditions."""
        return follow(
            worker_times(costs, counts, self.conditions, luck),
            self.orders(costs, counts),
            costs.times.window,
            strict=self.schedule != "varuna",
            compute_slots=self.conditions.compute_slots,
            keep_times=keep_times,
        )

    def orders(self, costs: StageCosts, counts: tuple[int, ...]) -> list[tuple[str, ...]]:
        """The planned order of each stage of each replica."""
        sizes = _sizes(counts)
        played = run_pipeline(costs.times, sizes, schedule=self.schedule, keep_orders=True)
        by_size = dict(zip(sizes, played.orders, strict=True))
        return [by_size[count] for count in counts]

    def _spread(self, costs: StageCosts, counts: tuple[int, ...], seed: int) -> Spread:
        sections = costs.sections
        if not has_jitter(sections.profile, sections.micro_batch_size):
            raise PlanError(
                "the profile has no quantiles to draw jitter from; calibrate again, or leave it out",
                field="jitter_seed",
                value=seed,
            )
        sections.mean_luck(seed, self.conditions.num_draws)  # refuses more draws than can be played
        orders, total = self.orders(costs, counts), sum(counts)
        draws_s = []
        for draw in range(self.conditions.num_draws):
            luck = Luck(sections.profile, sections.micro_batch_size, total, seed, draw)
            played = follow(
                worker_times(costs, counts, self.conditions, luck),
                orders,
                costs.times.window,
                strict=self.schedule != "varuna",
                compute_slots=self.conditions.compute_slots,
            )
            draws_s.append(finish(costs, played.last_backward_ns, self.conditions).mini_batch_ns / 1e9)
        return spread_of(draws_s)

    def best_window(self, candidates: Sequence[StageCosts], counts: tuple[int, ...]) -> Outcome:
        """Of stages with growing windows, the smallest windows whose mini-batch is within 1 % of the fastest.

        They are judged as planned, or under the conditions where these share cores, slow somebody down or vary.
        """
        if not self.conditions.uneven:
            costs, planned = self.planned_window(candidates, counts)
            outcome = self.full(costs, counts, planned)
            if outcome.mini_batch_ns * 100 <= planned.mini_batch_ns * 101:
                return outcome  # else links that are shared may want larger windows than the plan knows
        outcomes = [self.full(costs, counts) for costs in _distinct(candidates)]
        return _smallest_within_1_percent(outcomes, [outcome.mini_batch_ns for outcome in outcomes])

    def planned_window(self, candidates: Sequence[StageCosts], counts: tuple[int, ...]) -> tuple[StageCosts, Finish]:
        """The same, judged as planned."""
        entries = [(costs, self.planned(costs, counts)) for costs in _distinct(candidates)]
        return _smallest_within_1_percent(entries, [planned.mini_batch_ns for _, planned in entries])


def _smallest_within_1_percent(entries: Sequence[EntryT], times_ns: Sequence[int]) -> EntryT:
    fastest = min(times_ns)
    return next(entry for entry, time_ns in zip(entries, times_ns, strict=True) if time_ns * 100 <= fastest * 101)


def _distinct(candidates: Sequence[StageCosts]) -> list[StageCosts]:
    """Without those whose windows equal the ones before."""
    kept: list[StageCosts] = []
    for costs in candidates:
        if not kept or not np.array_equal(costs.times.window, kept[-1].times.window):
            kept.append(costs)
    return kept


def _sizes(counts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(set(counts)))
