"""Dealing kinds of workers to stages is exact."""

from __future__ import annotations

import itertools
import random

from manager.controller.shape.transport import largest_overlap
from tests.seeds import each_seed


def worth(gain: list[list[int]], dealt: list[list[int]]) -> int:
    return sum(gain[row][column] * count for row, counts in enumerate(dealt) for column, count in enumerate(counts))


def best_by_trying(gain: list[list[int]], demand: list[int], supply: list[int]) -> int:
    rows = [row for row, need in enumerate(demand) for _ in range(need)]
    columns = [column for column, count in enumerate(supply) for _ in range(count)]
    tried = set(itertools.permutations(columns, len(rows)))
    return max(sum(gain[row][column] for row, column in zip(rows, chosen, strict=True)) for chosen in tried)


@each_seed(100)
def test_the_largest_overlap_is_found(seed: int) -> None:
    draw = random.Random(seed)
    demand = [draw.randint(1, 2) for _ in range(draw.randint(1, 3))]
    supply = [draw.randint(1, 3) for _ in range(draw.randint(1, 4))]
    while sum(supply) < sum(demand):
        supply.append(1)
    if sum(supply) > 7:
        supply = [1] * 7
    gain = [[draw.choice([0, 0, 1, 5, 9]) for _ in supply] for _ in demand]
    dealt = largest_overlap(gain, demand, supply)
    assert [sum(counts) for counts in dealt] == demand
    assert all(sum(counts[column] for counts in dealt) <= count for column, count in enumerate(supply))
    assert all(count >= 0 for counts in dealt for count in counts)
    assert worth(gain, dealt) == best_by_trying(gain, demand, supply)


def test_where_it_makes_no_difference_earlier_columns_are_taken() -> None:
    assert largest_overlap([[0, 0], [0, 0]], [2, 1], [4, 4]) == [[2, 0], [1, 0]]
