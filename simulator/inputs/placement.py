"""Which worker runs on which node, where nodes have several GPUs.

Neighbouring stages on one node communicate over its inner links, so a replica should consist of as few pieces (runs of
stages on one node) as possible. Finding the fewest pieces over all replicas is a packing problem; the heuristic here
places replica after replica, and takes the better of two orders:

- the node with the least room that holds all remaining stages takes them;
- otherwise the node with the most room is filled, or, in the second order, the fullest pair of nodes that holds the
  stages exactly.

In both orders a replica's larger pieces come first, so that the same stages of all replicas tend to share nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from morph.contract import ranges
from morph.contract.errors import PlanError

_FEW_SPARE, _MOST_PLACED = 16, 20_000


@dataclass(frozen=True)
class Placement:
    """Nodes of workers. ``nodes[d][s]``: number of the node of stage s of replica d; ``node_sizes``: GPUs by node."""

    node_sizes: tuple[int, ...]
    nodes: tuple[tuple[int, ...], ...]

    @property
    def num_pieces(self) -> int:
        """The number of runs of neighbouring stages on one node, over all replicas."""
        nodes = self.array()
        return len(self.nodes) + int((nodes[1:] != nodes[:-1]).sum())

    def array(self) -> npt.NDArray[np.int64]:
        """Return the node of each worker: int64[P, D]."""
        return np.array(self.nodes, np.int64).T

    @property
    def used(self) -> dict[int, int]:
        """Return the number of GPUs in use on each node that is in use."""
        return dict(sorted(Counter(chain.from_iterable(self.nodes)).items()))

    @property
    def rings_at_once(self) -> int:
        """Return the most all-reduces that share one node's link: those of its stages with replicas on other nodes."""
        nodes = self.array()
        leaving = np.flatnonzero((nodes != nodes[:, :1]).any(axis=1))
        held = np.unique(nodes[leaving] * len(nodes) + leaving[:, None]) // len(nodes)
        return max(1, int(np.bincount(held, minlength=1).max()))


def node_sizes(
    num_gpus: int, num_gpus_per_node: int | Sequence[int] | Mapping[str, int | Sequence[int]]
) -> tuple[int, ...]:
    """Return the GPUs of each node: nodes of one size, the last one smaller if necessary, or of the given sizes.

    Raises PlanError if a size is below 1, the sizes do not add up to ``num_gpus``, or sizes are given by type.
    """
    if isinstance(num_gpus_per_node, Mapping):
        allowed = "one number, or a list of nodes; numbers by type need a pool"
        raise PlanError("is given by type", field="num_gpus_per_node", value=num_gpus_per_node, allowed=allowed)
    if not isinstance(num_gpus_per_node, Sequence):
        ranges.GPUS.check("num_gpus_per_node", num_gpus_per_node)
        whole, rest = divmod(num_gpus, num_gpus_per_node)
        return (num_gpus_per_node,) * whole + ((rest,) if rest else ())
    sizes = tuple(num_gpus_per_node)
    if not sizes or any(size not in ranges.GPUS for size in sizes):
        raise PlanError("are not node sizes", field="num_gpus_per_node", value=sizes, allowed=f"of each {ranges.GPUS}")
    if sum(sizes) not in ranges.GPUS:
        allowed = f"{ranges.GPUS} together"
        raise PlanError("are too many GPUs", field="num_gpus_per_node", value=sum(sizes), allowed=allowed)
    if sum(sizes) < num_gpus:
        allowed = f"at most {sum(sizes)} (all GPUs of the nodes)"
        raise PlanError("there are fewer GPUs", field="num_gpus", value=num_gpus, allowed=allowed)
    return sizes


def place(num_stages: int, num_replicas: int, sizes: Sequence[int]) -> Placement:
    """Return a placement of P x D workers on nodes of these sizes, always the same; PlanError: too few GPUs."""
    if num_stages * num_replicas > sum(sizes):
        raise PlanError(
            "there are fewer GPUs than workers",
            field="num_gpus",
            value=sum(sizes),
            allowed=f"{num_stages * num_replicas} or more ({num_stages} x {num_replicas})",
        )
    most, alike = max(sizes), len(set(sizes)) == 1
    whole = alike and (num_stages % most == 0 or most % num_stages == 0)
    if whole or 1 in (most, num_stages, len(sizes)):
        order = sorted(range(len(sizes)), key=lambda node: (-sizes[node], node))
        slots = [node for node in order for _ in range(sizes[node])]
        rows = tuple(tuple(slots[d * num_stages : (d + 1) * num_stages]) for d in range(num_replicas))
        return Placement(tuple(sizes), rows)
    tries = [place_pipelines([num_stages] * num_replicas, sizes, in_pairs=in_pairs) for in_pairs in (False, True)]
    return min((Placement(tuple(sizes), rows) for rows in tries), key=lambda placement: placement.num_pieces)


def placements(num_stages: int, num_replicas: int, sizes: Sequence[int]) -> list[Placement]:
    """Return placements of P x D workers: those of :func:`place` on all nodes, and on only the first few GPUs.

    The placements for fewer nodes, or for a smaller last node, are thus among them, so adding GPUs makes no plan
    slower. More than ``max(sizes) - 1`` spare GPUs for each replica give no new placement, nor does a node that holds
    all workers. For thousands of replicas fewer placements are tried.
    """
    num_workers = num_stages * num_replicas
    answers = [place(num_stages, num_replicas, sizes)]
    spare = min(num_replicas * (max(sizes) - 1), max(_FEW_SPARE, _MOST_PLACED // num_replicas))
    for num_gpus in range(num_workers, min(sum(sizes) - 1, num_workers + spare) + 1):
        if num_workers < num_gpus <= sizes[0]:
            continue
        few = place(num_stages, num_replicas, _first_gpus(sizes, num_gpus))
        if all(few.nodes != answer.nodes for answer in answers):
            answers.append(Placement(tuple(sizes), few.nodes))
    return answers


def _first_gpus(sizes: Sequence[int], num_gpus: int) -> tuple[int, ...]:
    """Return the first nodes that together have this many GPUs, the last one smaller if necessary."""
    kept, left = [], num_gpus
    for size in sizes:
        if left:
            kept.append(min(size, left))
            left -= kept[-1]
    return tuple(kept)


def place_pipelines(depths: Sequence[int], sizes: Sequence[int], *, in_pairs: bool) -> tuple[tuple[int, ...], ...]:
    """Return the node of each stage of pipelines that are placed one after the other; the nodes must have room."""
    free = list(sizes)
    rows = []
    for depth in depths:
        pieces: list[tuple[int, int]] = []
        left = depth
        while left:
            taken = _pieces(free, left, in_pairs)
            for node, size in taken:
                free[node] -= size
                left -= size
            pieces += taken
        rows.append(tuple(node for node, size in pieces for _ in range(size)))
    return tuple(rows)


def _pieces(free: list[int], wanted: int, in_pairs: bool) -> list[tuple[int, int]]:
    """Return the next pieces (node, size) of a replica that still lacks ``wanted`` stages."""
    enough = [node for node, room in enumerate(free) if room >= wanted]
    if enough:
        return [(min(enough, key=lambda node: (free[node], node)), wanted)]
    if in_pairs:
        by_room: dict[int, int] = {}
        for node, room in enumerate(free):
            by_room.setdefault(room, node)
        for room in sorted(by_room, reverse=True):
            partner = by_room.get(wanted - room)
            if room > 0 and partner is not None and partner != by_room[room]:
                return [(by_room[room], room), (partner, wanted - room)]
        half = wanted // 2
        if wanted % 2 == 0 and free.count(half) > 1:
            first = free.index(half)
            return [(first, half), (free.index(half, first + 1), half)]
    roomiest = max(range(len(free)), key=lambda node: (free[node], -node))
    return [(roomiest, free[roomiest])]
