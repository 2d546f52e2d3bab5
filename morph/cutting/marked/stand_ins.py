"""What a module returns that is not run: zeros of the shapes that it returned in the trial."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map


@dataclass(frozen=True)
class _Zeros:
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _PackedZeros:
    """Of as many steps as the packed sequence that the module is given has."""

    features: tuple[int, ...]
    dtype: torch.dtype


def _is_packed(value: object) -> bool:
    return isinstance(value, PackedSequence)


def remember(result: Any) -> Any:
    """Return what to keep of a module's result."""
    return tree_map(_remembered, result, is_leaf=_is_packed)


def _remembered(value: Any) -> Any:
    if isinstance(value, PackedSequence):
        return _PackedZeros(tuple(value.data.shape[1:]), value.data.dtype)
    return _Zeros(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


def fill(remembered: Any, args: tuple[Any, ...], device: torch.device) -> Any:
    """Return zeros in place of what was remembered, for a call with ``args``."""
    packed = next(filter(_is_packed, tree_leaves(args, is_leaf=_is_packed)), None)

    def filled(value: Any) -> Any:
        if isinstance(value, _PackedZeros) and packed is not None:
            zeros = torch.zeros((len(packed.data), *value.features), dtype=value.dtype, device=device)
            return PackedSequence(zeros, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
        return torch.zeros(value.shape, dtype=value.dtype, device=device) if isinstance(value, _Zeros) else value

    return tree_map(filled, remembered)
