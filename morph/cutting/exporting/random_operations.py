"""Operations of a graph that draw random numbers."""

from __future__ import annotations

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from morph.cutting.exporting.user_functions import UserFunction

_KNOWN_NAMESPACES = {"aten", "prims", "morph"}
"""Namespaces whose operations are tagged if they draw random numbers; users' own operations rarely are."""


def is_random(node: Node, graph_module: GraphModule) -> bool:
    """Whether a call draws random numbers, itself or in its submodule."""
    if isinstance(node.target, UserFunction):
        return True  # possibly
    if isinstance(node.target, OpOverload):
        if node.target.namespace not in _KNOWN_NAMESPACES:
            return True
        return torch.Tag.nondeterministic_seeded in node.target.tags and not _draws_nothing(node)
    submodules = [graph_module.get_submodule(str(a.target)) for a in node.all_input_nodes if a.op == "get_attr"]
    return any(
        is_random(inner, submodule)
        for submodule in submodules
        if isinstance(submodule, GraphModule)
        for inner in submodule.graph.nodes
        if inner.op == "call_function"
    )


def _draws_nothing(node: Node) -> bool:
    """Whether dropout is off: attention without dropout_p, or dropout outside training."""
    if node.target is torch.ops.aten.scaled_dot_product_attention.default:
        probability = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return bool(probability == 0.0)
    return node.target is torch.ops.aten.dropout.default and (node.args[1] in {0.0} or node.args[2] is False)
