"""A lower bound of the mini-batch's time over all plans, and so how much faster than an answer any plan can be.

Let a micro-batch's forward and backward through all P stages take q, and the slowest stage take t in the most even cut
that memory allows with the smallest windows. A pipeline with n micro-batches takes at least q + (n - 1) t. GPipe, whose
windows of at most w micro-batches are flushed, goes in r >= n/w rounds and takes at least r q + (n - r) t. So each
pipeline finishes at most so many micro-batches in a given time. The pipelines that finish most on the GPUs of one type
are a knapsack. If there are pipelines over two types, let each GPU of a type have a price so that no pipeline finishes
more micro-batches than its GPUs cost; then all GPUs together finish no more than they cost, whatever the prices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from morph.contract.plan import Schedule
from simulator.costs.memory import NEVER
from simulator.engine.times import Ints
from simulator.search.mixes import knapsack
from simulator.search.pools import Pools
from simulator.search.setting import SCHEDULES, Setting
from simulator.search.two_types import Splits

Floats = npt.NDArray[np.float64]
_NEAR = 1e-4
"""Relative precision of the bound."""
_CHEAPER = (0.5, 0.8, 0.95, 0.99, 1.01, 1.05, 1.25, 2.0)
"""Prices are multiplied by each of these as long as all GPUs together then cost less."""


def least_ns(pools: Pools, gpus: Sequence[int], above_ns: float) -> float:
    """Return a lower bound (ns), at most ``above_ns``, of every plan on these GPUs of each type."""
    schedules = SCHEDULES if pools.request.schedule is None else (pools.request.schedule,)
    schedules = tuple(dict.fromkeys("varuna" if each == "1f1b" else each for each in schedules))  # the bounds are equal
    least = above_ns
    for size in pools.sizes():
        for schedule in schedules:
            reach = _Reach(pools, size, schedule, tuple(gpus))
            least = _least_time_ns(reach, least)
    return least


def _least_time_ns(reach: _Reach, above_ns: float) -> float:
    low, high = 0.0, above_ns
    if reach.most(high * (1 - _NEAR)) < reach.total:
        return above_ns
    while high - low > _NEAR * high:
        middle = (low + high) / 2
        low, high = (low, middle) if reach.most(middle) >= reach.total else (middle, high)
    return low


class _Reach:
    """The most micro-batches that all pipelines together may finish, with one micro-batch size and schedule."""

    def __init__(self, pools: Pools, size: int, schedule: Schedule, gpus: tuple[int, ...]) -> None:
        self.gpus, types = gpus, pools.mixes(size, schedule).types
        self.total = types[0].total
        self.alone = [
            [_Alone(setting, number) for setting in each.settings] for each, number in zip(types, gpus, strict=True)
        ]
        self.splits: list[tuple[int, int, Splits]] = []
        if pools.request.num_gpus_per_node is None:
            two_types, there = pools.two_types_of(size, schedule), [place for place, has in enumerate(gpus) if has]
            deepest = types[0].sweep.num_sections - 1
            self.splits = [
                (i, j, two_types.splits_of(i, j, (min(gpus[i], deepest), min(gpus[j], deepest))))
                for i in there
                for j in there
                if i != j
            ]

    def most(self, time_ns: float) -> int:
        """Return an upper bound of the micro-batches that are finished in this time (ns)."""
        done = []
        for settings, number in zip(self.alone, self.gpus, strict=True):
            gains = np.max([each.gains(time_ns) for each in settings], axis=0)
            depths = np.flatnonzero(gains)
            done.append(knapsack(depths, gains[depths], number)[0])
        if not self.splits:
            return sum(int(each[-1]) for each in done)
        needs, gains = [np.zeros((0, len(done)), np.int64)], [np.zeros(0, np.int64)]
        for place, each in enumerate(done):
            needs.append(np.outer(np.arange(1, len(each)), np.arange(len(done)) == place))
            gains.append(each[1:])
        for i, j, splits in self.splits:
            found = splits.gains(time_ns)
            first, second = np.nonzero(found)
            needs.append(np.outer(first, np.arange(len(done)) == i) + np.outer(second, np.arange(len(done)) == j))
            gains.append(found[first, second])
        return self._priced(np.concatenate(needs).astype(np.float64), np.concatenate(gains))

    def _priced(self, needs: Floats, gains: Ints) -> int:
        """Return what all GPUs cost, where no pipeline, which ``needs`` GPUs [M, T], finishes more than it costs."""
        gpus, prices = np.array(self.gpus, np.float64), np.ones(len(self.gpus))

        def cost(prices: Floats) -> float:
            return float((gains / (needs @ prices)).max(initial=0.0) * (prices @ gpus))

        least, improved = cost(prices), True
        while improved:
            improved = False
            for place in np.flatnonzero(gpus):
                for factor in _CHEAPER:
                    other = prices.copy()
                    other[place] *= factor
                    if (there := cost(other)) < least * (1 - _NEAR):
                        least, prices, improved = there, other, True
        return int(least + 1e-6)


class _Alone:
    """Bounds of pipelines of each depth on one type of GPU, with one setting under one schedule."""

    def __init__(self, setting: Setting, num_gpus: int) -> None:
        self.total, deepest = setting.num_micro_batches, min(setting.sections.num_sections, num_gpus)
        sections = setting.sections
        both = int((sections.forward_sum_ns + sections.backward_sum_ns)[-1])
        depths = np.arange(deepest + 1)
        self.commit_ns, self.fill_ns = sections.commit_ns, both + np.maximum(0, depths - 1) * setting.least_link_ns
        longest = max(1, self.total - 1)
        held = sorted({1 << k for k in range((min(longest, sections.num_sections) - 1).bit_length() + 1)} | {longest})
        caps = [number - 1 for number in held[1:]] + [longest]
        self.steps = [(self._pace_ns(setting, number, deepest), cap) for number, cap in zip(held, caps, strict=True)]
        self.lone_ns = self._time_ns(self._pace_ns(setting, self.total, deepest), self.total)

    def _pace_ns(self, setting: Setting, held: int, deepest: int) -> tuple[Floats, Floats]:
        """Return t, and the least time for each further micro-batch, if windows hold this many: [depth + 1]."""
        slowest = setting.slowest_ns(held)[: deepest + 1].astype(np.float64)
        slowest[0] = NEVER
        window = np.maximum(1, setting.widest(held)[: deepest + 1])
        return slowest, slowest + np.maximum(0, self.fill_ns - slowest) / window

    def _time_ns(self, pace: tuple[Floats, Floats], number: int) -> Floats:
        slowest, each = pace
        through = np.maximum(self.fill_ns + (number - 1) * slowest, number * each)
        return np.where(slowest < NEVER, self.commit_ns + through, math.inf)

    def gains(self, time_ns: float) -> Ints:
        """Return the most micro-batches that a pipeline of each depth may finish in this time (ns): [depth + 1]."""
        found = np.zeros(len(self.fill_ns))
        for (slowest, each), cap in self.steps:
            left = time_ns - self.commit_ns
            number = np.minimum(np.floor((left - self.fill_ns) / slowest) + 1, np.floor(left / each))
            found = np.maximum(found, np.where(slowest < NEVER, np.clip(number, 0, cap), 0))
        return np.where(self.lone_ns <= time_ns, self.total, found).astype(np.int64)
