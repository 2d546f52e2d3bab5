"""Builds one section's module: a graph over border tensors, batch entries and parameters, for one m."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from morph.cutting.cuts.analysis import Analysis, concrete, is_known
from morph.cutting.exporting.functional import WRITTEN


@dataclass(frozen=True)
class BuiltSection:
    """A section's module, called with ``*inputs, *batch entries, *parameters, *buffers, *constants``."""

    module: GraphModule
    batch_keys: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    writes: tuple[str, ...]
    constants: tuple[str, ...]
    signature: str
    num_replicated: int


@dataclass
class _Builder:
    """Copies nodes into a new graph, together with the replicated nodes and numbers that they need."""

    analysis: Analysis
    num_samples: int
    graph: Graph = field(default_factory=Graph)
    root: nn.Module = field(default_factory=nn.Module)
    copies: dict[Node, Node] = field(default_factory=dict)

    def argument(self, node: Node) -> Any:
        if node in self.copies:
            return self.copies[node]
        if is_known(node):
            return concrete(self.analysis.exported, node.meta["val"], self.num_samples)
        if node.op == "get_attr":
            name = str(node.target)
            self.root.add_module(name, self.analysis.exported.graph_module.get_submodule(name))
            self.copies[node] = self.graph.get_attr(name)
            return self.copies[node]
        assert node in self.analysis.replicated, f"{node.name} does not reach this section"
        return self.copy(node)

    def copy(self, node: Node) -> Node:
        for argument in node.all_input_nodes:
            self.argument(argument)
        self.copies[node] = self.graph.node_copy(node, self.argument)
        return self.copies[node]


def build_section(
    analysis: Analysis, nodes: Sequence[Node], inputs: Sequence[Node], outputs: Sequence[Node], num_samples: int
) -> BuiltSection:
    """Build the module that runs ``nodes``, from border tensors ``inputs`` to border tensors ``outputs``.

    Outputs are contiguous, so that the next section cannot distinguish sent tensors from local ones.
    """
    builder = _Builder(analysis, num_samples)
    for node in inputs:
        builder.copies[node] = builder.graph.placeholder(node.name)
    sources = analysis.exported.sources
    ends = [node for node in nodes if node in analysis.writes]
    read = _placeholders_read(analysis, [*nodes, *(node for node in outputs if node in analysis.replicated)])
    entries = sorted((node for node in read if sources[node.name].kind == "batch"), key=lambda n: sources[n.name].name)
    parameters = [node for node in read if sources[node.name].kind == "parameter"]
    buffers = [node for node in read if sources[node.name].kind == "buffer"]
    constants = [node for node in read if sources[node.name].kind == "constant"]
    for node in (*entries, *parameters, *buffers, *constants):
        builder.copies[node] = builder.graph.placeholder(node.name)
    for node in nodes:
        builder.copy(node)
    results = [_border(builder, node) for node in outputs]
    builder.graph.output((*results, *(builder.copies[node] for node in ends)))
    builder.graph.lint()
    module = GraphModule(builder.root, builder.graph)
    return BuiltSection(
        module=module,
        batch_keys=tuple(sources[node.name].name for node in entries),
        parameters=tuple(sources[node.name].name for node in parameters),
        buffers=tuple(sources[node.name].name for node in buffers),
        writes=tuple(analysis.writes[node] for node in ends),
        constants=tuple(node.name for node in constants),
        signature=_signature(analysis, module, [*inputs, *entries, *parameters, *buffers, *constants], num_samples),
        num_replicated=sum(node in analysis.replicated for node in builder.copies),
    )


def _border(builder: _Builder, node: Node) -> Node:
    copied: Node = builder.argument(node)
    if node is builder.analysis.output:
        return copied
    if node not in builder.analysis.carries_gradient:
        copied = builder.graph.call_function(torch.ops.aten.detach.default, (copied,))
    return builder.graph.call_function(torch.ops.aten.contiguous.default, (copied,))


def _placeholders_read(analysis: Analysis, nodes: Sequence[Node]) -> list[Node]:
    """Return the graph inputs that the nodes read, directly or through replicated nodes, in graph order."""
    seen: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        for argument in waiting.pop().all_input_nodes:
            if argument not in seen and not is_known(argument):
                seen.add(argument)
                if argument in analysis.replicated:
                    waiting.append(argument)
    written = {
        entry.meta[WRITTEN] for entry in nodes if WRITTEN in entry.meta
    }  # an evaluation reads the old value as an input
    placeholders = analysis.exported.graph_module.graph.find_nodes(op="placeholder")
    return [node for node in placeholders if node in seen or node.name in written]


def _signature(analysis: Analysis, module: GraphModule, inputs: Sequence[Node], num_samples: int) -> str:
    """Hash a section's operations and shapes without its names: equal for sections that do the same work."""
    lines = [str((analysis.shapes(node, num_samples), [str(t.dtype) for t in _values(node)])) for node in inputs]
    lines += describe(module.graph.nodes)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _values(node: Node) -> list[torch.Tensor]:
    return [node.meta["val"]]


def describe(nodes: Iterable[Node]) -> list[str]:
    """Write nodes as text with numbers in place of names; the same in every process and on every machine."""
    numbers: dict[Node, int] = {}
    lines: list[str] = []
    for node in nodes:
        numbers[node] = len(numbers)
        target = "" if node.op in {"placeholder", "get_attr", "output"} else str(node.target)
        arguments = _numbered((node.args, node.kwargs), numbers)
        lines.append(f"{node.op} {target} {arguments}")
    return lines


def _numbered(value: Any, numbers: dict[Node, int]) -> str:
    if isinstance(value, Node):
        return f"%{numbers[value]}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(_numbered(item, numbers) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_numbered(item, numbers)}' for key, item in sorted(value.items()))}}}"
    return repr(value)
