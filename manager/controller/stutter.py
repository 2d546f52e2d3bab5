"""Fail-stutter (Varuna, section 4.6): which of a shape's workers compute slower than they should. Pure statistics."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from morph.contract.messages import WorkerId
from morph.contract.rules import StutterRules

NORMAL_MAD = 1.4826  # the median absolute deviation of a normal distribution, times this, is its standard deviation
CALIBRATORS = 3


class Judgement(NamedTuple):
    """``ratio``: how many times as long as expected. Neither slow nor well: in between, nothing is to change."""

    ratio: float
    slow: bool
    well: bool


def judge(
    medians_s: Mapping[WorkerId, float], expected_s: float | None, rules: StutterRules
) -> dict[WorkerId, Judgement]:
    """Judge the workers of one stage by the median compute time (seconds) of each over a window of micro-batches.

    Replicas of a stage do the same work. Three or more are held against their median, and must also lie some
    robust deviations (median absolute deviation) above it. Of two the faster one is the measure, for nothing makes
    a device faster than it is. One alone is held against ``expected_s``; without that it is not judged.
    """
    values = sorted(medians_s.values())
    spread_s = 0.0
    if len(values) >= 3:
        reference_s = statistics.median(values)
        spread_s = NORMAL_MAD * statistics.median(abs(value - reference_s) for value in values)
    elif len(values) == 2:
        reference_s = values[0]
    elif expected_s is not None:
        reference_s = expected_s
    else:
        return {}
    if reference_s <= 0:
        return {}
    return {worker: _judged(value, reference_s, spread_s, rules) for worker, value in medians_s.items()}


def calibration(ratios: Sequence[float]) -> float:
    """Return how the workers at hand compare with the profile: its median if there are enough of them, else 1.

    What slows everybody (another clock, contention that the profile did not see) is no single worker's fault.
    """
    return statistics.median(ratios) if len(ratios) >= CALIBRATORS else 1.0


def _judged(value_s: float, reference_s: float, spread_s: float, rules: StutterRules) -> Judgement:
    ratio = value_s / reference_s
    slow = ratio >= rules.ratio and value_s - reference_s >= rules.deviations * spread_s
    return Judgement(ratio, slow, ratio < rules.well_ratio)
