"""The transportation problem: which kinds of workers go to which stages. Integers only, exact, deterministic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


def largest_overlap(gain: Sequence[Sequence[int]], demand: Sequence[int], supply: Sequence[int]) -> list[list[int]]:
    """Meet every row's demand from the columns' supply so that the sum of gains is largest; return ``[row][column]``.

    Successive shortest paths with potentials (Ahuja, Magnanti, Orlin: Network Flows, 9.7). ``gain[i][j]``: of one
    worker of column j in row i. The total supply is at least the total demand.
    """
    assert sum(demand) <= sum(supply), "there are too few workers"
    problem = _Flow(gain, list(supply), [[0] * len(supply) for _ in demand], [0] * len(demand), [0] * len(supply))
    for row, need in enumerate(demand):
        while need:
            need -= problem.push(row, need)
    return problem.flow


@dataclass
class _Search:
    """Shortest paths from one row: distances, and the predecessor of each row and column."""

    row_distance: dict[int, int]
    distance: list[int]
    row_before: list[int]
    column_before: dict[int, int] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)


@dataclass
class _Flow:
    """A flow whose reduced costs (-gain less both potentials) are never negative, and 0 where it flows."""

    gain: Sequence[Sequence[int]]
    left: list[int]
    flow: list[list[int]]
    row_potential: list[int]
    column_potential: list[int]

    def push(self, row: int, most: int) -> int:
        """Send up to ``most`` units along the cheapest path from a row to a column with supply; return how many."""
        search, end = self._search(row)
        for other, distance in search.row_distance.items():
            self.row_potential[other] += search.distance[end] - distance
        for column in search.done:
            self.column_potential[column] -= search.distance[end] - search.distance[column]
        steps = []  # (row, the column it gets more of, the column it gives up or None)
        column, here = end, search.row_before[end]
        while here != row:
            given_up = search.column_before[here]
            steps.append((here, column, given_up))
            column, here = given_up, search.row_before[given_up]
        amount = min(most, self.left[end], *(self.flow[other][given] for other, _, given in steps))
        self.left[end] -= amount
        self.flow[row][column] += amount
        for other, taken, given in steps:
            self.flow[other][taken] += amount
            self.flow[other][given] -= amount
        return amount

    def _search(self, row: int) -> tuple[_Search, int]:
        """Dijkstra from a row until a column with supply left is the nearest."""
        base = -self.row_potential[row]
        distances = [base - gain - known for gain, known in zip(self.gain[row], self.column_potential, strict=True)]
        search, open_columns = _Search({row: 0}, distances, [row] * len(distances)), list(range(len(distances)))
        while True:
            nearest = min(open_columns, key=search.distance.__getitem__)
            open_columns.remove(nearest)
            search.done.append(nearest)
            if self.left[nearest]:
                return search, nearest
            for here, flow in enumerate(self.flow):
                if not flow[nearest] or here in search.row_distance:
                    continue
                search.row_distance[here], search.column_before[here] = search.distance[nearest], nearest
                base, gains = search.distance[nearest] - self.row_potential[here], self.gain[here]
                for column in open_columns:
                    distance = base - gains[column] - self.column_potential[column]
                    if distance < search.distance[column]:
                        search.distance[column], search.row_before[column] = distance, here
