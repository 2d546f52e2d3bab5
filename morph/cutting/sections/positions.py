"""Choose where to cut: pure arithmetic over costs and bytes.

Varuna, section 5.1: sections of equal compute, cut where few bytes cross. All cuts are chosen together: they minimise
the sum over sections of ((compute / even share) - 1)^2, plus 0.3 for each doubling of the bytes that cross a cut; less
than an eighth of the median bytes counts as an eighth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_DEFAULT_SECTIONS = 24
_NARROW = 1.5
_PER_DOUBLING = 0.3
_NARROWEST = 8
_NEAR, _MANY = 0.05, 400
_UNIT = 1_000_000
_NEVER = np.int64(1 << 60)


@dataclass(frozen=True)
class Position:
    """A place where the model may be cut, in front of operation ``index``; costs are in any unit."""

    index: int
    cost_before: float
    crossing_bytes: int


def default_num_sections(positions: Sequence[Position], total_cost: float) -> int:
    """Return one section for every two narrow positions (a transformer's block), from 1 to 24.

    A position is narrow if at most 1.5 times the 10th percentile of bytes cross it; near ones count once.
    """
    places = _distinct(positions, total_cost)
    if not places:
        return 1
    limit = _NARROW * sorted(place.crossing_bytes for place in places)[len(places) // 10]
    num_narrow = 0
    counted_until = 0.0
    for place in places:
        if place.crossing_bytes <= limit and place.cost_before >= counted_until:
            num_narrow += 1
            counted_until = place.cost_before + total_cost / 80
    return max(1, min(MAX_DEFAULT_SECTIONS, (num_narrow + 1) // 2))


def choose_positions(positions: Sequence[Position], total_cost: float, num_sections: int) -> tuple[int, ...]:
    """Return ``num_sections - 1`` ascending indices of cuts. Raises ValueError if there are fewer positions."""
    distinct = _distinct(positions, total_cost)
    if len(distinct) < num_sections - 1:
        raise ValueError(f"only {len(distinct) + 1} sections are possible")
    if num_sections == 1:
        return ()
    share = total_cost / num_sections
    cheapest = _cheapest_around(distinct, _NEAR * share)
    candidates = cheapest if len(distinct) > _MANY and len(cheapest) >= num_sections - 1 else distinct
    return _least_sum(candidates, total_cost, share, num_sections)


def _least_sum(candidates: Sequence[Position], total_cost: float, share: float, num_sections: int) -> tuple[int, ...]:
    """Minimise by dynamic programming over the number of sections, in integers, so that all machines agree on ties."""
    cost = np.array([0.0, *(place.cost_before for place in candidates), total_cost])
    sizes_bytes = sorted(place.crossing_bytes for place in candidates)
    narrow = max(1, sizes_bytes[0], sizes_bytes[len(candidates) // 2] // _NARROWEST)
    doublings = [max(0.0, math.log2(max(place.crossing_bytes, 1) / narrow)) for place in candidates]
    crossing = np.array([0, *(round(_UNIT * _PER_DOUBLING * count) for count in doublings), 0], dtype=np.int64)
    sizes = (cost[None, :] - cost[:, None]) / share
    uneven = np.rint(_UNIT * (sizes - 1.0) ** 2).astype(np.int64)
    step = np.where(sizes > 0, uneven + crossing[None, :], _NEVER)
    least = step[0]
    choices = []
    for _ in range(num_sections - 1):
        sums = np.minimum(least[:, None] + step, _NEVER)
        choices.append(sums.argmin(axis=0))
        least = sums.min(axis=0)
    place = len(cost) - 1
    chosen: list[int] = []
    for choice in reversed(choices):
        place = int(choice[place])
        chosen.append(candidates[place - 1].index)
    return tuple(reversed(chosen))


def _cheapest_around(places: Sequence[Position], reach: float) -> list[Position]:
    """Keep each position unless another within ``reach`` is cheaper to cross, or equally cheap and earlier."""
    kept: list[Position] = []
    first = 0
    for number, place in enumerate(places):
        while places[first].cost_before < place.cost_before - reach:
            first += 1
        last = number
        while last + 1 < len(places) and places[last + 1].cost_before <= place.cost_before + reach:
            last += 1
        earlier = min((neighbour.crossing_bytes for neighbour in places[first:number]), default=math.inf)
        later = min((neighbour.crossing_bytes for neighbour in places[number + 1 : last + 1]), default=math.inf)
        if earlier > place.crossing_bytes and later >= place.crossing_bytes:
            kept.append(place)
    return kept


def _distinct(positions: Sequence[Position], total_cost: float) -> list[Position]:
    """Keep one position, the cheapest to cross, for each amount of compute before it."""
    best: dict[float, Position] = {}
    for place in positions:
        if not 0 < place.cost_before < total_cost:
            continue
        kept = best.get(place.cost_before)
        if kept is None or place.crossing_bytes < kept.crossing_bytes:
            best[place.cost_before] = place
    return [best[cost] for cost in sorted(best)]
