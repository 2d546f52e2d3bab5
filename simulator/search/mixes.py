"""Finds the pipelines that train fastest side by side: their depths, types of node and numbers of micro-batches.

Mixes that take nearly the least time by the estimates of a search are simulated as a whole, with whole micro-batches
and the rings that all pipelines form. Pipelines that are cut alike form the fewest rings, so they are always among
these mixes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from simulator.costs.answer import SimulatedKind, deal
from simulator.costs.finish import Ended, finish_together
from simulator.costs.memory import NEVER
from simulator.costs.outcome import Kind, ShapeOutcome, together
from simulator.costs.reductions import Rings, rings
from simulator.search.knapsack import least_time_ns
from simulator.search.mix_search import Chosen, Group, Lines, Search
from simulator.search.moves import neighbours
from simulator.search.pipelines import PiecewiseLinear, Pipelines, Stages

_ROUNDS = 40
"""The cuts of a mix, or its shares of micro-batches, are improved at most this often in a row."""
_EXACT: tuple[Stages, ...] = ("even", "best")
"""The ways to choose stages that are tried for a mix once its shares are settled; both are timed as they run."""


@dataclass(frozen=True)
class Mix:
    """Pipelines with their micro-batches; within each kind the larger shares come first."""

    shares: tuple[tuple[Group, tuple[int, ...]], ...]
    mini_batch_ns: int
    stages: tuple[Stages, ...]

    @property
    def chosen(self) -> Chosen:
        """The number of pipelines of each kind."""
        return tuple((group, len(counts)) for group, counts in self.shares)

    @property
    def workers(self) -> dict[int, int]:
        """The number of workers on each type of node, by the index of the type."""
        used: Counter[int] = Counter()
        for (kind, depth), counts in self.shares:
            used[kind] += depth * len(counts)
        return dict(used)


@dataclass(frozen=True)
class Found:
    """One answer: equal pipelines on one type or over two (``node_types``: of each stage, or one for all), or a mix."""

    mini_batch_ns: int
    workers: tuple[int, ...]
    node_types: tuple[str, ...] = ("",)
    outcome: ShapeOutcome | None = None
    mix: Mix | None = None
    mixes: Mixes | None = None

    @property
    def micro_batch_size(self) -> int:
        """The m of all pipelines."""
        if self.outcome is not None:
            return self.outcome.costs.sections.micro_batch_size
        assert self.mixes is not None, "a mix of nothing"
        return self.mixes.types[0].settings[0].sections.micro_batch_size

    @property
    def num_kinds(self) -> int:
        """The number of kinds of pipelines."""
        return 1 if self.mix is None else len(self.mix.shares)


class Mixes:
    """Mixes of pipelines on some types of node, with one micro-batch size and schedule, and D <= ``most_replicas``."""

    def __init__(self, types: Sequence[Pipelines], most_replicas: int | None = None) -> None:
        self.types = tuple(types)
        self.total, self.num_sections = types[0].total, types[0].sweep.num_sections
        self.most_replicas = min(self.total, most_replicas or self.total)
        self._found: dict[tuple[int, ...], tuple[float, list[Mix]]] = {}
        self._searches: dict[tuple[tuple[int, ...], bool], Search] = {}
        self._settled: dict[tuple[Chosen, Stages, bool], tuple[int, tuple[int, ...]] | None] = {}
        self._rings: dict[object, Rings] = {}
        self._lines: Lines = {}

    def best(self, gpus: tuple[int, ...], below_ns: float = math.inf) -> list[Mix]:
        """Return the fastest mixes on these GPUs of each type, best first; empty if none can be below ``below_ns``."""
        known = self._found.get(gpus)
        if known is None or (not known[1] and known[0] < below_ns):
            known = self._found[gpus] = below_ns, self._search(gpus, below_ns)
        return known[1]

    def search(self, gpus: tuple[int, ...], *, bounds: bool = False) -> Search:
        """Return the search on these numbers of GPUs of each type; it is kept, with what it has simulated.

        ``bounds``: return another, in which nothing is simulated, so that all its times are lower bounds.
        """
        if (gpus, bounds) not in self._searches:
            self._searches[gpus, bounds] = Search(self.types, gpus, self._lines)
        return self._searches[gpus, bounds]

    def _search(self, gpus: tuple[int, ...], below_ns: float) -> list[Mix]:
        """Simulate promising mixes with stages that are found quickly, then the best of them with the best stages."""
        search = self.search(gpus)
        effort = search.effort
        rough = {
            chosen: found[0]
            for chosen in search.promising(below_ns)
            if (found := self.settled(chosen, "rough", thorough=effort.is_thorough)) is not None
        }
        mixes = []
        for chosen in sorted(rough, key=lambda each: (rough[each], len(each)))[: effort.finals]:
            best = self.exact(chosen, below_ns, thorough=effort.is_thorough)
            mixes += [] if best is None else [best]
            below_ns = min([below_ns, *(mix.mini_batch_ns for mix in mixes)])
        return sorted(mixes, key=lambda mix: (mix.mini_batch_ns, len(mix.shares), sum(mix.workers.values())))

    def exact(self, chosen: Chosen, below_ns: float, *, thorough: bool) -> Mix | None:
        """Return these pipelines with the best stages, cut for each kind or for all together; None: they do not fit. If
        they take ``below_ns`` or longer even without reductions, they are not cut together.
        """
        found = [
            (exact, (stages,) * len(chosen))
            for stages in _EXACT
            if (exact := self.settled(chosen, stages, thorough=thorough)) is not None
        ]
        if not found:
            return None
        (best_ns, totals), stages = min(found, key=lambda each: each[0][0])
        if len(chosen) > 1 and self._least_ns(chosen, totals, stages) < min(below_ns, best_ns):
            best_ns, totals, stages = self._cut_together(chosen, totals, stages, best_ns, thorough=thorough)
        dealt = ((group, deal(total, number)) for (group, number), total in zip(chosen, totals, strict=True))
        return Mix(tuple(dealt), best_ns, stages)

    def _cut_together(
        self, chosen: Chosen, totals: tuple[int, ...], stages: tuple[Stages, ...], best_ns: int, *, thorough: bool
    ) -> tuple[int, tuple[int, ...], tuple[Stages, ...]]:
        """Move cuts as long as that makes the mix faster; return its time, micro-batches and stages.

        Each kind's boundaries are moved to those of another kind, because pipelines that are cut in the same places
        reduce in fewer rings; if ``thorough``, each boundary is also moved by a section.
        """
        for _ in range(_ROUNDS):
            tried = {
                other: self.played(chosen, totals, other)[0]
                for place in range(len(chosen))
                for cut in self._moved_cuts(chosen, totals, stages, place, thorough=thorough)
                if (other := (*stages[:place], cut, *stages[place + 1 :])) != stages
            }
            fastest = min(tried, key=tried.__getitem__, default=stages)
            if fastest == stages or tried[fastest] >= best_ns:
                break
            improved = self._improved(chosen, totals, fastest, thorough)
            assert improved is not None, "a mix that was played"
            (best_ns, totals), stages = improved, fastest
        return best_ns, totals, stages

    def _moved_cuts(
        self, chosen: Chosen, totals: tuple[int, ...], stages: tuple[Stages, ...], place: int, *, thorough: bool
    ) -> list[tuple[int, ...]]:
        cuts = []
        for ((kind, depth), number), total, each in zip(chosen, totals, stages, strict=True):
            costs = self.types[kind].costs(depth, -(-total // number), each)
            assert costs is not None, "a mix that does not fit"
            cuts.append(costs.boundaries)
        own, found = cuts.pop(place), dict[tuple[int, ...], None]()
        for other in cuts:
            moved = set(own)
            for boundary in other if len(other) <= len(own) else own:  # those of the shallower pipelines
                free = sorted(set(own if len(other) <= len(own) else other))
                nearest = min(free, key=lambda each: abs(each - boundary))
                moved ^= {nearest, boundary} if nearest != boundary else set()
            if len(moved) == len(own) and 0 in moved:
                found[tuple(sorted(moved))] = None
        if thorough:
            found |= dict.fromkeys(map(tuple, neighbours(own, self.num_sections).tolist()))
        return [cut for cut in found if cut != own]

    def settled(self, chosen: Chosen, stages: Stages, *, thorough: bool) -> tuple[int, tuple[int, ...]] | None:
        """Return the time (ns) with the best numbers of micro-batches by kind, and these; None: they do not fit.

        If not ``thorough``, micro-batches are moved only away from the kind that ends last.
        """
        key = chosen, stages, thorough
        if key not in self._settled:
            num_replicas = sum(number for _, number in chosen)
            shares: tuple[int, ...] | None = None
            if stages != "rough":
                before = self.settled(chosen, "rough", thorough=thorough)
                shares = None if before is None else before[1]
            elif 2 <= num_replicas <= self.most_replicas:
                shares = self._shares(dict(chosen), num_replicas)
            each = (stages,) * len(chosen)
            self._settled[key] = None if shares is None else self._improved(chosen, shares, each, thorough)
        return self._settled[key]

    def _improved(
        self, chosen: Chosen, shares: tuple[int, ...], stages: tuple[Stages, ...], thorough: bool
    ) -> tuple[int, tuple[int, ...]] | None:
        best_ns, last = self.played(chosen, shares, stages)
        for _ in range(_ROUNDS):
            givers = range(len(chosen)) if thorough else (last,)
            tried = {other: self.played(chosen, other, stages) for other in _shifted(chosen, shares, givers)}
            other = min(tried, key=lambda each: tried[each][0], default=None)
            if other is None or tried[other][0] >= best_ns:
                break
            shares, (best_ns, last) = other, tried[other]
        return None if best_ns >= NEVER else (best_ns, shares)

    def _shares(self, chosen: Mapping[Group, int], num_replicas: int) -> tuple[int, ...] | None:
        """Return the numbers of micro-batches by kind with which the slowest pipeline, waiting for none, is fastest."""
        known: dict[Group, dict[int, int]] = {group: {} for group in chosen}
        most = {(kind, depth): self.types[kind].most(depth) for kind, depth in chosen}
        if sum(most[group] * number for group, number in chosen.items()) < self.total or min(most.values()) < 1:
            return None

        def play(group: Group, number: int) -> None:
            if 1 <= number <= most[group] and number not in known[group]:
                kind, depth = group
                known[group][number] = self.types[kind].alone_ns(depth, number, num_replicas)

        level = {group: min(most[group], max(1, self.total // num_replicas)) for group in chosen}
        for _ in range(_ROUNDS):
            before = sum(map(len, known.values()))
            for group, number in level.items():
                play(group, number)
                play(group, number + 1)
            if any(max(times.values(), default=NEVER) >= NEVER for times in known.values()):
                return None
            if sum(map(len, known.values())) == before:
                break
            lines = {group: PiecewiseLinear(times.items()) for group, times in known.items()}
            time_ns = least_time_ns(self.total, [(lines[group], number) for group, number in chosen.items()])
            level = {group: min(most[group], max(1, int(lines[group].number(time_ns)))) for group in chosen}
        return self._whole(chosen, level, known, most)

    def _whole(
        self,
        chosen: Mapping[Group, int],
        level: Mapping[Group, int],
        known: Mapping[Group, Mapping[int, int]],
        most: Mapping[Group, int],
    ) -> tuple[int, ...] | None:
        """Return whole totals by kind: the first to end get missing micro-batches, the last lose surplus ones."""
        lines = {group: PiecewiseLinear(known[group].items()) for group in chosen}
        totals = {group: level[group] * number for group, number in chosen.items()}
        while (left := self.total - sum(totals.values())) != 0:
            next_ns = {
                group: lines[group].time_ns(-(-(totals[group] + (left > 0)) // number))
                for group, number in chosen.items()
                if (totals[group] < most[group] * number if left > 0 else totals[group] > number)
            }
            if not next_ns:
                return None
            group = min(next_ns, key=next_ns.__getitem__) if left > 0 else max(next_ns, key=next_ns.__getitem__)
            over = totals[group] % chosen[group]
            step = min(left, chosen[group] - over) if left > 0 else max(left, -(over or chosen[group]))
            totals[group] = max(chosen[group], totals[group] + step)
        return tuple(totals[group] for group in chosen)

    def _ended(self, chosen: Chosen, totals: tuple[int, ...], stages: tuple[Stages, ...]) -> list[Ended] | None:
        """Return the latest ends of the pipelines of each kind; None if some do not fit."""
        ended = []
        for ((kind, depth), number), total, how in zip(chosen, totals, stages, strict=True):
            pipelines, most = self.types[kind], -(-total // number)
            each = [pipelines.ended(depth, count, most, how) for count in {most, total // number}]
            if each[0] is None or total < number:
                return None
            backwards = [end.last_backward_ns for end in each if end is not None]
            last = backwards[0] if len(backwards) == 1 else np.concatenate(backwards, axis=1)
            ended.append(Ended(each[0].costs, last, each[0].to_come_ns))
        return ended

    def _least_ns(self, chosen: Chosen, totals: tuple[int, ...], stages: tuple[Stages, ...]) -> float:
        """Return the time (ns) of these pipelines if nothing were reduced."""
        ended = self._ended(chosen, totals, stages)
        if ended is None:
            return math.inf
        return max(int(end.last_backward_ns.max()) + end.costs.sections.commit_ns for end in ended)

    def played(self, chosen: Chosen, totals: tuple[int, ...], stages: tuple[Stages, ...]) -> tuple[int, int]:
        """Return the time (ns) of the whole mini-batch, and the place of the kind whose last backward ends last."""
        ended, numbers = self._ended(chosen, totals, stages), [number for _, number in chosen]
        if ended is None:
            return NEVER, 0
        key = (*((id(end.costs), number) for end, number in zip(ended, numbers, strict=True)),)
        if key not in self._rings:
            sections = ended[0].costs.sections
            of_kinds = [(end.costs.reduced, number) for end, number in zip(ended, numbers, strict=True)]
            self._rings[key] = rings(of_kinds, sections.own_reduced_sum_bytes, sections.shared_units)
        conditions = [self.types[kind].sweep.shape_simulator.conditions for ((kind, _), _) in chosen]
        last_ns = [int(end.last_backward_ns.max()) for end in ended]
        time_ns = finish_together(ended, self._rings[key], conditions, numbers)[0].mini_batch_ns
        return time_ns, last_ns.index(max(last_ns))

    def described(self, mix: Mix) -> list[SimulatedKind]:
        """Return the kinds of this mix, simulated together, as parts of an answer."""
        kinds, names = [], []
        for ((kind, depth), counts), stages in zip(mix.shares, mix.stages, strict=True):
            pipelines = self.types[kind]
            costs = pipelines.costs(depth, max(counts), stages)
            assert costs is not None, "a mix that does not fit"
            kinds.append(Kind(pipelines.sweep.shape_simulator, costs, counts))
            names.append(pipelines.node_types)
        return [
            SimulatedKind(outcome, kind.simulator, name)
            for outcome, kind, name in zip(together(kinds), kinds, names, strict=True)
        ]


def _shifted(chosen: Chosen, totals: tuple[int, ...], givers: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield totals where the last micro-batch of the busiest pipelines of one kind goes to another kind."""
    for place, other in product(givers, range(len(totals))):
        number = chosen[place][1]
        step = (totals[place] - 1) % number + 1
        if place != other and totals[place] - step >= number:
            shifted = list(totals)
            shifted[place] -= step
            shifted[other] += step
            yield tuple(shifted)
