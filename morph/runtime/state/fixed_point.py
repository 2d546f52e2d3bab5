"""Gradients as 64-bit fixed point, so that their sum does not depend on the order (docs/decisions/0001).

A tensor's scale is an exponent e: a gradient g is stored as round(g * 2**e) in int64. Scaling by a
power of two is exact in floating point, integer addition is associative, so sums over micro-batches,
replicas and tied sections are the same bits in every shape.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from morph.user_cache import cache_folder, keep_as_it_is

# Where numba keeps what it compiles of Morph's loops: once for a user, wherever the code lies.
#
# Numba keeps it beside the file that has a function, and looks for it by that file's path. On each VM that file has
# another one, which goes with the VM's node: every node on a host, and every start of it, compiled the same anew.


_FOLDER = "loops"


def kept_for_user(loop: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as if its file lay in this user's cache; itself where nothing can be kept there.

    The file is a copy by a name that stands for its content, numba's version and the processor: what was compiled of
    other code, or for another processor on shared storage, is not found.
    """
    import numba
    from numba.core.registry import cpu_target

    assert isinstance(loop, FunctionType)
    try:
        source = Path(loop.__code__.co_filename).read_bytes()
    except OSError:  # it lies in an archive
        return loop
    about = f"{numba.__version__} {cpu_target.target_context.codegen().magic_tuple()}\n".encode()
    name = f"loops_{hashlib.sha256(about + source).hexdigest()}.py"
    copy = keep_as_it_is(cache_folder() / _FOLDER, name, source)
    if copy is None:
        return loop
    return FunctionType(loop.__code__.replace(co_filename=str(copy)), loop.__globals__, loop.__name__)


log = logging.getLogger(__name__)

SUM_BITS = 62
"""A sum must stay below 2**62 in magnitude."""

GROWTH_BITS = 6
"""Head-room kept above the largest gradient of the last step: it may grow 64-fold without a redo."""

FIRST_LARGEST_EXPONENT = 4
"""Before the first step, gradients are taken to stay below 2**4."""

MIN_EXPONENT, MAX_EXPONENT = -120, 120
"""2**e stays an ordinary float32, and every finite float32 gradient fits at the smallest scale."""

_HOST = torch.device("cpu")

BLOCK = 1 << 22
"""Elements that are turned back at a time on a device, so that what lies between takes little of its memory."""


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


def add_fixed(total: Tensor, gradient: Tensor, exponent: int, largest: Tensor) -> None:
    """Round a gradient to int64 at a scale, add it, and keep the largest magnitude. Nothing waits for the device.

    What is too large for the scale, or not finite, leaves any sum, and a ``largest`` that tells.

    Args:
        total: Flat int64 sums, as many as the gradient has elements, on its device.
        gradient: Of any floating type.
        exponent: The scale's.
        largest: A float64 of shape (1,), on the same device; grows to the largest magnitude, NaN if one is NaN. A
            negative one says that nothing was added before.
    """
    values = gradient.detach().reshape(-1)
    if values.numel() == 0:
        largest.clamp_(min=0.0)
        return
    fused = _fused(values.device)
    if fused is not None:
        fused.add(total, values, exponent, largest)
        return
    if values.dtype not in (torch.float32, torch.float64):
        values = values.to(torch.float32)
    if _on_processor(values):
        array = values.numpy()
        bits = np.array([2**31 - 1], np.uint32) if values.dtype == torch.float32 else np.array([2**63 - 1], np.uint64)
        sums, scale, top = total.numpy(), 2.0**exponent, bits.view(array.dtype)
        _loops().add(sums, array, array.view(bits.dtype), scale, largest.numpy(), bits, top)
        return
    _add_by_torch(total, values, exponent, largest)


def _add_by_torch(total: Tensor, values: Tensor, exponent: int, largest: Tensor) -> None:
    # with a loss scale on top, the factor may be no ordinary float32
    wide = values if MIN_EXPONENT <= exponent <= MAX_EXPONENT else values.to(torch.float64)
    total.add_((wide * 2.0**exponent).round_().to(torch.int64))
    torch.maximum(largest, values.abs().amax().to(torch.float64), out=largest)


def from_fixed(totals: Tensor, exponent: int, divisor: int, into: Tensor) -> None:
    """Turn fixed-point sums into mean gradients: total * 2**-e / divisor, in float64, then in the type of ``into``.

    Args:
        totals: int64 of shape (members, elements): what is added up are the sums of each.
        exponent: The scale's.
        divisor: N.
        into: Flat, of so many elements, on the device of ``totals``.
    """
    if into.dtype in (torch.float32, torch.float64) and into.numel():
        fused = _fused(totals.device)
        if fused is not None:
            fused.mean(totals, exponent, divisor, into)
            return
        if _on_processor(totals):
            _loops().mean(totals.numpy(), 2.0**-exponent / divisor, into.numpy())
            return
    _mean_by_torch(totals, exponent, divisor, into)


def _mean_by_torch(totals: Tensor, exponent: int, divisor: int, into: Tensor) -> None:
    scale = 2.0**-exponent / divisor
    for rows, some in zip(torch.split(totals, BLOCK, dim=1), torch.split(into, BLOCK), strict=True):
        some.copy_(rows.sum(0).to(torch.float64).mul_(scale))


def to_fixed(means: Tensor, exponent: int, divisor: int, into: Tensor) -> None:
    """Find sums that ``from_fixed`` turns into these means, bit for bit. There are some, since each mean is of a sum.

    The quotient is off by a few roundings at most: one of its neighbours is such a sum.

    Args:
        means: Flat; made by ``from_fixed`` with the same exponent and divisor.
        exponent: The scale's.
        divisor: N.
        into: int64, as many.
    """
    scale = 2.0**-exponent / divisor
    guess = (means.to(torch.float64) / scale).round_()
    spacing = torch.clamp((torch.nextafter(guess.abs(), guess.new_tensor(math.inf)) - guess.abs()), min=1.0)
    found = guess.clone()
    for steps in (1, -1, 2, -2):
        wrong = (found * scale).to(means.dtype) != means
        found = torch.where(wrong, guess + steps * spacing, found)
    into.copy_(found)


@cache
def _fused(device: torch.device) -> ModuleType | None:
    """One kernel of Triton for each pass, on a CUDA device on which they find the bits that torch's kernels find.

    None where they do not, or cannot be compiled: torch's do the same, more slowly.
    """
    if device.type != "cuda":
        return None
    try:
        from morph.runtime.state import fused_sums  # Triton is there with torch's builds for GPUs alone

        _compare(fused_sums, device)
    except Exception as error:
        log.warning(
            "gradients are summed by several kernels on %s, not one: %s: %s", device, type(error).__name__, error
        )
        return None
    return fused_sums


def _compare(fused: ModuleType, device: torch.device) -> None:
    """Try the fused kernels.

    Raises:
        ValueError: they find other bits than torch's kernels.
    """
    values = (torch.arange(-4096, 4096, device=device) / 64).to(torch.float32).exp2_()
    values[::3] *= -1
    found = []
    for add, mean in ((fused.add, fused.mean), (_add_by_torch, _mean_by_torch)):
        total = torch.ones(len(values), dtype=torch.int64, device=device)
        largest, means = torch.zeros(1, dtype=torch.float64, device=device), torch.empty_like(values)
        for exponent in (-40, -3, 0):
            add(total, values, exponent, largest)
        mean(total.view(2, -1), 5, 12, means[: len(values) // 2])
        found.append((total.tolist(), largest.tolist(), means[: len(values) // 2].tolist()))
    if found[0] != found[1]:
        raise ValueError("the kernel finds other bits than torch's")


def _on_processor(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _add(total: Any, values: Any, bits: Any, scale: Any, largest: Any, mask: Any, top: Any) -> None:
    """Without its sign bit, a float's bits are ordered as its magnitude: infinity, then NaN last.

    ``bits`` are those of ``values``; ``mask`` are those of ``top``, and say first which bits are no sign.
    """
    no_sign = mask[0]
    most = bits[0] & no_sign
    for i in range(values.size):
        total[i] += np.int64(np.rint(np.float64(values[i]) * scale))
        most = max(most, bits[i] & no_sign)
    mask[0] = most
    magnitude = np.float64(top[0])
    if magnitude > largest[0] or np.isnan(magnitude):
        largest[0] = magnitude


def _mean(totals: Any, scale: Any, into: Any) -> None:
    for i in range(into.size):
        total = totals[0, i]
        for member in range(1, totals.shape[0]):
            total += totals[member, i]
        into[i] = np.float64(total) * scale


def prepare(device: torch.device = _HOST) -> None:
    """Load and compile what adding float32 gradients there needs (half a second), so that no step has to."""
    total, mean = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, device=device)
    add_fixed(total, mean, 0, torch.zeros(1, dtype=torch.float64, device=device))
    from_fixed(total.view(1, 1), 0, 1, mean)


@cache
def _loops() -> SimpleNamespace:
    """The loops above for the processor, compiled once for each user: one pass each, where torch takes five."""
    import numba  # takes 0.2 s, for which a worker that sums nothing need not wait

    compiled = numba.njit(cache=True, nogil=True)
    return SimpleNamespace(add=compiled(kept_for_user(_add)), mean=compiled(kept_for_user(_mean)))
