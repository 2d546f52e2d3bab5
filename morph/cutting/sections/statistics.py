"""Normalisation by torch on copies of the running statistics, which are returned instead of changed."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

_LIBRARY: Any = torch.library.Library("morph", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch does not annotate it
_ARGUMENTS = (
    "Tensor input, Tensor? weight, Tensor? bias, Tensor mean, Tensor var, float momentum, float eps, bool cudnn"
)
_TRAINING, _STATISTICS = 5, (3, 4)
"""Positions of arguments; they are equal in both of torch's operations."""


def _returning(normalise: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    def run(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, *options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean, var = mean.detach().clone(), var.detach().clone()
        return normalise(x, weight, bias, mean, var, True, *options), mean, var

    return run


for _name, _function in (("batch_norm", torch.batch_norm), ("instance_norm", torch.instance_norm)):
    _LIBRARY.define(f"{_name}({_ARGUMENTS}) -> (Tensor, Tensor, Tensor)")
    _LIBRARY.impl(_name, _returning(_function), "CompositeImplicitAutograd")

_LIBRARY.define("assigned(Tensor value) -> Tensor")
_LIBRARY.impl("assigned", lambda value: value.detach().clone(), "CompositeImplicitAutograd")
ASSIGNED = torch.ops.morph.assigned.default
"""Marks a tensor that the forward assigned to a buffer; later reads of the buffer read this tensor."""

aten = torch.ops.aten
RETURNING: dict[Any, OpOverload] = {
    aten.batch_norm.default: torch.ops.morph.batch_norm.default,
    aten.instance_norm.default: torch.ops.morph.instance_norm.default,
}
"""The counterpart, by torch's operation, that returns (result, mean, variance)."""

PLAIN: dict[Any, Any] = {returning: plain for plain, returning in RETURNING.items()}


def updated_statistics(node: Node) -> list[Node]:
    """Return the running statistics that the node changes, although its schema does not say so."""
    if node.target not in RETURNING or not node.args[_TRAINING]:
        return []
    return [value for place in _STATISTICS if isinstance(value := node.args[place], Node)]


def return_statistics(node: Node) -> None:
    """Replace the node with the returning operation, followed by plain copies into the statistics."""
    graph, statistics = node.graph, updated_statistics(node)
    x, weight, bias, mean, var, _, *rest = node.args
    value, place = node.meta["val"], {key: entry for key, entry in node.meta.items() if key != "val"}
    with graph.inserting_before(node):
        all_three = graph.call_function(RETURNING[node.target], (x, weight, bias, mean, var, *rest))
        all_three.meta = place | {"val": (value, *(entry.meta["val"] for entry in statistics))}
        parts = [graph.call_function(operator.getitem, (all_three, index)) for index in range(3)]
        for part, example in zip(parts, all_three.meta["val"], strict=True):
            part.meta = place | {"val": example}
        for target, part in zip(statistics, parts[1:], strict=True):
            new = graph.call_function(aten.detach.default, (part,))
            copy = graph.call_function(aten.copy_.default, (target, new))
            new.meta, copy.meta = (place | {"val": target.meta["val"]} for _ in range(2))
    node.replace_all_uses_with(parts[0])
    graph.erase_node(node)


def use_statistics(node: Node) -> None:
    """Make a returning node normalise with its given statistics, as in evaluation mode."""
    arguments: tuple[Any, ...] = node.args
    x, weight, bias, mean, var, *rest = arguments
    for user in list(node.users):
        index = user.args[1]
        if index == 0:
            user.target, user.args = PLAIN[node.target], (x, weight, bias, mean, var, False, *rest)
        else:
            user.replace_all_uses_with(mean if index == 1 else var)
            node.graph.erase_node(user)
    node.graph.erase_node(node)
