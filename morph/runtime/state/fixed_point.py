"""Gradients as 64-bit fixed point, so that their sum does not depend on the order (docs/decisions/0001).

A tensor's scale is an exponent e: a gradient g is stored as round(g * 2**e) in int64. Scaling by a
power of two is exact in floating point, integer addition is associative, so sums over micro-batches,
replicas and tied sections are the same bits in every shape.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SUM_BITS = 62
"""A sum must stay below 2**62 in magnitude."""

GROWTH_BITS = 6
"""Head-room kept above the largest gradient of the last step: it may grow 64-fold without a redo."""

FIRST_LARGEST_EXPONENT = 4
"""Before the first step, gradients are taken to stay below 2**4."""

MIN_EXPONENT, MAX_EXPONENT = -120, 120
"""2**e stays an ordinary float32, and every finite float32 gradient fits at the smallest scale."""

BLOCK = 1 << 15
"""Elements converted at a time, so that what lies between two passes stays in a core's own cache."""

Floats = NDArray[Any]
"""A flat numpy array of float32 or float64."""


def limit_bits(num_contributions: int) -> int:
    """Bits that one contribution may use so that ``num_contributions`` of them cannot overflow."""
    return SUM_BITS - math.ceil(math.log2(num_contributions)) if num_contributions > 1 else SUM_BITS


def first_exponent(num_contributions: int) -> int:
    """Scale exponent of a tensor whose gradients have not been seen yet."""
    return limit_bits(num_contributions) - FIRST_LARGEST_EXPONENT


def next_exponent(exponent: int, largest: float, num_contributions: int) -> int:
    """Scale exponent for the next step, from the largest magnitude that any contribution of this step had.

    Depends on shape-independent numbers only. A tensor with zero gradients keeps its scale.
    """
    if largest == 0.0:
        return exponent
    _, bits = math.frexp(largest)  # largest < 2**bits
    return max(MIN_EXPONENT, min(MAX_EXPONENT, limit_bits(num_contributions) - GROWTH_BITS - bits))


def fits(exponent: int, largest: float, num_contributions: int) -> bool:
    """Whether contributions up to ``largest`` can be summed at this scale."""
    if largest == 0.0 or not math.isfinite(largest):
        return largest == 0.0
    _, bits = math.frexp(largest)  # 2**(bits-1) <= largest < 2**bits
    return bits + exponent <= limit_bits(num_contributions)


def flat_floats(gradient: Tensor) -> Floats:
    """View a gradient as a flat array of float32 or float64; copied if it lies elsewhere, otherwise, or is narrower."""
    host = gradient.detach().to("cpu")
    wide = host if host.dtype in (torch.float32, torch.float64) else host.to(torch.float32)
    array: Floats = wide.reshape(-1).numpy()
    return array


def largest_magnitude(values: Floats) -> float:
    """The largest magnitude in a flat array; NaN or infinite if one of them is. 0 if there are none."""
    return max(float(values.max()), -float(values.min())) if values.size else 0.0


def add_fixed(total: Tensor, values: Floats, exponent: int) -> None:
    """Round a gradient to int64 at a scale and add it to ``total`` (int64, flat, on the host, of as many elements).

    numpy's loops, because torch multiplies by ``alpha`` in each addition of integers, which takes three times as long.
    """
    if not MIN_EXPONENT <= exponent <= MAX_EXPONENT:  # with a loss scale on top: no ordinary float32
        values = values.astype(np.float64, copy=False)
    sums, scale = total.numpy(), values.dtype.type(2.0**exponent)
    scaled = np.empty(min(BLOCK, values.size), values.dtype)
    rounded = np.empty(len(scaled), np.int64)
    for start in range(0, values.size, BLOCK):
        block, into = values[start : start + BLOCK], sums[start : start + BLOCK]
        some, whole = scaled[: len(block)], rounded[: len(block)]
        np.multiply(block, scale, out=some)
        np.rint(some, out=some)
        np.copyto(whole, some, casting="unsafe")
        np.add(into, whole, out=into)


def from_fixed(total: Tensor, exponent: int, divisor: int, dtype: torch.dtype) -> Tensor:
    """Turn a flat fixed-point sum into the mean gradient: total * 2**-e / divisor, in float64, then in ``dtype``."""
    mean = torch.empty_like(total, dtype=dtype)
    for block, into in zip(torch.split(total, BLOCK), torch.split(mean, BLOCK), strict=True):
        into.copy_(block.to(torch.float64).mul_(2.0**-exponent / divisor))
    return mean
