"""Estimates the cost of one graph node, in floating-point operations for a given number of samples.

Products, attention and convolutions count as in ``torch.utils.flop_counter``, views nothing, other operations their
output elements, weighted for memory traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.fx import Node

from morph.cutting.exporting.functional import is_view

_FLOPS_PER_ELEMENT = 32.0
Shape = Sequence[int]
aten = torch.ops.aten
RECURRENT = {aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input}


def node_cost(node: Node, shape_of: Callable[[Any], list[Shape]]) -> float:
    """Return the cost of running ``node``; ``shape_of`` gives the concrete shapes of a node's tensors."""
    if node.op != "call_function" or is_view(node):
        return 0.0
    outputs = shape_of(node)
    if node.target in RECURRENT:
        return _recurrent(node, shape_of, outputs[0])
    formula = _FORMULAS.get(node.target)
    if formula is not None:
        shapes = [shape_of(argument)[0] if isinstance(argument, Node) else () for argument in node.args]
        return formula(shapes, outputs[0])
    return _FLOPS_PER_ELEMENT * sum(prod(shape) for shape in outputs)


def _linear(shapes: list[Shape], output: Shape) -> float:
    return 2.0 * prod(output) * shapes[0][-1]


def _added_product(shapes: list[Shape], output: Shape) -> float:
    return 2.0 * prod(output) * shapes[1][-1]


def _attention(shapes: list[Shape], _output: Shape) -> float:
    query, key, value = shapes[:3]
    return 2.0 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _convolution(shapes: list[Shape], output: Shape) -> float:
    return 2.0 * prod(output) * prod(shapes[1][1:])


def _recurrent(node: Node, shape_of: Callable[[Any], list[Shape]], output: Shape) -> float:
    """Return the cost of a recurrent layer: each weight is used once for each sample and time step."""
    weights = [shape_of(weight)[0] for weight in node.args[2] if isinstance(weight, Node)]  # type: ignore[union-attr]
    return 2.0 * prod(output[:2]) * sum(prod(shape) for shape in weights if len(shape) > 1)


_FORMULAS: dict[Any, Callable[[list[Shape], Shape], float]] = {
    aten.linear.default: _linear,
    aten.mm.default: _linear,
    aten.bmm.default: _linear,
    aten.matmul.default: _linear,
    aten.addmm.default: _added_product,
    aten.baddbmm.default: _added_product,
    aten.scaled_dot_product_attention.default: _attention,
    aten.conv1d.default: _convolution,
    aten.conv1d.padding: _convolution,
    aten.conv2d.default: _convolution,
    aten.conv2d.padding: _convolution,
    aten.conv3d.default: _convolution,
    aten.convolution.default: _convolution,
}
