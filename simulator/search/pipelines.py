"""Times of one pipeline of each depth with any number of micro-batches, on one type of node.

The time is nearly linear in the number of micro-batches, so a few numbers are simulated and others are interpolated.
Windows and cuts are chosen for a few numbers only (see ``anchor``), as the planner chooses them for equal pipelines.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Literal

import numpy as np

from morph.contract.plan import Schedule
from simulator.costs.finish import Ended, optimizer_ns
from simulator.costs.memory import NEVER
from simulator.costs.stage_costs import StageCosts
from simulator.engine.times import Flags, Floats, Ints
from simulator.search.setting import Setting
from simulator.search.sweep import Sweep
from simulator.search.windows import Trial

Stages = Literal["rough", "even", "best"] | tuple[int, ...]
"""How thoroughly the stages of a pipeline are chosen and timed.

"rough": the most even cut with the best of three windows, timed as planned; "even": the same stages, timed as they run;
"best": the best cut and windows that the search finds; first sections of stages: the best windows of this cut.
"""
FEW = 12
"""Up to this number of micro-batches, windows are chosen for each number separately."""


def anchor(num_micro_batches: int) -> int:
    """Return the number for which windows are chosen: a small one itself, others rounded up, to four per doubling."""
    if num_micro_batches <= FEW:
        return num_micro_batches
    step = 1 << ((num_micro_batches - 1).bit_length() - 3)
    return -(-num_micro_batches // step) * step


class Pipelines:
    """Pipelines on one type of node, with one micro-batch size and one schedule."""

    def __init__(self, sweep: Sweep, schedule: Schedule, node_type: str) -> None:
        self.sweep, self.schedule, self.node_type = sweep, schedule, node_type
        self.settings: tuple[Setting, ...] = tuple(setting.under(schedule) for setting in sweep.settings)
        self.total = self.settings[0].num_micro_batches
        self._costs: dict[tuple[int, int, Stages], StageCosts | None] = {}
        self._ended: dict[tuple[int, int, bool], Ended] = {}
        self._most: dict[int, int] = {}

    @property
    def node_types(self) -> tuple[str, ...]:
        """The type of node of each stage, or one type for all stages."""
        return (self.node_type,)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of micro-batches for which bounds are computed, ascending; the last is the whole mini-batch."""
        found, number = [], 1
        while number < self.total:
            found.append(number)
            number = anchor(2 * number)
        return (*found, self.total)

    @cached_property
    def bounds_ns(self) -> Ints:
        """The least time (ns) of P stages within memory, by ``numbers``: int64[numbers, K + 1]; 2**62: none fit."""
        found = np.min(
            [[setting.within_ns(number, beside=True) for number in self.numbers] for setting in self.settings], axis=0
        )
        bound: Ints = np.maximum.accumulate(found, axis=0)
        return bound

    @cached_property
    def free_bounds_ns(self) -> Ints:
        """The same bounds without a memory limit, which are computed much faster: int64[numbers, K + 1]."""
        found = np.array(
            [
                np.min([setting.bounds_ns(number) for setting in self.settings if not setting.grouped], axis=0)
                for number in self.numbers
            ],
            np.int64,
        )
        found[:, 0] = NEVER
        return found

    @cached_property
    def reach(self) -> Reach:
        """The bounds of pipelines of each depth: arrays over depths, [K + 1]."""
        sections = self.settings[0].sections
        links = np.maximum(0, np.arange(sections.num_sections + 1) - 1)
        work_ns = [each.sections.forward_sum_ns[-1] + each.sections.backward_sum_ns[-1] for each in self.settings]
        fill_ns = np.array(work_ns)[:, None] + np.outer([each.least_link_ns for each in self.settings], links)

        def paces_ns(held: int) -> tuple[Floats, Floats]:
            slowest = np.stack([setting.slowest_ns(held) for setting in self.settings]).astype(np.float64)
            slowest[:, 0] = NEVER
            window = np.stack([np.maximum(1, setting.widest(held)) for setting in self.settings])
            return slowest, slowest + np.maximum(0, fill_ns - slowest) / window

        return Reach(fill_ns, sections.commit_ns, self.total, sections.num_sections, paces_ns)

    def costs(self, depth: int, num_micro_batches: int, stages: Stages) -> StageCosts | None:
        """Return the stages of one pipeline with this many micro-batches; None if no P stages fit in memory.

        The best stages are chosen by their planned time; shared links are only simulated for a whole mix. Finding the
        best stages takes most of the time of a search. On several types of node the most even stages may be better,
        because all types are then cut alike.
        """
        key = depth, min(anchor(num_micro_batches), self.most(depth)), "even" if stages == "rough" else stages
        if key[1] < num_micro_batches:
            return None
        if key not in self._costs:
            self._costs[key] = self._best(*key)
        return self._costs[key]

    def most(self, depth: int) -> int:
        """Return the most micro-batches with which P stages fit in memory beside other pipelines; 0: none fit."""
        if depth not in self._most:
            numbers = range(1, max(2, self.total))
            self._most[depth] = bisect_left(
                numbers, True, key=lambda number: not any(each.fits(depth, number) for each in self.settings)
            )
        return self._most[depth]

    def _best(self, depth: int, number: int, stages: Stages) -> StageCosts | None:
        counts, cut = (number,) * max(2, round(self.total / number)), stages if isinstance(stages, tuple) else None
        best: tuple[StageCosts, int] | None = None
        layout = self.sweep.layouts((depth, len(counts)))[0]
        bounds_ns = {setting: setting.least_ns(depth, number) for setting in self.settings}
        for setting in sorted(self.settings, key=lambda each: (bounds_ns[each], each.grouped)):
            if bounds_ns[setting] >= (NEVER if best is None else best[1]):
                break
            quick, moves = stages == "even", stages == "best"
            trial = Trial(setting, self.sweep.shape_simulator, layout, depth, counts, cut, moves=moves, quick=quick)
            if cut is not None and not (trial.fits and (best is None or not setting.grouped)):
                continue
            if setting.grouped and best is not None and self._beats_groups(trial, best[1]):
                continue
            found = trial.planned
            if best is None or found[1] < best[1]:
                best = found
        return None if best is None else best[0]

    @staticmethod
    def _beats_groups(trial: Trial, best_ns: int) -> bool:
        """Return whether stages that recompute all sections at once, and fit, are as fast as those with groups."""
        return trial.roomy if trial.quick else trial.closest_ns * 101 >= best_ns * 100

    def ended(self, depth: int, number: int, most: int, stages: Stages) -> Ended | None:
        """Return the end of one pipeline with ``number`` micro-batches, if the busiest of its kind has ``most``.

        Return None if the pipeline does not fit in memory.
        """
        costs = self.costs(depth, most, stages)
        if costs is None:
            return None
        key, is_rough = (id(costs), number, stages == "rough"), stages == "rough"
        if key not in self._ended:
            simulator = self.sweep.shape_simulator
            self._ended[key] = (simulator.planned_end if is_rough else simulator.ended)(costs, (number,))
        return self._ended[key]

    def alone_ns(self, depth: int, number: int, num_replicas: int, most: int | None = None) -> int:
        """Return the approximate time (ns) of a mini-batch of D equal pipelines with ``number`` micro-batches each.

        The time is ``NEVER`` if they do not fit in memory. ``most``: the number for which the stages are chosen;
        None: ``number``.
        """
        ended = self.ended(depth, number, most or number, "rough")
        return NEVER if ended is None else self._through_ns(ended, num_replicas)

    def _through_ns(self, ended: Ended, num_replicas: int) -> int:
        reduced = ended.costs.reduced
        free = reduced.latest(ended.ready_ns() + reduced.remaining_ns(num_replicas))
        for stages, duration in reduced.tied_ns(num_replicas):
            free[list(stages)] = free[list(stages)].max() + duration
        step_ns = optimizer_ns(ended.costs, num_replicas, self.sweep.shape_simulator.conditions)
        return int(free.max()) + ended.costs.sections.commit_ns + step_ns


class Reach:
    """Lower bounds of the times of many kinds of pipelines, each in one of several settings.

    A micro-batch passes all stages in ``fill_ns``. ``paces_ns(held)`` returns two arrays, [settings, *kinds], for
    windows that hold this many micro-batches: the slowest stage's time in the most even cut that memory allows, 2**62
    where none fits, and the least time for each micro-batch where windows are flushed. A pipeline alone reduces
    nothing, so that it may fit where others do not: ``fits`` and ``lone_fits``.
    """

    def __init__(
        self,
        fill_ns: Floats,
        commit_ns: int,
        total: int,
        num_sections: int,
        paces_ns: Callable[[int], tuple[Floats, Floats]],
    ) -> None:
        self.fill_ns, self.commit_ns, self.total, self.num_sections = fill_ns, commit_ns, total, num_sections
        self._paces_ns, self._few, (lone, flushed) = paces_ns, paces_ns(1), paces_ns(total)
        self.lone_fits = np.any(lone < NEVER, axis=0)
        self.fits: Flags = np.any((self._few[0] < NEVER) | (lone < NEVER), axis=0)
        through = np.maximum(fill_ns + (total - 1) * lone, total * flushed)
        self._lone_ns: Floats = np.where(lone < NEVER, commit_ns + through, math.inf).min(axis=0)

    @cached_property
    def _steps(self) -> list[tuple[tuple[Floats, Floats], int]]:
        """Paces, each with the number of micro-batches up to which they are lower bounds.

        Fewer micro-batches need smaller windows and so less memory, which may allow a more even cut.
        """
        longest = max(1, self.total - 1)
        few, many = self._few, self._paces_ns(longest)
        found = [(many, longest)]
        if not np.array_equal(few[0], many[0]) or not np.array_equal(few[1], many[1]):
            deepest = min(self.num_sections, longest)
            held = [1 << k for k in range(deepest.bit_length()) if 1 << k < deepest]
            found += zip(map(self._paces_ns, held), [number - 1 for number in (*held[1:], longest)], strict=True)
        return found

    def gains(self, time_ns: float, *, rough: bool = False) -> Ints:
        """Return the most micro-batches that a pipeline of each kind may finish in this time: [*kinds].

        ``rough``: a higher bound, which is found sooner: with memory for one micro-batch, and without flushes.
        """
        found, left_ns = np.zeros(self.fits.shape), time_ns - self.commit_ns
        steps = [((self._few[0],) * 2, self.total)] if rough else self._steps
        for (slowest_ns, each_ns), most in steps:
            number = np.minimum(np.floor((left_ns - self.fill_ns) / slowest_ns) + 1, np.floor(left_ns / each_ns))
            found = np.maximum(found, np.clip(np.where(slowest_ns < NEVER, number, 0), 0, most).max(axis=0))
        return np.where(self._lone_ns <= time_ns, self.total, found).astype(np.int64)


class PiecewiseLinear:
    """The time (ns) of a pipeline as a function of its micro-batches: linear between known points and beyond them."""

    def __init__(self, times_ns: Iterable[tuple[int, int]]) -> None:
        points = sorted(times_ns)
        self.numbers = [number for number, _ in points]
        self.times_ns = [time_ns for _, time_ns in points]

    def number(self, time_ns: float) -> float:
        """Return how many micro-batches are done in this time (ns)."""
        place = bisect_left(self.times_ns, time_ns)
        if len(self.numbers) == 1:
            return self.numbers[0] * time_ns / self.times_ns[0]
        (low, high), (early, late) = self._around(place)
        return max(0.0, low + (time_ns - early) * (high - low) / max(1, late - early))

    def time_ns(self, number: int) -> float:
        """Return the time (ns) of this many micro-batches."""
        place = bisect_left(self.numbers, number)
        if len(self.numbers) == 1:
            return self.times_ns[0] * number / self.numbers[0]
        (low, high), (early, late) = self._around(place)
        return early + (number - low) * (late - early) / (high - low)

    def points(self, count: int) -> tuple[list[float], list[float]]:
        """Return ``count`` numbers of micro-batches and their times (ns): the known points, then extrapolated ones."""
        numbers, times_ns = [*map(float, self.numbers)], [*map(float, self.times_ns)]
        if len(numbers) == 1:
            numbers, times_ns = [0.0, *numbers], [0.0, *times_ns]
        step, later = numbers[-1] - numbers[-2], times_ns[-1] - times_ns[-2]
        for _ in range(count - len(numbers)):
            numbers.append(numbers[-1] + step)
            times_ns.append(times_ns[-1] + later)
        return numbers, times_ns

    def _around(self, place: int) -> tuple[list[int], list[int]]:
        first = max(1, min(place, len(self.numbers) - 1)) - 1
        return self.numbers[first : first + 2], self.times_ns[first : first + 2]
