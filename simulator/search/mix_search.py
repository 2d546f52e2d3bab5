"""Searches the mixes of pipelines that may be fastest on some GPUs: how many pipelines of each type and depth.

The answer of a search is the least time in which all types together finish the mini-batch. At first only a bound is
known for most depths. The depths of the best answer are simulated and the answer is found anew, until all its depths
have been simulated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product

import numpy as np

from simulator.costs.memory import NEVER
from simulator.engine.times import Ints
from simulator.search.knapsack import NEAR, finished, knapsack, least_time_ns
from simulator.search.pipelines import FEW, PiecewiseLinear, Pipelines, anchor

HOPE = 0.5
"""The assumed excess (time over bound, minus 1) of a depth that has not been simulated, as a fraction of the smaller
excess of the two nearest simulated depths."""
_ALIKE = 4
"""This many mixes of pipelines of one depth are always simulated."""
_PLAYS, _FAR = 3, 1.5
"""Each kind is simulated at most ``_PLAYS`` times, with numbers of micro-batches at least a factor ``_FAR`` apart."""
_POINTS = 3 * _PLAYS
"""The most points that the line of a simulated kind has."""
_GUESSED = 6
"""This many kinds are simulated before a search may end because of guesses about the others."""
_CHANGES = 2
"""The number of replicas, on which the times of reductions depend, is corrected at most this often in a search."""
Group = tuple[int, int]
"""A kind of equal pipelines: the number of their type of node, and their depth."""
Chosen = tuple[tuple[Group, int], ...]
"""The number of pipelines of each kind, in the order of the kinds."""
Lines = dict[tuple[Group, int, frozenset[int]], PiecewiseLinear]
"""Times by kind, number of replicas, and the numbers of micro-batches with which the kind was simulated."""


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


class Search:
    """The search for one number of GPUs of each type; if not ``limited`` by memory, only ``least_ns`` may be used."""

    def __init__(
        self, types: Sequence[Pipelines], gpus: tuple[int, ...], known: Lines | None = None, *, limited: bool = True
    ) -> None:
        self.types, self.gpus, self.total = types, gpus, types[0].total
        self._known: Lines = {} if known is None else known
        self.lines: dict[Group, PiecewiseLinear] = {}
        self.played: dict[Group, frozenset[int]] = {}
        """The numbers of micro-batches (see ``anchor``) with which each kind has been simulated."""
        found = [each.bounds_ns if limited else each.free_bounds_ns for each in types]
        self.depths = [np.flatnonzero(each[0, : number + 1] < NEVER) for each, number in zip(found, gpus, strict=True)]
        self.groups = [(kind, depth) for kind, depths in enumerate(self.depths) for depth in depths.tolist()]
        self.place = {group: place for place, group in enumerate(self.groups)}
        self.ends = np.cumsum([0, *map(len, self.depths)]).tolist()
        bounds = [each[:, depths] for each, depths in zip(found, self.depths, strict=True)]
        self.bounds = np.concatenate(bounds, axis=1).astype(np.float64)
        self.bound_numbers = np.array(types[0].numbers, np.float64)
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
        return min(anchor(max(1, int(min(number, self.total)))), self.types[group[0]].most(group[1]))

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
        if key not in self._known:
            depth, pipelines = group[1], self.types[group[0]]
            alone_ns, most = pipelines.alone_ns, pipelines.most(depth)
            times_ns: dict[int, int] = {}
            for number in sorted(self.played[group]):
                is_few = number <= FEW
                others = (max(1, number * 3 // 4), number + 1) if is_few else (number * 3 // 4,)
                for each in others:
                    if each <= most:
                        times_ns.setdefault(each, alone_ns(depth, each, num_replicas, None if is_few else number))
                times_ns[number] = alone_ns(depth, number, num_replicas)
            self._known[key] = PiecewiseLinear(_growing(times_ns).items())
        return self._known[key]

    def gains(self, time_ns: float, without: frozenset[Group] = frozenset()) -> Ints:
        """Return the number of micro-batches that a pipeline of each kind finishes in this time (ns)."""
        found: Ints = finished(time_ns, self.numbers, self.times_ns, self.total)
        found[[self.place[group] for group in without]] = 0
        return found

    def done(self, time_ns: float, without: frozenset[Group] = frozenset()) -> list[Ints]:
        """Return the most micro-batches in this time (ns) on 0, 1, ... GPUs of each type, by present estimates."""
        return [knapsack(*each)[0] for each in self._parts(self.gains(time_ns, without))]

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
        return math.inf if found is None else found[0] * (1 - NEAR)

    def least_time(self, without: frozenset[Group], least_ns: float) -> tuple[float, Chosen] | None:
        """Return the least time (ns) in which some pipelines finish all micro-batches, and these pipelines."""
        high = max(least_ns, float(self.times_ns.min(initial=NEVER, where=self.times_ns > 0)))
        if high >= NEVER:
            return None

        def is_enough(time_ns: float) -> bool:
            return sum(int(each[-1]) for each in self.done(time_ns, without)) >= self.total

        low = high
        for _ in range(40):
            if is_enough(high):
                break
            low, high = high, high * (1.02 if least_ns else 2.0)
        else:
            return None
        while high - low > NEAR * high:
            middle = (low + high) / 2
            low, high = (low, middle) if is_enough(middle) else (middle, high)
        return high, self.needed(self.most(high, without)[1], high)

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


def _growing(times_ns: Mapping[int, int]) -> dict[int, int]:
    """Return the times made strictly increasing: other windows can make more micro-batches as fast as fewer."""
    least, found = 0, {}
    for number in sorted(times_ns):
        least = found[number] = max(least + 1, times_ns[number])
    return found
