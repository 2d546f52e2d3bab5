from __future__ import annotations

from functools import cache
from itertools import combinations_with_replacement

import pytest

from morph.contract.errors import PlanError
from simulator.inputs.placement import node_sizes, place


@cache
def fewest_pieces(num_stages: int, num_replicas: int, free: tuple[int, ...]) -> int:
    """Return the fewest pieces, found by trying everything, for a sorted number of free GPUs per node."""
    if num_replicas == 0:
        return 0

    @cache
    def ways(left: int, rooms: tuple[int, ...]) -> frozenset[tuple[int, tuple[int, ...]]]:
        """Return (pieces, free GPUs afterwards) of each way to place this many stages."""
        if left == 0:
            return frozenset([(0, rooms)])
        found = set()
        for node, room in enumerate(rooms):
            if room and room not in rooms[:node]:
                for size in range(1, min(room, left) + 1):
                    after = tuple(sorted((*rooms[:node], room - size, *rooms[node + 1 :])))
                    found |= {(1 + pieces, rest) for pieces, rest in ways(left - size, after)}
        return frozenset(found)

    return min(pieces + fewest_pieces(num_stages, num_replicas - 1, rest) for pieces, rest in ways(num_stages, free))


CASES = [
    (num_stages, sum(sizes) // num_stages, sizes)
    for number in range(1, 5)
    for sizes in combinations_with_replacement((1, 2, 3, 4), number)
    for num_stages in range(1, 7)
    if sum(sizes) >= num_stages
]


def test_small_cases_have_the_fewest_pieces() -> None:
    extra = {case: place(*case).num_pieces - fewest_pieces(*case) for case in CASES}
    assert {case: more for case, more in extra.items() if more} == {}
    assert len(CASES) > 300


@pytest.mark.parametrize("case", CASES[::7])
def test_every_worker_has_a_gpu_of_its_own(case: tuple[int, int, tuple[int, ...]]) -> None:
    num_stages, num_replicas, sizes = case
    placed = place(*case)
    assert [len(row) for row in placed.nodes] == [num_stages] * num_replicas
    assert all(used <= sizes[node] for node, used in placed.used.items())
    assert sum(placed.used.values()) == num_stages * num_replicas


def test_a_replica_that_fits_a_node_is_not_torn_apart() -> None:
    placed = place(4, 3, (1, 1, 1, 1, 4, 4))
    assert placed.nodes[:2] == ((4, 4, 4, 4), (5, 5, 5, 5))
    assert len(set(placed.nodes[2])) == 4


def test_the_same_stages_of_all_replicas_share_nodes() -> None:
    placed = place(6, 2, (4, 4, 2, 2))
    assert [[row.count(node) for node in dict.fromkeys(row)] for row in placed.nodes] == [[4, 2], [4, 2]]


def test_all_reduces_that_leave_a_node_are_counted() -> None:
    assert place(4, 2, (4, 4)).rings_at_once == 4
    assert place(4, 2, (2, 2, 2, 2)).rings_at_once == 2
    assert place(2, 2, (4,)).rings_at_once == 1  # both replicas are on one node, which no ring leaves
    assert place(4, 1, (4,)).rings_at_once == 1
    assert place(3, 3, (1,) * 9).rings_at_once == 1


def test_node_sizes_are_read_from_a_number_or_a_list() -> None:
    assert node_sizes(10, 4) == (4, 4, 2)
    assert node_sizes(3, (1, 4)) == (1, 4)
    for num_gpus, given, field in [(4, 0, "num_gpus_per_node"), (6, (1, 4), "num_gpus"), (2, (), "num_gpus_per_node")]:
        with pytest.raises(PlanError) as caught:
            node_sizes(num_gpus, given)
        assert caught.value.field == field


def test_more_workers_than_gpus_are_refused() -> None:
    with pytest.raises(PlanError, match="6 or more"):
        place(3, 2, (4, 1))
