"""The two passes over fixed-point sums, each in one kernel of Triton, for devices that have it (docs/decisions/0001).

``fixed_point`` calls them in place of four to eight kernels of torch's, with what lies between in memory. Bits are the
same. Imported only where Triton is: torch's builds for GPUs bring it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 2048
"""Of one program."""


@triton.jit
def _add(sums, values, largest, scale, scale_too, num, size: tl.constexpr):
    """Add ``values`` times both scales, rounded to even, and keep the largest magnitude's bits as float64.

    Both scales are powers of two. Floats that are not negative are ordered as their bits, NaN after infinity. What is
    below the power of two from which on floats are whole is rounded, to even, by adding that and taking it off again.
    """
    places = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    there = places < num
    found = tl.load(values + places, mask=there, other=0.0)
    whole = 4503599627370496.0 if values.dtype.element_ty == tl.float64 else 8388608.0
    if values.dtype.element_ty != tl.float64:
        found = found.to(tl.float32)
    scaled = found * scale * scale_too
    size_of = tl.abs(scaled)
    rounded = tl.where(size_of < whole, (size_of + whole) - whole, size_of)
    rounded = tl.where(scaled < 0, -rounded, rounded)
    before = tl.load(sums + places, mask=there, other=0)
    tl.store(sums + places, before + rounded.to(tl.int64), mask=there)
    bits = tl.abs(found).to(tl.float64).to(tl.int64, bitcast=True)
    tl.atomic_max(largest, tl.max(bits, 0))


@triton.jit
def _mean(sums, means, scale, divisor, num, stride, members, size: tl.constexpr):
    """Add up the rows of ``sums``, and multiply by a power of two over a whole number, both as float64."""
    places = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    there = places < num
    total = tl.load(sums + places, mask=there, other=0)
    for member in range(1, members):
        total += tl.load(sums + member * stride + places, mask=there, other=0)
    factor = tl.full([1], scale, tl.float64) / tl.full([1], divisor, tl.float64)
    mean = total.to(tl.float64) * factor
    tl.store(means + places, mean.to(means.dtype.element_ty), mask=there)


def add(total: Tensor, values: Tensor, exponent: int, largest: Tensor) -> None:
    """See ``fixed_point.add_fixed``; all on one device, contiguous."""
    half = exponent // 2  # what a loss scale takes off may leave no ordinary float32
    programs = (triton.cdiv(values.numel(), ELEMENTS),)
    bits = largest.view(torch.int64)
    with torch.cuda.device_of(values):  # type: ignore[no-untyped-call]
        _add[programs](total, values, bits, 2.0**half, 2.0 ** (exponent - half), values.numel(), ELEMENTS)


def mean(totals: Tensor, exponent: int, divisor: int, into: Tensor) -> None:
    """See ``fixed_point.from_fixed``; into float32 or float64, elements one behind the other."""
    members, num = totals.shape
    programs = (triton.cdiv(num, ELEMENTS),)
    with torch.cuda.device_of(totals):  # type: ignore[no-untyped-call]
        _mean[programs](totals, into, 2.0**-exponent, divisor, num, totals.stride(0), members, ELEMENTS)
