"""Sums of one parameter unit's gradients, and of changes to its buffers, over the micro-batches of a step.

Two kinds behind one interface: ``ExactAccumulator`` (64-bit fixed point) and ``FastAccumulator``
(ordinary floating point). A step uses a fresh accumulator, so that a reduction left behind by an
aborted generation cannot write into one that is in use. A micro-batch's change to a buffer is a number that is summed
as gradients are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from morph.contract.decided import LossScale
from morph.contract.errors import JobError, NonFiniteGradient
from morph.runtime.groups.channels import Pending, Ring
from morph.runtime.state.fixed_point import add_fixed, fits, flat_floats, from_fixed, largest_magnitude, next_exponent


@dataclass(frozen=True)
class Reduced:
    """Mean gradients of one unit over the whole mini-batch, and mean changes of its buffers, held until the commit.

    ``exponents`` are the scales that the next step uses; ``overflowed`` asks for a redo with them.
    ``non_finite``: there are no gradients, for one is NaN or infinite; the step is to be skipped.
    """

    gradients: Mapping[str, Tensor]
    exponents: Mapping[str, int]
    overflowed: bool
    non_finite: bool = False


class Accumulator(Protocol):
    """Sums gradients of one unit, then reduces them over a ring."""

    def add(self, name: str, gradient: Tensor) -> None:
        """Add one contribution (of one micro-batch and one section) to a parameter's sum."""

    def start_reduce(self, ring: Ring | None) -> Sequence[Pending]:
        """Start the reductions; ``finish`` may be called once all of them are done."""

    def finish(self, num_micro_batches: int, step: int) -> Reduced:
        """Turn the reduced sums into mean gradients, without the loss scale.

        Raises:
            NonFiniteGradient: naming step and parameter; only without a loss scale.
        """


class ExactAccumulator:
    """Fixed-point sums of one unit in one flat int64 buffer.

    The scales are those of gradients without the loss scale, which is taken off when a gradient is rounded. ``changes``
    names what is no gradient, but the change of a buffer: it has no loss scale.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        exponents: Mapping[str, int],
        num_contributions: int,
        loss_scale: LossScale | None = None,
        changes: frozenset[str] = frozenset(),
    ) -> None:
        self._loss_scale = loss_scale
        self._loss_exponent = 0 if loss_scale is None else loss_scale.exponent
        self._changes = changes
        self._names = tuple(parameters)
        self._indices = {name: index for index, name in enumerate(self._names)}
        self._parameters = parameters
        self._exponents = dict(exponents)
        self._num_contributions = num_contributions
        sizes = [parameters[name].numel() for name in self._names]
        self._flat = torch.zeros(sum(sizes), dtype=torch.int64)
        self._slices = dict(zip(self._names, torch.split(self._flat, sizes), strict=True))
        self._largest = torch.zeros(len(self._names), dtype=torch.float64)

    def add(self, name: str, gradient: Tensor) -> None:
        """See ``Accumulator.add``."""
        values = flat_floats(gradient)
        index = self._indices[name]
        loss_exponent = 0 if name in self._changes else self._loss_exponent
        largest = math.ldexp(largest_magnitude(values), -loss_exponent)
        largest = largest if math.isfinite(largest) else math.inf
        self._largest[index] = max(float(self._largest[index]), largest)
        if fits(self._exponents[name], largest, self._num_contributions):
            exponent = self._exponents[name] - loss_exponent
            add_fixed(self._slices[name], values, exponent)

    def start_reduce(self, ring: Ring | None) -> Sequence[Pending]:
        """See ``Accumulator.start_reduce``."""
        if ring is None:
            return ()
        return (ring.reduce(self._flat, dist.ReduceOp.SUM), ring.reduce(self._largest, dist.ReduceOp.MAX))

    def finish(self, num_micro_batches: int, step: int) -> Reduced:
        """See ``Accumulator.finish``."""
        gradients, exponents, overflowed = {}, {}, False
        for name, largest in zip(self._names, self._largest.tolist(), strict=True):
            if not math.isfinite(largest):
                return _broken(_called(name, self._changes), step, self._exponents, self._loss_scale)
            exponent, parameter = self._exponents[name], self._parameters[name]
            overflowed |= not fits(exponent, largest, self._num_contributions)
            total = from_fixed(self._slices[name], exponent, num_micro_batches, parameter.dtype)
            gradients[name] = total.view(parameter.shape).to(parameter.device)
            exponents[name] = next_exponent(exponent, largest, self._num_contributions)
        return Reduced(gradients=gradients, exponents=exponents, overflowed=overflowed)


class FastAccumulator:
    """Floating-point sums of one unit in one flat float32 buffer (float64 for float64 parameters)."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        loss_scale: LossScale | None = None,
        changes: frozenset[str] = frozenset(),
    ) -> None:
        self._loss_scale = loss_scale
        self._changes = changes
        self._parameters = parameters
        wide = any(parameter.dtype == torch.float64 for parameter in parameters.values())
        sizes = [parameter.numel() for parameter in parameters.values()]
        self._flat = torch.zeros(sum(sizes), dtype=torch.float64 if wide else torch.float32)
        self._slices = dict(zip(parameters, torch.split(self._flat, sizes), strict=True))

    def add(self, name: str, gradient: Tensor) -> None:
        """See ``Accumulator.add``."""
        self._slices[name].add_(gradient.detach().to("cpu").reshape(-1))

    def start_reduce(self, ring: Ring | None) -> Sequence[Pending]:
        """See ``Accumulator.start_reduce``."""
        return () if ring is None else (ring.reduce(self._flat, dist.ReduceOp.SUM),)

    def finish(self, num_micro_batches: int, step: int) -> Reduced:
        """See ``Accumulator.finish``."""
        gradients = {}
        for name, total in self._slices.items():
            if not math.isfinite(largest_magnitude(flat_floats(total))):
                return _broken(_called(name, self._changes), step, {}, self._loss_scale)
            parameter = self._parameters[name]
            mean = total / num_micro_batches
            if self._loss_scale is not None and name not in self._changes:
                mean /= self._loss_scale.factor
            mean = mean.to(parameter.dtype)
            gradients[name] = mean.view(parameter.shape).to(parameter.device)
        return Reduced(gradients=gradients, exponents={}, overflowed=False)


def _called(name: str, changes: frozenset[str]) -> str:
    return f"change of buffer {name}" if name in changes else f"gradient of {name}"


def _broken(what: str, step: int, exponents: Mapping[str, int], loss_scale: LossScale | None) -> Reduced:
    """What becomes of a step in which a gradient is not finite: skipped with a loss scale, else the end."""
    if loss_scale is None:
        raise NonFiniteGradient(f"step {step}: the {what} is NaN or infinite")
    return Reduced(gradients={}, exponents=dict(exponents), overflowed=False, non_finite=True)


_EXACT_IN_FLOAT64 = 2**52


def change_of(old: Tensor, new: Tensor) -> Tensor:
    """Return by how much one micro-batch changes a buffer, in float64."""
    if not old.is_floating_point():
        return (new.to(torch.int64) - old.to(torch.int64)).to(torch.float64)
    # what stays infinite does not change
    return torch.where(new == old, 0.0, new.to(torch.float64) - old.to(torch.float64))


def change_like(buffer: Tensor, *, exact: bool) -> Tensor:
    """Return a tensor, without memory, of the shape, type and device of the mean change."""
    dtype = torch.float64 if exact or buffer.dtype == torch.float64 else torch.float32
    return torch.empty((), dtype=dtype, device=buffer.device).expand(buffer.shape)


def apply_change(name: str, buffer: Tensor, change: Tensor) -> None:
    """Change a buffer, in place, by the mean over the micro-batches of a step; integers change by whole numbers.

    Raises:
        JobError: an integer changes by more than float64 holds exactly.
    """
    with torch.no_grad():
        if buffer.is_floating_point():
            buffer.copy_(buffer.to(torch.float64) + change)
            return
        if bool((change.abs() > _EXACT_IN_FLOAT64).any()):
            raise JobError(
                f"the forward changes integer buffer {name} by a number that is too large",
                source="Job",
                field="model",
                allowed=f"changes up to {_EXACT_IN_FLOAT64}",
            )
        buffer.copy_(buffer.to(torch.int64) + change.round().to(torch.int64))
