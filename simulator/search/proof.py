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
from collections.abc import Callable, Sequence
from itertools import permutations, product

import numpy as np

from morph.contract.plan import Schedule
from simulator.inputs.stock import Stock
from simulator.search.knapsack import NEAR, knapsack, most_by_prices
from simulator.search.pipelines import Reach
from simulator.search.pools import Pools
from simulator.search.setting import SCHEDULES


def proof(pools: Pools, stocks: Sequence[Stock], best_s: float) -> Callable[[], float] | None:
    """Return a function that computes a lower bound (s), at most ``best_s``, of every plan on any one of the stocks.

    Return None if other plans than those that the bound covers may answer the request.
    """
    request = pools.request
    given = (request.jitter_seed, request.compute_slots, request.pipeline_depth, request.num_replicas)
    if request.objective != "examples_per_s" or any(each is not None for each in given):
        return None

    def least_s() -> float:
        """Compute close bounds, which take long, only where rough ones are lower than the least one so far."""
        best_ns = least_ns = best_s * 1e9
        reaches = [reach for stock in stocks for reach in _reaches(pools, stock)]
        for reach in sorted(reaches, key=lambda each: -each.share(best_ns, rough=True)):
            if reach.share(least_ns * (1 - NEAR), rough=True) >= 1:
                least_ns = _least_time_ns(reach, least_ns)
        return least_ns / 1e9

    return least_s


def may_take(pools: Pools, stock: Stock, time_s: float) -> bool:
    """Return False if it is certain that no plan on this stock takes this time (s) or less."""
    if pools.request.jitter_seed is not None or not math.isfinite(time_s):
        return True
    return any(reach.share(time_s * 1e9, rough=True) >= 1 for reach in _reaches(pools, stock))


def _reaches(pools: Pools, stock: Stock) -> list[_Reach]:
    given, there = pools.request.schedule, pools.on_nodes(stock.nodes)
    schedules = SCHEDULES if given is None else (given,)
    schedules = tuple(dict.fromkeys("varuna" if each == "1f1b" else each for each in schedules))  # equal bounds
    return [_Reach(there, *way, stock.gpus) for way in product(there.sizes(), schedules)]


def _least_time_ns(reach: _Reach, above_ns: float) -> float:
    low, high = 0.0, above_ns
    if reach.share(high * (1 - NEAR)) < 1:
        return above_ns
    while high - low > NEAR * high:
        middle = (low + high) / 2
        low, high = (low, middle) if reach.share(middle) >= 1 else (middle, high)
    return low


class _Reach:
    """The share of a mini-batch that pipelines may finish, with one micro-batch size and schedule."""

    def __init__(self, pools: Pools, size: int, schedule: Schedule, gpus: tuple[int, ...]) -> None:
        self.gpus, types = gpus, pools.mixes(size, schedule).types
        self.total, self.prices = types[0].total, np.ones(len(gpus))
        self.alone = [each.reach for each in types]
        self.splits: list[tuple[int, int, Reach]] = []
        if pools.nodes is None:
            two_types, deepest = pools.two_types_of(size, schedule), types[0].sweep.num_sections - 1
            self.splits = [
                (i, j, two_types.splits_of(i, j, (min(gpus[i], deepest), min(gpus[j], deepest))))
                for i, j in permutations(np.flatnonzero(gpus).tolist(), 2)
            ]

    def share(self, time_ns: float, *, rough: bool = False) -> float:
        """Return an upper bound of the share of the mini-batch that is finished in this time (ns)."""
        done = []
        for reach, number in zip(self.alone, self.gpus, strict=True):
            by_depth = reach.gains(time_ns, rough=rough)[: number + 1]
            depths = np.flatnonzero(by_depth)
            done.append(knapsack(depths, by_depth[depths], number)[0])
        if not self.splits:
            return sum(int(each[-1]) for each in done) / self.total
        crossing = []
        for i, j, splits in self.splits:
            gains = splits.gains(time_ns, rough=rough)
            first, second = np.nonzero(gains)
            crossing.append((i, j, first, second, gains[first, second]))
        most, self.prices = most_by_prices(done, crossing, self.prices)
        return most / self.total
