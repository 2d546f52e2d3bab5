"""A cut model and its initial values, as JSON and back: numbers, names, torch's operations by name, and no code."""

from __future__ import annotations

import base64
import json
import operator
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, GraphModule, Node

from morph.cutting.deferred_init.construct import LazyTensors
from morph.cutting.deferred_init.recordable import TRUNCATED
from morph.cutting.deferred_init.tape import Operation, Tape, TensorRef
from morph.cutting.deferred_init.weight_files import read_slice
from morph.cutting.exporting.exported_job import ExportedJob, GraphJob, InitialState
from morph.cutting.exporting.functional import WRITTEN
from morph.cutting.sections.section import BoundaryTensor, Constants, CutModel, ParameterUnit, Section

Json = Any
MOST_BYTES = 256 << 20
"""Most bytes of one artefact's JSON. A graph of 96 layers takes 5 MB."""
_FORM = 5
_FOLDER = "<folder of the job>/"
_MOST_DATA_BYTES = 1 << 16
"""Most bytes of one tensor from outside the constructor or the forward; larger ones are weights."""
_NAMESPACES = frozenset({"aten", "prims", "morph"})
_OPERATORS = frozenset(
    {"getitem", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "eq", "ne", "lt", "le"}
)
_OPS = frozenset({"placeholder", "call_function", "output"})
_OF_GRAPHS = frozenset({"wrap_with_set_grad_enabled", "wrap_with_autocast"})
"""Operations that run a graph: code under ``torch.no_grad()`` or ``torch.autocast`` in the model."""
_READ = "read_slice"
_PLAIN = (type(None), bool, int, float, str)
_RECORDS = {kind.__name__: kind for kind in (CutModel, Section, ParameterUnit, BoundaryTensor, Operation, TensorRef)}
_OF_A_PROCESS = frozenset({"finish", "_on_device"})
"""Fields of a section that are set when it is run."""
_META = ("stack_trace", WRITTEN)
"""The metadata of a node that running or evaluating a section reads besides its operation."""
_OF_TORCH = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


class CannotKeep(Exception):
    """A value that the form cannot hold."""


@dataclass(frozen=True)
class Entry:
    """The parts of its job's model that a worker needs."""

    model: CutModel
    initial: InitialState
    tape: Tape


def write_entry(exported: ExportedJob, model: CutModel, folder: str) -> bytes:
    """Return the form of a model that was cut, compressed; code lines are relative to the job's folder.

    Raises CannotKeep if the model was not recorded, or the form cannot hold a part of it.
    """
    tape = exported.initial_parameters.tape
    if not isinstance(exported, GraphJob):
        raise CannotKeep("a model that torch.export refuses")
    if tape is None:
        raise CannotKeep("a model whose constructor cannot be recorded")
    lazy = (exported.initial_parameters, exported.initial_buffers, exported.initial_constants)
    places = _needed(tape, lazy)
    form = {
        "form": _FORM,
        "torch": _torch_version(),
        "seed": tape.seed,
        "tape": [write_value(tape.operations[place]) for place in places],
        "tensors": [
            [write_value(cut.entries), write_value(cut.specs), sum(place < cut.num_operations for place in places)]
            for cut in lazy
        ],
        "constants": {place: source.name for place, source in exported.sources.items() if source.kind == "constant"},
        "model": write_value(model),
    }
    text = json.dumps(form, separators=(",", ":"))
    content = zlib.compress(text.replace(_in_json(folder), _FOLDER).encode())
    read = read_entry(content, folder).model.every()
    for size, cut in model.every().items():
        for section, again in zip(cut.sections, read[size].sections, strict=True):
            if _codes(section.code) != _codes(again.code):
                raise CannotKeep("a graph that reads back as another")
    return content


def read_entry(content: bytes, folder: str) -> Entry:
    """Return the parts that ``write_entry`` wrote. Raises ValueError for another form or version of torch."""
    try:
        text = zlib.decompressobj().decompress(content, MOST_BYTES).decode()
        form = json.loads(text.replace(_FOLDER, _in_json(folder)))
        if form["form"] != _FORM or form["torch"] != _torch_version():
            raise ValueError(f"it was made by torch {form['torch']}, and this is torch {_torch_version()}")
        tape = Tape(form["seed"], [read_value(operation) for operation in form["tape"]])
        parameters, buffers, constants = (
            LazyTensors.of(read_value(entries), read_value(specs), tape, num_operations)
            for entries, specs, num_operations in form["tensors"]
        )
        return Entry(
            read_value(form["model"], constants=Constants(constants, form["constants"], constants.specs)),
            InitialState(parameters, buffers),
            tape,
        )
    except (TypeError, LookupError, AttributeError, RuntimeError, AssertionError, zlib.error) as error:
        raise ValueError(f"it cannot be read: {type(error).__name__}: {error}") from error


def write_value(value: Any, numbers: dict[Node, int] | None = None) -> Json:
    """Return the form of a value; nodes become the numbers given for them. Raises CannotKeep if it has none."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list):
        return [write_value(item, numbers) for item in value]
    kind = type(value).__name__
    if type(value) is tuple:
        return {kind: [write_value(item, numbers) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[write_value(key), write_value(item, numbers)] for key, item in value.items()]}
    if _RECORDS.get(kind) is type(value):
        return {kind: [write_value(getattr(value, name), numbers) for name in _fields(type(value))]}
    if isinstance(value, Node) and numbers is not None:
        return {"node": numbers[value]}
    for kind, (of_type, write, _) in _LEAVES.items():
        if isinstance(value, of_type):
            return {kind: write(value)}
    if callable(value) and not isinstance(value, type):
        return {"function": _write_function(value)}
    raise CannotKeep(f"a {kind}")


def read_value(form: Json, nodes: Sequence[Node] = (), constants: Constants | None = None) -> Any:
    """Return the value that ``write_value`` wrote. Raises ValueError if there is no such form."""
    if isinstance(form, list):
        return [read_value(item, nodes, constants) for item in form]
    if not isinstance(form, dict):
        return form
    ((kind, content),) = form.items()
    if kind == "node":
        return nodes[content]
    if kind == "constants":
        return constants
    if kind == "function":
        return _read_function(content)
    if kind in _LEAVES:
        return _LEAVES[kind][2](content)
    items = read_value(content, nodes, constants)
    if kind == "tuple":
        return tuple(items)
    if kind == "dict":
        return dict(items)
    if kind in _RECORDS:
        return _RECORDS[kind](**dict(zip(_fields(_RECORDS[kind]), items, strict=True)))
    raise ValueError(f"{kind} is no kind of value")


def _fields(record: type) -> list[str]:
    return [field.name for field in fields(record) if field.name not in _OF_A_PROCESS]


def _write_graph(code: GraphModule) -> Json:
    numbers: dict[Node, int] = {}
    forms: list[Json] = []
    for node in code.graph.nodes:
        inner = getattr(code, node.target, None) if node.op == "get_attr" else None
        if node.op not in _OPS and not isinstance(inner, GraphModule):
            raise CannotKeep(f"a graph's {node.op}")
        meta = {key: node.meta[key] for key in _META if isinstance(node.meta.get(key), str)}
        given = [write_value(part, numbers) for part in (node.target, node.args, dict(node.kwargs))]
        forms.append([node.op, node.name, *given, _write_graph(inner) if isinstance(inner, GraphModule) else meta])
        numbers[node] = len(numbers)
    return forms


def _read_graph(forms: Json) -> GraphModule:
    graph, root = Graph(), nn.Module()
    nodes: list[Node] = []
    for op, name, target, args, kwargs, meta in forms:
        is_graph = op == "get_attr" and isinstance(meta, list) and target.isidentifier() and not hasattr(root, target)
        if op not in _OPS and not is_graph:
            raise ValueError(f"a graph's {op} is no operation")
        if is_graph:
            root.add_module(target, _read_graph(meta))
        called, given, named = (read_value(part, nodes) for part in (target, args, kwargs))
        node = graph.create_node(op, called, given, named, name=name)
        node.meta.update({} if is_graph else meta)
        nodes.append(node)
    graph_module = GraphModule(root, graph)
    graph_module.graph.lint()
    return graph_module


def _codes(code: Any) -> list[str]:
    return [module.code for module in code.modules() if isinstance(module, GraphModule)]


def _write_function(function: Any) -> str:
    name = getattr(function, "__name__", "")
    if isinstance(function, OpOverload) and function.namespace in _NAMESPACES:
        return str(function)
    if function is getattr(nn.init, TRUNCATED, None):
        return TRUNCATED
    if isinstance(function, HigherOrderOperator) and name in _OF_GRAPHS:
        return f"higher_order.{name}"
    if function is read_slice:
        return _READ
    if name in _OPERATORS and function is getattr(operator, name):
        return f"operator.{name}"
    raise CannotKeep(f"a call of {function}")


def _read_function(name: str) -> Callable[..., Any]:
    namespace, _, rest = name.partition(".")
    function: Any = None
    if name == TRUNCATED:
        function = getattr(nn.init, TRUNCATED)
    elif name == _READ:
        function = read_slice
    elif namespace == "operator" and rest in _OPERATORS:
        function = getattr(operator, rest)
    elif namespace == "higher_order" and rest in _OF_GRAPHS:
        function = getattr(torch.ops.higher_order, rest)
    elif namespace in _NAMESPACES:
        packet, _, overload = rest.partition(".")
        function = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
        function = function if isinstance(function, OpOverload) else None
    if function is None:
        raise ValueError(f"{name} is no operation of torch")
    return function  # type: ignore[no-any-return]  # looked up by name


def _name(value: object) -> str:
    return str(value).removeprefix("torch.")


def _of_torch(kind: str, name: str) -> Any:
    value = getattr(torch, name)
    if not isinstance(value, _OF_TORCH[kind]):
        raise ValueError(f"torch.{name} is no {kind}")
    return value


def _write_data(tensor: Tensor) -> Json:
    plain = type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.layout is torch.strided
    if not plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise CannotKeep("a tensor that is not plain")
    if not tensor.is_contiguous() or tensor.numel() * tensor.element_size() > _MOST_DATA_BYTES:
        raise CannotKeep(f"a tensor of shape {list(tensor.shape)} that its constructor does not make")
    content = base64.b64encode(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()).decode()
    return [_name(tensor.dtype), list(tensor.shape), list(tensor.stride()), content]


def _read_data(form: Json) -> Tensor:
    name, shape, stride, text = form
    dtype, content = _of_torch("dtype", name), bytearray(base64.b64decode(text, validate=True))
    tensor = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return tensor.as_strided(shape, stride)


_LEAVES: dict[str, tuple[type, Callable[[Any], Json], Callable[[Json], Any]]] = {
    "frozenset": (frozenset, sorted, frozenset),
    "graph": (GraphModule, _write_graph, _read_graph),
    "constants": (Constants, lambda _: None, lambda _: None),
    "data": (Tensor, _write_data, _read_data),
    "complex": (complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "device": (torch.device, str, torch.device),
    **{kind: (of_type, _name, partial(_of_torch, kind)) for kind, of_type in _OF_TORCH.items()},
}
"""Kinds of values that contain no others: their type, and the functions that write and read them."""


def _in_json(folder: str) -> str:
    return json.dumps(f"{folder}/")[1:-1]


def _torch_version() -> str:
    """Return torch's version without its build: a manager without a GPU cuts for workers that have one."""
    return torch.__version__.partition("+")[0]


def _needed(tape: Tape, lazy: Sequence[LazyTensors]) -> list[int]:
    """Return the positions of the operations on which some of the tensors depend."""
    wanted: set[int] = set()
    for tensors in lazy:
        storages = {entry.storage for entry in tensors.entries.values() if isinstance(entry, TensorRef)}
        wanted |= {id(operation) for operation in tape.needed_for(storages, tensors.num_operations)}
    return [place for place, operation in enumerate(tape.operations) if id(operation) in wanted]
