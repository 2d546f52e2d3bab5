"""Sorts a graph's nodes into a sequence, replicated nodes, and known sizes.

- *sequence*: nodes on the way from parameters or random numbers to the loss; they are run once, in order.
- *replicated*: cheap nodes that depend on no trainable parameter and no random operation (masks, position numbers,
  rotary tables); every section that uses one computes it again, so they never cross a cut.
- *known*: symbolic sizes; they are numbers once m is fixed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from morph.contract.errors import ExportError
from morph.cutting.exporting.exported_job import GraphJob
from morph.cutting.exporting.functional import is_view, results_of
from morph.cutting.exporting.random_operations import is_random
from morph.cutting.exporting.user_functions import UserFunction
from morph.cutting.sections.positions import Position

REFERENCE_SAMPLES = 16
_REPLICATED_SHARE = 0.05
aten = torch.ops.aten
_NO_GRADIENT = {aten.detach.default, torch.ops.higher_order.wrap_with_set_grad_enabled}
_FLOPS_PER_ELEMENT = 32.0
Shape = Sequence[int]
RECURRENT = {aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input}


def concrete(exported: GraphJob, value: Any, num_samples: int) -> Any:
    """Return a number, evaluated for ``num_samples`` samples if symbolic. Raises ExportError if it depends on data."""
    if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value
    known: dict[Any, int | None] = {exported.batch_symbol: num_samples}
    if exported.length_symbol is not None:
        known[exported.length_symbol] = exported.length
    result = value.node.expr.subs(known)
    if result.free_symbols:
        raise ExportError(
            "the model has a size that depends on the data",
            source=exported.model_line,
            value=str(value),
            allowed="sizes known from the shapes of the batch; pad in the data set",
        )
    kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)]
    return kind(result)


def tensors_of(node: Node) -> list[Tensor]:
    """Return the (fake) tensors that a node produces."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return [value]
    return [item for item in value if isinstance(item, Tensor)] if isinstance(value, list | tuple) else []


def is_known(node: Node) -> bool:
    """Whether the node is a number that follows from m."""
    return isinstance(node.meta.get("val"), int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool)


@dataclass(frozen=True)
class Analysis:
    """One exported graph with its nodes sorted (see the module's text)."""

    exported: GraphJob
    sequence: tuple[Node, ...]
    replicated: frozenset[Node]
    output: Node
    metrics: tuple[Node, ...] = ()
    writes: Mapping[Node, str] = field(default_factory=dict)
    """Names of buffers by the node of their new value."""

    @cached_property
    def order(self) -> dict[Node, int]:
        """The place of each sequence node."""
        return {node: place for place, node in enumerate(self.sequence)}

    @cached_property
    def last_use(self) -> dict[Node, int]:
        """Place of the last sequence node that reads each sequence node; loss and metrics are read after the end."""
        last: dict[Node, int] = {}
        for place, node in enumerate(self.sequence):
            for argument in node.all_input_nodes:
                if argument in self.order:
                    last[argument] = place
        for node in (self.output, *self.metrics):
            last[node] = len(self.sequence)
        return last

    @cached_property
    def costs(self) -> tuple[float, ...]:
        """The cost of each sequence node for the reference number of samples."""
        return tuple(node_cost(node, self.shapes) + self._own_flops(node) for node in self.sequence)

    def _own_flops(self, node: Node) -> float:
        flops = node.target.flops if isinstance(node.target, UserFunction) else 0
        return float(concrete(self.exported, flops, REFERENCE_SAMPLES))

    @property
    def total_cost(self) -> float:
        """The cost of the sequence."""
        return sum(self.costs)

    def shapes(self, node: Node, num_samples: int = REFERENCE_SAMPLES) -> list[Sequence[int]]:
        """Return the shapes of a node's tensors for ``num_samples`` samples, and the exported job's length."""
        return [
            tuple(concrete(self.exported, size, num_samples) for size in tensor.shape) for tensor in tensors_of(node)
        ]

    def positions(self) -> list[Position]:
        """Return every place where the model may be cut: only tensors are alive there."""
        num_places = len(self.sequence)
        change_bytes = [0] * (num_places + 1)
        blocked = [False] * (num_places + 1)
        for place, node in enumerate(self.sequence):
            last = self.last_use.get(node, place)
            if node in self.writes:
                value = self.order.get(node.args[0], place)  # type: ignore[arg-type]
                blocked[value + 1 : place + 1] = [True] * (place - value)
            if not isinstance(node.meta.get("val"), Tensor):
                blocked[place + 1 : last + 1] = [True] * (last - place)
                continue
            change_bytes[place + 1] += self.bytes_of(node)
            if last < num_places:
                change_bytes[last + 1] -= self.bytes_of(node)
        places: list[Position] = []
        cost, alive_bytes = 0.0, 0
        for place in range(1, num_places):
            cost += self.costs[place - 1]
            alive_bytes += change_bytes[place]
            if not blocked[place]:
                places.append(Position(place, cost, alive_bytes))
        return places

    def alive(self, place: int) -> tuple[Node, ...]:
        """Return the nodes before ``place`` that are read at or after it."""
        return tuple(node for node in self.sequence[:place] if self.last_use.get(node, -1) >= place)

    def bytes_of(self, node: Node, num_samples: int = REFERENCE_SAMPLES) -> int:
        """Return the bytes of a node's tensors."""
        sizes = [tensor.dtype.itemsize for tensor in tensors_of(node)]
        return sum(size * prod(shape) for size, shape in zip(sizes, self.shapes(node, num_samples), strict=True))

    @cached_property
    def carries_gradient(self) -> frozenset[Node]:
        """Return the sequence nodes through which the loss depends differentiably on a parameter."""
        return _reaches_loss(self, _differentiable(self))


def analyse(exported: GraphJob) -> Analysis:
    """Sort the nodes of an exported graph."""
    graph = exported.graph_module.graph
    results = results_of(exported.graph_module)
    num_told = 1 + len(exported.metric_names)
    output, *metrics = results[:num_told]
    writes = dict(zip(results[num_told:], exported.written, strict=True))
    calls = [node for node in graph.nodes if node.op == "call_function" and not is_known(node)]
    free = _free_of_parameters_and_chance(exported, calls) - writes.keys()  # only one section writes a buffer
    replicated = _cheap(exported, calls, free)
    sequence = tuple(node for node in calls if node not in replicated)
    return Analysis(exported, sequence, frozenset(replicated), output, tuple(metrics), writes)


def _free_of_parameters_and_chance(exported: GraphJob, calls: list[Node]) -> set[Node]:
    free: set[Node] = set()
    bound: set[Node] = set()
    for node in calls:
        inputs = [argument for argument in node.all_input_nodes if not is_known(argument)]
        depends = any(
            argument in bound or (argument.op == "placeholder" and exported.sources[argument.name].kind == "parameter")
            for argument in inputs
        )
        (bound if depends or is_random(node, exported.graph_module) else free).add(node)
    return free


def _cheap(exported: GraphJob, calls: list[Node], free: set[Node]) -> set[Node]:
    """Keep the free nodes that cost little, counting the nodes that they need."""
    shapes_of = Analysis(exported, (), frozenset(), calls[-1]).shapes
    costs = {node: node_cost(node, shapes_of) for node in calls}
    limit = _REPLICATED_SHARE * sum(costs.values())
    needed: dict[Node, frozenset[Node]] = {}
    for node in calls:
        inputs = [a for a in node.all_input_nodes if a.op == "call_function" and not is_known(a)]
        if node in free and all(argument in needed for argument in inputs):
            cone = frozenset((node,)).union(*(needed[argument] for argument in inputs))
            if sum(costs[part] for part in cone) <= limit:
                needed[node] = cone
    return set(needed)


def _differentiable(analysis: Analysis) -> set[Node]:
    """Return the sequence nodes whose values autograd follows back to a parameter."""
    sources = analysis.exported.sources
    reached: set[Node] = set()
    for node in analysis.sequence:
        inputs = _gradient_inputs(node)
        follows = any(
            argument in reached or (argument.op == "placeholder" and sources[argument.name].kind == "parameter")
            for argument in inputs
        )
        if follows and any(tensor.dtype.is_floating_point or tensor.dtype.is_complex for tensor in tensors_of(node)):
            reached.add(node)
    return reached


def _gradient_inputs(node: Node) -> Iterator[Node]:
    """Return the arguments through which a gradient flows: none for detach, no_grad, ``zeros_like`` and the like."""
    if node.target in _NO_GRADIENT:
        return
    if node.target is operator.getitem:
        called, place = node.args
        function = called.target if isinstance(called, Node) else None
        if isinstance(function, UserFunction) and isinstance(place, int) and not function.differentiable[place]:
            return
    elif not isinstance(node.target, UserFunction):
        name = str(node.target)
        if "_like" in name or ".new_" in name:
            return
    yield from node.all_input_nodes


def _reaches_loss(analysis: Analysis, differentiable: set[Node]) -> frozenset[Node]:
    reaching: set[Node] = {analysis.output} & differentiable
    for node in reversed(analysis.sequence):
        if node in reaching:
            reaching.update(argument for argument in _gradient_inputs(node) if argument in differentiable)
    return frozenset(reaching)


def node_cost(node: Node, shape_of: Callable[[Any], list[Shape]]) -> float:
    """Return the floating-point operations of a node; ``shape_of`` gives the concrete shapes of a node's tensors.

    Products, attention and convolutions count as in ``torch.utils.flop_counter``, views nothing, other operations their
    output elements, weighted for memory traffic.
    """
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
