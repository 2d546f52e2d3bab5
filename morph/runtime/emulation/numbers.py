"""Numbers that stand for what training computes: they depend on everything that a real result would depend on.

A micro-batch's value goes through every section of the model forwards, each section's parameters and random numbers
changing it, and its gradient backwards: an order that is wrong, a message that is lost or a stale weight shows in the
final weights, which are the same bits in every shape and history otherwise.
"""

from __future__ import annotations

import math

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
LOSS_GRADIENT = 0.5
_KEEP = 0.75
_GRADIENT_SIZE = 1e-2


def noise(*key: int) -> float:
    """A number in [0, 1) that depends on the key alone (splitmix64, Steele et al. 2014)."""
    state = 0
    for part in key:
        state = (state + part + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state >> 11) / (1 << 53)


def forward(value: float, weights: float, noise_value: float) -> float:
    """A section's output value: in [0, 1)."""
    return math.fmod(_KEEP * value + 0.25 * noise_value + abs(weights), 1.0)


def backward(gradient: float, value: float) -> float:
    """A section's input gradient: in [0, 1)."""
    return _KEEP * gradient + 0.25 * value


def weight_gradient(gradient: float, value: float) -> float:
    """By what a unit's pattern is multiplied to give a section's contribution to its gradient: small, of both signs."""
    return _GRADIENT_SIZE * (gradient - value)
