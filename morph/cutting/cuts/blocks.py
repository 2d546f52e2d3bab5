"""Find the blocks that a model repeats: members of a ``ModuleList`` or ``Sequential`` of one class, run in turn.

Cuts between blocks make equal sections, of which only one of each kind is measured, and let the fewest bytes cross.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

from torch.fx import Node

from morph.cutting.cuts.analysis import Analysis
from morph.cutting.sections.positions import Position
from morph.cutting.source.locate import SLICE

_NARROW = 1.5
_LEAST_SHARE = 0.3
_SHARE_OF_A_FAMILY = 0.1
_OF_A_BLOCK = 0.5


@dataclass(frozen=True)
class Block:
    """One run of one module: places ``start`` to ``end`` (exclusive) of an analysis' sequence."""

    path: str
    start: int
    end: int


@dataclass(frozen=True)
class Blocks:
    """The blocks of a model; it may be cut between them.

    ``positions``: beginnings of blocks, and of other code after a block; ascending. ``num_sections``: one for each
    block, and one for each stretch outside blocks that has at least half a block's compute.
    """

    positions: list[Position]
    num_sections: int


def find_blocks(analysis: Analysis, positions: Sequence[Position]) -> Blocks | None:
    """Return the model's repeated blocks; None if they are less than 30 % of its compute.

    If blocks contain blocks (layers of a stage of a ConvNet), the smaller ones are used, unless crossing them costs
    over 50 % more: inside a transformer's block, a residual crosses as well.
    """
    by_index = {place.index: place for place in positions}
    before = [0.0, *accumulate(analysis.costs)]

    def cost_of(family: Sequence[Block]) -> float:
        return sum(before[block.end] - before[block.start] for block in family)

    families = [
        family
        for family in _families(analysis)
        if cost_of(family) >= _SHARE_OF_A_FAMILY * before[-1] and sum(block.start in by_index for block in family) > 1
    ]
    crossing = {
        id(family): median(by_index[block.start].crossing_bytes for block in family if block.start in by_index)
        for family in families
    }
    taken: list[Block] = []
    for family in sorted(families, key=len, reverse=True):
        rivals = [other for other in families if _overlap(family, other)]
        narrow = crossing[id(family)] <= _NARROW * min(crossing[id(other)] for other in rivals)
        if narrow and not _overlap(family, taken):
            taken += family
    taken.sort(key=lambda block: block.start)
    if cost_of(taken) < _LEAST_SHARE * before[-1]:
        return None
    block_cost = median(before[block.end] - before[block.start] for block in taken)
    starts = [block.start for block in taken] + [len(analysis.sequence)]
    ends = [0] + [block.end for block in taken]
    between = [before[start] - before[end] for end, start in zip(ends, starts, strict=True)]
    num_others = sum(cost >= _OF_A_BLOCK * block_cost for cost in between)
    borders = sorted({*starts, *ends} & by_index.keys())
    return Blocks([by_index[place] for place in borders], len(taken) + num_others)


def _families(analysis: Analysis) -> list[list[Block]]:
    """Return blocks by the class of their module, each family in order and without overlaps."""
    first: dict[tuple[str, str], int] = {}
    last: dict[tuple[str, str], int] = {}
    paths: dict[tuple[str, str], str] = {}
    for place, node in enumerate(analysis.sequence):
        for key, path, kind in _numbered_modules(node):
            first.setdefault((kind, key), place)
            last[kind, key] = place + 1
            paths[kind, key] = path
    families: dict[str, list[Block]] = {}
    for (kind, key), start in sorted(first.items(), key=lambda item: item[1]):
        family = families.setdefault(kind, [])
        if not family or family[-1].end <= start:
            family.append(Block(paths[kind, key], start, last[kind, key]))
    return list(families.values())


def _numbered_modules(node: Node) -> Iterator[tuple[str, str, str]]:
    """Yield (key of the call, path, class) of each module around the node that is a numbered member of another."""
    for key, (path, kind) in (node.meta.get("nn_module_stack") or {}).items():
        plain = SLICE.sub("", path)
        if plain.rpartition(".")[2].isdigit():
            yield key, plain, kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"


def _overlap(some: Sequence[Block], others: Sequence[Block]) -> bool:
    return any(one.start < other.end and other.start < one.end for one in some for other in others)
