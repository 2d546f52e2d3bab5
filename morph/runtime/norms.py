"""Squared norms of gradients with the same bits on every holder, machine and device."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

_CHUNK = 1 << 20


def squared_norm(tensors: Iterable[Tensor]) -> float:
    """Sum of squares over all elements, in float64.

    ``torch.sum`` adds in an order that depends on the processor and the number of threads. Here the elements of a
    chunk are folded in halves, by additions of whole tensors; chunks are added by ``fsum``, whose result does not
    depend on their order.
    """
    return math.fsum(
        _folded(chunk.to(torch.float64).square())
        for tensor in tensors
        for chunk in torch.split(tensor.detach().reshape(-1), _CHUNK)
        if chunk.numel()
    )


def _folded(values: Tensor) -> float:
    while values.numel() > 1:
        half = (values.numel() + 1) // 2
        head, tail = values[:half], values[half:]
        head[: tail.numel()] += tail
        values = head
    return float(values)
