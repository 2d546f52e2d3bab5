"""Sums of one parameter unit's gradients, and of changes to its buffers, over the micro-batches of a step.

``ExactAccumulator`` uses 64-bit fixed point, ``FastAccumulator`` ordinary floating point. Sums are on the device of the
gradients, and nothing waits for it before ``finish``. A step uses a fresh accumulator, so that a reduction left behind
cannot write into one in use. A complex number is summed as two real ones. A parameter without a gradient in the whole
mini-batch gets none, as in plain PyTorch: optimizers skip it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from morph.contract.decided import LossScale
from morph.contract.errors import NonFiniteGradient, wrong_job
from morph.runtime.device.staging import moved
from morph.runtime.state.fixed_point import FixedSum, add_fixed, fits, fixed_sum, from_fixed, next_exponent, to_fixed
from morph.runtime.state.parts import Memory, UnitPart, from_reals, reals

IN_CACHE = 1 << 16
"""Elements of a block that stays in a processor's cache for several passes."""

_NOTHING = -1.0
"""The largest magnitude of a parameter whose sum is empty."""
_EXACT_IN_FLOAT64 = 2**52


@dataclass(frozen=True)
class Reduced:
    """Mean gradients of one unit over the mini-batch, and mean changes of its buffers, held until the commit.

    ``exponents`` are the scales of the next step, or if ``overflowed`` of this one again; ``non_finite``: skip it.
    """

    gradients: Mapping[str, Tensor]
    exponents: Mapping[str, int]
    overflowed: bool
    non_finite: bool = False


class Accumulator(ABC):
    """Sums gradients of one unit, part by part, in ``memory`` on their device.

    ``like``: shape, type and device of each mean, by name. ``loss_scale``: a factor that is removed from the means.
    ``changes``: names of buffers' changes, which have no loss scale, and are zero if nothing was added.
    """

    allows_non_finite: bool
    """Whether a gradient may be infinite or NaN without an error, because the step may be skipped."""
    marks_non_finite = False
    """Whether ``mean`` makes the first mean of a tensor's range NaN if any mean of that range is not finite."""

    def __init__(
        self,
        like: Mapping[str, Tensor],
        loss_scale: LossScale | None,
        changes: frozenset[str],
        memory: Memory | None,
    ) -> None:
        memory = memory or Memory()
        self.device = memory.device
        self._like = like
        self._loss_scale = loss_scale
        self.allows_non_finite = loss_scale is not None
        self._changes = changes
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name, tensor in like.items():
            by_dtype.setdefault(tensor.dtype, []).append(name)
        self.parts = tuple(UnitPart(tuple(names), like, self._type(dtype), memory) for dtype, names in by_dtype.items())
        self._part_of = {name: part for part in self.parts for name in part.names}
        self._largest = torch.full((len(like),), _NOTHING, dtype=torch.float64, device=self.device)
        self._largest_of = {name: self._largest[place : place + 1] for place, name in enumerate(like)}
        self._reduced_by: int | None = None
        self._largest_of_all: Tensor | None = None

    @abstractmethod
    def _type(self, mean_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of sums whose means have this dtype."""

    def add(self, name: str, gradient: Tensor) -> None:
        """Add one contribution (of one micro-batch and one section) to a parameter's sum."""
        self.add_all([(name, gradient)])

    @abstractmethod
    def add_all(self, gradients: Sequence[tuple[str, Tensor]]) -> None:
        """Add contributions of one micro-batch and one section: at most one for each parameter."""

    @property
    def largest(self) -> Tensor:
        """Return magnitudes (float64), negative if nothing was added, of which a ring needs the largest."""
        return self._largest

    @property
    def _known_largest(self) -> Tensor:
        """Return the largest magnitudes over all members, once a ring has collected them."""
        return self._largest if self._largest_of_all is None else self._largest_of_all

    @abstractmethod
    def mean(self, part: UnitPart, sums: Tensor, first: int, num_micro_batches: int, into: Tensor) -> None:
        """Compute mean gradients of a range of a part into a flat tensor of its ``mean_dtype``.

        ``sums``: (members, elements), possibly with padding after the part.
        """

    @abstractmethod
    def whole(self, part: UnitPart, means: Tensor, num_micro_batches: int) -> Tensor:
        """Return sums of a whole part from which ``mean`` makes these means."""

    def take(self, means: Mapping[UnitPart, Tensor], largest: Tensor | None, num_micro_batches: int) -> None:
        """Hold the results of a ring for all members: means on the sums' device, largest magnitudes on the host."""
        self._largest_of_all = largest
        for part, values in means.items():
            part.means, part.sum_of_means = values, math.nan
        self._reduced_by = num_micro_batches

    @property
    def is_reduced(self) -> bool:
        """Whether a ring has reduced the sums, so that they are over all members."""
        return self._reduced_by is not None

    def partial(self) -> dict[str, Tensor] | None:
        """Return the present sum, of all members if reduced, for ``merge``; None if a gradient in it does not fit."""
        tensors = {"largest": self._known_largest}
        for number, part in enumerate(self.parts):
            sums = part.sums
            if self._reduced_by is not None:
                assert part.means is not None
                sums = self.whole(part, part.means, self._reduced_by)
            tensors[f"sums{number}"] = sums
        return tensors if self._fits(tensors) else None

    @abstractmethod
    def _fits(self, partial: dict[str, Tensor]) -> bool:
        """Return whether sums can be used; if so, the numbers that belong to them are added."""

    def merge(self, partial: Mapping[str, Tensor]) -> None:
        """Add a sum of other contributions to the same unit in the same step."""
        for number, part in enumerate(self.parts):
            part.sums.add_(moved(partial[f"sums{number}"], part.sums.device))
        torch.maximum(self._largest, moved(partial["largest"], self._largest.device), out=self._largest)

    def finish(self, num_micro_batches: int, step: int) -> Reduced:
        """Return mean gradients, from the ring or this worker's sums. Raises NonFiniteGradient, unless allowed."""
        return finish_all({"": self}, num_micro_batches, step)[""]

    def make_means(self, num_micro_batches: int) -> None:
        """Turn this worker's own sums into means, unless a ring has done so."""
        for part in self.parts:
            if part.means is None:
                part.means = part.sums.new_empty(part.size, dtype=part.mean_dtype)
                self.mean(part, part.sums.unsqueeze(0), 0, num_micro_batches, part.means)

    def asked(self) -> list[Tensor]:
        """Return the numbers that ``finished`` needs on the host: flat, in float64, on the sums' device."""
        return [self._known_largest]

    def finished(self, numbers: Sequence[list[float]], step: int) -> Reduced:
        """Return the means, and check them by the requested numbers. Raises as ``finish``."""
        means: dict[str, Tensor] = {}
        for part in self.parts:
            assert part.means is not None
            means |= zip(part.names, torch.split(part.means[: part.size], part.sizes), strict=True)
        largest = dict(zip(self._like, numbers[0], strict=True))
        gradients = {
            name: moved(from_reals(means[name], like), like.device)
            for name, like in self._like.items()
            if largest[name] != _NOTHING or name in self._changes
        }
        return self._judged(gradients, largest, numbers[1:], step)

    @abstractmethod
    def _judged(
        self, gradients: dict[str, Tensor], largest: Mapping[str, float], totals: Sequence[list[float]], step: int
    ) -> Reduced:
        """Check the means by the other requested numbers."""

    def _broken(self, name: str, step: int, exponents: Mapping[str, int]) -> Reduced:
        """Handle a gradient that is not finite: the step may be skipped, or this is an error."""
        if not self.allows_non_finite:
            what = f"change of buffer {name}" if name in self._changes else f"gradient of {name}"
            raise NonFiniteGradient(f"step {step}: the {what} is NaN or infinite")
        return Reduced(gradients={}, exponents=dict(exponents), overflowed=False, non_finite=True)


class ExactAccumulator(Accumulator):
    """Fixed-point sums in int64; see ``Accumulator`` and docs/decisions/0001. The scales are without the loss scale."""

    def __init__(
        self,
        like: Mapping[str, Tensor],
        exponents: Mapping[str, int],
        num_contributions: int,
        loss_scale: LossScale | None = None,
        changes: frozenset[str] = frozenset(),
        memory: Memory | None = None,
    ) -> None:
        super().__init__(like, loss_scale, changes, memory)
        self._exponents = {name: exponents[name] for name in like}
        self._num_contributions = num_contributions
        loss_exponent = 0 if loss_scale is None else loss_scale.exponent
        self._loss_exponents = {name: 0 if name in changes else loss_exponent for name in like}
        self._fixed: dict[str, FixedSum] = {}

    def _type(self, mean_dtype: torch.dtype) -> torch.dtype:  # noqa: ARG002
        return torch.int64

    def add_all(self, gradients: Sequence[tuple[str, Tensor]]) -> None:
        sums, values, is_first = [], [], []
        for name, gradient in gradients:
            into, first = self._part_of[name].sum_of(name)
            fixed = self._fixed.get(name)
            if fixed is None:
                exponent = self._exponents[name] - self._loss_exponents[name]
                fixed = self._fixed[name] = fixed_sum(into, self._largest_of[name], exponent)
            plain = reals(gradient) if gradient.is_complex() else gradient
            assert plain.numel() == len(into), f"a gradient of {plain.numel()} numbers for {len(into)} of {name}"
            sums.append(fixed)
            values.append(plain)
            is_first.append(first)
        add_fixed(sums, values, is_first)

    def mean(self, part: UnitPart, sums: Tensor, first: int, num_micro_batches: int, into: Tensor) -> None:
        names, rows, means = [], [], []
        for name, begin, end in part.tensors_between(first, first + sums.shape[1]):
            own = slice(begin - first, end - first)
            names.append(name)
            rows.append(sums[:, own])
            means.append(into[own])
        from_fixed(rows, [self._exponents[name] for name in names], num_micro_batches, means)

    def whole(self, part: UnitPart, means: Tensor, num_micro_batches: int) -> Tensor:
        """See ``Accumulator.whole``: the integers may differ from the added ones, if several have the same mean."""
        sums = torch.empty_like(part.sums)
        for name, begin, end in part.tensors_between(0, part.size):
            to_fixed(means[begin:end], self._exponents[name], num_micro_batches, sums[begin:end])
        return sums

    def _fits(self, partial: dict[str, Tensor]) -> bool:
        partial["exponents"] = torch.tensor(list(self._exponents.values()), dtype=torch.int64)
        sizes = self._sizes(dict(zip(self._exponents, partial["largest"].tolist(), strict=True)))
        return all(fits(self._exponents[name], size, self._num_contributions) for name, size in sizes.items())

    def merge(self, partial: Mapping[str, Tensor]) -> None:
        assert partial["exponents"].tolist() == list(self._exponents.values()), "summed at other scales"
        super().merge(partial)

    def _sizes(self, largest: Mapping[str, float]) -> dict[str, float]:
        """Return the largest magnitude of each tensor's gradients without the loss scale; NaN or infinite if one is."""
        return {
            name: math.ldexp(0.0 if size == _NOTHING else size, -self._loss_exponents[name])
            for name, size in largest.items()
        }

    def _judged(
        self,
        gradients: dict[str, Tensor],
        largest: Mapping[str, float],
        totals: Sequence[list[float]],  # noqa: ARG002
        step: int,
    ) -> Reduced:
        exponents, overflowed = {}, False
        for name, size in self._sizes(largest).items():
            if not math.isfinite(size):
                return self._broken(name, step, self._exponents)
            overflowed |= not fits(self._exponents[name], size, self._num_contributions)
            exponents[name] = next_exponent(self._exponents[name], size, self._num_contributions)
        return Reduced(gradients=gradients, exponents=exponents, overflowed=overflowed)


class FastAccumulator(Accumulator):
    """Floating-point sums in float32 (float64 for means of that type); see ``Accumulator``."""

    marks_non_finite = True

    def __init__(
        self,
        like: Mapping[str, Tensor],
        loss_scale: LossScale | None = None,
        changes: frozenset[str] = frozenset(),
        memory: Memory | None = None,
    ) -> None:
        super().__init__(like, loss_scale, changes, memory)
        self._added: set[str] = set()
        self._shaped: dict[str, Tensor] = {}
        """Sums in the shapes of their means."""

    def _type(self, mean_dtype: torch.dtype) -> torch.dtype:
        return torch.float64 if mean_dtype == torch.float64 else torch.float32

    def add_all(self, gradients: Sequence[tuple[str, Tensor]]) -> None:
        first: tuple[list[Tensor], list[Tensor]] = [], []
        later: tuple[list[Tensor], list[Tensor]] = [], []
        for name, gradient in gradients:
            into, is_first = self._part_of[name].sum_of(name)
            if name in self._changes:
                gradient = reals(gradient)
            else:
                shaped = self._shaped.get(name)
                if shaped is None:
                    shaped = self._shaped[name] = from_reals(into, self._like[name])
                into = shaped
            sums, values = first if is_first else later
            sums.append(into)
            values.append(gradient)
        fresh = [name for name, _ in gradients if name not in self._added]
        self._added.update(fresh)
        if first[0]:
            torch._foreach_copy_(first[0], first[1])
        if later[0]:
            torch._foreach_add_(later[0], later[1])
        if fresh:
            torch._foreach_zero_([self._largest_of[name] for name in fresh])

    def mean(self, part: UnitPart, sums: Tensor, first: int, num_micro_batches: int, into: Tensor) -> None:
        """See ``Accumulator.mean``: members' sums are added in their order.

        On a processor, only the first element of a tensor's range tells whether all are finite.
        """
        total = into if into.dtype == sums.dtype else torch.empty_like(sums[0])
        on_processor, seen = sums.device.type == "cpu", 0.0
        block = IN_CACHE if on_processor else max(1, len(total))
        for rows, some in zip(torch.split(sums, block, dim=1), torch.split(total, block), strict=True):
            if len(rows) == 1:
                torch.div(rows[0], num_micro_batches, out=some)
            else:
                torch.add(rows[0], rows[1], out=some)
                for more in rows[2:]:
                    some += more
                some /= num_micro_batches
            if on_processor:
                seen += float(some.sum())
        if self._loss_scale is not None:
            for name, begin, end in part.tensors_between(first, first + len(total)):
                if name not in self._changes:
                    total[begin - first : end - first] /= self._loss_scale.factor
        if total is not into:
            into.copy_(total)
            seen = math.nan if on_processor else seen  # a narrower type may hold less
        if not math.isfinite(seen):
            for _, begin, end in part.tensors_between(first, first + len(into)):
                if not _is_finite(into[begin - first : end - first]):
                    into[begin - first] = math.nan

    def whole(self, part: UnitPart, means: Tensor, num_micro_batches: int) -> Tensor:
        """See ``Accumulator.whole``; the last bits may differ, as fast accumulation does not fix them."""
        sums = means[: part.size].to(part.sums.dtype) * num_micro_batches
        if self._loss_scale is not None:
            for name, begin, end in part.tensors_between(0, part.size):
                if name not in self._changes:
                    sums[begin:end] *= self._loss_scale.factor
        return sums

    def _fits(self, partial: dict[str, Tensor]) -> bool:
        return all(_is_finite(sums) for sums in partial.values())

    def asked(self) -> list[Tensor]:
        """See ``Accumulator.asked``: finite means have a finite sum, nearly always."""
        unseen = [part for part in self.parts if not math.isfinite(part.sum_of_means)]
        sums = [part.means[: part.size].sum().to(torch.float64) for part in unseen if part.means is not None]
        return [*super().asked(), *(total.view(1) for total in sums)]

    def _judged(
        self,
        gradients: dict[str, Tensor],
        largest: Mapping[str, float],  # noqa: ARG002
        totals: Sequence[list[float]],
        step: int,
    ) -> Reduced:
        unseen = [part for part in self.parts if not math.isfinite(part.sum_of_means)]
        for part, (total,) in zip(unseen, totals, strict=True):
            assert part.means is not None
            if not (math.isfinite(total) or _is_finite(part.means[: part.size])):
                ranges = part.tensors_between(0, part.size)
                name = next(name for name, begin, end in ranges if not _is_finite(part.means[begin:end]))
                return self._broken(name, step, {})
        return Reduced(gradients=gradients, exponents={}, overflowed=False)


def finish_all(accumulators: Mapping[str, Accumulator], num_micro_batches: int, step: int) -> dict[str, Reduced]:
    """Finish the accumulators of a worker's units. It waits for a device once. Raises as ``Accumulator.finish``."""
    for accumulator in accumulators.values():
        accumulator.make_means(num_micro_batches)
    asked = {unit: accumulator.asked() for unit, accumulator in accumulators.items()}
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in (tensor for tensors in asked.values() for tensor in tensors):
        by_device.setdefault(tensor.device, []).append(tensor)
    numbers_on = {device: iter(torch.cat(tensors).tolist()) for device, tensors in by_device.items()}
    numbers = {
        unit: [list(islice(numbers_on[tensor.device], len(tensor))) for tensor in tensors]
        for unit, tensors in asked.items()
    }
    return {unit: accumulator.finished(numbers[unit], step) for unit, accumulator in accumulators.items()}


def _is_finite(values: Tensor) -> bool:
    if math.isfinite(values.sum()):  # the fastest pass; finite values may have an infinite sum
        return True
    return all(map(math.isfinite, torch.stack(torch.aminmax(values)).tolist()))


def change_of(old: Tensor, new: Tensor) -> Tensor:
    """Return the change of a buffer by one micro-batch, in float64; flat, like ``reals``, if it is complex."""
    if old.is_complex():
        old, new = reals(old), reals(new)
    if not old.is_floating_point():
        return (new.to(torch.int64) - old.to(torch.int64)).to(torch.float64)
    # infinite values that stay infinite do not change
    return torch.where(new == old, 0.0, new.to(torch.float64) - old.to(torch.float64))


def change_like(buffer: Tensor, *, exact: bool) -> Tensor:
    """Return a tensor, without memory, of the shape, type and device of the mean change."""
    dtype = torch.float64 if exact or buffer.dtype.to_real() == torch.float64 else torch.float32
    dtype = dtype.to_complex() if buffer.is_complex() else dtype
    return torch.empty((), dtype=dtype, device=buffer.device).expand(buffer.shape)


def apply_change(name: str, buffer: Tensor, change: Tensor) -> None:
    """Change a buffer in place by the mean change of a step. Raises JobError if float64 cannot hold an integer's."""
    with torch.no_grad():
        if buffer.is_floating_point() or buffer.is_complex():
            buffer.copy_(buffer.to(torch.complex128 if buffer.is_complex() else torch.float64) + change)
            return
        if bool((change.abs() > _EXACT_IN_FLOAT64).any()):
            raise wrong_job(
                "model",
                f"the forward changes integer buffer {name} by a number that is too large",
                allowed=f"changes up to {_EXACT_IN_FLOAT64}",
            )
        buffer.copy_(buffer.to(torch.int64) + change.round().to(torch.int64))
