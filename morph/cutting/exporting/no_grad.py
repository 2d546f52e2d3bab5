"""Inlines the regions under ``torch.no_grad()``, which torch.export keeps as submodules."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from morph.contract.errors import ExportError
from morph.cutting.source.locate import node_line

_REGION = torch.ops.higher_order.wrap_with_set_grad_enabled
_ALLOWED = "operations that return a new tensor, outside torch.no_grad()"


def regions(graph_module: GraphModule) -> Iterator[tuple[Node, GraphModule]]:
    """Yield each no-grad region of the outermost graph, with its own graph."""
    for node in graph_module.graph.find_nodes(op="call_function", target=_REGION):
        (name,) = (argument for argument in node.args if isinstance(argument, Node) and argument.op == "get_attr")
        inner = graph_module.get_submodule(str(name.target))
        assert isinstance(inner, GraphModule)
        yield node, inner


def write_out(graph_module: GraphModule, region: Node, inner: GraphModule, changed: set[Node]) -> None:
    """Put a region's operations into the surrounding graph; their inputs are detached, so that no gradient passes.

    ``region``: the node that runs the graph ``inner``. ``changed``: placeholders of ``inner`` that it changes: buffers,
    which carry no gradient. Raises ExportError if gradients are switched on again within the region.
    """
    graph = graph_module.graph
    arguments: tuple[Any, ...] = region.args
    enabled, name, *given = arguments
    copies: dict[Node, Any] = {}
    placeholders = inner.graph.find_nodes(op="placeholder")
    with graph.inserting_before(region):
        for placeholder, operand in zip(placeholders, given, strict=True):
            copies[placeholder] = operand if enabled or placeholder in changed else _detached(operand, region)
        for node in inner.graph.nodes:
            if node.op == "get_attr":
                nested = f"{name.target}_{node.target}"
                graph_module.add_module(nested, inner.get_submodule(str(node.target)))
                copies[node] = graph.get_attr(nested)
            elif node.op == "call_function":
                if node.target is _REGION and node.args[0] != enabled:
                    raise ExportError(
                        "gradients are switched on inside torch.no_grad()", source=node_line(node), allowed=_ALLOWED
                    )
                copies[node] = graph.node_copy(node, copies.__getitem__)
    results: Any = inner.graph.output_node().args[0]
    for user in list(region.users):
        assert user.target is operator.getitem
        index: Any = user.args[1]
        user.replace_all_uses_with(copies[results[index]])
        graph.erase_node(user)
    graph.erase_node(region)
    if not name.users:
        graph.erase_node(name)
    graph_module.delete_all_unused_submodules()


def _detached(operand: object, region: Node) -> object:
    value = operand.meta.get("val") if isinstance(operand, Node) else None
    if not isinstance(operand, Node) or not isinstance(value, torch.Tensor):
        return operand
    if not (value.is_floating_point() or value.is_complex()):
        return operand
    detached = operand.graph.call_function(torch.ops.aten.detach.default, (operand,))
    detached.meta = {**region.meta, "val": value}
    return detached
