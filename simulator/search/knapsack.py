"""Which pipelines finish most micro-batches in a given time, and the least time or price for all of them.

In a given time each pipeline finishes some number of micro-batches. Which pipelines finish most on the GPUs of one type
is a knapsack problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import product

import numpy as np

from simulator.costs.memory import NEVER
from simulator.engine.compilation import compiled, entry, inlined
from simulator.engine.times import Floats, Ints
from simulator.search.pipelines import PiecewiseLinear

NEAR = 1e-4
"""Relative precision of least times and of bounds."""
_CHEAPER = (0.5, 0.8, 0.95, 0.99, 1.01, 1.05, 1.25, 2.0)
"""Prices are multiplied by each of these to find lower ones."""
SLOWER, LENGTHS, CHEAPEST = 16.0, 24, 6
"""Cheaper mini-batches may be up to ``SLOWER`` times as long; ``LENGTHS`` durations in between are tried, and the
``CHEAPEST`` choices of GPUs are planned."""


@entry
@compiled
def finished(time_ns, numbers, times_ns, total):  # type: ignore[no-untyped-def]
    """Return the whole micro-batches that each kind finishes in this time (ns), by linear inter- and extrapolation."""
    last, num_kinds = len(numbers) - 1, numbers.shape[1]
    found = np.zeros(num_kinds, np.int64)
    for kind in range(num_kinds):
        at = 1
        while at < last and times_ns[at, kind] <= time_ns:
            at += 1
        found[kind] = int(min(total, max(0.0, _number(time_ns, numbers, times_ns, at, kind)) + 1e-9))
    return found


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
            if (there := cost(other)) < least * (1 - NEAR):
                least, prices, improved = there, other, True
    return int(least + 1e-6), prices


def least_time_ns(total: int, lines: Sequence[tuple[PiecewiseLinear, int]]) -> float:
    """Return the least time (ns) in which these pipelines finish all micro-batches, if fractions of them count."""
    high = float(max(line.time_ns(total) for line, _ in lines))
    if high >= NEVER:
        return NEVER
    numbers, times_ns = _columns([line for line, _ in lines])
    counts = np.array([number for _, number in lines], np.float64)
    return float(_least_ns(numbers, times_ns, counts, total, 0.0, high))


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


def _columns(lines: Sequence[PiecewiseLinear], least: int = 2) -> tuple[Floats, Floats]:
    """Return the micro-batches and times (ns) of lines: float64[points, lines]; shorter lines are extrapolated."""
    num_points = max(least, *(len(line.numbers) for line in lines))
    numbers, times_ns = np.zeros((2, num_points, len(lines)))
    for place, line in enumerate(lines):
        numbers[:, place], times_ns[:, place] = line.points(num_points)
    return numbers, times_ns


@entry
@compiled
def _least_ns(numbers, times_ns, counts, total, low, high):  # type: ignore[no-untyped-def]
    """Return the least time (ns) in which these pipelines finish all micro-batches, if fractions of them count."""
    last = len(numbers) - 1
    while high - low > NEAR / 100 * high:
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


@inlined
def _number(time_ns, numbers, times_ns, at, kind):  # type: ignore[no-untyped-def]
    low, early = numbers[at - 1, kind], times_ns[at - 1, kind]
    return low + (time_ns - early) * (numbers[at, kind] - low) / max(1.0, times_ns[at, kind] - early)
