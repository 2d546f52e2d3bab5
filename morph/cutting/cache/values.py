"""Plain values, graphs and tapes as JSON: numbers, names and operations of torch's own, and nothing that is run."""

from __future__ import annotations

import base64
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from morph.cutting.deferred_init.recordable import TRUNCATED
from morph.cutting.deferred_init.tape import Operation, Tape, TensorRef
from morph.cutting.exporting.functional import WRITTEN

Json = Any
_NAMESPACES = frozenset({"aten", "prims", "morph"})
_MOST_DATA_BYTES = 1 << 16
"""Of one tensor that the constructor or the forward takes from elsewhere: more of it are weights."""
_OPERATORS = frozenset(
    {"getitem", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "eq", "ne", "lt", "le"}
)
_PLAIN = (type(None), bool, int, float, str)
_FROM_TORCH: dict[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}
_META = ("stack_trace", WRITTEN)
"""What running or evaluating a section reads of a node besides its operation."""


class CannotKeep(Exception):
    """Something that these forms do not hold."""


def write_value(value: Any, numbers: Mapping[Node, int] | None = None) -> Json:
    """Return the form of a value; nodes become the numbers given for them.

    Raises:
        CannotKeep: it has none.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list):
        return [write_value(item, numbers) for item in value]
    if type(value) is tuple:
        return {"tuple": [write_value(item, numbers) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[write_value(key), write_value(item, numbers)] for key, item in value.items()]}
    if isinstance(value, Node) and numbers is not None:
        return {"node": numbers[value]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, TensorRef):
        return {"stored": [value.storage, _name(value.dtype), list(value.size), list(value.stride), value.offset]}
    if isinstance(value, Tensor):
        return {"data": _write_data(value)}
    for kind, of_torch in _FROM_TORCH.items():
        if isinstance(value, of_torch):
            return {kind: _name(value)}
    raise CannotKeep(f"a {type(value).__name__}")


def read_value(form: Json, nodes: Sequence[Node] = ()) -> Any:
    """Return what ``write_value`` wrote.

    Raises:
        ValueError: no such form.
    """
    if isinstance(form, list):
        return [read_value(item, nodes) for item in form]
    if not isinstance(form, dict):
        return form
    ((kind, content),) = form.items()
    if kind == "tuple":
        return tuple(read_value(item, nodes) for item in content)
    if kind == "dict":
        return {read_value(key): read_value(item, nodes) for key, item in content}
    if kind == "node":
        return nodes[content]
    if kind == "device":
        return torch.device(content)
    if kind == "complex":
        return complex(*content)
    if kind == "stored":
        storage, dtype, size, stride, offset = content
        return TensorRef(storage, read_dtype(dtype), tuple(size), tuple(stride), offset)
    if kind == "data":
        return _read_data(content)
    if kind in _FROM_TORCH:
        return _of_torch(content, _FROM_TORCH[kind])
    raise ValueError(f"{kind} is no kind of value")


def write_code(code: GraphModule) -> Json:
    """Return the form of a section's code.

    Raises:
        CannotKeep: it calls anything but operations of torch.
    """
    numbers: dict[Node, int] = {}
    forms: list[Json] = []
    for node in code.graph.nodes:
        target = _write_function(node.target) if node.op == "call_function" else node.target
        if node.op not in {"placeholder", "call_function", "output"}:
            raise CannotKeep(f"a graph's {node.op}")
        meta = {key: node.meta[key] for key in _META if isinstance(node.meta.get(key), str)}
        given = [write_value(node.args, numbers), write_value(dict(node.kwargs), numbers)]
        forms.append([node.op, node.name, target, *given, meta])
        numbers[node] = len(numbers)
    return forms


def read_code(forms: Json) -> GraphModule:
    """Return what ``write_code`` wrote.

    Raises:
        ValueError: it names no operation of torch.
    """
    graph = Graph()
    nodes: list[Node] = []
    for op, name, target, args, kwargs, meta in forms:
        if op not in {"placeholder", "call_function", "output"}:
            raise ValueError(f"a graph's {op}")
        called = _read_function(target) if op == "call_function" else target
        given = (read_value(args, nodes), read_value(kwargs, nodes))
        node = graph.create_node(op, called, *given, name=name)
        node.meta.update(meta)
        nodes.append(node)
    graph.lint()
    return GraphModule(nn.Module(), graph)


def write_operation(operation: Operation) -> Json:
    """Return the form of an operation on a tape.

    Raises:
        CannotKeep: it is none of torch's.
    """
    return [
        _write_function(operation.function),
        write_value(operation.args),
        write_value(operation.kwargs),
        *(sorted(numbers) for numbers in (operation.reads, operation.writes, operation.creates)),
        operation.overwrites,
        write_value(list(operation.results)),
        operation.draw,
    ]


def read_tape(seed: int, forms: Json) -> Tape:
    """Return a tape of the operations that ``write_operation`` wrote."""
    tape = Tape(seed)
    for function, args, kwargs, reads, writes, creates, overwrites, results, draw in forms:
        operation = Operation(
            function=_read_function(function),
            args=read_value(args),
            kwargs=read_value(kwargs),
            reads=frozenset(reads),
            writes=frozenset(writes),
            overwrites=overwrites,
            results=tuple(read_value(results)),
            creates=frozenset(creates),
            draw=draw,
        )
        tape.operations.append(operation)
    return tape


def read_dtype(name: str) -> torch.dtype:
    """Return torch's type of this name."""
    found: torch.dtype = _of_torch(name, torch.dtype)
    return found


def _write_function(function: Any) -> str:
    if isinstance(function, OpOverload) and function.namespace in _NAMESPACES:
        return str(function)
    if function is getattr(nn.init, TRUNCATED, None):
        return TRUNCATED
    name = getattr(function, "__name__", "")
    if name in _OPERATORS and function is getattr(operator, name):
        return f"operator.{name}"
    raise CannotKeep(f"a call of {function}")


def _read_function(name: str) -> Callable[..., Any]:
    namespace, _, rest = name.partition(".")
    found: Any = None
    if name == TRUNCATED:
        found = getattr(nn.init, TRUNCATED)
    elif namespace == "operator" and rest in _OPERATORS:
        found = getattr(operator, rest)
    elif namespace in _NAMESPACES:
        packet, _, overload = rest.partition(".")
        found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
        found = found if isinstance(found, OpOverload) else None
    if found is None:
        raise ValueError(f"{name} is no operation of torch")
    return found  # type: ignore[no-any-return]  # looked up by name


def _name(value: object) -> str:
    return str(value).removeprefix("torch.")


def _of_torch(name: str, kind: type) -> Any:
    value = getattr(torch, name)
    if not isinstance(value, kind):
        raise ValueError(f"torch.{name} is no {kind.__name__}")
    return value


def _write_data(tensor: Tensor) -> Json:
    plain = type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.layout is torch.strided
    if not plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise CannotKeep("a tensor that is not plain")
    if not tensor.is_contiguous() or tensor.numel() * tensor.element_size() > _MOST_DATA_BYTES:
        raise CannotKeep("much data")
    content = tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [_name(tensor.dtype), list(tensor.shape), list(tensor.stride()), base64.b64encode(content).decode()]


def _read_data(form: Json) -> Tensor:
    dtype, shape, stride, text = form
    content = bytearray(base64.b64decode(text, validate=True))
    found = torch.frombuffer(content, dtype=read_dtype(dtype)) if content else torch.empty(0, dtype=read_dtype(dtype))
    return found.as_strided(shape, stride)
