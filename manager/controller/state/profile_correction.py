"""Corrections of the profile from compute times during a run: a factor for each section's time, with its uncertainty.

The logarithm of a stage's time over its profiled time is about the mean of the sections' logarithms, weighted by their
times; stages with different cuts tell sections apart. This is Bayesian linear regression with a common part and a part
for each section; both have a prior around 0, which shrinks the effect of few observations. It is pure arithmetic on few
numbers, equal to the bit when a journal is replayed. All nodes of a run have the node type of the profile.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import groupby

from pydantic import Field

from morph.contract.base import Value

COMMON_SPREAD, OWN_SPREAD = 0.5, 0.15
"""Prior standard deviations of the common part and of an average section's own part.

The variance of a section's own part is inversely proportional to its time, as if it consisted of many equal parts: so
sections that were only observed together have the same factor.
"""
NOISE, NOISE_COUNTS = 0.1, 4
"""Standard deviation assumed for one observation, and how many observations this assumption counts as."""
MISFIT = 0.005
"""Standard deviation that remains however many observations of the same stage there are."""
MOST_STAGES = 16
MOST_COUNTED = 400
"""Observations of a stage count as this many at most: a machine's speed changes, and older ones are forgotten."""
MATERIAL, ERRORS = 0.03, 3.0
"""A change of a stage's time is material above this share and above this many standard errors."""


class StageRatios(Value):
    """Logarithms of time over profiled time of a stage: their number, mean, and sum of squared deviations."""

    first_section: int
    end_section: int
    num: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def with_one(self, log_ratio: float) -> StageRatios:
        """Return these ratios with one more observation (Welford); at the limit it replaces an average one."""
        num = min(self.num + 1, MOST_COUNTED)
        kept = self.squares * (num - 1) / self.num if self.num else 0.0
        mean = self.mean + (log_ratio - self.mean) / num
        squares = kept + (log_ratio - self.mean) * (log_ratio - mean)
        return self.model_copy(update={"num": num, "mean": mean, "squares": squares})

    @property
    def variance(self) -> float:
        """The variance of the mean."""
        each = (self.squares + NOISE_COUNTS * NOISE**2) / (self.num - 1 + NOISE_COUNTS)
        return each / self.num + MISFIT**2


class Correction(Value):
    """By section: the factor on its profiled time, and the factor's standard error as a share of it."""

    factors: tuple[float, ...] = Field(min_length=1)
    errors: tuple[float, ...] = Field(min_length=1)

    @property
    def sentence(self) -> str:
        """The correction in words; neighbouring sections with the same factor are listed together."""
        parts, first = [], 0
        for factor, alike in groupby(f"{factor:.2f}" for factor in self.factors):
            last = first + len(list(alike)) - 1
            error = max(self.errors[first : last + 1])
            sections = f"{first}-{last}" if first < last else f"{first}"
            parts.append(f"{sections} x{factor} (each +-{error:.0%})")
            first = last + 1
        return f"times of sections against the profile: {', '.join(parts)}"


def with_observation(seen: tuple[StageRatios, ...], sections: range, log_ratio: float) -> tuple[StageRatios, ...]:
    """Add one observation of a stage; beyond ``MOST_STAGES``, the least recently observed stages are forgotten."""
    key = (sections.start, sections.stop)
    known = next((entry for entry in seen if (entry.first_section, entry.end_section) == key), None)
    entry = known or StageRatios(first_section=sections.start, end_section=sections.stop)
    others = tuple(other for other in seen if other is not known)
    return (*others, entry.with_one(log_ratio))[-MOST_STAGES:]


def with_times(
    seen: tuple[StageRatios, ...],
    sections: Mapping[int, range],
    samples_s: Mapping[int, Sequence[float]],
    section_compute_s: Sequence[float],
) -> tuple[StageRatios, ...]:
    """Add one observation for each of some stages: the median over its micro-batches.

    Args:
        seen: The ratios so far.
        sections: The sections of each stage.
        samples_s: Compute seconds of micro-batches, by stage.
        section_compute_s: The profile's seconds of each section.
    """
    for stage, times_s in sorted(samples_s.items()):
        median_s = statistics.median(times_s) if times_s else 0.0
        if median_s > 0:
            profiled_s = sum(section_compute_s[sections[stage].start : sections[stage].stop])
            seen = with_observation(seen, sections[stage], math.log(median_s / profiled_s))
    return seen


def correction_of(seen: Sequence[StageRatios], section_compute_s: Sequence[float]) -> Correction:
    """Return the correction of each section that follows from the observations and the profiled times (seconds)."""
    weights = [_weights(entry, section_compute_s) for entry in seen]
    common, mean_s = COMMON_SPREAD**2, sum(section_compute_s) / len(section_compute_s)
    owns = [OWN_SPREAD**2 * mean_s / time_s for time_s in section_compute_s]
    covariance = [
        [common + sum(own * x * y for own, x, y in zip(owns, one, other, strict=True)) for other in weights]
        for one in weights
    ]
    for index, entry in enumerate(seen):
        covariance[index][index] += entry.variance
    inverse = _inverse(covariance)
    gains = [sum(value * entry.mean for value, entry in zip(row, seen, strict=True)) for row in inverse]
    factors, errors = [], []
    for section, own in enumerate(owns):
        to_stages = [common + own * weight[section] for weight in weights]
        told = sum(x * inverse[i][j] * y for i, x in enumerate(to_stages) for j, y in enumerate(to_stages))
        factors.append(round(math.exp(sum(x * gain for x, gain in zip(to_stages, gains, strict=True))), 4))
        errors.append(round(math.sqrt(max(0.0, common + own - told)), 4))
    return Correction(factors=tuple(factors), errors=tuple(errors))


def is_material(
    before: Correction | None, now: Correction, seen: Sequence[StageRatios], section_compute_s: Sequence[float]
) -> bool:
    """Whether some stage's time surely differs from that of the last reported correction, or else of the profile."""
    for entry in seen:
        weights = _weights(entry, section_compute_s)
        told = 1.0 if before is None else sum(x * factor for x, factor in zip(weights, before.factors, strict=True))
        ratio = sum(x * factor for x, factor in zip(weights, now.factors, strict=True)) / told
        if abs(math.log(ratio)) > max(MATERIAL, ERRORS * math.sqrt(entry.variance)):
            return True
    return False


def _weights(entry: StageRatios, section_compute_s: Sequence[float]) -> list[float]:
    total_s = sum(section_compute_s[entry.first_section : entry.end_section])
    return [
        time_s / total_s if entry.first_section <= index < entry.end_section else 0.0
        for index, time_s in enumerate(section_compute_s)
    ]


def _inverse(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the inverse of a symmetric positive definite matrix (Gauss-Jordan, which needs no pivoting here)."""
    size = len(matrix)
    rows = [[*row, *(float(i == j) for j in range(size))] for i, row in enumerate(matrix)]
    for pivot in range(size):
        rows[pivot] = [value / rows[pivot][pivot] for value in rows[pivot]]
        for other in range(size):
            if other != pivot:
                factor = rows[other][pivot]
                rows[other] = [x - factor * y for x, y in zip(rows[other], rows[pivot], strict=True)]
    return [row[size:] for row in rows]
