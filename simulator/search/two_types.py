"""Pipelines whose first stages are on GPUs of one type, and whose last stages are on GPUs of another.

Such pipelines use a model's memory where no type alone has enough of it, and GPUs that pipelines of one type leave
idle. The same dynamic programming cuts them: stages behind the border have the times and memory of the second type. A
knapsack over both types decides how many stages are on each type, first by bounds: if these pipelines gain nothing over
pipelines of one type, nothing is simulated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import permutations
from typing import NamedTuple

import numpy as np

from morph.contract.plan import Schedule
from simulator.costs.answer import deal
from simulator.costs.joined_sections import JoinedSections
from simulator.costs.memory import NEVER
from simulator.costs.outcome import ShapeOutcome
from simulator.costs.stage_costs import SectionCosts
from simulator.engine.compilation import compiled, entry
from simulator.engine.times import Flags, Floats, Ints
from simulator.search.knapsack import CHEAPEST, cheap_choices, most_by_prices
from simulator.search.mix_search import HOPE, Chosen, Effort, Search
from simulator.search.mixes import Found, Mixes
from simulator.search.partition import PartitionTable, partition_table
from simulator.search.pipelines import Pipelines, Reach
from simulator.search.setting import Rule, Setting, widest_alike
from simulator.search.sweep import Sweep
from simulator.search.windows import Trial

_MANY_PLACES = 2_500
"""If two types have more pairs of numbers of GPUs, only splits that finish more than others on as many are tried."""
_LONG = 8
"""From this many micro-batches for each stage on, three windows are enough for an approximate time."""


class Split(NamedTuple):
    """The places of two types of node, and the number of stages on each; the first type has the first stages."""

    first: int
    second: int
    num_first: int
    num_second: int

    @property
    def depth(self) -> int:
        """P."""
        return self.num_first + self.num_second


class Border:
    """Cuts of pipelines that begin on one type of node and end on another, with one m and with or without recompute."""

    def __init__(self, first: Setting, second: Setting) -> None:
        self.settings = first, second
        self.num_sections, self.deepest = first.sections.num_sections, 0
        self._tables: dict[tuple[object, ...], PartitionTable] = {}
        self._sections: dict[int, JoinedSections] = {}
        self._widest: dict[bool, Ints] = {}
        self._slowest: dict[tuple[Schedule, bool, int], dict[int, Ints]] = {}

    def sections_at(self, border: int) -> JoinedSections:
        """Return the costs of the sections if those from ``border`` on are on the second type."""
        if border not in self._sections:
            behind = (np.arange(self.num_sections) >= border).astype(np.int64)
            limits = [setting.memory_bytes for setting in self.settings]
            self._sections[border] = JoinedSections([each.sections for each in self.settings], behind, limits)
        return self._sections[border]

    def even(self, schedule: Schedule, num_second: int) -> PartitionTable:
        """Return the most even cuts without a memory limit, with ``num_second`` stages on the second type."""
        again = schedule == "gpipe" and self.settings[0].sections.recompute
        return self._table(Rule("gpipe" if again else "varuna", 1), 1, True, num_second, limited=False)

    def tight(self, rule: Rule, most: int, num_second: int) -> PartitionTable:
        """Return the most even cuts that fit in memory, with ``num_second`` stages on the second type."""
        single = self.settings[0].single(most)
        if rule.schedule == "gpipe":
            return self._table(Rule("gpipe", 1), -(-most // rule.slope), single, num_second, limited=True)
        number = min(most, rule.slope * (self.num_sections - 1) + 1)
        return self._table(Rule("varuna", rule.slope), number, single, num_second, limited=True)

    def deepen(self, depth: int) -> None:
        """Find cuts into up to this many stages from now on."""
        if depth > self.deepest:
            self.deepest = min(depth, self.num_sections)
            self._tables.clear()
            self._slowest.clear()

    def _table(self, rule: Rule, number: int, single: bool, num_second: int, *, limited: bool) -> PartitionTable:
        key = rule, number, single, num_second, limited
        if key not in self._tables:
            setting = self.settings[num_second == 0]
            behind = None
            if num_second:
                behind = self._table(rule, number, single, 0, limited=limited), num_second
            self._tables[key] = partition_table(
                setting.sections,
                rule.schedule,
                num_micro_batches=number,
                slope=rule.slope,
                memory_bytes=setting.memory_bytes if limited else None,
                single=single,
                behind=behind,
                deepest=self.deepest,
            )
        return self._tables[key]

    @cached_property
    def fill_ns(self) -> int:
        """The least time in which a micro-batch passes all sections forward and backward, without messages."""
        work_ns = [np.diff(each.sections.forward_sum_ns + each.sections.backward_sum_ns) for each in self.settings]
        return int(np.minimum(*work_ns).sum())

    def widest(self, schedule: Schedule, most: int) -> Ints:
        """Return the most micro-batches that are not flushed before others begin, by P; GPipe flushes its windows."""
        if schedule != "gpipe":
            return np.full(self.num_sections + 1, NEVER)
        single = self.settings[0].single(most)
        if single not in self._widest:
            self._widest[single] = widest_alike(np.maximum(*(each.rooms(single) for each in self.settings)))
        return np.minimum(most, self._widest[single])

    def bottleneck_ns(self, schedule: Schedule, most: int, num_first: int, num_second: int) -> Ints:
        """Return the slowest stage's time, by stages on each type: [first + 1, second + 1]; 2**62 where none fit."""
        found = np.full((num_first + 1, num_second + 1), NEVER)
        has_limit = any(setting.memory_bytes is not None for setting in self.settings)
        for behind in range(1, min(num_second, self.num_sections - 1) + 1):
            slowest = self._tight_ns(schedule, most, behind) if has_limit else self.even(schedule, behind).bottleneck_ns
            deepest = min(num_first, self.num_sections - behind)
            found[1 : deepest + 1, behind] = slowest[behind + 1 : behind + deepest + 1]
        return found

    def _tight_ns(self, schedule: Schedule, most: int, num_second: int) -> Ints:
        """Return the slowest stage's time, by P; if it is equal for fewer and for more micro-batches, also for these.

        More micro-batches need larger windows, and so memory, which never makes the most even cut faster.
        """
        known = self._slowest.setdefault((schedule, self.settings[0].single(most), num_second), {})
        fewer = max((number for number in known if number <= most), default=None)
        more = min((number for number in known if number >= most), default=None)
        if fewer is not None and more is not None and np.array_equal(known[fewer], known[more]):
            return known[more]
        rule = Rule(schedule, most if schedule == "gpipe" else 1)
        known[most] = self.tight(rule, most, num_second).bottleneck_ns
        return known[most]


class SplitSetting(Setting):
    """A setting of pipelines over two types of node, with fixed numbers of stages on each."""

    def __init__(self, border: Border, split: Split) -> None:
        vars(self).update(vars(border.settings[0]))
        self.border, self.split = border, split
        self.sections = border.sections_at(split.num_first)
        self.grouped = self.sections.grouped
        limits = [setting.memory_bytes for setting in border.settings]
        self.memory_bytes = max((limit for limit in limits if limit is not None), default=None)
        self._room, self._cuts, self._stages, self._unlimited = {}, {}, {}, None

    def sections_at(self, boundaries: Sequence[int]) -> SectionCosts:
        return self.border.sections_at(int(boundaries[self.split.num_first]))

    def by_sections(self, cuts: Ints) -> Iterator[tuple[SectionCosts, slice | Flags]]:
        for border in np.unique(cuts[:, self.split.num_first]).tolist():
            yield self.border.sections_at(border), cuts[:, self.split.num_first] == border

    def bound_ns(self, depth: int, most: int) -> int:
        slowest = self.border.even(self.schedules[0], self.split.num_second).bottleneck_ns[depth]
        return (most - 1) * int(slowest) + self.border.fill_ns + self.sections.commit_ns

    def least_ns(self, depth: int, most: int) -> int:
        return self.bound_ns(depth, most) if self.fits(depth, most) else NEVER

    def has_room(self, rule: Rule, depth: int, most: int) -> bool:
        return self.memory_bytes is None or self.cut(rule, depth, most) is not None

    def _most_even(self, schedule: Schedule, depth: int) -> tuple[int, ...]:
        return self.border.even(schedule, self.split.num_second).boundaries(depth)

    def _tight_cut(self, rule: Rule, depth: int, most: int) -> tuple[int, ...] | None:
        table = self.border.tight(rule, most, self.split.num_second)
        return table.boundaries(depth) if table.fits(depth) else None


class SplitPipelines(Pipelines):
    """Pipelines that begin on one type of node and end on another, with fixed numbers of stages on each."""

    def __init__(self, first: Pipelines, second: Pipelines, settings: Sequence[SplitSetting], split: Split) -> None:
        self.sweep, self.schedule, self.total = first.sweep, first.schedule, first.total
        self.settings = tuple(setting.under(first.schedule) for setting in settings)
        self._types = (first.node_type,) * split.num_first + (second.node_type,) * split.num_second
        self._costs, self._ended, self._most = {}, {}, {}

    @property
    def node_types(self) -> tuple[str, ...]:
        return self._types


@entry
@compiled
def _most_on_both(first, second, gains, alone, others):  # type: ignore[no-untyped-def]
    """Return the most micro-batches on each number of GPUs of two types, and the place of the last split; -1: none.

    ``gains``: micro-batches of a pipeline with ``first`` and ``second`` stages on the types; ``alone`` and ``others``:
    micro-batches of pipelines of one type, by number of GPUs.
    """
    best = np.zeros((len(alone), len(others)), np.int64)
    taken = np.full(best.shape, -1)
    for i in range(len(alone)):
        best[i] = alone[i] + others
        for place in range(len(gains)):
            a, b, gain = first[place], second[place], gains[place]
            if a <= i and b < len(others):
                before, row, last = best[i - a], best[i, b:], taken[i, b:]
                for j in range(len(row)):  # the inner loop, so that it is vectorized
                    if gain + before[j] > row[j]:
                        row[j], last[j] = gain + before[j], place
    return best, taken


def reach_of_two(borders: Sequence[Border], schedule: Schedule, total: int, most: tuple[int, int]) -> Reach:
    """Return the bounds of pipelines with up to ``most`` stages on each type, in arrays over these two numbers."""
    fill_ns = np.array([each.fill_ns for each in borders], np.float64)[:, None, None]
    num_sections = borders[0].num_sections
    depths = np.minimum(np.add.outer(*(np.arange(number + 1) for number in most)), num_sections)
    for each in borders:
        each.deepen(sum(most))

    def paces_ns(held: int) -> tuple[Floats, Floats]:
        slowest = np.stack([each.bottleneck_ns(schedule, held, *most) for each in borders]).astype(np.float64)
        window = np.stack([np.maximum(1, each.widest(schedule, held))[depths] for each in borders])
        return slowest, slowest + np.maximum(0, fill_ns - slowest) / window

    return Reach(fill_ns, borders[0].settings[0].sections.commit_ns, total, num_sections, paces_ns)


class TwoTypes:
    """The search for pipelines over two types, with one micro-batch size and schedule."""

    def __init__(self, mixes: Mixes, sweeps: Sequence[Sweep]) -> None:
        self.mixes, self.sweeps, self.total = mixes, tuple(sweeps), mixes.total
        self.schedule = mixes.types[0].schedule
        self.joint = Mixes(mixes.types, mixes.most_replicas)
        self._borders: dict[tuple[int, int], list[Border]] = {}
        self._splits: dict[tuple[int, int], tuple[tuple[int, int], Reach]] = {}
        self._kinds: dict[Split, int] = {}
        self._settings: dict[Split, list[SplitSetting]] = {}
        self._rough: dict[tuple[Split, int], dict[SplitSetting, int]] = {}
        self._alone: dict[tuple[Split, int], ShapeOutcome | None] = {}

    def best(self, gpus: tuple[int, ...], below_ns: float, *, quick: bool = False) -> Found | None:
        """Return the fastest such mix below ``below_ns``; None: none. ``quick``: simulate only the most promising."""
        search, effort = self.mixes.search(gpus), Effort.for_gpus(gpus)
        hopeful, rough = self._hopeful(gpus, below_ns), []
        most = 2 if quick and not effort.is_thorough else effort.finals
        for splits, others in [each for way in hopeful[:most] for each in self._near(*way, search)]:
            chosen = self.chosen(splits, others)
            if len(chosen) == 1:
                times_ns = self._rough_ns(*next(iter(splits.items()))).values()
                rough.append((min(times_ns, default=math.inf), splits, others))
            elif (known := self.joint.settled(chosen, "rough", thorough=effort.is_thorough)) is not None:
                rough.append((float(known[0]), splits, others))
        rough.sort(key=lambda each: each[0])
        best: Found | None = None
        for time_ns, splits, others in rough[:most]:
            least = min(below_ns, math.inf if best is None else best.mini_batch_ns)
            if time_ns < least * effort.doubt:
                found = self._settled(splits, others, least, thorough=effort.is_thorough)
                if found is not None and found.mini_batch_ns < least:
                    best = found
        return best

    def least_ns(self, gpus: tuple[int, ...]) -> float:
        """Return the estimated time of the best such mix; inf if there is none."""
        search = self.mixes.search(gpus)
        return min((self._least_time(search, pair) for pair in self._pairs(gpus)), default=math.inf)

    def cheap(self, gpus: tuple[int, ...], usd_per_h: Sequence[float]) -> list[tuple[float, tuple[int, ...]]]:
        """Return numbers of GPUs of two types whose plans may cost the least per example, for several mini-batch times.

        Each comes with its cost, nanoseconds times USD per hour, and the cheapest is first.
        """
        found: list[tuple[float, tuple[int, ...]]] = []
        for pair in self._pairs(gpus):
            search = self.mixes.search(tuple(number if kind in pair else 0 for kind, number in enumerate(gpus)))
            prices = np.add.outer(*(np.arange(gpus[kind] + 1) * usd_per_h[kind] for kind in pair))

            def enough(
                time_ns: float, search: Search = search, pair: tuple[int, int] = pair, prices: Floats = prices
            ) -> tuple[int, ...] | None:
                done, gained = search.done(time_ns), self._gains(search, pair, time_ns)[:3]
                best, _ = _most_on_both(*gained, *(done[kind] for kind in pair))
                if best[-1, -1] < self.total:
                    return None
                ends = np.unravel_index(np.where(best >= self.total, prices, math.inf).argmin(), prices.shape)
                numbers = dict(zip(pair, map(int, ends), strict=True))
                return tuple(numbers.get(kind, 0) for kind in range(len(gpus))) if all(numbers.values()) else None

            found += cheap_choices(self._least_time(search, pair), enough, usd_per_h)
        return sorted(found)[:CHEAPEST]

    def fewest(self, gpus: Sequence[int]) -> tuple[int, ...] | None:
        """Return GPUs on which such a pipeline fits, with the fewest more than these; None if it fits on none."""

        def missing(needed: tuple[int, ...]) -> int:
            return sum(max(0, need - number) for need, number in zip(needed, gpus, strict=True))

        return min(self.fitting(gpus), key=lambda needed: (missing(needed), sum(needed), needed), default=None)

    def fitting(self, gpus: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Yield the GPUs of each pipeline over two of these types that fits alone, even if some of them are missing."""
        deepest = self.sweeps[0].num_sections
        for i, j in permutations(range(len(gpus)), 2):
            if gpus[i] and gpus[j]:
                for a, b in np.argwhere(self.splits_of(i, j, (deepest, deepest)).lone_fits).tolist():
                    yield self.gpus_of({Split(i, j, a, b): 1}, ())

    # ---- what there is to gain, by bounds ----

    def _pairs(self, gpus: Sequence[int]) -> list[tuple[int, int]]:
        there = [kind for kind, number in enumerate(gpus) if number]
        return [(i, j) for i in there for j in there if i < j]

    def splits_of(self, i: int, j: int, most: tuple[int, int]) -> Reach:
        """Return the bounds of pipelines from type i to type j with up to ``most`` stages on each."""
        known = self._splits.get((i, j))
        if known is None or known[0][0] < most[0] or known[0][1] < most[1]:
            most = most if known is None else (max(most[0], known[0][0]), max(most[1], known[0][1]))
            splits = reach_of_two(self._borders_of(i, j), self.schedule, self.total, most)
            known = self._splits[i, j] = most, splits
        return known[1]

    def _borders_of(self, i: int, j: int) -> list[Border]:
        if (i, j) not in self._borders:
            found = {}
            for first in self.sweeps[i].settings:
                for second in self.sweeps[j].settings:
                    if first.sections.recompute == second.sections.recompute:
                        found[first.sections.recompute, first.grouped or second.grouped] = Border(first, second)
            self._borders[i, j] = list(found.values())
        return self._borders[i, j]

    def _gains(self, search: Search, pair: tuple[int, int], time_ns: float) -> tuple[Ints, Ints, Ints, Ints]:
        """Return the splits that gain anything: stages on each type, micro-batches, and the order.

        Their times are bounds if nothing was simulated in this search, else estimates.
        """
        (i, j), gpus, deepest = pair, search.gpus, self.sweeps[0].num_sections - 1
        most = min(gpus[i], deepest), min(gpus[j], deepest)
        played = [float(search.ratios[search.place[group]]) for group in search.lines]
        time_ns /= 1 + HOPE * (min(played, default=1.0) - 1)
        there = self.splits_of(i, j, most).gains(time_ns)[: most[0] + 1, : most[1] + 1]
        back = self.splits_of(j, i, most[::-1]).gains(time_ns)[: most[1] + 1, : most[0] + 1].T
        gains, order = np.maximum(there, back), (back > there).astype(np.int64)
        first, second = np.nonzero(gains)
        return first, second, gains[first, second], order[first, second]

    def _done(self, search: Search, pair: tuple[int, int], time_ns: float) -> int:
        """Return the most micro-batches in this time (ns), by the bounds or estimates of a search."""
        done, gained = search.done(time_ns), self._gains(search, pair, time_ns)
        alone, beside = (done[kind] for kind in pair)
        others = sum(int(each[-1]) for kind, each in enumerate(done) if kind not in pair)
        if len(alone) * len(beside) > _MANY_PLACES:
            return others + most_by_prices((alone, beside), [(0, 1, *gained[:3])], np.ones(2))[0]
        return others + int(_most_on_both(*gained[:3], alone, beside)[0][-1, -1])

    def _least_time(self, search: Search, pair: tuple[int, int]) -> float:
        """Return the least time (ns) for all micro-batches, by the bounds or estimates of a search; inf: never."""
        high = float(self.splits_of(*pair, (1, 1)).fill_ns.min())
        for _ in range(60):
            if self._done(search, pair, high) >= self.total:
                break
            high *= 2
        else:
            return math.inf
        low = high / 2
        while self._done(search, pair, low) >= self.total:
            low, high = low / 2, low
        while high - low > 1e-3 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self._done(search, pair, middle) >= self.total else (middle, high)
        return high

    def _hopeful(self, gpus: tuple[int, ...], below_ns: float) -> list[tuple[dict[Split, int], Chosen]]:
        """Return mixes that may take less than ``below_ns`` by their bounds, the most promising by estimates first."""
        found: list[tuple[float, int, dict[Split, int], Chosen]] = []
        search, bounds = self.mixes.search(gpus), self.mixes.search(gpus, bounds=True)
        for pair in self._pairs(gpus):
            if below_ns < math.inf and self._done(bounds, pair, below_ns) < self.total:
                continue
            time_ns = self._least_time(search, pair)
            if time_ns == math.inf:
                continue
            gained, done = self._gains(search, pair, time_ns), search.done(time_ns)
            if math.prod(len(done[kind]) for kind in pair) > _MANY_PLACES:  # others are never needed
                more = gained[2] > done[pair[0]][gained[0]] + done[pair[1]][gained[1]]
                gained = gained[0][more], gained[1][more], gained[2][more], gained[3][more]
            for splits in self._ways(pair, gpus, gained, done):
                used = self.gpus_of(splits, ())
                left = tuple(number - taken for number, taken in zip(gpus, used, strict=True))
                num_done, others = search.most(time_ns, frozenset(), left)
                places = {(a, b): gain for a, b, gain in zip(*(each.tolist() for each in gained[:3]), strict=True)}
                for split, number in splits.items():
                    ends = (split.num_first, split.num_second)
                    num_done += number * places[ends if split.first == pair[0] else ends[::-1]]
                others = search.needed(others, time_ns, num_done - self.total)
                if sum(splits.values()) + sum(number for _, number in others) <= self.mixes.most_replicas:
                    found.append((time_ns / num_done, len(splits) + len(others), splits, others))
        return [(splits, others) for _, _, splits, others in sorted(found, key=lambda each: each[:2])]

    def _near(
        self, splits: dict[Split, int], others: Chosen, search: Search
    ) -> Iterator[tuple[dict[Split, int], Chosen]]:
        """Yield this mix, in both orders of types, and in tiny pools with other pipelines of one type or without."""
        back = {Split(j, i, b, a): number for (i, j, a, b), number in splits.items()}
        has_room = all(bool(self.splits_of(i, j, (a, b)).fits[a, b]) for i, j, a, b in back)
        nearby = dict.fromkeys((others, (), *search.moved(others)) if search.effort.is_thorough else (others,))
        for ordered in (splits, back) if has_room else (splits,):
            yield from ((ordered, each) for each in nearby)

    def _ways(
        self, pair: tuple[int, int], gpus: tuple[int, ...], gained: tuple[Ints, Ints, Ints, Ints], done: Sequence[Ints]
    ) -> Iterator[dict[Split, int]]:
        """Yield pipelines over both types: those of the best mix, and equal ones with which a mix finishes most."""
        (i, j), (first, second, gains, order) = pair, gained

        def split(place: int) -> Split:
            ends = int(first[place]), int(second[place])
            return Split(j, i, *ends[::-1]) if order[place] else Split(i, j, *ends)

        _, taken = _most_on_both(first, second, gains, done[i], done[j])
        chosen, left = Counter[Split](), [gpus[i], gpus[j]]
        while (place := int(taken[left[0], left[1]])) >= 0:
            chosen[split(place)] += 1
            left = [left[0] - int(first[place]), left[1] - int(second[place])]
        if chosen:
            yield dict(chosen)
        worth = []
        for place in range(len(first)):
            a, b = int(first[place]), int(second[place])
            needed = -(-self.total // int(gains[place]))
            for number in range(1, min(gpus[i] // a, gpus[j] // b, needed) + 1):
                whole = number * int(gains[place]) + int(done[i][gpus[i] - number * a] + done[j][gpus[j] - number * b])
                worth.append((-whole, number, place))
        nearest = sorted(worth)[: Effort.for_gpus(gpus).finals]
        yield from (each for _, number, place in nearest if (each := {split(place): number}) != chosen)

    # ---- the promising mixes, simulated ----

    def chosen(self, splits: Mapping[Split, int], others: Chosen) -> Chosen:
        """Return pipelines of all kinds as ``joint`` numbers them."""
        own = [((self._kind(split), split.depth), number) for split, number in splits.items()]
        return (*others, *own)

    def _kind(self, split: Split) -> int:
        """Return the place of pipelines with this split among the types of ``joint``."""
        if split not in self._kinds:
            first, second = (self.mixes.types[kind] for kind in split[:2])
            self._kinds[split] = len(self.joint.types)
            self.joint.types += (SplitPipelines(first, second, self._settings_of(split), split),)
        return self._kinds[split]

    def _settings_of(self, split: Split) -> list[SplitSetting]:
        if split not in self._settings:
            self._settings[split] = [SplitSetting(each, split) for each in self._borders_of(split.first, split.second)]
        return self._settings[split]

    def _rough_ns(self, split: Split, number: int) -> dict[SplitSetting, int]:
        """Return the approximate time of equal pipelines alone, by the settings in which they fit and may be best."""
        key = split, number
        if key not in self._rough:
            found: dict[SplitSetting, int] = {}
            counts = deal(self.total, number)
            for setting in sorted(self._settings_of(split), key=lambda each: each.bound_ns(split.depth, counts[0])):
                least = min(found.values(), default=NEVER)
                if setting.bound_ns(split.depth, counts[0]) < least and setting.fits(split.depth, counts[0]):
                    is_long = counts[0] > _LONG * split.depth
                    trial = self._trial(setting.under(self.schedule), split, counts, quick=is_long)
                    if not (setting.grouped and found and trial.roomy):
                        found[setting] = trial.planned[1]
            self._rough[key] = found
        return self._rough[key]

    def _trial(self, setting: Setting, split: Split, counts: tuple[int, ...], *, quick: bool) -> Trial:
        sweep = self.sweeps[split.first]
        layout = sweep.layouts((split.depth, len(counts)))[0]
        return Trial(setting, sweep.shape_simulator, layout, split.depth, counts, moves=not quick, quick=quick)

    def equal(self, split: Split, number: int) -> ShapeOutcome | None:
        """Return the best of this many equal pipelines without others; None if they do not fit."""
        if (split, number) not in self._alone:
            rough_ns, counts = self._rough_ns(split, number), deal(self.total, number)
            least = min(rough_ns.values(), default=NEVER)
            outcomes = [
                self._trial(setting, split, counts, quick=False).best()
                for setting, time_ns in rough_ns.items()
                if time_ns <= least * Effort.for_gpus([number * split.depth]).doubt
            ]
            self._alone[split, number] = min(outcomes, key=lambda each: each.mini_batch_ns, default=None)
        return self._alone[split, number]

    def _settled(self, splits: dict[Split, int], others: Chosen, below_ns: float, *, thorough: bool) -> Found | None:
        chosen, workers = self.chosen(splits, others), self.gpus_of(splits, others)
        if len(chosen) == 1:
            (split, number), *_ = splits.items()
            outcome = self.equal(split, number)
            types = self.joint.types[self._kind(split)].node_types
            return None if outcome is None else Found(outcome.mini_batch_ns, workers, types, outcome)
        best = self.joint.exact(chosen, below_ns, thorough=thorough)
        return None if best is None else Found(best.mini_batch_ns, workers, mix=best, mixes=self.joint)

    def gpus_of(self, splits: Mapping[Split, int], others: Chosen) -> tuple[int, ...]:
        """Return the GPUs of each type."""
        used = [0] * len(self.sweeps)
        for split, number in splits.items():
            used[split.first] += number * split.num_first
            used[split.second] += number * split.num_second
        for (kind, depth), number in others:
            used[kind] += depth * number
        return tuple(used)
