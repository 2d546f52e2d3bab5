"""The best windows, and cuts next to the most even one, for one shape under its conditions.

Windows of growing slope are tried until no windows could be more than 1 % faster; then the other schedules are tried.
The period of a pipeline with windows w is the maximum of the slowest stage and, over i < j, the round trip from i to j
divided by w_i - w_j + 1; the period shows above which slope nothing can be gained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise

import numpy as np

from morph.contract.plan import Schedule
from simulator.costs.answer import bound_ns
from simulator.costs.finish import Finish
from simulator.costs.memory import spans
from simulator.costs.outcome import ShapeOutcome, ShapeSimulator
from simulator.costs.stage_costs import StageCosts
from simulator.engine.times import Ints, StageTimes
from simulator.inputs.layout import Layout
from simulator.search.moves import moved_bounds_ns, neighbours
from simulator.search.setting import Rule, Setting

TOLERATED = 101
"""Percent of the fastest time that smaller windows, a more even cut, or stages without recompute groups may take."""
_NEAREST, _HOPEFUL = 2, 103
"""For few micro-batches, windows are chosen for up to ``_NEAREST`` neighbouring cuts, if with windows chosen for other
cuts they take less than ``_HOPEFUL`` percent of the time from which a cut is a gain."""
_FILL, _MANY = 8, 32
"""Micro-batches of the busiest replica, for each stage, up to which filling and draining the pipeline takes much of the
time, and up to which 1F1B with more warm-up forwards may be worth a search."""
_SHALLOW = 12
"""The most stages of pipelines in which several adjacent boundaries are moved together."""
_MORE_THAN_NEEDED = 4
"""Slopes are tried up to this many times the least with which no round trip limits the period."""
Judge = Callable[[StageCosts], int]


@dataclass(frozen=True)
class Trial:
    """One shape with one placement: P stages, and the number of micro-batches of each replica.

    ``boundaries``: the given first sections, or None; ``slope``: the slope of given windows, or None; ``moves``:
    whether cuts next to the most even one are tried; ``quick``: whether only three windows are tried.
    """

    setting: Setting
    shape_simulator: ShapeSimulator
    layout: Layout
    depth: int
    counts: tuple[int, ...]
    boundaries: tuple[int, ...] | None = None
    slope: int | None = None
    moves: bool = True
    quick: bool = False
    _costs: dict[tuple[Rule, tuple[int, ...] | None], StageCosts | None] = field(default_factory=dict)
    _bounds: dict[tuple[int, ...] | None, int] = field(default_factory=dict)
    _plans: dict[tuple[object, ...], Finish] = field(default_factory=dict)
    _outcomes: dict[tuple[object, ...], ShapeOutcome] = field(default_factory=dict)

    @property
    def most(self) -> int:
        """The number of micro-batches of the busiest replica."""
        return max(self.counts)

    @cached_property
    def planned(self) -> tuple[StageCosts, int]:
        """Return the best stages as planned and the fastest time; a cut beside the most even one must be 1 % faster."""
        costs, fastest = self._chosen(self._planned_ns, self.boundaries)
        while self.moves and (moved := self._best_move(costs, fastest, self._planned_ns)) is not None:
            costs, fastest = moved
        return costs, fastest

    @property
    def fits(self) -> bool:
        """Whether the given boundaries fit in memory with the least windows of some schedule."""
        return any(self._stages(rule, self.boundaries) is not None for rule in self.setting.frugal(self.most))

    @property
    def _few(self) -> bool:
        """Whether there are so few micro-batches that filling and draining the pipeline takes much of the time."""
        return self.most <= _FILL * self.depth

    @property
    def _eager(self) -> bool:
        """Whether 1F1B with more warm-up forwards is tried; for many micro-batches its gain is not worth a search."""
        return self.most <= _MANY * self.depth or self.setting.schedules == ("1f1b",)

    def best(self) -> ShapeOutcome:
        """Return the outcome with the smallest windows within 1 % of the fastest, of the most even or the best cut."""
        outcomes = [self._best_windows(self.boundaries)]
        if self.planned[0].boundaries != outcomes[0].costs.boundaries:
            outcomes.append(self._best_windows(self.planned[0].boundaries))
        best = min(outcomes, key=lambda outcome: outcome.mini_batch_ns)
        move = self.moves and self._few
        while move and (moved := self._best_move(best.costs, best.mini_batch_ns, self._executed_ns)) is not None:
            best = self._best_windows(moved[0].boundaries)
        return best

    def likely_ns(self) -> int:
        """Return the planned time; for few micro-batches, the executed time with the widest windows if that is less."""
        costs, planned_ns = self.planned
        if not self._few or self.shape_simulator.conditions.jitter_seed is not None:
            return planned_ns
        widest = [rule for schedule in self.setting.schedules[:1] for rule in self._rules(schedule, costs.boundaries)]
        there = self._stages(widest[-1], costs.boundaries) if widest else None
        return planned_ns if there is None else min(planned_ns, self._executed_ns(there))

    def least_ns(self) -> int:
        """Return a lower bound, up to the tolerance, of the most even cut and its neighbours with windows that fit."""
        return self.closest_ns * 98 // 100

    @cached_property
    def closest_ns(self) -> int:
        """Return a lower bound of the most even cut within memory, and for few micro-batches of its neighbours."""
        costs = self._widest(None)
        windows = tuple(costs.times.window.tolist())
        if self.setting.grouped or self._windowed(costs.schedule, windows, costs.boundaries) is not None:
            stages, least = [costs], self._least_ns(None)
        else:
            schedules = dict.fromkeys("varuna" if each == "1f1b" else each for each in self.setting.schedules)
            rules = [rule for schedule in schedules for rule in self._rules(schedule, None)]
            fitting = [found for rule in rules if (found := self._stages(rule, None)) is not None]
            widest = {  # one of all stages that differ only in windows: that with the widest windows
                (found.schedule == "gpipe", found.boundaries): found
                for found in sorted(fitting, key=lambda found: int(found.times.window.sum()))
            }
            stages = [self._loosened(found) for found in widest.values()]
            least = min(bound_ns(found, self.counts, self.shape_simulator.conditions) for found in stages)
        if self._few:
            least = min(int(self._moved_bounds_ns(found)[1].min(initial=least)) for found in stages)
        return least

    def _best_windows(self, boundaries: tuple[int, ...] | None) -> ShapeOutcome:
        if not self.shape_simulator.conditions.uneven:
            outcome = self._outcome(self._chosen(self._planned_ns, boundaries)[0])
            if outcome.mini_batch_ns * 100 <= self._enough_ns(boundaries, outcome.costs):
                return outcome  # otherwise the execution may be faster with windows that the plan does not prefer
        return self._outcome(self._chosen(self._executed_ns, boundaries, between=True)[0])

    def _chosen(
        self, judge: Judge, boundaries: tuple[int, ...] | None, *, between: bool = False
    ) -> tuple[StageCosts, int]:
        """Return the stages of the first rule within 1 % of the fastest, and the time of the fastest.

        ``between``: also try slopes between the standard ones, by bisection towards the fastest. They are always tried
        for few micro-batches.
        """
        tried: list[tuple[int, StageCosts]] = []
        for schedule in self.setting.schedules:
            first, times_ns = len(tried), dict[int, int]()
            rules = self._rules(schedule, boundaries)
            if schedule != "gpipe" and (self._few or between) and not self.quick:
                rules = chain(rules, (Rule(schedule, slope) for slope in _halfway(times_ns)))
            for rule in rules:
                costs = self._stages(rule, boundaries)
                assert costs is not None, "a rule that does not fit"
                times_ns[rule.slope] = judge(costs)
                tried.insert(first + sorted(times_ns).index(rule.slope), (times_ns[rule.slope], costs))
                fastest = min(entry[0] for entry in tried)
                chosen = next(entry for entry in tried if entry[0] * 100 <= fastest * TOLERATED)
                if not self.quick and chosen[0] * 100 <= self._enough_ns(boundaries, chosen[1]):
                    return chosen[1], fastest
        assert tried, "a shape that does not fit in memory was tried"
        return chosen[1], fastest

    def _stages(self, rule: Rule, boundaries: tuple[int, ...] | None) -> StageCosts | None:
        key = rule, boundaries
        if key not in self._costs:
            self._costs[key] = self.setting.stages(rule, self.most, self.layout, boundaries, depth=self.depth)
        return self._costs[key]

    def _windowed(self, schedule: Schedule, windows: tuple[int, ...], boundaries: tuple[int, ...]) -> StageCosts | None:
        return self.setting.windowed(schedule, windows, boundaries, self.layout, single=len(self.counts) == 1)

    def _rules(self, schedule: Schedule, boundaries: tuple[int, ...] | None) -> Iterator[Rule]:
        """Yield the rules of one schedule that fit in memory, by growing windows or growing numbers of rounds."""

        def fits(slope: int) -> bool:
            if schedule == "gpipe" and boundaries is None:
                return self.setting.has_room(Rule(schedule, slope), self.depth, self.most)
            return self._stages(Rule(schedule, slope), boundaries) is not None

        slopes: Iterable[int] = (self.slope or 1,)
        if self.slope is None and schedule == "gpipe":
            slopes = _fewest_rounds(fits, self.most)
        elif self.slope is None and self.depth > 1 and (schedule == "varuna" or self._eager):
            needed, widest = self._needed_slope, max(1, self.most - 1)
            some = sorted({1, min(needed, widest), min(2 * needed, widest)})
            slopes = _growing(fits, some if self.quick else _slopes(needed, self.most))
        return (Rule(schedule, slope) for slope in slopes if fits(slope))

    def _widest(self, boundaries: tuple[int, ...] | None) -> StageCosts:
        """Return these stages, or the most even cut without a memory limit, with the widest windows."""
        free, schedule = self.setting.without_memory_limit(), self.setting.schedules[0]
        cuts = free.cut(Rule(schedule, 1), self.depth, self.most) if boundaries is None else boundaries
        windows, single = (self.most,) * self.depth, len(self.counts) == 1
        costs = free.windowed(schedule, windows, cuts or (), self.layout, single=single)
        assert costs is not None, "only memory forbids stages"
        return replace(costs, soonest=self.setting.grouped)

    def _loosened(self, costs: StageCosts) -> StageCosts:
        """Return these stages without recompute groups, but with gradients complete as early as with any groups."""
        if not self.setting.grouped:
            return costs
        free, windows = self.setting.without_memory_limit(), tuple(costs.times.window.tolist())
        whole = free.windowed(costs.schedule, windows, costs.boundaries, self.layout, single=len(self.counts) == 1)
        assert whole is not None, "only memory forbids stages"
        return replace(whole, soonest=True)

    def _least_ns(self, boundaries: tuple[int, ...] | None) -> int:
        """Return a lower bound of these stages, or of the most even ones, over all windows and schedules."""
        if boundaries is None:
            boundaries = self.setting.without_memory_limit().cut(
                Rule(self.setting.schedules[0], 1), self.depth, self.most
            )
        if boundaries not in self._bounds:
            conditions, costs = self.shape_simulator.conditions, self._widest(boundaries)
            bound = bound_ns(costs, self.counts, conditions)
            if conditions.share_links and not conditions.uneven and self.layout.placement is None:
                bound = max(bound, _links_ns(costs.times, self.most) + self.setting.sections.commit_ns)
            self._bounds[boundaries] = bound
        return self._bounds[boundaries]

    @cached_property
    def roomy(self) -> bool:
        """Whether memory allows the most even cut all windows that could make it faster."""
        schedule, slope = self.setting.schedules[0], 1
        if schedule != "gpipe":
            slope = self.most if self._few else _MORE_THAN_NEEDED * self._needed_slope
        return self.setting.holds_even(Rule(schedule, slope), self.depth, self.most)

    def _enough_ns(self, boundaries: tuple[int, ...] | None, costs: StageCosts) -> int:
        """Return 100 times the time that is close enough to the bounds of these cuts and of the cut that memory allows.

        The cut that memory allows is less even, but may have less to reduce after its backwards.
        """
        return min(self._least_ns(boundaries), self._least_ns(costs.boundaries)) * TOLERATED

    @cached_property
    def _needed_slope(self) -> int:
        return slope_for_period(self._widest(self.boundaries).times)

    def _outcome(self, costs: StageCosts) -> ShapeOutcome:
        key = (costs.schedule, costs.boundaries, costs.times.window.tobytes())
        if key not in self._outcomes:
            self._outcomes[key] = self.shape_simulator.full(costs, self.counts, self._planned(costs))
        return self._outcomes[key]

    def _executed_ns(self, costs: StageCosts) -> int:
        return self._outcome(costs).mini_batch_ns

    def _planned_ns(self, costs: StageCosts) -> int:
        return self._planned(costs).mini_batch_ns

    def _planned(self, costs: StageCosts) -> Finish:
        key = (costs.schedule, costs.boundaries, costs.times.window.tobytes())
        if key not in self._plans:
            self._plans[key] = self.shape_simulator.planned(costs, self.counts)
        return self._plans[key]

    def _best_move(self, costs: StageCosts, fastest_ns: int, judge: Judge) -> tuple[StageCosts, int] | None:
        """Return the best neighbouring cut if it is 1 % faster.

        Each neighbour is judged with the present windows and, for few micro-batches, where windows matter more, with
        the widest that fit; then the best neighbours are judged with their own best windows.
        """
        cuts, bounds = self._moved_bounds_ns(costs)
        enough, best = fastest_ns * 100 // TOLERATED, None
        nearest: list[tuple[int, tuple[int, ...]]] = []
        for place in np.argsort(bounds, kind="stable").tolist():
            if bounds[place] >= min([enough, *(time_ns for time_ns, _ in nearest)]):
                break
            moved = tuple(cuts[place].tolist())
            there = [each for each in self._glimpsed(costs, moved) if each is not None]
            nearest += [(min(map(judge, there)), moved)] if there else []
        hopeful = enough * _HOPEFUL // 100 if self._few else enough
        for time_ns, moved in sorted(nearest)[: _NEAREST if self._few else 1]:
            if time_ns < hopeful:
                found = self._chosen(judge, moved)
                if found[1] < enough:
                    enough, best = found[1], found
        return best

    def _glimpsed(self, costs: StageCosts, moved: tuple[int, ...]) -> Iterator[StageCosts | None]:
        """Yield a neighbouring cut with the present windows, and for few micro-batches with the widest that fit."""
        yield self._windowed(costs.schedule, tuple(costs.times.window.tolist()), moved)
        if self._few:
            windows = np.full(self.depth, self.most)
            if self.setting.memory_bytes is not None:
                sections, single = self.setting.sections_at(moved), len(self.counts) == 1
                memory, again = sections.memory(single=single), costs.times.recompute
                usable = memory.usable_bytes(self.setting.memory_bytes)
                rooms = memory.most_windows(*spans(moved, sections.num_sections), again, usable)
                windows = np.minimum.accumulate(np.minimum(windows, rooms))
            if windows[-1] >= 1:
                widest = windows if costs.schedule != "gpipe" else np.full(self.depth, windows[-1])
                yield self._windowed(costs.schedule, tuple(widest.tolist()), moved)

    def _moved_bounds_ns(self, costs: StageCosts) -> tuple[Ints, Ints]:
        """Return the neighbouring cuts, and a lower bound of each."""
        rows = self._few and self.depth <= _SHALLOW
        cuts = neighbours(costs.boundaries, self.setting.sections.num_sections, rows=rows)
        bounds = np.zeros(len(cuts), np.int64)
        for sections, here in self.setting.by_sections(cuts):
            there = costs if sections is costs.sections else replace(costs, sections=sections)
            bounds[here] = moved_bounds_ns(
                there, cuts[here], self.counts, self.setting.memory_bytes, self.shape_simulator.conditions
            )
        return cuts, bounds


def _slopes(needed: int, most: int) -> Iterator[int]:
    """Yield slopes to try for replicas with ``most`` micro-batches: all if there are at most 8, else a selection.

    With the last slope, the windows of all stages but the last contain all micro-batches.
    """
    widest = max(1, most - 1)
    if widest <= 8:
        return iter(range(1, widest + 1))
    return (slope for slope in _ladder(widest) if slope <= _MORE_THAN_NEEDED * needed or slope == widest)


def _growing(fits: Callable[[int], bool], slopes: Iterable[int]) -> Iterator[int]:
    """Yield growing slopes while they fit, ending with the largest that fits."""
    before = 0
    for slope in slopes:
        if not fits(slope):
            while slope - before > 1:
                middle = (slope + before) // 2
                before, slope = (middle, slope) if fits(middle) else (before, middle)
            yield before
            return
        yield slope
        before = slope


def _halfway(times_ns: Mapping[int, int]) -> Iterator[int]:
    """Yield slopes halfway between the fastest known one and its neighbours, until there are none."""
    while times_ns:
        known = sorted(times_ns)
        at = known.index(min(known, key=times_ns.__getitem__))
        slopes = [sum(pair) // 2 for pair in pairwise(known[max(0, at - 1) : at + 2]) if pair[1] - pair[0] > 1]
        if not slopes:
            return
        yield from slopes


def _fewest_rounds(fits: Callable[[int], bool], most: int) -> Iterator[int]:
    """Yield the fewest rounds that fit, and twice as many, which leave memory for more even cuts."""
    before = 0
    for rounds in _ladder(most):
        if fits(rounds):
            while rounds - before > 1:
                middle = (rounds + before) // 2
                before, rounds = (before, middle) if fits(middle) else (middle, rounds)
            yield rounds
            if 1 < rounds < most:
                yield min(most, 2 * rounds)
            return
        before = rounds


def _ladder(most: int) -> Iterator[int]:
    """Yield 1, 2, 3, 4, 6, 8, 12, 16, ... and ``most``."""
    step = 1
    while step < most:
        yield step
        if step > 1 and step * 3 // 2 < most:
            yield step * 3 // 2
        step *= 2
    yield most


def slope_for_period(times: StageTimes) -> int:
    """Return the least slope of windows with which no round trip limits the period.

    The period is max over i <= j of [ sum from i to j of (F + B) + R_j + sum from i to j - 1 of (a + g) ] over
    (w_i - w_j + 1), but never less than the slowest stage, or wire, takes.
    """
    wires = np.maximum(*times.wires_ns)[:-1]
    work = times.forward_ns + times.recompute_ns * times.recompute + times.backward_ns
    period = max(int(work.max()), int(wires.max(initial=0)))
    both = np.concatenate([[0], np.cumsum(times.forward_ns + times.backward_ns)])
    links = np.concatenate([[0], np.cumsum((times.activation_ns + times.gradient_ns)[:-1])])
    last = both[1:] + links + times.recompute_ns * times.recompute
    trips = last[None, :] - (both[:-1] + links)[:, None]
    distance = np.arange(len(links))[None, :] - np.arange(len(links))[:, None]
    far = distance > 0
    slopes = (trips[far] / period - 1) / distance[far]
    return max(1, int(np.ceil(slopes.max(initial=1.0))))


def _links_ns(times: StageTimes, count: int) -> int:
    """Return a lower bound of the mini-batch's time if all messages of a stage share one link.

    Stage s sends activations to the next stage (u_s on the wire) and gradients to the previous one (v_(s-1)). The last
    gradient follows its last backward; likewise, the stage receives messages only after the head.
    """
    if times.num_stages == 1:
        return 0
    activation_wire, gradient_wire = (wire[:-1] for wire in times.wires_ns)
    activation, gradient = times.activation_ns[:-1], times.gradient_ns[:-1]
    zero = np.zeros(1, np.int64)
    out = np.append(activation_wire, 0) + np.append(zero, gradient_wire)
    head = np.append(zero, np.cumsum(times.forward_ns[:-1] + activation)) + times.forward_ns
    back = np.append(zero, np.cumsum(times.backward_ns[:-1] + gradient))
    before_last = np.append(zero, gradient_wire)
    return int((head + count * out + back - before_last).max())
