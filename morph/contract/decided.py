"""Decisions about a step that need all units: gradient norm, weights, skipping, loss scale, and the loss rules.

Workers report facts of their units with ``Prepared``, and the next order carries what the manager decides from them. So
a value over the whole model needs no collective of its own, and does not depend on the shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from pydantic import Field

from morph.contract.base import Value
from morph.contract.errors import TrainingStopped
from morph.contract.rules import LossRules

MIN_LOSS_SCALE_EXPONENT = -20
"""If gradients are not finite even at this loss scale, the scale is not the cause."""
_MOST = 1e100
"""Larger losses count as this value in means, so that their squares stay finite."""
_LEAST_SHARE = 1e-3
"""The least deviation, as a share of the mean; without it, a slight rise after nearly equal losses would be bad."""


class LossScale(Value):
    """The loss is multiplied by ``2**exponent`` before its backward; the rules are ``torch.amp.GradScaler``'s."""

    exponent: int
    good_steps: int = Field(default=0, ge=0, description="good steps since the last change of the scale")
    growth_steps: int = Field(ge=1)

    @property
    def factor(self) -> float:
        """``2**exponent``."""
        return math.ldexp(1.0, self.exponent)

    def after(self, *, skipped: bool) -> LossScale:
        """Return the scale of the next step. Raises TrainingStopped if there is no smaller scale to try."""
        if skipped:
            if self.exponent <= MIN_LOSS_SCALE_EXPONENT:
                raise TrainingStopped(f"gradients are not finite even at a loss scale of 2**{self.exponent}")
            return self.model_copy(update={"exponent": self.exponent - 1, "good_steps": 0})
        if self.good_steps + 1 >= self.growth_steps:
            return self.model_copy(update={"exponent": self.exponent + 1, "good_steps": 0})
        return self.model_copy(update={"good_steps": self.good_steps + 1})


class Decided(Value):
    """The facts about the decided step ``version - 1`` that the optimizer needs beyond its own gradients."""

    version: int = Field(ge=1)
    gradient_norm: float | None = Field(
        default=None, ge=0, description="2-norm of the mean gradient over all units; None: the job does not ask for it"
    )
    gradient_factor: float = Field(
        default=1.0,
        ge=0,
        description="factor of the mean gradients: number of micro-batches over the sum of their losses' weights",
    )
    skipped: bool = Field(
        default=False,
        description="a gradient was not finite, or all weights were 0: the version grows, the weights stay",
    )
    bad_loss: bool = Field(
        default=False, exclude_if=lambda given: not given, description="skipped because of its loss, whatever the scale"
    )
    state_of: int | None = Field(
        default=None,
        ge=0,
        exclude_if=lambda given: given is None,
        description="the version whose state is taken over unchanged, because the steps since led to a bad step",
    )

    def next_scale(self, scale: LossScale | None) -> LossScale | None:
        """Return the loss scale of the next step; a step in which all weights were 0 does not change it."""
        if scale is None or self.gradient_factor == 0 or self.bad_loss:
            return scale
        return scale.after(skipped=self.skipped)


class LossTrend(Value):
    """Statistics of the losses up to a version; they depend only on its steps, not on shapes and history.

    ``mean`` and ``variance`` decay: each loss has the weight ``1/window``, and the first losses more. ``num_bad``: bad
    steps since the last version that is a multiple of ``LossRules.back_steps``.
    """

    num: int = Field(default=0, ge=0)
    mean: float = 0.0
    variance: float = Field(default=0.0, ge=0)
    num_bad: int = Field(default=0, ge=0)

    def why_bad(self, losses: Mapping[int, float], weights: Mapping[int, float], rules: LossRules) -> str:
        """Return a sentence on why a step with these losses of micro-batches is bad; empty if it is not."""
        broken = sorted(number for number, loss in losses.items() if not math.isfinite(loss))
        if broken:
            return (
                f"the loss of micro-batch {', '.join(map(str, broken[:4]))}{', ...' * (len(broken) > 4)} is not finite"
            )
        loss, most = _mean_of(losses, weights), rules.deviations
        if loss is None or most is None or self.num < rules.window:
            return ""
        deviation = max(math.sqrt(self.variance), _LEAST_SHARE * abs(self.mean))
        if loss <= self.mean + most * deviation:
            return ""
        return (
            f"its loss, {loss:.6g}, is more than {most:g} deviations ({deviation:.3g}) above the mean, {self.mean:.6g}"
        )

    def after(
        self, version: int, losses: Mapping[int, float], weights: Mapping[int, float], rules: LossRules, *, bad: bool
    ) -> LossTrend:
        """Return the statistics of ``version``, which the step with these losses leads to."""
        num_bad = 0 if version % rules.back_steps == 0 else self.num_bad + bad
        loss = None if bad or rules.deviations is None else _mean_of(losses, weights)
        if loss is None:
            return self.model_copy(update={"num_bad": num_bad}) if num_bad != self.num_bad else self
        share = 1.0 / min(self.num + 1, rules.window)
        off = min(max(loss, -_MOST), _MOST) - self.mean
        variance = (1.0 - share) * (self.variance + share * off * off)
        num = min(self.num + 1, rules.window)
        return LossTrend(num=num, mean=self.mean + share * off, variance=variance, num_bad=num_bad)


def _mean_of(losses: Mapping[int, float], weights: Mapping[int, float]) -> float | None:
    """Return the exact mean over micro-batches, or total over weight; None if nothing counts."""
    weight = math.fsum(weights.values()) if weights else float(len(losses))
    return math.fsum(losses.values()) / weight if weight else None


def decided_step(
    version: int,
    norms_sq: Iterable[Mapping[str, float]],
    non_finite: Iterable[bool],
    units: Iterable[str],
    weights: Iterable[Mapping[int, float]] = (),
) -> Decided:
    """Combine the members' reports about step ``version - 1``; each argument but ``units`` has one entry per member.

    ``norms_sq``: squared norms by unit; every holder of a unit reports it. ``non_finite``: whether a gradient of its
    units is NaN or infinite. ``weights``: weights of losses by micro-batch; each micro-batch at least once, or none at
    all.

    Raises TrainingStopped if two members hold different gradients of a unit, no member reported a unit, or the sum of
    the weights is negative.
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
    """Return the factor from the mean over micro-batches to the total over the weights' sum; 0 if all weights are 0."""
    known: dict[int, float] = {}
    for reported in weights:
        known |= reported
    if not known:
        return 1.0
    total = math.fsum(known.values())
    if not (math.isfinite(total) and min(known.values()) >= 0):
        raise TrainingStopped(f"step {version - 1}: a loss has a weight that is negative or not finite")
    return len(known) / total if total else 0.0
