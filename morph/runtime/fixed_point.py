"""Gradients as 64-bit fixed point, so that their sum does not depend on the order (docs/decisions/0001).

A tensor's scale is an exponent e: a gradient g is stored as round(g * 2**e) in int64. Scaling by a
power of two is exact in floating point, integer addition is associative, so sums over micro-batches,
replicas and tied sections are the same bits in every shape.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SUM_BITS = 62
"""A sum must stay below 2**62 in magnitude."""

GROWTH_BITS = 6
"""Head-room kept above the largest gradient of the last step: it may grow 64-fold without a redo."""

FIRST_LARGEST_EXPONENT = 4
"""Before the first step, gradients are taken to stay below 2**4."""

MIN_EXPONENT, MAX_EXPONENT = -120, 120
"""2**e stays an ordinary float32, and every finite float32 gradient fits at the smallest scale."""


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


def to_fixed(gradient: Tensor, exponent: int) -> Tensor:
    """Round a floating-point gradient to int64 at a scale."""
    wide = gradient if gradient.dtype in (torch.float32, torch.float64) else gradient.to(torch.float32)
    if not MIN_EXPONENT <= exponent <= MAX_EXPONENT:  # with a loss scale on top: no ordinary float32
        wide = wide.to(torch.float64)
    return (wide * 2.0**exponent).round_().to(torch.int64)


def from_fixed(total: Tensor, exponent: int, divisor: int, dtype: torch.dtype) -> Tensor:
    """Turn a fixed-point sum into the mean gradient: total * 2**-e / divisor, in float64, then in ``dtype``."""
    return (total.to(torch.float64) * (2.0**-exponent / divisor)).to(dtype)
