"""Fail-stutter (Varuna, section 4.6): which workers of a shape compute too slowly. Pure statistics."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from morph.contract.messages import WorkerId
from morph.contract.rules import StutterRules

NORMAL_MAD = 1.4826  # the median absolute deviation of a normal distribution, times this, is its standard deviation
MEDIAN_ERROR = 1.2533  # standard error of the median of a normal sample, divided by that of its mean
LOADED_RATIO = 1.5
"""The smallest ratio that counts as slow when all workers wait for cores at least as long as they compute."""
PEERS = 3
"""The smallest number of workers from which the random spread can be estimated."""
SMALL_SAMPLE = {3: 1.495, 4: 1.363, 5: 1.206, 6: 1.2, 7: 1.14, 8: 1.129, 9: 1.107}
"""Factors that correct the median absolute deviation of few values (Croux and Rousseeuw 1992)."""


class Usual(NamedTuple):
    """How the present workers compare with the profile: the median of their ratios to it, and its robust spread."""

    ratio: float
    spread: float

    def expects(self, profiled_s: float) -> Expected:
        """Return the expected time (seconds) for work that took ``profiled_s`` when it was profiled."""
        return Expected(profiled_s * self.ratio, profiled_s * self.spread)


class Expected(NamedTuple):
    """The expected time of a micro-batch (seconds), and the deviation (seconds) of healthy workers from it."""

    compute_s: float
    spread_s: float


class Judgement(NamedTuple):
    """A worker's time is ``ratio`` times the expected ``healthy_s``; ``by_sums``: judged over many windows."""

    ratio: float
    slow: bool
    well: bool
    healthy_s: float
    by_sums: bool = False


def spread(values: Sequence[float]) -> float:
    """Return the robust standard deviation of some values; 0 for one value."""
    middle = statistics.median(values)
    return NORMAL_MAD * statistics.median(abs(value - middle) for value in values)


def error_of_median(samples_s: Sequence[float]) -> float:
    """Return the standard error (seconds) of the median from the samples' spread, which is large on shared cores."""
    return MEDIAN_ERROR * spread(samples_s) / math.sqrt(len(samples_s))


def judge(
    medians_s: Mapping[WorkerId, float],
    expected: Expected | None,
    rules: StutterRules,
    errors_s: Mapping[WorkerId, float] = MappingProxyType({}),
    waited_s: float = 0.0,
) -> dict[WorkerId, Judgement]:
    """Judge workers that do the same work by the median compute time (seconds) of each over a window of micro-batches.

    Three or more are compared with their median, and a slow one must lie some robust deviations (median absolute
    deviation) above it; the slower of two is compared with the faster, and one alone with ``expected``. The excess must
    also be some standard errors (``errors_s``). ``waited_s``: the time that all of them waited for cores. It is added
    to both times of a ratio, and raises the ratio that counts as slow, up to ``LOADED_RATIO``.
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
        worker: _judgement(
            value, reference_s, max(spread_s, math.hypot(errors_s.get(worker, 0.0), measure_error_s)), rules, waited_s
        )
        for worker, value in medians_s.items()
    }


def usual(ratios: Sequence[float]) -> Usual | None:
    """Return how workers compare with the profile, by the ratios of their times to it; None: too few workers."""
    count = len(ratios)
    if count < PEERS:
        return None
    return Usual(statistics.median(ratios), spread(ratios) * SMALL_SAMPLE.get(count, count / (count - 0.8)))


def _judgement(value_s: float, reference_s: float, spread_s: float, rules: StutterRules, waited_s: float) -> Judgement:
    ratio = (value_s + waited_s) / (reference_s + waited_s)
    least = rules.ratio + max(0.0, LOADED_RATIO - rules.ratio) * min(1.0, waited_s / reference_s)
    slow = ratio >= least and value_s - reference_s >= rules.deviations * spread_s
    return Judgement(ratio, slow, ratio < rules.well_ratio, reference_s)
