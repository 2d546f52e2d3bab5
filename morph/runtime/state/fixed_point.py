"""Sums gradients in 64-bit fixed point, so that the sum does not depend on the order (docs/decisions/0001).

A gradient g is stored as round(g * 2**e) in int64, with an exponent e for each tensor: scaling by a power of two is
exact, and integer addition is associative, so sums have the same bits in every shape.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from morph.runtime.state.loops import Loops

log = logging.getLogger(__name__)

SUM_BITS = 62
"""A sum must stay below 2**62 in magnitude."""

GROWTH_BITS = 6
"""Head-room kept above the largest gradient of the last step: it may grow 64-fold without a redo."""

FIRST_LARGEST_EXPONENT = 4
"""Before the first step, gradients are assumed to stay below 2**4."""

MIN_EXPONENT, MAX_EXPONENT = -120, 120
"""2**e stays an ordinary float32, and every finite float32 gradient fits at the smallest scale."""

_HOST = torch.device("cpu")

_LOOPED = (torch.float32, torch.float64)
"""Types of gradients for the processor's loop, and of means from a loop or a kernel."""

BLOCK = 1 << 22
"""Elements converted at a time on a device, so that intermediate results take little of its memory."""


def limit_bits(num_contributions: int) -> int:
    """Return the bits that one contribution may use so that ``num_contributions`` of them cannot overflow."""
    return SUM_BITS - math.ceil(math.log2(num_contributions)) if num_contributions > 1 else SUM_BITS


def first_exponent(num_contributions: int) -> int:
    """Return the scale exponent of a tensor whose gradients are not known yet."""
    return limit_bits(num_contributions) - FIRST_LARGEST_EXPONENT


def next_exponent(exponent: int, largest: float, num_contributions: int) -> int:
    """Return the next step's scale exponent, from this step's largest magnitude; zero gradients keep the scale."""
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


@dataclass(frozen=True, slots=True)
class FixedSum:
    """One tensor's fixed-point sums (``total``, flat int64), and their addresses on the host for the compiled loops.

    ``largest``: float64 of shape (1,), on the same device: a magnitude, NaN if one is, negative before the first.
    """

    total: Tensor
    largest: Tensor
    exponent: int
    addresses: tuple[int, int] | None = None


def fixed_sum(total: Tensor, largest: Tensor, exponent: int) -> FixedSum:
    """Return empty sums at a scale."""
    addresses = (total.data_ptr(), largest.data_ptr()) if _on_processor(total) else None
    return FixedSum(total, largest, exponent, addresses)


def add_fixed(sums: Sequence[FixedSum], gradients: Sequence[Tensor], is_first: Sequence[bool]) -> None:
    """Round gradients to int64 at their scales, add each to its sums, and keep the largest magnitudes.

    All are on one device, of equal sizes. If a value does not fit, the sum is undefined, and ``largest`` shows it.
    """
    if sums and sums[0].addresses is not None:
        for fixed, gradient, first in zip(sums, gradients, is_first, strict=True):
            _add_on_processor(fixed, gradient, first)
        return
    flat = [gradient.detach().reshape(-1) for gradient in gradients]
    fused = _fused(sums[0].total.device) if sums else None
    if fused is not None:
        fused.add(sums, flat, is_first)
        return
    _add_each_by_torch(sums, flat, is_first)


def _add_on_processor(fixed: FixedSum, gradient: Tensor, first: bool) -> None:
    assert fixed.addresses is not None, "sums of two devices"
    total, largest = fixed.addresses
    if gradient.dtype not in _LOOPED or gradient.is_neg() or not gradient.is_contiguous():
        wide = gradient.dtype if gradient.dtype in _LOOPED else torch.float32
        gradient = gradient.detach().resolve_neg().to(wide).contiguous()
    loops = _loops(gradient.dtype)
    if loops is None:
        _add_each_by_torch([fixed], [gradient.detach().reshape(-1)], [first])
        return
    loops.add(total, gradient.data_ptr(), gradient.numel(), 2.0**fixed.exponent, largest, first)


def _add_by_torch(fixed: FixedSum, values: Tensor) -> None:
    if values.numel() == 0:
        fixed.largest.clamp_(min=0.0)
        return
    if values.dtype not in (torch.float32, torch.float64):
        values = values.to(torch.float32)
    # with a loss scale too, the factor may not be a normal float32
    wide = values if MIN_EXPONENT <= fixed.exponent <= MAX_EXPONENT else values.to(torch.float64)
    fixed.total.add_((wide * 2.0**fixed.exponent).round_().to(torch.int64))
    torch.maximum(fixed.largest, values.abs().amax().to(torch.float64), out=fixed.largest)


def from_fixed(totals: Sequence[Tensor], exponents: Sequence[int], divisor: int, into: Sequence[Tensor]) -> None:
    """Turn fixed-point sums into mean gradients: total * 2**-e / divisor, in float64, then in the type of ``into``.

    ``totals``: int64 (members, elements), contiguous, to be added over members; ``divisor``: N; ``into``: flat.
    """
    if into and into[0].dtype in _LOOPED:
        fused = _fused(into[0].device)
        if fused is not None:
            fused.mean(totals, exponents, divisor, into)
            return
        loops = _loops(into[0].dtype) if _on_processor(into[0]) else None
        if loops is not None:
            _mean_each_by_loop(loops, totals, exponents, divisor, into)
            return
    _mean_each_by_torch(totals, exponents, divisor, into)


def _mean_by_torch(totals: Tensor, exponent: int, divisor: int, into: Tensor) -> None:
    scale = 2.0**-exponent / divisor
    for rows, some in zip(torch.split(totals, BLOCK, dim=1), torch.split(into, BLOCK), strict=True):
        some.copy_(rows.sum(0).to(torch.float64).mul_(scale))


def to_fixed(means: Tensor, exponent: int, divisor: int, into: Tensor) -> None:
    """Find sums that ``from_fixed`` turns into these means (flat), bit for bit, into int64 of as many elements.

    The product is off by at most a few roundings: one of its neighbours is such a sum.
    """
    scale = 2.0**-exponent / divisor
    guess = (means.to(torch.float64) / scale).round_()
    spacing = torch.clamp((torch.nextafter(guess.abs(), guess.new_tensor(math.inf)) - guess.abs()), min=1.0)
    nearest = guess.clone()
    for steps in (1, -1, 2, -2):
        wrong = (nearest * scale).to(means.dtype) != means
        nearest = torch.where(wrong, guess + steps * spacing, nearest)
    into.copy_(nearest)


@cache
def _fused(device: torch.device) -> ModuleType | None:
    """Return one Triton kernel for each pass, if they give the same bits as torch's kernels on a device, else None."""
    if device.type != "cuda":
        return None
    try:
        from morph.runtime.state import fused_sums  # only torch's builds for GPUs include Triton

        _compare(fused_sums, device, torch.float32)
    except Exception as error:
        log.warning(
            "gradients are summed by several kernels on %s, not one: %s: %s", device, type(error).__name__, error
        )
        return None
    return fused_sums


@cache
def _loops(dtype: torch.dtype) -> Loops | None:
    """Return one compiled loop for each pass over numbers of this type on the processor; None as in ``_fused``."""
    try:
        from morph.runtime.state.loops import compile_loops  # a worker without sums need not wait for llvmlite

        loops = compile_loops(dtype)

        def add(sums: Sequence[FixedSum], flat: Sequence[Tensor], is_first: Sequence[bool]) -> None:
            for fixed, values, first in zip(sums, flat, is_first, strict=True):
                addresses = fixed.total.data_ptr(), fixed.largest.data_ptr()
                loops.add(addresses[0], values.data_ptr(), len(values), 2.0**fixed.exponent, addresses[1], first)

        _compare(SimpleNamespace(add=add, mean=partial(_mean_each_by_loop, loops)), _HOST, dtype)
    except Exception as error:
        log.warning("gradients are summed by several passes of torch, not one: %s: %s", type(error).__name__, error)
        return None
    return loops


def _compare(kernels: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Try kernels or loops for numbers of a type. Raises ValueError if they give other bits than torch's kernels."""
    values = (torch.arange(-4096, 4096, device=device) / 64).to(dtype).exp2_()
    values[::3] *= -1
    sizes = [1, 5000, 3191]
    some = torch.split(values, sizes)
    results = []
    for each in (kernels, SimpleNamespace(add=_add_each_by_torch, mean=_mean_each_by_torch)):
        total = torch.ones(len(values), dtype=torch.int64, device=device)
        largest, means = torch.zeros(len(some), dtype=torch.float64, device=device), torch.empty_like(values[:4096])
        for number, exponents in enumerate(((-40, 0, -3), (-3, -40, 0), (0, -3, -40))):
            places = zip(torch.split(total, sizes), torch.split(largest, 1), exponents, strict=True)
            each.add([fixed_sum(*place) for place in places], some, [False, number == 1, False])
        rows = total.view(2, -1)
        halves = [rows[:, :1000], rows[:, 1000:]], [5, 7], 12, [means[:1000], means[1000:]]
        each.mean(*halves)
        results.append((total.tolist(), largest.tolist(), means.tolist()))
    if results[0] != results[1]:
        raise ValueError("it gives other bits than torch does")


def _add_each_by_torch(sums: Sequence[FixedSum], flat: Sequence[Tensor], is_first: Sequence[bool]) -> None:
    for fixed, values, first in zip(sums, flat, is_first, strict=True):
        if first:
            fixed.total.zero_()
        _add_by_torch(fixed, values)


def _mean_each_by_loop(
    loops: Loops, totals: Sequence[Tensor], exponents: Sequence[int], divisor: int, into: Sequence[Tensor]
) -> None:
    for rows, exponent, means in zip(totals, exponents, into, strict=True):
        size = len(rows), rows.shape[1], rows.stride(0)
        loops.mean(rows.data_ptr(), *size, 2.0**-exponent / divisor, means.data_ptr())


def _mean_each_by_torch(
    totals: Sequence[Tensor], exponents: Sequence[int], divisor: int, into: Sequence[Tensor]
) -> None:
    for rows, exponent, means in zip(totals, exponents, into, strict=True):
        _mean_by_torch(rows, exponent, divisor, means)


def _on_processor(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def prepare(device: torch.device = _HOST) -> None:
    """Compile and check the code for adding float32 gradients on a device, so that no step has to."""
    total, mean = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, device=device)
    add_fixed([fixed_sum(total, torch.zeros(1, dtype=torch.float64, device=device), 0)], [mean], [True])
    from_fixed([total.view(1, 1)], [0], 1, [mean])
