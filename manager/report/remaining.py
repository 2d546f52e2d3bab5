"""Forecasts when a run ends and what it will have cost, from its decided steps so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import NormalDist

from pydantic import Field

from morph.contract.base import Value
from morph.words import duration_text

SHARE = 0.8
"""The share of runs that end within the interval, if pauses and losses come as often as so far."""
FEWEST = 20
"""The number of steps before which a forecast would be a guess."""
NUM_BATCHES = 10
"""The number of batches between which the spread is measured."""


class Remaining(Value):
    """The time that a run still needs, and its dollars at the end; each interval holds the truth in ``SHARE`` of runs.

    ``left_s``: seconds from now. ``low_s``, ``high_s``: its interval. The dollars are None if no price is known.
    """

    left_s: float = Field(ge=0)
    low_s: float = Field(ge=0)
    high_s: float = Field(ge=0)
    usd: float | None = None
    end_usd: tuple[float, float, float] | None = Field(default=None, description="expected, lowest, highest")

    @property
    def text(self) -> str:
        """The forecast in one line."""
        low, high = duration_text(self.low_s), duration_text(self.high_s)
        return f"about {duration_text(self.left_s)} left" + (f" ({low} to {high})" if low != high else "")

    @property
    def dollars_text(self) -> str | None:
        """The dollars so far and at the end in one line; None if no price is known."""
        if self.usd is None or self.end_usd is None:
            return None
        expected, low, high = (f"${usd:.4f}" for usd in self.end_usd)
        return f"${self.usd:.4f} so far, about {expected} at the end" + (f" ({low} to {high})" if low != high else "")


def remaining(
    points: Sequence[tuple[float, float]],
    now_s: float,
    num_steps: int | None,
    dollars: tuple[float | None, float | None] = (None, None),
) -> Remaining | None:
    """Forecast the end of a run; None if it is open-ended, or has at most ``FEWEST`` steps.

    ``points``: (time in s, version) after decided steps of this session, in order; set-backs included. ``dollars``: at
    the first of them and now. The time per step includes pauses and steps that were run again, as often as so far. Its
    spread comes from batch means: A. M. Law, "Simulation Modeling and Analysis", section 9.5.3; batches are stretches
    of equal progress, so slow shapes and pauses within one add up as they do in the rest of the run.
    """
    gained: list[tuple[float, float]] = []
    for time_s, reached in points:
        if not gained or reached > gained[-1][1]:
            gained.append((time_s, reached))
    if num_steps is None or len(gained) <= FEWEST:
        return None
    left = max(0.0, num_steps - points[-1][1])  # after a set-back, from the version that the run went back to
    (first_s, first), (last_s, last) = gained[0], gained[-1]
    took_s, num = max(now_s, last_s) - first_s, last - first
    step_s = took_s / num
    edges = [gained[(len(gained) - 1) * place // NUM_BATCHES] for place in range(NUM_BATCHES)]
    edges.append((first_s + took_s, last))
    squares = sum((end_s - begin_s - step_s * (end - begin)) ** 2 for (begin_s, begin), (end_s, end) in pairwise(edges))
    variance = squares / num * NUM_BATCHES / (NUM_BATCHES - 1)  # of the time of one step
    left_s = left * step_s
    spread = math.sqrt(variance * left * (1 + left / num)) / left_s if left_s else 0.0
    log = math.sqrt(math.log1p(spread**2))
    reach, middle = _student(NUM_BATCHES - 1) * log, left_s * math.exp(-(log**2) / 2)
    times = (left_s, min(left_s, middle * math.exp(-reach)), max(left_s, middle * math.exp(reach)))
    begun_usd, usd = dollars
    end_usd = None
    if usd is not None and begun_usd is not None and took_s > 0:
        rate = max(0.0, usd - begun_usd) / took_s
        end_usd = (usd + rate * times[0], usd + rate * times[1], usd + rate * times[2])
    return Remaining(left_s=times[0], low_s=times[1], high_s=times[2], usd=usd, end_usd=end_usd)


def _student(freedom: int) -> float:
    """Return Student's quantile for ``SHARE``; Abramowitz and Stegun, 26.7.5."""
    z = NormalDist().inv_cdf((1 + SHARE) / 2)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
