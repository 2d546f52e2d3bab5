"""What an operation reads and writes, split into influences that do not touch each other.

An ordinary operation is one influence. ``torch._foreach_*`` and fused optimizer operations take lists and work on the
first entries, the second entries, ... by themselves: one influence per index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

_OVERWRITING = {"copy_", "zero_", "fill_", "normal_", "uniform_", "_foreach_copy_", "_foreach_zero_", "bernoulli_"}
_PER_ENTRY = ("_foreach_", "_fused_")
_SHAPE_ONLY = ("new_empty", "new_full", "new_ones", "new_zeros", "new_empty_strided")


@dataclass(frozen=True)
class Influence:
    """Tensors that may influence each other in one operation.

    ``reads``: tensors whose values are read, those changed in place among them. ``overwrites``: the written ones' old
    values do not matter.
    """

    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    overwrites: bool = False


@dataclass(frozen=True)
class _Argument:
    tensors: tuple[Tensor | None, ...]
    is_list: bool
    written: bool
    out: bool


def name_of(operation: OpOverload) -> str:
    """Return the operation's name without namespace and overload."""
    return operation._schema.name.partition("::")[2]


def is_random(operation: OpOverload) -> bool:
    """Whether it draws from torch's generators."""
    return torch.Tag.nondeterministic_seeded in operation.tags


def takes_only_shapes(operation: OpOverload) -> bool:
    """Whether the values of its arguments do not matter (``zeros_like``, ``new_empty``)."""
    name = name_of(operation)
    return name.endswith("_like") or name in _SHAPE_ONLY


def influences_of(operation: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> list[Influence]:
    """Split one call of an operation into influences."""
    arguments = _arguments(operation, args, kwargs)
    name = name_of(operation)
    overwrites = name in _OVERWRITING or any(argument.out for argument in arguments)
    if name.startswith(_PER_ENTRY) and arguments and arguments[0].is_list:
        return _per_entry(arguments, result, overwrites)
    written = _flat(argument for argument in arguments if argument.written)
    read = _flat(argument for argument in arguments if not (argument.out or (overwrites and argument.written)))
    return [Influence(read, written, tensors_in(result), overwrites)]


def tensors_in(value: Any) -> tuple[Tensor, ...]:
    """Return the tensors in a value, a list or a tuple, however deep."""
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, list | tuple):
        return tuple(tensor for item in value for tensor in tensors_in(item))
    return ()


def _arguments(operation: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> list[_Argument]:
    found: list[_Argument] = []
    for position, argument in enumerate(operation._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        is_list = isinstance(value, list | tuple)
        entries: tuple[Any, ...] = tuple(value) if isinstance(value, list | tuple) else (value,)
        tensors = tuple(entry if isinstance(entry, Tensor) else None for entry in entries)
        if any(tensor is not None for tensor in tensors):
            written = argument.alias_info is not None and argument.alias_info.is_write
            found.append(_Argument(tensors, is_list, written, written and argument.kwarg_only))
    return found


def _per_entry(arguments: list[_Argument], result: Any, overwrites: bool) -> list[Influence]:
    lists = [argument for argument in arguments if argument.is_list]
    single = [argument for argument in arguments if not argument.is_list]
    shared = _flat(argument for argument in single if not argument.written)
    results = list(result) if isinstance(result, list | tuple) else []
    influences: list[Influence] = []
    for index in range(len(lists[0].tensors)):
        reads = [a.tensors[index] for a in lists if index < len(a.tensors) and not (overwrites and a.written)]
        writes = [a.tensors[index] for a in lists if index < len(a.tensors) and a.written]
        made = tensors_in(results[index]) if len(results) == len(lists[0].tensors) else ()
        influences.append(Influence((*_present(reads), *shared), _present(writes), made, overwrites))
    together = _flat(argument for argument in single if argument.written)  # found_inf of a loss scaler
    if together:
        influences.append(Influence((*_flat(lists), *together), together, ()))
    return influences


def _flat(arguments: Any) -> tuple[Tensor, ...]:
    return tuple(tensor for argument in arguments for tensor in _present(argument.tensors))


def _present(tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in tensors if tensor is not None)
