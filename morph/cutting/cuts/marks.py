"""Places that the user marked for cutting: ``morph.CutPoint`` in the forward, or names of modules in the job."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from morph.contract.errors import JobError
from morph.cutting.cuts.analysis import Analysis
from morph.cutting.sections.cut_point import CutPoint
from morph.cutting.sections.positions import Position
from morph.cutting.source.locate import module_paths, node_line

_MARK = f"{CutPoint.__module__}.{CutPoint.__qualname__}"


def marked_positions(analysis: Analysis, positions: Sequence[Position]) -> list[Position]:
    """Return the marked ones of all positions, in order; none when nothing is marked.

    Raises:
        JobError: a name is of no module that the loss runs, or the model cannot be cut at a mark.
    """
    nodes = [*_cut_point_calls(analysis), *(_first_node(analysis, name) for name in analysis.exported.cut_points)]
    by_index = {place.index: place for place in positions}
    marked: dict[int, Position] = {}
    for node in nodes:
        place = analysis.order[node]
        if place not in by_index:
            raise JobError(
                "the model cannot be cut here: nothing precedes it, or a value other than a tensor is needed after it",
                source=node_line(node),
                field="cut_points",
                value=next(reversed(module_paths(node)), None),
                allowed="another place",
            )
        marked[place] = by_index[place]
    return [marked[place] for place in sorted(marked)]


def _cut_point_calls(analysis: Analysis) -> list[Node]:
    return [node for node in analysis.sequence if _innermost_type(node) == _MARK]


def _innermost_type(node: Node) -> str | None:
    stack = node.meta.get("nn_module_stack") or {}
    kinds = [kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}" for _, kind in stack.values()]
    return kinds[-1] if kinds else None


def _first_node(analysis: Analysis, name: str) -> Node:
    """Return the first operation that is inside the module ``name``."""
    for node in analysis.sequence:
        if name in module_paths(node):
            return node
    called = dict.fromkeys(path for node in analysis.sequence for path in module_paths(node))
    raise JobError(
        "the loss runs no operation in a module of this name",
        source="Job",
        field="cut_points",
        value=name,
        allowed=", ".join(list(called)[:12]) + (", ..." if len(called) > 12 else ""),
    )
