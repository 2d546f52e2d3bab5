"""What is decided about a step over all units, and no worker can know alone: norm, weights, skipping, loss scale.

Workers report facts of their units with ``Prepared``; the manager combines them when it decides the next version,
and the next order carries the result. So a value over the whole model needs no collective of its own, does not
depend on the shape, and is the same for workers that roll forward after a loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from pydantic import Field

from morph.contract.base import Value
from morph.contract.errors import TrainingStopped

MIN_LOSS_SCALE_EXPONENT = -20
"""Gradients that are not finite even at this loss scale are not a matter of scale."""


class LossScale(Value):
    """The loss is multiplied by ``2**exponent`` before its backward; gradients are divided by it, which is exact.

    Rules of ``torch.amp.GradScaler``: halved when a gradient is not finite (that step is skipped), doubled after
    ``growth_steps`` good steps in a row.
    """

    exponent: int
    good_steps: int = Field(default=0, ge=0, description="since the scale was changed last")
    growth_steps: int = Field(ge=1)

    @property
    def factor(self) -> float:
        """``2**exponent``."""
        return math.ldexp(1.0, self.exponent)

    def after(self, *, skipped: bool) -> LossScale:
        """The scale of the next step.

        Raises:
            TrainingStopped: there is no smaller scale to try.
        """
        if skipped:
            if self.exponent <= MIN_LOSS_SCALE_EXPONENT:
                raise TrainingStopped(f"gradients are not finite even at a loss scale of 2**{self.exponent}")
            return self.model_copy(update={"exponent": self.exponent - 1, "good_steps": 0})
        if self.good_steps + 1 >= self.growth_steps:
            return self.model_copy(update={"exponent": self.exponent + 1, "good_steps": 0})
        return self.model_copy(update={"good_steps": self.good_steps + 1})


class Decided(Value):
    """What the optimizer must know of the decided step ``version - 1``, beyond its own gradients."""

    version: int = Field(ge=1)
    gradient_norm: float | None = Field(
        default=None, ge=0, description="2-norm of the mean gradient over all units; None: the job does not ask for it"
    )
    gradient_factor: float = Field(
        default=1.0,
        ge=0,
        description="by what mean gradients are multiplied: micro-batches over the sum of their losses' weights",
    )
    skipped: bool = Field(
        default=False,
        description="a gradient was not finite, or nothing had a weight: the version grows, the weights stay",
    )

    def next_scale(self, scale: LossScale | None) -> LossScale | None:
        """Return the loss scale of the next step; one in which nothing had a weight tells nothing about it.

        Raises:
            TrainingStopped: there is no smaller scale to try.
        """
        return scale if scale is None or self.gradient_factor == 0 else scale.after(skipped=self.skipped)


def decided_step(
    version: int,
    norms_sq: Iterable[Mapping[str, float]],
    non_finite: Iterable[bool],
    units: Iterable[str],
    weights: Iterable[Mapping[int, float]] = (),
) -> Decided:
    """Combine what the members reported of step ``version - 1``.

    Args:
        version: The version that is decided.
        norms_sq: Per member, squared norms by unit; every holder of a unit reports it.
        non_finite: Per member, whether a gradient of its units is NaN or infinite.
        units: Every unit of the model.
        weights: Per member, weights of losses by micro-batch; each micro-batch is there once at least, or none is.

    Raises:
        TrainingStopped: two members hold different gradients of one unit, or none reported one; or the weights add up
            to less than nothing.
    """
    if any(non_finite):
        return Decided(version=version, skipped=True)
    factor = _gradient_factor(version, weights)
    if factor == 0:
        return Decided(version=version, gradient_factor=0, skipped=True)
    known: dict[str, float] = {}
    for reported in filter(None, norms_sq):
        for unit, norm_sq in reported.items():
            if known.setdefault(unit, norm_sq) != norm_sq:
                raise TrainingStopped(f"step {version - 1}: two workers hold different gradients of unit {unit}")
    if not known:
        return Decided(version=version, gradient_factor=factor)
    missing = sorted(set(units) - set(known))
    if missing:
        raise TrainingStopped(f"step {version - 1}: no worker reported the gradient norm of {', '.join(missing)}")
    total = math.fsum(known[unit] for unit in sorted(known))
    return Decided(version=version, gradient_factor=factor, gradient_norm=factor * math.sqrt(total))


def _gradient_factor(version: int, weights: Iterable[Mapping[int, float]]) -> float:
    """Turn the mean over micro-batches into the total over the sum of weights; 0 where nothing has a weight."""
    known: dict[int, float] = {}
    for reported in weights:
        known |= reported
    if not known:
        return 1.0
    total = math.fsum(known.values())
    if not (math.isfinite(total) and min(known.values()) >= 0):
        raise TrainingStopped(f"step {version - 1}: a loss has a weight below 0, or one that is no finite number")
    return len(known) / total if total else 0.0
