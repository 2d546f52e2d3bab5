"""How long one pipeline of each depth takes for any number of micro-batches, on one type of node.

Nearly linear in the micro-batches; so a few are played, and others lie between. Windows and cuts are chosen for a few
numbers (``anchor``) alone, as the planner does for equal pipelines that have so many each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from functools import cached_property

import numpy as np

from morph.contract.plan import Schedule
from simulator.costs.finish import Ended, optimizer_ns
from simulator.costs.stage_costs import StageCosts
from simulator.engine.times import Ints
from simulator.search.setting import Setting
from simulator.search.sweep import Sweep
from simulator.search.windows import Trial

NEVER = 2**62
_EXACT = 12
"""Up to so many micro-batches each number has windows of its own."""


def anchor(num_micro_batches: int) -> int:
    """The number of micro-batches that windows are chosen for: the same, or the next of four for each doubling."""
    if num_micro_batches <= _EXACT:
        return num_micro_batches
    step = 1 << ((num_micro_batches - 1).bit_length() - 3)
    return -(-num_micro_batches // step) * step


class Pipelines:
    """Of one type of node, one m and one schedule.

    Args:
        sweep: The job on that type, of one m.
        schedule: Of all pipelines.
        node_type: Its name.
    """

    def __init__(self, sweep: Sweep, schedule: Schedule, node_type: str) -> None:
        self.sweep, self.schedule, self.node_type = sweep, schedule, node_type
        self.settings: tuple[Setting, ...] = tuple(setting.under(schedule) for setting in sweep.settings)
        self.total = self.settings[0].num_micro_batches
        self._costs: dict[tuple[int, int, bool], StageCosts | None] = {}
        self._ended: dict[tuple[int, int], Ended] = {}

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """Of micro-batches, for which bounds are worked out."""
        found, number = [], 1
        while number < self.total:
            found.append(number)
            number = anchor(2 * number)
        return (*found, self.total)

    @cached_property
    def bounds_ns(self) -> Ints:
        """No pipeline of P stages is faster, for each of ``numbers``: int64[numbers, K + 1]."""
        found = np.full((len(self.numbers), self.sweep.num_sections + 1), NEVER)
        for setting in self.settings:
            bounds = np.array([setting.bounds_ns(number) for number in self.numbers], np.int64)
            for depth in range(1, self.sweep.num_sections + 1):
                fitting = self._num_fitting(setting, depth)
                found[:fitting, depth] = np.minimum(found[:fitting, depth], bounds[:fitting, depth])
        bound: Ints = np.maximum.accumulate(found, axis=0)
        return bound

    def _num_fitting(self, setting: Setting, depth: int) -> int:
        """Of ``numbers`` those of which a pipeline, beside others, fits into memory: the first so many."""

        def is_too_large(number: int) -> bool:
            return not setting.fits(depth, min(number, max(1, self.total - 1)))

        if setting.memory_bytes is None or not is_too_large(self.numbers[-1]):
            return len(self.numbers)
        return bisect_left(self.numbers, True, key=is_too_large)

    def depths(self, num_gpus: int) -> Ints:
        """Those of which a pipeline fits into memory, beside others."""
        found: Ints = np.flatnonzero(self.bounds_ns[0, : num_gpus + 1] < NEVER)
        return found

    def costs(self, depth: int, num_micro_batches: int, *, moves: bool = True) -> StageCosts | None:
        """The best stages of one pipeline with so many micro-batches; None where it does not fit.

        ``moves``: whether cuts next to the most even one are tried, which takes most of the time.
        """
        key = depth, min(anchor(num_micro_batches), max(1, self.total - 1)), moves
        if key not in self._costs:
            self._costs[key] = self._best(*key)
        return self._costs[key]

    def _best(self, depth: int, number: int, moves: bool) -> StageCosts | None:
        counts = (number,) * max(2, round(self.total / number))
        best: tuple[int, StageCosts] | None = None
        layout = self.sweep.layouts((depth, len(counts)))[0]
        for setting in sorted(self.settings, key=lambda each: (each.bound_ns(depth, number), each.grouped)):
            if best is not None and setting.bound_ns(depth, number) >= best[0]:
                continue
            if not setting.fits(depth, number):
                continue
            trial = Trial(setting, self.sweep.shape_simulator, layout, depth, counts, moves=moves)
            if setting.grouped and best is not None and trial.closest_ns * 101 >= best[0] * 100:
                continue
            found = trial.best()
            if best is None or found.mini_batch_ns < best[0]:
                best = found.mini_batch_ns, found.costs
        return None if best is None else best[1]

    def ended(self, depth: int, number: int, most: int, *, moves: bool = True) -> Ended | None:
        """How one pipeline ends that has so many micro-batches, the busiest of its kind ``most``."""
        costs = self.costs(depth, most, moves=moves)
        if costs is None:
            return None
        key = id(costs), number
        if key not in self._ended:
            self._ended[key] = self.sweep.shape_simulator.ended(costs, (number,))
        return self._ended[key]

    def alone_ns(self, depth: int, number: int, most: int, num_replicas: int) -> int:
        """What a mini-batch takes of D pipelines like that; ``NEVER`` where it does not fit."""
        ended = self.ended(depth, number, most, moves=False)
        return NEVER if ended is None else self._through_ns(ended, num_replicas)

    def _through_ns(self, ended: Ended, num_replicas: int) -> int:
        reduced = ended.costs.reduced
        free = reduced.latest(ended.ready_ns() + reduced.behind_ns(num_replicas))
        for stages, duration in reduced.tied_ns(num_replicas):
            free[list(stages)] = free[list(stages)].max() + duration
        step_ns = optimizer_ns(ended.costs, num_replicas, self.sweep.shape_simulator.conditions)
        return int(free.max()) + ended.costs.sections.commit_ns + step_ns


class Line:
    """Times of a pipeline by its micro-batches, as far as some are known: linear between them and beyond."""

    def __init__(self, times_ns: Iterable[tuple[int, int]]) -> None:
        points = sorted(times_ns)
        self.numbers = [number for number, _ in points]
        self.times_ns = [time_ns for _, time_ns in points]

    def number(self, time_ns: float) -> float:
        """Micro-batches in so much time."""
        place = bisect_left(self.times_ns, time_ns)
        if len(self.numbers) == 1:
            return self.numbers[0] * time_ns / self.times_ns[0]
        (low, high), (early, late) = self._around(place)
        return max(0.0, low + (time_ns - early) * (high - low) / max(1, late - early))

    def time_ns(self, number: int) -> float:
        """The time of so many micro-batches."""
        place = bisect_left(self.numbers, number)
        if len(self.numbers) == 1:
            return self.times_ns[0] * number / self.numbers[0]
        (low, high), (early, late) = self._around(place)
        return early + (number - low) * (late - early) / (high - low)

    def _around(self, place: int) -> tuple[list[int], list[int]]:
        first = max(1, min(place, len(self.numbers) - 1)) - 1
        return self.numbers[first : first + 2], self.times_ns[first : first + 2]
