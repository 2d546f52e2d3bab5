"""Corrections of the profile from compute times during a run: a factor for each section's time, with its uncertainty.

The logarithm of a stage's time over its profiled time is about the mean of the sections' logarithms, weighted by their
times; stages with different cuts tell sections apart. This is Bayesian linear regression with a common part and a part
for each section; both have a prior around 0, which shrinks the effect of few observations. It is pure arithmetic on few
numbers, equal to the bit when a journal is replayed.

Each type of GPU has its own parts, and the parts of two types are correlated (``ALIKE``). Each observation belongs to
one stage and so to one type: a type that is slower than its profile shows in its own stages. The correction of a type
without observations follows in part those of the other types, and stays nearly as uncertain as before. If a type has
only run the same sections, a slower type cannot be told from slower sections, and the standard errors of its other
sections show this. Times of links are not learned.

Only runs whose workers have a device each are observed: what neighbours on the same cores take is no property of a
section. A stage counts once it is ``established``. A correction is kept only as long as it forecasts stages that were
not observed before better than the profile does (``Forecasts``).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

from pydantic import Field

from morph.contract.base import Value
from morph.contract.plan import StagePlan

Times = Mapping[str, Sequence[float]]
"""Profiled seconds of compute of each section, by type of GPU; "" if no type is named."""

COMMON_SPREAD, OWN_SPREAD = 0.5, 0.15
"""Prior standard deviations (of logarithms) of the common part and of an average section's own part.

The variance of a section's own part is inversely proportional to its time, as if it consisted of many equal parts: so
sections that were only observed together have the same factor.
"""
ALIKE = 0.5
"""Correlation of the parts of two types of GPU: a profile's errors are partly due to the job, partly to the type."""
NOISE, NOISE_COUNTS = 0.1, 4
"""The standard deviation assumed for one observation, and the number of observations for which it counts."""
MISFIT = 0.005
"""Standard deviation that remains however many observations of the same stage there are."""
MOST_STAGES = 16
"""The number of observed stages that are remembered, of all types of GPU together."""
MOST_COUNTED = 400
"""The largest number for which observations of a stage count: a machine's speed changes, so old ones are forgotten."""
MATERIAL, ERRORS = 0.03, 3.0
"""A change of a stage's time is material above this share and above this many standard errors."""


class StageRatios(Value):
    """Logarithms of time over profiled time of a stage: their number, mean, and sum of squared deviations."""

    first_section: int
    end_section: int
    node_type: str = Field(default="", description="type of its GPU; empty: there is only one")
    num: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def with_one(self, log_ratio: float) -> StageRatios:
        """Return these ratios with one more observation (Welford); at the limit, it replaces an average one."""
        num = min(self.num + 1, MOST_COUNTED)
        kept = self.squares * (num - 1) / self.num if self.num else 0.0
        mean = self.mean + (log_ratio - self.mean) / num
        squares = kept + (log_ratio - self.mean) * (log_ratio - mean)
        return self.model_copy(update={"num": num, "mean": mean, "squares": squares})

    @property
    def key(self) -> tuple[int, int, str]:
        """The stage: its first and end section, and its type of GPU."""
        return self.first_section, self.end_section, self.node_type

    @property
    def variance(self) -> float:
        """The variance of the mean."""
        each = (self.squares + NOISE_COUNTS * NOISE**2) / (self.num - 1 + NOISE_COUNTS)
        return each / self.num + MISFIT**2


class Forecasts(Value):
    """Sums of squared errors (of logarithms) of forecasts of stages that had not been observed yet."""

    corrected: float = 0.0
    profiled: float = 0.0

    @property
    def are_worse(self) -> bool:
        """Whether corrected times were further off than the profile's own."""
        return self.corrected > self.profiled


class Correction(Value):
    """Corrections by section: the factor on its profiled time, and the factor's standard error as a share of it."""

    factors: tuple[float, ...] = Field(min_length=1)
    errors: tuple[float, ...] = Field(min_length=1)
    types: dict[str, Correction] = Field(
        default={},
        exclude_if=lambda given: not given,
        description="of each type of GPU, if there are several; the other fields are then for a further type",
    )

    def of_type(self, node_type: str) -> Correction:
        """Return the correction for a type of GPU."""
        return self.types.get(node_type, self)

    @property
    def sentence(self) -> str:
        """The correction in words; neighbouring sections with the same factor are listed together."""
        every = self.types or {"": self}
        texts = [f"{f'on {name} ' if name else ''}{each._parts()}" for name, each in every.items()]
        return f"measured against the profile: {'; '.join(texts)}"

    def _parts(self) -> str:
        parts, first = [], 0
        for factor, alike in groupby(f"{factor:.2f}" for factor in self.factors):
            last = first + len(list(alike)) - 1
            error = max(self.errors[first : last + 1])
            sections = f"sections {first}-{last} take" if first < last else f"section {first} takes"
            parts.append(f"{sections} {factor} times as long, give or take {error:.0%}")
            first = last + 1
        return ", ".join(parts)


def with_observation(
    seen: tuple[StageRatios, ...], sections: range, log_ratio: float, node_type: str = ""
) -> tuple[StageRatios, ...]:
    """Add one observation; beyond ``MOST_STAGES``, forget the oldest stage of the type of GPU with most stages."""
    key = (sections.start, sections.stop, node_type)
    known = next((entry for entry in seen if entry.key == key), None)
    entry = known or StageRatios(first_section=sections.start, end_section=sections.stop, node_type=node_type)
    observations = (*(each for each in seen if each is not known), entry.with_one(log_ratio))
    if len(observations) <= MOST_STAGES:
        return observations
    counts = Counter(each.node_type for each in observations)
    forgotten = next(each for each in observations if counts[each.node_type] == max(counts.values()))
    return tuple(each for each in observations if each is not forgotten)


def established(seen: Sequence[StageRatios]) -> tuple[StageRatios, ...]:
    """Return the stages observed often enough that their own spread weighs as much as the assumed one."""
    return tuple(entry for entry in seen if entry.num >= NOISE_COUNTS)


def with_times(
    seen: tuple[StageRatios, ...],
    stages: Mapping[int, StagePlan],
    samples_s: Mapping[int, Sequence[float]],
    compute_s: Times,
) -> tuple[StageRatios, ...]:
    """Add an observation for each stage: the median of ``samples_s``; ``compute_s``: the profile's, by type of GPU."""
    for number, times_s in sorted(samples_s.items()):
        median_s, stage = statistics.median(times_s) if times_s else 0.0, stages[number]
        if median_s > 0:
            name = stage.node_type if stage.node_type in compute_s else ""
            profiled_s = sum(compute_s[name][stage.first_section : stage.end_section])
            seen = with_observation(seen, stage.sections, math.log(median_s / profiled_s), name)
    return seen


def correction_of(seen: Sequence[StageRatios], compute_s: Times) -> Correction:
    """Return the corrections, by section and type of GPU, given the observations and the profiled times (seconds)."""
    common, types = COMMON_SPREAD**2, [entry.node_type for entry in seen]
    spreads = {
        name: [OWN_SPREAD * math.sqrt(statistics.fmean(times_s) / time_s) for time_s in times_s]
        for name, times_s in compute_s.items()
    }
    parts = [  # for each stage: what a section's own part adds to the stage's logarithm, in standard deviations
        [weight * spread for weight, spread in zip(_weights(entry, compute_s), spreads[entry.node_type], strict=True)]
        for entry in seen
    ]
    covariance = [
        [
            _alike(name, other) * (common + sum(x * y for x, y in zip(own, others, strict=True)))
            for other, others in zip(types, parts, strict=True)
        ]
        for name, own in zip(types, parts, strict=True)
    ]
    for index, entry in enumerate(seen):
        covariance[index][index] += entry.variance
    inverse = _inverse(covariance)
    gains = [sum(value * entry.mean for value, entry in zip(row, seen, strict=True)) for row in inverse]
    corrections = {}
    for name, own in spreads.items():
        factors, errors = [], []
        for section, spread in enumerate(own):
            to_stages = [
                _alike(name, of) * (common + spread * part[section]) for of, part in zip(types, parts, strict=True)
            ]
            explained = sum(x * inverse[i][j] * y for i, x in enumerate(to_stages) for j, y in enumerate(to_stages))
            factors.append(round(math.exp(sum(x * gain for x, gain in zip(to_stages, gains, strict=True))), 4))
            errors.append(round(math.sqrt(max(0.0, common + spread**2 - explained)), 4))
        corrections[name] = Correction(factors=tuple(factors), errors=tuple(errors))
    return corrections.pop("").model_copy(update={"types": corrections})


def with_forecasts(
    known: Forecasts, before: Sequence[StageRatios], now: Sequence[StageRatios], compute_s: Times
) -> Forecasts:
    """Add the stages that are observed for the first time: their ratios, and what the earlier ones had forecast."""
    old = {entry.key for entry in before}
    new = [entry for entry in now if entry.key not in old]
    if not before or not new:
        return known
    forecast, corrected, profiled = correction_of(before, compute_s), known.corrected, known.profiled
    for entry in new:
        factors = forecast.of_type(entry.node_type).factors
        expected = sum(x * factor for x, factor in zip(_weights(entry, compute_s), factors, strict=True))
        corrected += (entry.mean - math.log(expected)) ** 2
        profiled += entry.mean**2
    return Forecasts(corrected=corrected, profiled=profiled)


def _alike(node_type: str, other: str) -> float:
    return 1.0 if node_type == other else ALIKE


def is_material(before: Correction | None, now: Correction, seen: Sequence[StageRatios], compute_s: Times) -> bool:
    """Return whether a stage's time surely differs from the last reported correction's, or else the profile's."""
    for entry in seen:
        weights, was = _weights(entry, compute_s), 1.0
        if before is not None:
            was = sum(x * factor for x, factor in zip(weights, before.of_type(entry.node_type).factors, strict=True))
        ratio = sum(x * factor for x, factor in zip(weights, now.of_type(entry.node_type).factors, strict=True)) / was
        if abs(math.log(ratio)) > max(MATERIAL, ERRORS * math.sqrt(entry.variance)):
            return True
    return False


def _weights(entry: StageRatios, compute_s: Times) -> list[float]:
    times_s = compute_s[entry.node_type]
    total_s = sum(times_s[entry.first_section : entry.end_section])
    return [
        time_s / total_s if entry.first_section <= index < entry.end_section else 0.0
        for index, time_s in enumerate(times_s)
    ]


def _inverse(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the inverse of a symmetric positive definite matrix (Gauss-Jordan, which needs no pivoting here)."""
    size = len(matrix)
    rows = [[*row, *(float(i == j) for j in range(size))] for i, row in enumerate(matrix)]
    for pivot in range(size):
        rows[pivot] = [value / rows[pivot][pivot] for value in rows[pivot]]
        for number in range(size):
            if number != pivot:
                factor = rows[number][pivot]
                rows[number] = [x - factor * y for x, y in zip(rows[number], rows[pivot], strict=True)]
    return [row[size:] for row in rows]
