"""Make an exported graph free of assertions, dead code and in-place operations.

torch.export in training form keeps in-place operations. Where nothing else can see the changed tensor, they are
replaced by their functional overload; otherwise the whole graph is functionalised by torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from morph.contract.errors import ExportError, JobError
from morph.cutting.locate import node_line

_ASSERTIONS = {
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten._assert_async.default,
    torch.ops.aten._assert_async.msg,
    torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
}
_RUNNING_STATISTICS = {
    torch.ops.aten.batch_norm.default: (5, (3, 4)),
    torch.ops.aten.instance_norm.default: (5, (3, 4)),
}


def make_functional(program: ExportedProgram, prefix: str) -> GraphModule:
    """Return the program's graph without assertions, dead code and in-place operations.

    Raises:
        JobError: the model changes buffers (running statistics), named without ``prefix``.
        ExportError: an operation that changes its argument cannot be replaced.
    """
    _refuse_changed_buffers(program, prefix)
    _clean(program.graph_module)
    if not all(_replace_in_place(node) for node in _in_place_nodes(program.graph_module)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = program.run_decompositions({})
        _make_copies_differentiable(program.graph_module)
        for node in _in_place_nodes(program.graph_module):
            raise ExportError(
                f"cannot replace the in-place operation {node.target}",
                source=node_line(node),
                allowed="operations that return a new tensor",
            )
    graph_module: GraphModule = program.graph_module
    _bear_other_strides(graph_module)
    _clean(graph_module)
    return graph_module


def is_view(node: Node) -> bool:
    """Whether the node's result may share memory with an argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(
        result.alias_info is not None and not result.alias_info.is_write for result in schema.returns
    )


def _clean(graph_module: GraphModule) -> None:
    """Drop assertions and dead nodes, in submodules of higher-order operations too."""
    for module in graph_module.modules():
        if not isinstance(module, GraphModule):
            continue
        for node in list(module.graph.nodes):
            if node.op == "call_function" and node.target in _ASSERTIONS:
                module.graph.erase_node(node)
        for node in reversed(list(module.graph.nodes)):
            dead = node.op in {"call_function", "get_attr"} and not node.users
            if dead and _written_argument(node) is None:
                module.graph.erase_node(node)
        module.recompile()


def _bear_other_strides(graph_module: GraphModule) -> None:
    """Write ``reshape`` for ``view``: kernels of attention lay out their result otherwise than fake ones promise."""
    for module in graph_module.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
                node.target = torch.ops.aten.reshape.default
            module.recompile()


def _in_place_nodes(graph_module: GraphModule) -> Iterator[Node]:
    for module in graph_module.modules():
        if isinstance(module, GraphModule):
            yield from [node for node in module.graph.nodes if _written_argument(node) is not None]


def _written_argument(node: Node) -> Node | None:
    """Return the argument that the node changes, if it does."""
    if not isinstance(node.target, OpOverload):
        return None
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            return value if isinstance(value, Node) else None
    return None


def _refuse_changed_buffers(program: ExportedProgram, prefix: str) -> None:
    targets = program.graph_signature.inputs_to_buffers
    changed: dict[str, Node] = {}
    for node in program.graph.nodes:
        written = _written_argument(node)
        candidates = [written] if written is not None else []
        if node.target in _RUNNING_STATISTICS:
            flag, statistics = _RUNNING_STATISTICS[node.target]
            candidates += [node.args[place] for place in statistics if node.args[flag]]
        for candidate in candidates:
            base = _base(candidate) if isinstance(candidate, Node) else None
            if base is not None and base.name in targets:
                changed.setdefault(targets[base.name].removeprefix(prefix), node)
    if changed:
        names = ", ".join(sorted(changed))
        raise JobError(
            f"the model changes buffers while training: {names}",
            source=node_line(next(iter(changed.values()))),
            field="model",
            allowed="no running statistics, for they would depend on the shape of the job; "
            "use LayerNorm or GroupNorm, or track_running_stats=False",
        )


def _base(node: Node) -> Node:
    while node.op == "call_function" and is_view(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _replace_in_place(node: Node) -> bool:
    """Replace one in-place node by its functional overload; False when another node could see the difference."""
    changed = _written_argument(node)
    functional = _functional_overload(node)
    if changed is None or functional is None or changed.op == "placeholder" or is_view(changed):
        return False
    order = {other: place for place, other in enumerate(node.graph.nodes)}
    if any(order[user] > order[node] for view in _views(changed) if view is not node for user in view.users):
        return False
    if any(_dtype(argument) not in {None, _dtype(changed)} for argument in node.all_input_nodes):
        return False
    changed.replace_all_uses_with(node, delete_user_cb=lambda user: order[user] > order[node])
    node.target = functional
    return True


def _make_copies_differentiable(graph_module: GraphModule) -> None:
    """Functionalising writes ``aten.copy``, which has no derivative; converting and expanding have."""
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
    namespace, _, name = node.target._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    overload = getattr(packet, node.target._overloadname, None) if name.endswith("_") else None
    return overload if isinstance(overload, OpOverload) else None


def _views(node: Node) -> Iterator[Node]:
    for user in node.users:
        if user.op == "call_function" and is_view(user):
            yield user
            yield from _views(user)


def _dtype(node: Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None
