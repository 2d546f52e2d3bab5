"""Frees an exported graph of assertions, dead code, no-grad regions and in-place operations.

These are replaced by their functional overload or, if another node can see the changed tensor, functionalised by torch.
Values that the forward writes into buffers become further results.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from morph.contract.errors import ExportError, JobError
from morph.cutting.sections.statistics import ASSIGNED, return_statistics, updated_statistics
from morph.cutting.source.locate import node_line

_ASSERTIONS = {
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten._assert_async.default,
    torch.ops.aten._assert_async.msg,
    torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
}
WRITTEN = "morph_written"
"""Key in a node's ``meta`` for the placeholder of a buffer; the node is the buffer's new value."""
_REGION = torch.ops.higher_order.wrap_with_set_grad_enabled
_ALLOWED = "operations that return a new tensor, outside torch.no_grad()"


@dataclass(frozen=True)
class Functional:
    """A graph without in-place operations; its results are loss and metrics, then new values of ``written``."""

    graph_module: GraphModule
    written: tuple[str, ...]


def make_functional(program: ExportedProgram) -> Functional:
    """Return the program's graph without assertions, dead code and in-place operations.

    Raises JobError for a changed tensor that is no buffer, ExportError for an operation without replacement.
    """
    graph_module: GraphModule = program.graph_module
    _write_out_regions(graph_module, only_of_buffers=True)
    for node in list(_in_place_nodes(graph_module)):
        if updated_statistics(node):
            return_statistics(node)
    _clean(graph_module)
    buffers = [
        node
        for node in graph_module.graph.find_nodes(op="placeholder")
        if node.name in program.graph_signature.inputs_to_buffers
    ]
    results = results_of(graph_module)
    _set_results(graph_module, [*results, *buffers])  # the buffer's final value is its new value
    of_buffer = {node: node.name for node in buffers}
    if not all(_replace_in_place(node, of_buffer) for node in list(_in_place_nodes(graph_module))):
        return _functionalised(program, buffers, len(results))
    _make_copies_differentiable(graph_module)
    outputs = results_of(graph_module)
    return _finished(graph_module, outputs[: len(results)], dict(zip(buffers, outputs[len(results) :], strict=True)))


def _functionalised(program: ExportedProgram, buffers: Sequence[Node], num_results: int) -> Functional:
    """Let torch functionalise the rest; buffers' new values found so far are written back at the end of the graph."""
    graph_module: GraphModule = program.graph_module
    _write_out_regions(graph_module, only_of_buffers=False)  # torch would drop them
    outputs = results_of(graph_module)
    output = graph_module.graph.output_node()
    for buffer, value in zip(buffers, outputs[num_results:], strict=True):
        if value is not buffer:
            with graph_module.graph.inserting_before(output):
                copy = graph_module.graph.call_function(torch.ops.aten.copy_.default, (buffer, value))
            copy.meta = dict(value.meta)
    _set_results(graph_module, outputs[:num_results])
    graph_module.recompile()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = program.run_decompositions({})
    graph_module = program.graph_module
    _make_copies_differentiable(graph_module)
    for node in _in_place_nodes(graph_module):
        raise ExportError(
            f"cannot replace the in-place operation {node.target}",
            source=node_line(node),
            allowed="operations that return a new tensor",
        )
    signature, outputs = program.graph_signature, results_of(graph_module)
    names = {target: name for name, target in signature.inputs_to_buffers.items()}
    placeholders = {node.name: node for node in graph_module.graph.find_nodes(op="placeholder")}
    results, values = [], {}
    for spec, node in zip(signature.output_specs, outputs, strict=True):
        if spec.kind == OutputKind.USER_OUTPUT:
            results.append(node)
        elif spec.kind == OutputKind.BUFFER_MUTATION and str(spec.target) in names:
            values[placeholders[names[str(spec.target)]]] = node
        elif spec.kind != OutputKind.USER_INPUT_MUTATION:
            raise JobError(
                f"the forward changes {spec.target} in place",
                source=node_line(node),
                field="model",
                allowed="parameters that only the optimizer changes, and buffers",
            )
    return _finished(graph_module, results, values)


def _finished(graph_module: GraphModule, results: Sequence[Node], values: dict[Node, Node]) -> Functional:
    """Give each buffer's new value its own node of the buffer's dtype, and clean up."""
    graph, aten = graph_module.graph, torch.ops.aten
    written = {buffer: value for buffer, value in values.items() if value is not buffer}
    ends: list[Node] = []
    for buffer, value in written.items():
        for node in (value, *_assigned(value)):
            node.meta[WRITTEN] = buffer.name
        with graph.inserting_after(value):
            end = graph.call_function(aten.detach.default, (value,))
        end.meta = {key: entry for key, entry in value.meta.items() if key != WRITTEN}
        ends.append(end)
    _set_results(graph_module, [*results, *ends])
    _bear_other_strides(graph_module)
    _clean(graph_module)
    return Functional(graph_module, tuple(buffer.name for buffer in written))


def _assigned(value: Node) -> Iterator[Node]:
    """Yield the tensor of which a buffer's new value is a copy, if the forward assigned it to the buffer."""
    source = value.args[0]
    if isinstance(source, Node) and source.target is ASSIGNED:
        source.target = torch.ops.aten.detach.default
        (operation,) = source.all_input_nodes
        if operation.op == "call_function":
            yield operation


def results_of(graph_module: GraphModule) -> list[Node]:
    """Return the nodes that a graph returns."""
    results: Any = graph_module.graph.output_node().args[0]
    return list(results) if isinstance(results, list | tuple) else [results]


def _set_results(graph_module: GraphModule, results: Sequence[Node]) -> None:
    graph_module.graph.output_node().args = (tuple(results),)


def _write_out_regions(graph_module: GraphModule, *, only_of_buffers: bool) -> None:
    """Inline no-grad regions: all, or those that change a tensor from outside or compute a buffer's change."""
    again = True
    while again:
        again = False
        for region, inner in list(regions(graph_module)):
            changed = _changed_placeholders(inner)
            if only_of_buffers and not changed and region not in _between_buffers(graph_module):
                continue
            given = dict(zip(inner.graph.find_nodes(op="placeholder"), region.args[2:], strict=True))
            for placeholder, node in changed.items():
                operand = given[placeholder]
                if isinstance(operand, Node) and _base(operand).op != "placeholder":
                    raise ExportError(
                        "changes an activation in place inside torch.no_grad()",
                        source=node_line(node),
                        allowed="an operation that returns a new tensor",
                    )
            write_out(graph_module, region, inner, set(changed))
            again = True
    graph_module.recompile()


def _between_buffers(graph_module: GraphModule) -> set[Node]:
    """Return the nodes that depend on a buffer's placeholder and on which a value written to a buffer depends."""
    order = list(graph_module.graph.nodes)
    written = {node: _base(argument) for node in order for argument in _written_arguments(node)}
    writes = {node: base for node, base in written.items() if base.op == "placeholder"}
    follows, needed = set(writes.values()), set(writes)
    for node in order:
        if follows.intersection(node.all_input_nodes):
            follows.add(node)
    for node in reversed(order):
        if node in needed:
            needed.update(node.all_input_nodes)
    return follows & needed


def _changed_placeholders(inner: GraphModule) -> dict[Node, Node]:
    """Return the placeholders that a region, or one inside it, changes, each with the node that changes it."""
    changed: dict[Node, Node] = {}
    for node in inner.graph.nodes:
        for argument in _written_arguments(node):
            base = _base(argument)
            if base.op == "placeholder":
                changed.setdefault(base, node)
    for region, nested in regions(inner):
        given = dict(zip(nested.graph.find_nodes(op="placeholder"), region.args[2:], strict=True))
        for placeholder, node in _changed_placeholders(nested).items():
            operand = given[placeholder]
            if isinstance(operand, Node) and _base(operand).op == "placeholder":
                changed.setdefault(_base(operand), node)
    return changed


def is_view(node: Node) -> bool:
    """Whether the node's result may share memory with an argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(
        result.alias_info is not None and not result.alias_info.is_write for result in schema.returns
    )


def _clean(graph_module: GraphModule) -> None:
    """Drop assertions and dead nodes, also in submodules of higher-order operations."""
    for module in graph_module.modules():
        if not isinstance(module, GraphModule):
            continue
        for node in list(module.graph.nodes):
            if node.op == "call_function" and node.target in _ASSERTIONS:
                module.graph.erase_node(node)
        for node in reversed(list(module.graph.nodes)):
            dead = node.op in {"call_function", "get_attr"} and not node.users
            if dead and not _written_arguments(node):
                module.graph.erase_node(node)
        module.recompile()


def _bear_other_strides(graph_module: GraphModule) -> None:
    """Replace ``view`` with ``reshape``: real attention kernels return other strides than their fake counterparts."""
    for module in graph_module.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
                node.target = torch.ops.aten.reshape.default
            module.recompile()


def _in_place_nodes(graph_module: GraphModule) -> Iterator[Node]:
    for module in graph_module.modules():
        if isinstance(module, GraphModule):
            yield from [node for node in module.graph.nodes if _written_arguments(node)]


def _written_arguments(node: Node) -> list[Node]:
    if not isinstance(node.target, OpOverload):
        return []
    statistics = updated_statistics(node)
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            statistics += [entry for entry in tree_leaves(value) if isinstance(entry, Node)]
    return statistics


def _base(node: Node) -> Node:
    """Return the node whose memory this node's result shares, through views and in-place operations."""
    while node.op == "call_function":
        changed = _written_arguments(node)
        if changed and not updated_statistics(node):
            node = changed[0]
        elif is_view(node) and isinstance(node.args[0], Node):
            node = node.args[0]
        else:
            break
    return node


def _replace_in_place(node: Node, of_buffer: dict[Node, str]) -> bool:
    """Replace an in-place node with its functional overload; return False if another node could see that."""
    (changed, *more), functional = _written_arguments(node), _functional_overload(node)
    if more or functional is None or (changed.op == "placeholder" and changed not in of_buffer) or is_view(changed):
        return False
    order = {each: place for place, each in enumerate(node.graph.nodes)}
    if any(order[user] > order[node] for view in _views(changed) if view is not node for user in view.users):
        return False
    if any(_dtype(argument) not in {None, _dtype(changed)} for argument in node.all_input_nodes):
        return False
    changed.replace_all_uses_with(node, delete_user_cb=lambda user: order[user] > order[node])
    node.target = functional
    node.kwargs = {key: value for key, value in node.kwargs.items() if key != "out"}
    if changed in of_buffer:
        of_buffer[node] = node.meta[WRITTEN] = of_buffer[changed]
    return True


def _make_copies_differentiable(graph_module: GraphModule) -> None:
    """Replace ``aten.copy``, which functionalisation inserts, with conversion and expansion, which have gradients."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.copy.default:
            continue
        target, source = node.args[:2]
        with graph.inserting_before(node):
            if _dtype(source) != _dtype(target):
                meta = {**source.meta, "val": source.meta["val"].to(_dtype(target))}
                source = graph.call_function(torch.ops.aten.to.dtype, (source, _dtype(target)))
                source.meta = meta
            expanded = graph.call_function(torch.ops.aten.expand_as.default, (source, target))
        expanded.meta = node.meta
        node.replace_all_uses_with(expanded)
        graph.erase_node(node)


def _functional_overload(node: Node) -> OpOverload | None:
    assert isinstance(node.target, OpOverload)
    schema = node.target._schema
    namespace, _, name = schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    if name.endswith("_"):
        overload = getattr(packet, node.target._overloadname, None)
        return overload if isinstance(overload, OpOverload) else None
    taken = [str(argument.type) for argument in schema.arguments if not argument.is_out]
    overloads: list[OpOverload] = [getattr(packet, name) for name in packet.overloads()] if packet is not None else []
    for overload in overloads:
        arguments = overload._schema.arguments
        plain = all(argument.alias_info is None for argument in arguments)
        if plain and [str(argument.type) for argument in arguments] == taken:
            return overload
    return None


def _views(node: Node) -> Iterator[Node]:
    for user in node.users:
        if user.op == "call_function" and is_view(user):
            yield user
            yield from _views(user)


def _dtype(node: Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None


def regions(graph_module: GraphModule) -> Iterator[tuple[Node, GraphModule]]:
    """Yield each no-grad region of the outermost graph, with its own graph."""
    for node in graph_module.graph.find_nodes(op="call_function", target=_REGION):
        (name,) = (argument for argument in node.args if isinstance(argument, Node) and argument.op == "get_attr")
        inner = graph_module.get_submodule(str(name.target))
        assert isinstance(inner, GraphModule)
        yield node, inner


def write_out(graph_module: GraphModule, region: Node, inner: GraphModule, changed: set[Node]) -> None:
    """Put a region's operations into the surrounding graph; inputs are detached, so that no gradient passes.

    ``changed``: buffers' placeholders. Raises ExportError if gradients are switched on again within the region.
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
