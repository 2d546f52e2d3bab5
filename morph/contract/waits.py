"""Waiting times between failed tries and between saves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

_MOST_GROWTHS = 64
"""After so many failures every pause has its full length, and no float overflows."""


@dataclass(frozen=True)
class Backoff:
    """Pauses between failed tries: each is ``factor`` times as long as the one before, at most ``most_s``."""

    first_s: float
    most_s: float
    factor: float = 2.0

    def pause_s(self, num_before: int) -> float:
        """Return the pause after a failure that follows ``num_before`` others in a row."""
        return min(self.first_s * self.factor ** min(num_before, _MOST_GROWTHS), self.most_s)

    def pauses(self) -> Iterator[float]:
        """Yield the pauses one after the other, endlessly."""
        return map(self.pause_s, count())


def cheapest_interval_s(cost_s: float, mttf_s: float, again_s: float = 0.0) -> float:
    """Return the seconds between two saves that minimise the cost of saves and losses together.

    An interval of tau costs one save, and at each loss half of tau is trained again. The sum is least at tau = sqrt(2
    cost MTTF): Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974. The thesis on
    Spotify adds the time R that a new VM takes: sqrt(2 cost (MTTF + R)), equation 4.5.

    ``cost_s``: time for which a save stops training. ``mttf_s``: mean time between two losses from which a save helps.
    ``again_s``: R, from such a loss until training continues.
    """
    return math.sqrt(2 * cost_s * (mttf_s + again_s))
