"""The two passes over fixed-point sums as kernels of Triton, for devices that support it (docs/decisions/0001).

One call takes up to ``TENSORS`` tensors, in place of four to eight of torch's kernels for each, with the same bits.
This module is imported only if Triton is present.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 2048
"""The number of elements of one program."""
TENSORS = 32
"""The largest number of tensors of one call: each takes 48 of the 4,096 bytes of a kernel's arguments."""


class Sums(Protocol):
    """One tensor's sums, as ``fixed_point`` has them."""

    @property
    def total(self) -> Tensor:
        """The sums, flat int64."""

    @property
    def largest(self) -> Tensor:
        """The largest magnitude, float64 of shape (1,)."""

    @property
    def exponent(self) -> int:
        """The exponent of the scale."""


@triton.jit
def _place(nums, size: tl.constexpr):
    """Return the tensor of this program and its elements in it. The programs of one tensor are consecutive."""
    program = tl.program_id(0)
    which = program * 0
    begin = program * 0
    end = begin + tl.cdiv(nums[0], size)
    for index in tl.static_range(1, len(nums)):
        is_behind = program >= end
        which = tl.where(is_behind, index, which)
        begin = tl.where(is_behind, end, begin)
        end += tl.cdiv(nums[index], size)
    return which, (program - begin).to(tl.int64) * size + tl.arange(0, size)


@triton.jit
def _of(which, each):
    chosen = each[0]
    for index in tl.static_range(1, len(each)):
        chosen = tl.where(which == index, each[index], chosen)
    return chosen


@triton.jit
def _add(sums, values, largest, scales, scales_too, nums, is_first, size: tl.constexpr):
    """Add the values of several tensors times both scales, rounded to even, and keep the largest magnitudes' bits.

    Values below the power of two from which floats are whole are rounded by adding and subtracting that power.
    """
    which, places = _place(nums, size)
    total = _of(which, sums)
    there = places < _of(which, nums)
    loaded = tl.load(_of(which, values) + places, mask=there, other=0.0)
    whole = 4503599627370496.0 if loaded.dtype == tl.float64 else 8388608.0
    if loaded.dtype != tl.float64:
        loaded = loaded.to(tl.float32)
    scaled = loaded * _of(which, scales) * _of(which, scales_too)
    size_of = tl.abs(scaled)
    rounded = tl.where(size_of < whole, (size_of + whole) - whole, size_of)
    rounded = tl.where(scaled < 0, -rounded, rounded)
    is_added_to = there & (tl.zeros_like(places) == is_first)
    before = tl.load(total + places, mask=is_added_to, other=0)
    tl.store(total + places, before + rounded.to(tl.int64), mask=there)
    bits = tl.abs(loaded).to(tl.float64).to(tl.int64, bitcast=True)
    tl.atomic_max(_of(which, largest), tl.max(bits, 0))


@triton.jit
def _mean(sums, means, scales, nums, divisor, stride, members, size: tl.constexpr):
    """Add up the rows of several tensors' sums, and multiply by a power of two over a whole number, both as float64."""
    which, places = _place(nums, size)
    row = _of(which, sums)
    there = places < _of(which, nums)
    total = tl.load(row + places, mask=there, other=0)
    member = which * 0 + 1  # not a range: Triton's interpreter does not accept a tensor as its bound
    own = places
    while member < members:
        own += stride
        total += tl.load(row + own, mask=there, other=0)
        member += 1
    factor = tl.full([1], 1.0, tl.float64) * _of(which, scales) / tl.full([1], divisor, tl.float64)
    mean = total.to(tl.float64) * factor
    into = _of(which, means)
    tl.store(into + places, mean.to(into.dtype.element_ty), mask=there)


def add(sums: Sequence[Sums], values: Sequence[Tensor], is_first: Sequence[bool]) -> None:
    """See ``fixed_point.add_fixed``; flat, and all on one device."""
    kinds: dict[tuple[torch.dtype, bool, bool], list[tuple[Sums, Tensor]]] = {}
    for target, value, first in zip(sums, values, is_first, strict=True):
        if value.numel() == 0:
            target.largest.clamp_(min=0.0)
        else:
            kinds.setdefault((value.dtype, _is_even(target.total, value), first), []).append((target, value))
    for (_, _, first), pairs in kinds.items():
        for some in _portions(pairs):
            # in two halves, because with a loss scale the factor may not be a normal float32
            halves = [target.exponent // 2 for target, _ in some]
            nums = tuple(value.numel() for _, value in some)
            with torch.cuda.device_of(some[0][1]):  # type: ignore[no-untyped-call]
                _add[(_programs(nums),)](
                    tuple(target.total for target, _ in some),
                    tuple(value for _, value in some),
                    tuple(target.largest.view(torch.int64) for target, _ in some),
                    tuple(2.0**half for half in halves),
                    tuple(2.0 ** (target.exponent - half) for (target, _), half in zip(some, halves, strict=True)),
                    nums,
                    int(first),
                    ELEMENTS,
                )


def mean(totals: Sequence[Tensor], exponents: Sequence[int], divisor: int, into: Sequence[Tensor]) -> None:
    """See ``fixed_point.from_fixed``; into float32 or float64, with rows equally far apart in all tensors."""
    every = [row for row in zip(totals, exponents, into, strict=True) if row[2].numel()]
    even = [_is_even(total, means) for total, _, means in every]
    kinds = [[row for row, is_even in zip(every, even, strict=True) if is_even == wanted] for wanted in (True, False)]
    for some in (some for kind in kinds for some in _portions(kind)):
        rows = some[0][0]
        nums = tuple(means.numel() for _, _, means in some)
        with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
            _mean[(_programs(nums),)](
                tuple(total for total, _, _ in some),
                tuple(means for _, _, means in some),
                tuple(2.0**-exponent for _, exponent, _ in some),
                nums,
                divisor,
                rows.stride(0),
                len(rows),
                ELEMENTS,
            )


def _is_even(total: Tensor, values: Tensor) -> bool:
    """Return whether a kernel may move several numbers at once; every tensor must allow it."""
    return values.numel() % 16 == 0 and not (total.data_ptr() % 16 or values.data_ptr() % 16)


def _portions(tensors: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (tensors[first : first + TENSORS] for first in range(0, len(tensors), TENSORS))


def _programs(nums: Sequence[int]) -> int:
    return sum(triton.cdiv(num, ELEMENTS) for num in nums)
