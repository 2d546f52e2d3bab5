"""Who is taken when. Pure: the same seed, names and births give the same times, in whatever order VMs come.

Times are seconds of the run's clock.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count, groupby
from typing import Protocol

from morph.contract.trace import Trace


@dataclass(frozen=True)
class Taking:
    """VMs that are taken together."""

    time_s: float
    vms: tuple[str, ...]


class Schedule(Protocol):
    """Says which VMs are due."""

    @property
    def end_s(self) -> float:
        """Nobody is taken after that."""

    def between(self, vms: Mapping[str, float], after_s: float, until_s: float) -> tuple[Taking, ...]:
        """Return what is due after one moment and until another, that one included, in order; each VM at most once.

        Args:
            vms: The VMs that there are, and since when.
            after_s: The first moment.
            until_s: The second one.
        """


@dataclass(frozen=True)
class Lifetimes:
    """Each VM lives for an exponential time with this mean: the preemption injector of Spotify (6.2.1, Eq. 6.1).

    A lifetime counts from the VM's birth, or from ``start_s`` if it was there before; by Eq. 6.1 a VM's age makes no
    difference. One that is not taken when it is over (too few others are left) lives for another one.
    """

    seed: int
    mttp_s: float
    start_s: float
    end_s: float = math.inf

    def between(self, vms: Mapping[str, float], after_s: float, until_s: float) -> tuple[Taking, ...]:
        """See ``Schedule``."""
        due = ((self._next_s(vm, since_s, after_s), vm) for vm, since_s in vms.items())
        return tuple(Taking(time_s, (vm,)) for time_s, vm in sorted(due) if time_s <= until_s)

    def _next_s(self, vm: str, since_s: float, after_s: float) -> float:
        """When the first lifetime is over that ends after a moment."""
        time_s = max(since_s, self.start_s)
        for number in count():
            time_s += lifetime_s(self.seed, vm, self.mttp_s, number)
            if time_s > after_s:
                break
        return time_s


@dataclass(frozen=True)
class Traced:
    """As many VMs at once as a trace takes, when it does; it brings none. Which of those that there are, the seed says.

    The trace's time 0 is ``start_s``.
    """

    seed: int
    trace: Trace
    start_s: float

    @property
    def end_s(self) -> float:
        """See ``Schedule``."""
        return self.start_s + self.trace.duration_s

    def between(self, vms: Mapping[str, float], after_s: float, until_s: float) -> tuple[Taking, ...]:
        """See ``Schedule``."""
        left, takings = set(vms), []
        removed = (event.time_s for event in self.trace.events if event.event == "remove")
        for trace_s, together in groupby(removed):
            if after_s < self.start_s + trace_s <= until_s:
                drawn = sorted(left, key=lambda vm: _uniform(self.seed, vm, trace_s))[: len(list(together))]
                left.difference_update(drawn)
                if drawn:
                    takings.append(Taking(self.start_s + trace_s, tuple(drawn)))
        return tuple(takings)


def lifetime_s(seed: int, vm: str, mttp_s: float, number: int = 0) -> float:
    """Draw a VM's lifetime with this number from the exponential distribution with this mean."""
    return -mttp_s * math.log(_uniform(seed, vm, number))


def _uniform(seed: int, vm: str, number: float) -> float:
    """A number above 0, at most 1, which depends on these alone."""
    digest = hashlib.sha256(f"{seed} {number!r} {vm}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") + 1) / 2**64
