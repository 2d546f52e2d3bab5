"""Choose where to cut: pure arithmetic over costs and bytes.

Varuna, section 5.1: around each point of equal compute, the cheapest position to cross; among equals, the nearest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_DEFAULT_SECTIONS = 24
_WINDOW = 0.4
_NARROW = 1.5


@dataclass(frozen=True)
class Position:
    """A place between two operations: the model may be cut in front of operation ``index``.

    Attributes:
        index: The operation behind the cut.
        cost_before: Compute in front of the cut, any unit.
        crossing_bytes: Bytes alive across the cut, for a fixed number of samples.
    """

    index: int
    cost_before: float
    crossing_bytes: int


def default_num_sections(positions: Sequence[Position], total_cost: float) -> int:
    """Return one section for every two narrow positions, from 1 to 24.

    Narrow: crossed by at most 1.5 times the bytes that the narrowest tenth of all positions stays within; those nearer
    to each other than 1/80 of the total compute count once. A transformer has two narrow positions per block (behind
    attention and behind the MLP), so this is one section per block.
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
    """Return ``num_sections - 1`` indices, strictly ascending, one near each point of equal compute.

    Raises:
        ValueError: when there are fewer distinct positions than cuts.
    """
    distinct = _distinct(positions, total_cost)
    if len(distinct) < num_sections - 1:
        raise ValueError(f"only {len(distinct) + 1} sections are possible")
    chosen: list[int] = []
    share = total_cost / num_sections
    first = 0
    for cut in range(1, num_sections):
        last = len(distinct) - (num_sections - 1 - cut)
        place = _best(distinct[first:last], cut * share, _WINDOW * share)
        chosen.append(place.index)
        first = distinct.index(place, first) + 1
    return tuple(chosen)


def _best(candidates: Sequence[Position], target: float, half_window: float) -> Position:
    inside = [place for place in candidates if abs(place.cost_before - target) <= half_window]
    if inside:
        return min(inside, key=lambda place: (place.crossing_bytes, abs(place.cost_before - target), place.index))
    return min(candidates, key=lambda place: (abs(place.cost_before - target), place.crossing_bytes, place.index))


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
