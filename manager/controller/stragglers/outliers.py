"""Fail-stutter (Varuna, section 4.6): which of a shape's workers compute slower than they should. Pure statistics."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from morph.contract.messages import WorkerId
from morph.contract.rules import StutterRules

NORMAL_MAD = 1.4826  # the median absolute deviation of a normal distribution, times this, is its standard deviation
MEDIAN_ERROR = 1.2533  # standard error of a normal sample's median over that of its mean
PEERS = 3
"""So many can show by themselves what is chance."""
SMALL_SAMPLE = {3: 1.495, 4: 1.363, 5: 1.206, 6: 1.2, 7: 1.14, 8: 1.129, 9: 1.107}
"""By how much the deviation of few is more than their median absolute deviation says (Croux and Rousseeuw 1992)."""


class Usual(NamedTuple):
    """How the workers at hand compare with the profile: the median of their ratios to it, and the robust spread."""

    ratio: float
    spread: float

    def expects(self, profiled_s: float) -> Expected:
        """Return what is expected (seconds) of a worker for work that took that long when it was profiled."""
        return Expected(profiled_s * self.ratio, profiled_s * self.spread)


class Expected(NamedTuple):
    """What a micro-batch should take (seconds), and the deviation (seconds) by which healthy workers miss that."""

    compute_s: float
    spread_s: float


class Judgement(NamedTuple):
    """``ratio``: how many times as long as expected, which is ``healthy_s``.

    Neither slow nor well: in between, nothing is to change.
    """

    ratio: float
    slow: bool
    well: bool
    healthy_s: float


def spread(values: Sequence[float]) -> float:
    """Return the robust standard deviation of some values, 0 for one; of few it says too little."""
    middle = statistics.median(values)
    return NORMAL_MAD * statistics.median(abs(value - middle) for value in values)


def error_of_median(samples_s: Sequence[float]) -> float:
    """Return the standard error (seconds) of the median of these samples, as their own spread has it.

    On a machine whose cores are shared a micro-batch takes now this long, now that: a window says less there.
    """
    return MEDIAN_ERROR * spread(samples_s) / math.sqrt(len(samples_s))


def judge(
    medians_s: Mapping[WorkerId, float],
    expected: Expected | None,
    rules: StutterRules,
    errors_s: Mapping[WorkerId, float] = MappingProxyType({}),
) -> dict[WorkerId, Judgement]:
    """Judge the workers of one stage by the median compute time (seconds) of each over a window of micro-batches.

    Replicas of a stage do the same work. Three or more are held against their median, and must also lie some
    robust deviations (median absolute deviation) above it. Of two the faster one is the measure, for nothing makes
    a device faster than it is. One alone is held against ``expected``, and must also lie some of its deviations
    above it; without that it is not judged. Always, the excess must also be some standard errors of the two medians
    (``errors_s``) that are compared.
    """
    values = sorted(medians_s.values())
    spread_s = measure_error_s = 0.0
    if len(values) >= PEERS:
        reference_s, spread_s = statistics.median(values), spread(values)
    elif len(values) == 2:
        reference_s = values[0]
        measure_error_s = errors_s.get(min(medians_s, key=medians_s.__getitem__), 0.0)
    elif expected is not None:
        reference_s, spread_s = expected
    else:
        return {}
    if reference_s <= 0:
        return {}
    return {
        worker: _judged(
            value, reference_s, max(spread_s, math.hypot(errors_s.get(worker, 0.0), measure_error_s)), rules
        )
        for worker, value in medians_s.items()
    }


def usual(ratios: Sequence[float]) -> Usual | None:
    """Return how workers compare with the profile, by the ratio of each one's time to its own; None: too few to tell.

    What slows everybody (another clock, contention that the profile did not see) is no single worker's fault, and
    where workers compare with the profile unequally it is the profile that is not to be trusted. One or two workers
    cannot show whether a worker or the profile is wrong.
    """
    count = len(ratios)
    if count < PEERS:
        return None
    return Usual(statistics.median(ratios), spread(ratios) * SMALL_SAMPLE.get(count, count / (count - 0.8)))


def _judged(value_s: float, reference_s: float, spread_s: float, rules: StutterRules) -> Judgement:
    ratio = value_s / reference_s
    slow = ratio >= rules.ratio and value_s - reference_s >= rules.deviations * spread_s
    return Judgement(ratio, slow, ratio < rules.well_ratio, reference_s)
