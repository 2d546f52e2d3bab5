"""Finds the pipelines that train fastest side by side: their depths, types of node and numbers of micro-batches.

In a given time each pipeline finishes some number of micro-batches. Which pipelines finish most on the GPUs of one type
is a knapsack problem; the answer is the least time in which all types together finish the mini-batch. At first only a
bound is known for most depths. The depths of the best answer are simulated and the answer is found anew, until all its
depths have been simulated. Mixes with nearly the least time are then simulated as a whole, with whole micro-batches and
the rings that all pipelines form. Pipelines that are cut alike form the fewest rings, so they are always among these
mixes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product

import numpy as np
import numpy.typing as npt

from simulator.costs.answer import SimulatedKind, deal
from simulator.costs.finish import Ended, finish_together
from simulator.costs.outcome import Kind, ShapeOutcome, together
from simulator.costs.reductions import Rings, rings
from simulator.engine.compilation import compiled, entry, inlined
from simulator.engine.times import Ints
from simulator.search.moves import neighbours
from simulator.search.pipelines import NEVER, PiecewiseLinear, Pipelines, Stages, anchor

Floats = npt.NDArray[np.float64]
Group = tuple[int, int]
"""A kind of equal pipelines: the number of their type of node, and their depth."""
Chosen = tuple[tuple[Group, int], ...]
"""The number of pipelines of each kind, in the order of the kinds."""
HOPE = 0.5
"""The assumed excess (time over bound, minus 1) of a depth that has not been simulated, as a fraction of the smaller
excess of the two nearest simulated depths."""
_NEAR = 1e-4
_ROUNDS = 40
_CHEAPER = (0.5, 0.8, 0.95, 0.99, 1.01, 1.05, 1.25, 2.0)
"""Prices are multiplied by each of these to find lower ones."""
_FEW = 12
_ALIKE = 4
"""This many mixes of pipelines of one depth are always simulated."""
_EXACT: tuple[Stages, ...] = ("even", "best")
_PLAYS, _FAR = 3, 1.5
"""Each kind is simulated at most ``_PLAYS`` times, with numbers of micro-batches at least a factor ``_FAR`` apart."""
_POINTS = 3 * _PLAYS
"""The most points that the line of a simulated kind has."""
_GUESSED = 6
"""This many kinds are simulated before a search may end because of guesses about the others."""
SLOWER, LENGTHS, CHEAPEST = 16.0, 24, 6
"""Cheaper mini-batches may be up to ``SLOWER`` times as long; ``LENGTHS`` durations in between are tried, and the
``CHEAPEST`` choices of GPUs are planned."""
_CHANGES = 2
"""The number of replicas, on which the times of reductions depend, is corrected at most this often in a search."""


@dataclass(frozen=True)
class Effort:
    """How much a search tries. On few GPUs each trial is quick, and each choice matters more."""

    sizes: int
    """Micro-batch sizes, in the order of their bounds."""
    subsets: int
    """Smaller choices of GPUs, so that an added GPU never makes a plan slower."""
    mixes: int
    """Mixes that are simulated with stages that are found quickly."""
    finals: int
    """Mixes of these that are simulated with the stages that suit them best."""
    doubt: float
    """An estimate may be this factor too high: a mix is tried if its estimate is within the factor of the best time."""
    is_thorough: bool = False
    """Whether all mixes are estimated, and cuts and micro-batches are moved in all ways."""

    @classmethod
    def for_gpus(cls, gpus: Sequence[int]) -> Effort:
        """Return the effort for these numbers of GPUs of each type."""
        return next(effort for most, effort in _EFFORTS if sum(gpus) <= most)


_EFFORTS = (
    (8, Effort(sizes=4, subsets=16, mixes=24, finals=24, doubt=1.03, is_thorough=True)),
    (64, Effort(sizes=4, subsets=16, mixes=8, finals=4, doubt=1.02)),
    (math.inf, Effort(sizes=1, subsets=2, mixes=8, finals=4, doubt=1.02)),
)
"""Efforts, each with the most GPUs for which it is made."""


@entry
@compiled
def _gains(time_ns, numbers, times_ns, total):  # type: ignore[no-untyped-def]
    """Return the whole micro-batches that each kind finishes in this time (ns), by linear inter- and extrapolation."""
    last, num_kinds = len(numbers) - 1, numbers.shape[1]
    found = np.zeros(num_kinds, np.int64)
    for kind in range(num_kinds):
        at = 1
        while at < last and times_ns[at, kind] <= time_ns:
            at += 1
        found[kind] = int(min(total, max(0.0, _number(time_ns, numbers, times_ns, at, kind)) + 1e-9))
    return found


@inlined
def _number(time_ns, numbers, times_ns, at, kind):  # type: ignore[no-untyped-def]
    low, early = numbers[at - 1, kind], times_ns[at - 1, kind]
    return low + (time_ns - early) * (numbers[at, kind] - low) / max(1.0, times_ns[at, kind] - early)


@entry
@compiled
def _least_ns(numbers, times_ns, counts, total, low, high):  # type: ignore[no-untyped-def]
    """Return the least time (ns) in which these pipelines finish all micro-batches, if fractions of them count."""
    last = len(numbers) - 1
    while high - low > _NEAR / 100 * high:
        middle, done = (low + high) / 2, 0.0
        for kind in range(len(counts)):
            at = 1
            while at < last and times_ns[at, kind] <= middle:
                at += 1
            done += counts[kind] * max(0.0, _number(middle, numbers, times_ns, at, kind))
        if done >= total:
            high = middle
        else:
            low = middle
    return high


@entry
@compiled
def knapsack(sizes, gains, most):  # type: ignore[no-untyped-def]
    """Return the most gain on each number of GPUs, and the place of the kind taken last; -1: one GPU stays idle."""
    best = np.zeros(most + 1, np.int64)
    taken = np.full(most + 1, -1)
    for number in range(1, most + 1):
        best[number] = best[number - 1]
        for place in range(len(sizes)):
            size = sizes[place]
            if size > number:
                break  # sizes ascend
            gain = best[number - size] + gains[place]
            if gain > best[number]:
                best[number], taken[number] = gain, place
    return best, taken


def most_by_prices(
    done: Sequence[Ints], crossing: Iterable[tuple[int, int, Ints, Ints, Ints]], prices: Floats
) -> tuple[int, Floats]:
    """Return an upper bound of the micro-batches on all GPUs, and prices of a GPU of each type that prove it.

    If no pipeline finishes more micro-batches than its GPUs cost, all GPUs finish no more than they cost together. The
    prices begin with ``prices`` and are changed as long as all GPUs then cost less. ``done``: for each type, the
    micro-batches on 0, 1, ... GPUs; ``crossing``: two types, the stages on each of some pipelines, their micro-batches.
    """
    each_type, gpus = np.eye(len(done)), np.array([len(each) - 1 for each in done])
    needs = [np.outer(np.arange(1, len(each)), row) for each, row in zip(done, each_type, strict=True)]
    gains = [each[1:] for each in done]
    for i, j, first, second, gained in crossing:
        needs.append(np.outer(first, each_type[i]) + np.outer(second, each_type[j]))
        gains.append(gained)
    need, gain = np.concatenate(needs), np.concatenate(gains)

    def cost(prices: Floats) -> float:
        return float((gain / (need @ prices)).max(initial=0.0) * (prices @ gpus))

    least, improved = cost(prices), True
    while improved:
        improved = False
        for place, factor in product(np.flatnonzero(gpus)[1:], _CHEAPER):  # only their ratios matter
            other = prices.copy()
            other[place] *= factor
            if (there := cost(other)) < least * (1 - _NEAR):
                least, prices, improved = there, other, True
    return int(least + 1e-6), prices


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


class Mixes:
    """Mixes of pipelines on some types of node, with one micro-batch size and schedule, and D <= ``most_replicas``."""

    def __init__(self, types: Sequence[Pipelines], most_replicas: int | None = None) -> None:
        self.types = tuple(types)
        self.total, self.num_sections = types[0].total, types[0].sweep.num_sections
        self.most_replicas = min(self.total, most_replicas or self.total)
        self._found: dict[tuple[int, ...], tuple[float, list[Mix]]] = {}
        self._searches: dict[tuple[int, ...], Search] = {}
        self._bounds: dict[tuple[int, ...], Search] = {}
        self._settled: dict[tuple[Chosen, Stages, bool], tuple[int, tuple[int, ...]] | None] = {}
        self._rings: dict[object, Rings] = {}
        self.lines: dict[tuple[Group, int, frozenset[int]], PiecewiseLinear] = {}

    def best(self, gpus: tuple[int, ...], below_ns: float = math.inf) -> list[Mix]:
        """Return the fastest mixes on these GPUs of each type, best first; empty if none can be below ``below_ns``."""
        known = self._found.get(gpus)
        if known is None or (not known[1] and known[0] < below_ns):
            known = self._found[gpus] = below_ns, self._search(gpus, below_ns)
        return known[1]

    def search(self, gpus: tuple[int, ...]) -> Search:
        """Return the search on these numbers of GPUs of each type; it is kept, with what it has simulated."""
        if gpus not in self._searches:
            self._searches[gpus] = Search(self, gpus)
        return self._searches[gpus]

    def bounds(self, gpus: tuple[int, ...]) -> Search:
        """Return a search on these GPUs in which nothing is simulated, so that all its times are lower bounds."""
        if gpus not in self._bounds:
            self._bounds[gpus] = Search(self, gpus)
        return self._bounds[gpus]

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


def _growing(times_ns: Mapping[int, int]) -> dict[int, int]:
    """Return the times made strictly increasing: other windows can make more micro-batches as fast as fewer."""
    least, found = 0, {}
    for number in sorted(times_ns):
        least = found[number] = max(least + 1, times_ns[number])
    return found


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


def least_time_ns(total: int, lines: Sequence[tuple[PiecewiseLinear, int]]) -> float:
    """Return the least time (ns) in which these pipelines finish all micro-batches, if fractions of them count."""
    high = float(max(line.time_ns(total) for line, _ in lines))
    if high >= NEVER:
        return NEVER
    numbers, times_ns = _columns([line for line, _ in lines])
    counts = np.array([number for _, number in lines], np.float64)
    return float(_least_ns(numbers, times_ns, counts, total, 0.0, high))


def _columns(lines: Sequence[PiecewiseLinear], least: int = 2) -> tuple[Floats, Floats]:
    """Return the micro-batches and times (ns) of lines: float64[points, lines]; shorter lines are extrapolated."""
    num_points = max(least, *(len(line.numbers) for line in lines))
    numbers, times_ns = np.zeros((2, num_points, len(lines)))
    for place, line in enumerate(lines):
        numbers[:, place], times_ns[:, place] = line.points(num_points)
    return numbers, times_ns


def cheap_choices(
    shortest_ns: float, enough: Callable[[float], tuple[int, ...] | None], usd_per_h: Sequence[float]
) -> list[tuple[float, tuple[int, ...]]]:
    """Return numbers of GPUs whose plans may cost the least per example, each with its estimated cost (USD/h x ns).

    ``enough`` returns the cheapest GPUs that finish a mini-batch in this time (ns); several times are tried, from
    ``shortest_ns`` on.
    """
    found: dict[tuple[int, ...], float] = {}
    for time_ns in np.geomspace(shortest_ns, shortest_ns * SLOWER, LENGTHS).tolist() if shortest_ns < math.inf else ():
        subset = enough(time_ns)
        if subset is not None:
            usd = time_ns * float(np.dot(subset, usd_per_h))
            found[subset] = min(usd, found.get(subset, math.inf))
    return sorted((usd, subset) for subset, usd in found.items())[:CHEAPEST]


class Search:
    """The search for one number of GPUs of each type; if not ``limited`` by memory, only ``least_ns`` may be used."""

    def __init__(self, mixes: Mixes, gpus: tuple[int, ...], *, limited: bool = True) -> None:
        self.mixes, self.gpus, self.total = mixes, gpus, mixes.total
        self.lines: dict[Group, PiecewiseLinear] = {}
        self.played: dict[Group, frozenset[int]] = {}
        """The numbers of micro-batches (see ``anchor``) with which each kind has been simulated."""
        found = [each.bounds_ns if limited else each.free_bounds_ns for each in mixes.types]
        self.depths = [np.flatnonzero(each[0, : number + 1] < NEVER) for each, number in zip(found, gpus, strict=True)]
        self.groups = [(kind, depth) for kind, depths in enumerate(self.depths) for depth in depths.tolist()]
        self.place = {group: place for place, group in enumerate(self.groups)}
        self.ends = np.cumsum([0, *map(len, self.depths)]).tolist()
        bounds = [each[:, depths] for each, depths in zip(found, self.depths, strict=True)]
        self.bounds = np.concatenate(bounds, axis=1).astype(np.float64)
        self.bound_numbers = np.array(mixes.types[0].numbers, np.float64)
        if len(self.bounds) < _POINTS:  # the lines of simulated kinds need this many rows
            more = _POINTS - len(self.bounds)
            self.bounds = np.concatenate([self.bounds, *[self.bounds[-1:] + each for each in range(1, more + 1)]])
            self.bound_numbers = np.append(self.bound_numbers, [self.total] * more)
        self.numbers = np.repeat(self.bound_numbers[:, None], len(self.groups), axis=1)
        self.times_ns = self.bounds.copy()
        self.effort = Effort.for_gpus(gpus)
        self.ratios = np.ones(len(self.groups))
        self.num_replicas = 2

    def promising(self, below_ns: float) -> Iterator[Chosen]:
        """Yield mixes that may be the fastest and take less than ``below_ns``."""
        first = self.solve(frozenset(), below_ns=below_ns)
        if first is None or not first[1]:
            return
        time_ns, chosen = first
        found = {chosen: time_ns}
        for group, _ in chosen:
            other = self.solve(frozenset((group,)), time_ns)
            if other is not None:
                found.setdefault(other[1], other[0])
        alike = {each: self.time_ns(each) for each in self.alike()}
        alike = {each: alike[each] for each in sorted(alike, key=alike.__getitem__)[:_ALIKE]}
        if self.effort.is_thorough:
            for group in self.groups:
                if group not in self.lines:
                    self.play(group, time_ns)
            for each in self.all_mixes():
                found.setdefault(each, self.time_ns(each))
        for moved in [moved for near in found for moved in self.moved(near)]:
            if moved and moved not in found:
                found[moved] = self.time_ns(moved)
        found |= alike
        hopeful = [each for each in found if found[each] < below_ns * self.effort.doubt]
        nearest = sorted(hopeful, key=lambda each: (found[each], len(each)))[: self.effort.mixes]
        yield from dict.fromkeys((*nearest, *(each for each in alike if each in hopeful)))

    def solve(
        self, without: frozenset[Group], least_ns: float = 0.0, below_ns: float = math.inf
    ) -> tuple[float, Chosen] | None:
        """Return the least estimated time (ns) and its mix, once all kinds of that mix have been simulated; None if it
        is not below ``below_ns``. ``without``: kinds that are left out.
        """
        changes = 0
        while True:
            found = self.least_time(without, least_ns)
            if found is None:
                return None
            time_ns, chosen = found
            new = [group for group, _ in chosen if group not in self.lines]
            if time_ns >= below_ns * self.effort.doubt and (not new or len(self.lines) >= _GUESSED):
                return None
            num_replicas = sum(number for _, number in chosen)
            if abs(num_replicas - self.num_replicas) > self.num_replicas // 8 and changes < _CHANGES:
                self.num_replicas, changes = num_replicas, changes + 1
                for group in self.lines:
                    self.replace(group)
                continue
            new += [group for group, _ in chosen if group in self.lines and self.is_far(group, time_ns)]
            if not new:
                return time_ns, chosen
            for group in new:
                self.play(group, time_ns)

    def is_far(self, group: Group, time_ns: float) -> bool:
        """Return whether a kind would have far more, or far fewer, micro-batches than it was simulated with."""
        number = self._anchor(group, self.lines[group].number(time_ns))
        played = self.played[group]
        return len(played) < _PLAYS and all(max(number, each) > _FAR * min(number, each) for each in played)

    def _anchor(self, group: Group, number: float) -> int:
        return min(anchor(max(1, int(min(number, self.total)))), self.mixes.types[group[0]].most(group[1]))

    def play(self, group: Group, time_ns: float) -> None:
        """Simulate a pipeline of this kind with about as many micro-batches as it finishes in this time (ns)."""
        if group in self.lines:
            number = self.lines[group].number(time_ns)
        else:
            place = self.place[group]
            number = float(np.interp(time_ns / self.ratios[place], self.bounds[:, place], self.bound_numbers))
        self.played[group] = self.played.get(group, frozenset()) | {self._anchor(group, number)}
        self.replace(group)

    def replace(self, group: Group) -> None:
        """Replace the guessed times of a kind with simulated ones."""
        place, numbers = self.place[group], self.played[group]
        line = self.lines[group] = self.line_of(group, self.num_replicas)
        self.numbers[:, place], self.times_ns[:, place] = line.points(len(self.bounds))
        number = max(numbers)
        if (time_ns := line.time_ns(number)) < NEVER:
            bound_ns = float(np.interp(number, self.bound_numbers, self.bounds[:, place]))
            self.ratios[place] = max(1.0, time_ns / bound_ns)
            self._hope(group[0])

    def _hope(self, kind: int) -> None:
        """Guess the times of depths from the nearest depths that have been simulated."""
        first, end = self.ends[kind], self.ends[kind + 1]
        is_known = np.array([other in self.lines for other in self.groups[first:end]], np.bool_)
        known, others = np.flatnonzero(is_known), np.flatnonzero(~is_known)
        ratios, after = self.ratios[first:end], np.searchsorted(known, others)
        below, above = np.maximum(0, after - 1), np.minimum(len(known) - 1, after)
        hoped = 1 + HOPE * (np.minimum(ratios[known[below]], ratios[known[above]]) - 1)
        ratios[others] = hoped
        self.times_ns[:, first:end][:, others] = self.bounds[:, first:end][:, others] * hoped

    def line_of(self, group: Group, num_replicas: int) -> PiecewiseLinear:
        """Return the times of a pipeline of a simulated kind, as one of D pipelines."""
        key = group, num_replicas, self.played[group]
        if key not in self.mixes.lines:
            depth, pipelines = group[1], self.mixes.types[group[0]]
            alone_ns, most = pipelines.alone_ns, pipelines.most(depth)
            times_ns: dict[int, int] = {}
            for number in sorted(self.played[group]):
                is_few = number <= _FEW
                others = (max(1, number * 3 // 4), number + 1) if is_few else (number * 3 // 4,)
                for each in others:
                    if each <= most:
                        times_ns.setdefault(each, alone_ns(depth, each, num_replicas, None if is_few else number))
                times_ns[number] = alone_ns(depth, number, num_replicas)
            self.mixes.lines[key] = PiecewiseLinear(_growing(times_ns).items())
        return self.mixes.lines[key]

    def gains(self, time_ns: float, without: frozenset[Group] = frozenset()) -> Ints:
        """Return the number of micro-batches that a pipeline of each kind finishes in this time (ns)."""
        found: Ints = _gains(time_ns, self.numbers, self.times_ns, self.total)
        found[[self.place[group] for group in without]] = 0
        return found

    def done(self, time_ns: float) -> list[Ints]:
        """Return the most micro-batches in this time (ns) on 0, 1, ... GPUs of each type, by present estimates."""
        gains = self.gains(time_ns)
        return [knapsack(*each)[0] for each in self._parts(gains)]

    def _parts(self, gains: Ints) -> Iterator[tuple[Ints, Ints, int]]:
        """Yield the depths, gains and number of GPUs of each type."""
        for kind, (depths, number) in enumerate(zip(self.depths, self.gpus, strict=True)):
            yield depths, gains[self.ends[kind] : self.ends[kind + 1]], number

    def most(
        self, time_ns: float, without: frozenset[Group], gpus: tuple[int, ...] | None = None
    ) -> tuple[int, Chosen]:
        """Return the most micro-batches in this time (ns) and their pipelines, on all GPUs or on ``gpus`` by type."""
        done, chosen = 0, Counter[Group]()
        for kind, (depths, gains, number) in enumerate(self._parts(self.gains(time_ns, without))):
            number = number if gpus is None else gpus[kind]
            best, taken = knapsack(depths, gains, number)
            done += int(best[number])
            while number > 0:
                place = int(taken[number])
                if place < 0:
                    number -= 1
                else:
                    chosen[kind, int(depths[place])] += 1
                    number -= int(depths[place])
        return done, tuple(sorted(chosen.items()))

    def least_ns(self) -> float:
        """Return a lower bound (ns) for any mix on these GPUs, by present estimates; inf if no mix fits."""
        found = self.least_time(frozenset(), 0.0)
        return math.inf if found is None else found[0] * (1 - _NEAR)

    def least_time(self, without: frozenset[Group], least_ns: float) -> tuple[float, Chosen] | None:
        """Return the least time (ns) in which some pipelines finish all micro-batches, and these pipelines."""
        high = max(least_ns, float(self.times_ns.min(initial=NEVER, where=self.times_ns > 0)))
        if high >= NEVER:
            return None
        low = high
        for _ in range(_ROUNDS):
            done, chosen = self.most(high, without)
            if done >= self.total:
                break
            low, high = high, high * (1.02 if least_ns else 2.0)
        else:
            return None
        while high - low > _NEAR * high:
            middle = (low + high) / 2
            done, other = self.most(middle, without)
            if done >= self.total:
                high, chosen = middle, other
            else:
                low = middle
        return high, self.needed(chosen, high)

    def needed(self, chosen: Chosen, time_ns: float, spare: int | None = None) -> Chosen:
        """Return the mix without pipelines that are not needed to finish in this time (ns).

        ``spare``: the surplus micro-batches; None: those of these pipelines alone.
        """
        gains, kept = self.gains(time_ns), dict(chosen)
        if spare is None:
            spare = sum(int(gains[self.place[group]]) * number for group, number in chosen) - self.total
        for group, number in sorted(chosen, key=lambda each: -each[0][1]):  # the deepest first
            gain = int(gains[self.place[group]])
            drop = min(number, max(0, spare) // gain) if gain else number
            kept[group] -= drop
            spare -= drop * gain
        return tuple((group, number) for group, number in sorted(kept.items()) if number)

    def time_ns(self, chosen: Chosen) -> float:
        """Return the estimated time (ns) of these pipelines."""
        num_replicas = sum(number for _, number in chosen)
        lines = [
            (self.line_of(group, num_replicas) if group in self.played else self.line(group), number)
            for group, number in chosen
        ]
        return least_time_ns(self.total, lines)

    def line(self, group: Group) -> PiecewiseLinear:
        """Return the known or guessed times of a kind."""
        if group in self.lines:
            return self.lines[group]
        place = self.place[group]
        return PiecewiseLinear(zip(map(int, self.numbers[:, place]), map(int, self.times_ns[:, place]), strict=True))

    def alike(self) -> Iterator[Chosen]:
        """Yield mixes with one depth for all types; pipelines that are cut alike need the fewest rings."""
        for depth in sorted({depth for _, depth in self.groups}):
            yield tuple(
                ((kind, depth), number // depth)
                for kind, number in enumerate(self.gpus)
                if number >= depth and (kind, depth) in self.place
            )

    def all_mixes(self) -> Iterator[Chosen]:
        """Yield every mix of two or more pipelines."""

        def of_type(kind: int, left: int, place: int) -> Iterator[Chosen]:
            depths = self.depths[kind]
            if place == len(depths) or depths[place] > left:
                yield ()
                return
            for number in range(left // int(depths[place]) + 1):
                here: Chosen = (((kind, int(depths[place])), number),) if number else ()
                for rest in of_type(kind, left - number * int(depths[place]), place + 1):
                    yield here + rest

        for each in product(*(list(of_type(kind, number, 0)) for kind, number in enumerate(self.gpus))):
            chosen = tuple(chain.from_iterable(each))
            if sum(number for _, number in chosen) > 1:
                yield chosen

    def moved(self, chosen: Chosen) -> Iterator[Chosen]:
        """Yield mixes with a stage moved to another pipeline of the same type, or with one pipeline fewer.

        If the only stage of a pipeline is moved, that leaves one pipeline fewer, too.
        """
        kept = dict(chosen)
        for (kind, depth), (other, deep) in product(kept, kept):
            if kind != other or (depth == deep and kept[kind, depth] < 2):
                continue
            moved = Counter(kept)
            moved.subtract([(kind, depth), (kind, deep)])
            moved.update([(kind, depth - 1), (kind, deep + 1)])
            if (depth == 1 or (kind, depth - 1) in self.place) and (kind, deep + 1) in self.place:
                yield tuple(sorted((group, number) for group, number in moved.items() if number and group[1]))
        for group in kept:
            fewer = kept | {group: kept[group] - 1}
            yield tuple(sorted((each, number) for each, number in fewer.items() if number))
