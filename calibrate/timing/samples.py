"""Summarises repeated measurements by their median and spread, and decides when there are enough of them."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from morph.contract.profile import Timing

NUM_QUANTILES = 17
STABLE_WITHIN = 0.01
ROUGHLY_WITHIN = 0.03
"""For small parts of a step, and for work that waits for other processes: both vary more."""
_NORMAL_95 = 1.96
_DIGITS = 9


def timing(samples_s: Sequence[float]) -> Timing:
    """Summarise one or more durations in seconds, without discarding outliers, rounded to nanoseconds."""
    centre = median(samples_s)
    spread = median(abs(sample - centre) for sample in samples_s)
    levels = np.quantile(np.asarray(samples_s, np.float64), np.linspace(0.0, 1.0, NUM_QUANTILES)).tolist()
    return Timing(
        median_s=_rounded(centre),
        mad_s=_rounded(spread),
        num_samples=len(samples_s),
        mean_s=_rounded(fmean(samples_s)),
        quantiles_s=tuple(_rounded(level) for level in levels) if len(samples_s) > 1 else (),
    )


def sum_of(parts: Sequence[Timing]) -> Timing:
    """Summarise parts that run one after the other; their spreads, being independent, add in quadrature."""
    centre = sum(part.median_s for part in parts)
    has_quantiles = bool(parts) and all(len(part.quantiles_s) == NUM_QUANTILES for part in parts)
    quantiles = [_sum_at(parts, centre, level) for level in range(NUM_QUANTILES)] if has_quantiles else []
    return Timing(
        median_s=_rounded(centre),
        mad_s=_rounded(math.sqrt(sum(part.mad_s**2 for part in parts))),
        num_samples=min((part.num_samples for part in parts), default=1),
        mean_s=_rounded(sum(part.median_s if part.mean_s is None else part.mean_s for part in parts)),
        quantiles_s=tuple(quantiles),
    )


def mean_of(parts: Sequence[tuple[float, Timing]]) -> Timing:
    """Summarise alternatives, weighted by their shares: the means of their medians and of their spreads."""
    if len(parts) == 1:
        return parts[0][1]

    def mean(number: Callable[[Timing], float]) -> float:
        return _rounded(sum(share * number(part) for share, part in parts))

    levels = range(NUM_QUANTILES if all(len(part.quantiles_s) == NUM_QUANTILES for _, part in parts) else 0)
    return Timing(
        median_s=mean(lambda part: part.median_s),
        mad_s=mean(lambda part: part.mad_s),
        num_samples=min(part.num_samples for _, part in parts),
        mean_s=mean(lambda part: part.median_s if part.mean_s is None else part.mean_s),
        quantiles_s=tuple(_rounded(sum(share * part.quantiles_s[level] for share, part in parts)) for level in levels),
    )


def _sum_at(parts: Sequence[Timing], centre_s: float, level: int) -> float:
    squares = [(part.quantiles_s[level] - part.median_s) for part in parts]
    total = sum(away * abs(away) for away in squares)
    return _rounded(centre_s + math.copysign(math.sqrt(abs(total)), total))


def _rounded(seconds: float) -> float:
    return round(max(0.0, seconds), _DIGITS)


def is_stable(measured: Sequence[Sequence[float]], within: float = STABLE_WITHIN) -> bool:
    """Return whether the error of the sum of medians is at most ``within`` times that sum.

    A median's error is half its 95 % confidence interval, from order statistics; errors add in quadrature.
    """
    return math.hypot(*map(_half_width, measured)) <= within * sum(map(median, measured))


def _half_width(samples: Sequence[float]) -> float:
    ordered, count = sorted(samples), len(samples)
    reach = _NORMAL_95 * math.sqrt(count) / 2
    low, high = math.floor(count / 2 - reach), math.ceil(count / 2 + reach)
    return math.inf if low < 0 or high >= count else (ordered[high] - ordered[low]) / 2


@dataclass(frozen=True)
class Sampling:
    """Decides how often something is measured: at least ``least`` and at most ``most`` times.

    In between, measuring ends when ``budget_s`` is spent, or once there are ``enough`` samples and the median is stable
    (its error is at most the share ``within`` of it).
    """

    budget_s: float
    most: int = 100
    least: int = 5
    enough: int = 20
    within: float = STABLE_WITHIN

    def wants_more(self, measured: Sequence[Sequence[float]], spent_s: float) -> bool:
        """Return whether another sample is needed; ``measured``: the samples of each thing that is measured in turn."""
        count = len(measured[0])
        if count >= self.most:
            return False
        if count < self.least:
            return True
        if spent_s > self.budget_s:
            return False
        return count < self.enough or not is_stable(measured, self.within)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep Python's garbage collector out of the measurements."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
