"""Strategies that keep replicas together, and the rules by which ``auto`` changes the strategy. Pure.

========= ============================================================================================================
strategy  a step
========= ============================================================================================================
s-sgd     applies the mean gradient of all workers: replicas are equal
sma       moves each replica towards the mean of all, then applies its own gradient (Koliousis et al., CROSSBOW, VLDB
          2019; as in KungFu, without momentum of the mean)
ad-psgd   averages each replica with one other worker's, then applies its own gradient (Lian et al., 2018); workers
          wait for others only at a synchronisation, every ``SYNC_STEPS`` steps
========= ============================================================================================================

``auto`` begins with s-sgd and decides by the throughput of a worker, as Spotnik does (HotCloud 2020, section 4).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

S_SGD, SMA, AD_PSGD, AUTO = SYNCS = ("s-sgd", "sma", "ad-psgd", "auto")
PULL = 0.1
"""How far a step of sma moves a replica towards the mean: KungFu's value."""
SYNC_STEPS = 16
"""The number of steps of ad-psgd after which workers meet, to let joiners in and to decide."""
WINDOW = 8
"""The number of steps of s-sgd whose median throughput counts."""
LEAVE_BELOW, RETURN_ABOVE = 0.4, 0.6
"""Fractions of the reference throughput: s-sgd is left below the first (Spotnik's), and a trial kept above the second.
"""
FIRST_WAIT, MOST_WAIT = 4, 64
"""Synchronisations until s-sgd is tried again; each failed trial doubles the number."""


@dataclass(frozen=True)
class Pace:
    """The state of ``auto`` on which the workers of a job agree; equal at all of them after each boundary.

    ``reference``: the best throughput of a worker under s-sgd so far, in shares per second. ``other``: the newest
    throughput under ad-psgd. ``rates``: throughputs in this ring under this strategy. ``wait``: synchronisations until
    the next trial.
    """

    sync: str
    is_auto: bool = False
    reference: float = 0.0
    other: float = 0.0
    rates: tuple[float, ...] = ()
    num_workers: int = 0
    is_trial: bool = False
    next_wait: int = FIRST_WAIT
    wait: int = 0


def begun(sync: str) -> Pace:
    """Return the first pace of a job, for the strategy that the user requested."""
    return Pace(S_SGD if sync == AUTO else sync, is_auto=sync == AUTO)


def observed(pace: Pace, rate: float, num_workers: int) -> tuple[Pace, str | None]:
    """Record the workers' mean throughput at a boundary; return the new pace, and a reason if the strategy changes.

    ``rate``: shares per second, in one step under s-sgd, or since the last synchronisation under ad-psgd.
    """
    if not pace.is_auto:
        return pace, None
    if num_workers != pace.num_workers:
        has_shrunk = num_workers < pace.num_workers
        wait = 0 if has_shrunk and pace.sync == AD_PSGD else pace.wait
        return replace(pace, num_workers=num_workers, rates=(), wait=wait), None
    if pace.sync == AD_PSGD:
        if pace.wait > 0:
            return replace(pace, other=rate, wait=pace.wait - 1), None
        tried = replace(pace, sync=S_SGD, other=rate, rates=(), is_trial=True)
        return tried, f"s-sgd is tried again with {num_workers} workers"
    pace = replace(pace, rates=(*pace.rates, rate))
    return _judged(pace) if len(pace.rates) >= WINDOW else (pace, None)


def _judged(pace: Pace) -> tuple[Pace, str | None]:
    rate = statistics.median(pace.rates)
    reference = max(pace.reference, rate)
    pace = replace(pace, reference=reference, rates=())
    least = min(RETURN_ABOVE * reference, pace.other) if pace.is_trial else LEAVE_BELOW * reference
    if rate >= least:
        return replace(pace, is_trial=False, next_wait=FIRST_WAIT), None
    reason = f"a worker has {rate:.3g} shares/s under s-sgd, {rate / reference:.0%} of the best so far"
    wait, later = pace.next_wait, min(MOST_WAIT, 2 * pace.next_wait)
    return replace(pace, sync=AD_PSGD, is_trial=False, wait=wait, next_wait=later), reason


def is_sync_step(sync: str, num_steps: int) -> bool:
    """Whether workers meet after this many steps; they meet after step 1, so that none returns to the first model."""
    return sync == AD_PSGD and num_steps % SYNC_STEPS == 1


def partner(members: Sequence[int], me: int, step: int) -> int | None:
    """Return the member with which a member averages after a step: each other one equally often. None if alone."""
    others = [member for member in members if member != me]
    return Random(f"{me}/{step}").choice(others) if others else None


def shares_of(rank: int, num_workers: int, num_shares: int, *, is_shared: bool) -> list[int]:
    """Return the shares of a mini-batch that a worker computes; a worker with a replica of its own computes at least
    one.

    ``is_shared``: whether the sum over all workers is applied, so that no share may count twice.
    """
    mine = list(range(rank, num_shares, num_workers))
    return mine if mine or is_shared else [rank % num_shares]
