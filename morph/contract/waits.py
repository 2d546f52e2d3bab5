"""How long to wait: between tries that fail, and between two saves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

_MOST_GROWTHS = 64
"""By then every pause is as long as it gets, and no float overflows."""


@dataclass(frozen=True)
class Backoff:
    """Pauses between tries that fail: each is ``factor`` times as long as the one before, and at most ``most_s``."""

    first_s: float
    most_s: float
    factor: float = 2.0

    def pause_s(self, num_before: int) -> float:
        """Return the pause after a failure that comes after so many others in a row."""
        return min(self.first_s * self.factor ** min(num_before, _MOST_GROWTHS), self.most_s)

    def pauses(self) -> Iterator[float]:
        """Yield the pauses one after the other, without an end."""
        return map(self.pause_s, count())


def cheapest_interval_s(cost_s: float, mttf_s: float, again_s: float = 0.0) -> float:
    """Return the seconds between two saves with which saves and losses together cost least.

    An interval of tau costs one save, and at each loss half of tau is trained again. The sum is least at
    tau = sqrt(2 cost MTTF): Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974.
    The thesis on Spotify adds the time R that a new VM takes: sqrt(2 cost (MTTF + R)), equation 4.5.

    Args:
        cost_s: For so long a save stops training.
        mttf_s: Mean time between two losses from which a save helps.
        again_s: From such a loss until training continues.
    """
    return math.sqrt(2 * cost_s * (mttf_s + again_s))
