"""Decides which changes of buffers by the forward are equal in every shape, and where they belong in the graph.

Their mean over all micro-batches is applied with the step, as of gradients (docs/decisions/0013).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from morph.contract.errors import JobError
from morph.cutting.exporting.exported_job import GraphInput
from morph.cutting.exporting.functional import Functional, results_of
from morph.cutting.exporting.random_operations import is_random
from morph.cutting.sections.statistics import PLAIN
from morph.cutting.source.locate import node_line

_KEEPS_MEANS = {
    *("detach", "alias", "clone", "to", "_to_copy", "contiguous", "lift_fresh_copy", "neg"),
    *("view", "reshape", "expand", "expand_as", "squeeze", "unsqueeze", "permute", "transpose", "t"),
    *("add", "sub", "rsub"),
}
"""Operations that commute with the mean: applied to the mean of arguments, they give the mean of results."""

_ONE_ARGUMENT_VARIES = {"mul": (0, 1), "div": (0,), "lerp": (0, 1), "where": (1, 2), "getitem": (0,)}
"""Operations that do so if only these arguments differ between micro-batches; in a product, only one factor may."""

_COPIES: set[object] = {torch.ops.aten.detach.default, torch.ops.aten.expand_as.default, torch.ops.aten.to.dtype}

_ALLOWED = (
    "changes that do not depend on the samples, and floating-point averages "
    "(buffer = a * buffer + b * statistic), which are averaged over the micro-batches of a step; "
    "queues, extremes, and counts of samples belong into the data set or the metrics"
)


def settle_writes(functional: Functional, sources: Mapping[str, GraphInput]) -> None:
    """Refuse changes that would depend on the shape, and move the others to the place where their values are used."""
    if not functional.written:
        return
    graph = functional.graph_module.graph
    ends = results_of(functional.graph_module)[-len(functional.written) :]
    placeholders = {node.name: node for node in graph.find_nodes(op="placeholder")}
    varying = _varying(functional, sources)
    changed = {end: placeholders[name] for end, name in zip(ends, functional.written, strict=True)}
    for end, buffer in changed.items():
        if end in varying:
            _move_to_its_value(end)
            starts = {buffer, *(other for other in changed if other in varying and other is not end)}
            starts |= {other.args[0] for other in starts if other in changed}
            problem = _not_averaged(graph, end, starts, varying)
            if problem is not None:
                raise JobError(
                    f"the forward changes buffer {sources[buffer.name].name} in a way that depends on "
                    "how the batch is divided into micro-batches",
                    source=node_line(problem),
                    field="model",
                    allowed=_ALLOWED,
                )
    _move_to_their_use(graph, [end for end in changed if end not in varying], set(changed))


def _varying(functional: Functional, sources: Mapping[str, GraphInput]) -> set[Node]:
    """Return nodes that differ between micro-batches: they depend on samples or their number, or are random."""
    varying: set[Node] = set()
    for node in functional.graph_module.graph.nodes:
        of_batch = node.op == "placeholder" and sources[node.name].kind == "batch"
        drawn = node.op == "call_function" and is_random(node, functional.graph_module)
        if of_batch or drawn or any(argument in varying for argument in node.all_input_nodes):
            varying.add(node)
    return varying


def _not_averaged(graph: Graph, end: Node, starts: Iterable[Node], varying: set[Node]) -> Node | None:
    """Return the node for which the mean of a buffer's changes is not the change intended; None: there is none.

    On the way to the new value, what differs by micro-batch may only be added, with fixed factors.
    """
    value: torch.Tensor = end.meta["val"]
    if not (value.is_floating_point() or value.is_complex()):
        return end
    follows = set(starts)
    node: Node
    for node in graph.nodes:
        if follows.intersection(_read_for_statistics(node)):
            follows.add(node)
    needed = _cone([end])
    for node in graph.nodes:
        on_the_way = node in follows and node in needed and node in varying
        if on_the_way and node.op == "call_function" and not _keeps_means(node, varying, follows):
            return node
    return None


def _read_for_statistics(node: Node) -> Sequence[Node]:
    """Return the nodes on which a result depends; BatchNorm's output in training ignores its running statistics."""
    source = node.args[0] if node.args else None
    if node.target is operator.getitem and isinstance(source, Node) and source.target in PLAIN and node.args[1] == 0:
        return [value for value in source.args[:3] if isinstance(value, Node)]
    return node.all_input_nodes


def _keeps_means(node: Node, varying: set[Node], follows: set[Node]) -> bool:
    if node.target in PLAIN:
        return node.args[0] not in follows
    given = {place: value for place, value in enumerate(node.args) if isinstance(value, Node) and value in varying}
    if sum(value in varying for value in node.all_input_nodes) > len(set(given.values())):
        return False
    if not all(isinstance(value.meta.get("val"), torch.Tensor | tuple) for value in given.values()):
        return False  # the number of samples
    differing = set(given)
    target = node.target
    name = target._schema.name.partition("::")[2] if isinstance(target, OpOverload) else getattr(target, "__name__", "")
    if name in _ONE_ARGUMENT_VARIES:
        return differing <= set(_ONE_ARGUMENT_VARIES[name]) and (name != "mul" or len(differing) == 1)
    return name in _KEEPS_MEANS


def _cone(ends: Iterable[Node]) -> set[Node]:
    """Return these nodes and all nodes on which these depend."""
    nodes: set[Node] = set()
    waiting = list(ends)
    while waiting:
        node = waiting.pop()
        if node not in nodes:
            nodes.add(node)
            waiting += node.all_input_nodes
    return nodes


def _move_to_its_value(end: Node) -> None:
    """Move a buffer's new value directly after its inputs; at the end of the forward, they would cross every cut."""
    chain = [end]
    while isinstance(node := chain[-1].args[0], Node) and node.target in _COPIES and set(node.users) == {chain[-1]}:
        chain.append(node)
    order = {node: place for place, node in enumerate(end.graph.nodes)}
    for node in reversed(chain):
        latest = max(node.all_input_nodes, key=lambda given: (given.op != "placeholder", order[given]))
        if latest.op != "placeholder":
            latest.append(node)
            order[node] = order[latest]


def _move_to_their_use(graph: Graph, fixed: Sequence[Node], ends: set[Node]) -> None:
    """Move changes that depend on no samples to the first reader of the new value, or of a parameter."""
    cone = _cone(fixed)
    movable = [node for node in graph.nodes if node in cone and node.op == "call_function" and node not in ends]
    for node in reversed(movable):
        order = {each: place for place, each in enumerate(graph.nodes)}
        readers = [user for user in node.users if user not in ends] or [
            user
            for given in _cone([node])
            if given.op == "placeholder"
            for user in given.users
            if user.op == "call_function" and user not in cone
        ]
        if readers:
            min(readers, key=order.__getitem__).prepend(node)
    for end in fixed:
        value = end.args[0]
        assert isinstance(value, Node)
        value.append(end)
