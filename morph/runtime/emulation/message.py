"""The head of an emulated message: its due time, its step and micro-batch, and a number that depends on its past.

A micro-batch's value passes every section forwards, and each section's parameters and random numbers change it; its
gradient passes backwards. So errors in order, messages or state show in the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from morph.contract.emulation import HEADER_NUMBERS
from morph.cutting.sections.section import BoundaryTensor

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
LOSS_GRADIENT = 0.5
_KEEP = 0.75
_GRADIENT_SIZE = 1e-2


@dataclass(frozen=True)
class Head:
    """The head. ``value`` stands for the message's contents; step and micro-batch reveal a misdirected message."""

    step: int
    micro_batch: int
    value: float


def border(real_bytes: int) -> BoundaryTensor:
    """Return a tensor of this many bytes that crosses an emulated cut-point."""
    return BoundaryTensor("emulated", (max(HEADER_NUMBERS, real_bytes // 8),), torch.float64, True)


def write_head(message: Tensor, head: Head) -> None:
    """Put a head on a message."""
    message[2:HEADER_NUMBERS] = torch.tensor([head.step, head.micro_batch, head.value], dtype=torch.float64)


def read_head(message: Tensor, step: int, micro_batch: int) -> float:
    """Return the value of a message that must belong to this step and micro-batch."""
    found_step, found_micro_batch, value = message[2:HEADER_NUMBERS].tolist()
    assert (found_step, found_micro_batch) == (step, micro_batch), (
        f"a message of step {found_step:g}, micro-batch {found_micro_batch:g} came for {step}, {micro_batch}"
    )
    return float(value)


def stamp(message: Tensor, due_s: float, late_s: float = 0.0) -> None:
    """Set the due time of a message, and the delay by busy hosts."""
    message[0], message[1] = due_s, late_s


def due_s(message: Tensor) -> float:
    """Return the due time of a message."""
    return float(message[0])


def late_s(message: Tensor) -> float:
    """Return the delay of a message by busy hosts."""
    return float(message[1])


def noise(*key: int) -> float:
    """Return a number in [0, 1) that depends on the key alone (splitmix64, Steele et al. 2014)."""
    state = 0
    for part in key:
        state = (state + part + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state >> 11) / (1 << 53)


def forward(value: float, weights: float, noise_value: float) -> float:
    """Return a section's output value in [0, 1)."""
    return math.fmod(_KEEP * value + 0.25 * noise_value + abs(weights), 1.0)


def backward(gradient: float, value: float) -> float:
    """Return a section's input gradient in [0, 1)."""
    return _KEEP * gradient + 0.25 * value


def weight_gradient(gradient: float, value: float) -> float:
    """Return the factor of a unit's pattern in a section's contribution to its gradient: small, of both signs."""
    return _GRADIENT_SIZE * (gradient - value)
