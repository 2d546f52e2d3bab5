"""A model whose traces have a trace's statistics, zone by zone."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from morph.contract.errors import TraceError
from morph.contract.trace import Trace
from simulator.traces.model import HOURS, TraceModel, Zone, sizes_of
from simulator.traces.statistics import (
    ALL,
    WINDOW_S,
    Revocation,
    TraceStatistics,
    counts_of,
    revocations_of,
    statistics_of,
)

DAYS_FOR_HOURS = 2.0
"""In shorter traces hours of the day do not occur often enough to distinguish them."""
_PRIOR_LOSSES = 4.0
"""Prior weight of the mean rate in each hour of the day, as a number of losses."""


def fit(trace: Trace, *, window_s: float = WINDOW_S, start_hour: float = 0.0) -> TraceModel:
    """Return a model whose traces have the statistics of this trace.

    Losses per VM and hour, numbers of VMs lost at once, and notices are those of the trace. The wanted number of VMs is
    its peak, and missing VMs are replaced after the trace's mean delay (Little's law). Hours of the day differ only if
    the trace is longer than ``DAYS_FOR_HOURS``. Zones lose VMs together as often as in the trace, beyond chance. Raises
    TraceError if no VM is ever lost in the trace, or no VM exists for any time.
    """
    statistics = statistics_of(trace, window_s)
    whole = statistics.get(ALL) or next(iter(statistics.values()))
    if not whole.num_lost or not whole.vm_hours:
        what = "is lost in it" if not whole.num_lost else "is there for any time"
        raise TraceError(f"cannot be fitted: no VM {what}", field="trace")
    revocations = revocations_of(trace, window_s)
    zones = tuple(
        _zone(of_zone, trace, start_hour)
        for name, of_zone in statistics.items()
        if (name != ALL or len(statistics) == 1) and of_zone.peak
    )
    gaps = [
        later.time_s - price.time_s
        for price, later in pairwise(trace.prices)
        if later.zone == price.zone and later.time_s > price.time_s
    ]
    return TraceModel(
        zones=zones,
        together=_together(revocations, [zone.name for zone in zones], whole.hours * 3600, window_s),
        noticed=whole.num_noticed / whole.num_lost,
        notice_s=whole.lead_s or 120.0,
        start_hour=start_hour % HOURS,
        price_every_s=float(np.median(gaps)) if gaps else 3600.0,
        instance_type=trace.events[0].instance_type,
    )


def _zone(statistics: TraceStatistics, trace: Trace, start_hour: float) -> Zone:
    usd = [price.usd_per_h for price in trace.prices if price.zone == statistics.zone and price.usd_per_h > 0]
    return Zone(
        name=statistics.zone,
        vms=statistics.peak,
        initial=min(statistics.peak, statistics.first or round(statistics.mean_vms)),
        losses_per_vm_h=statistics.losses_per_vm_h,
        by_hour=_by_hour(statistics, trace, start_hour),
        sizes=sizes_of(statistics.sizes),
        replacement_s=max(1.0, statistics.replacement_s or 3600.0),
        usd_per_h=statistics.usd_per_h,
        price_spread=float(np.std(np.log(usd))) if usd else 0.0,
    )


def _by_hour(statistics: TraceStatistics, trace: Trace, start_hour: float) -> tuple[float, ...]:
    """Return factors of the rate of losses by hour of the day, shrunk towards 1."""
    if statistics.hours < 24 * DAYS_FOR_HOURS or not statistics.num_lost:
        return ()
    events = [event for event in trace.events if event.zone == statistics.zone]
    losses, vm_hours = np.zeros(HOURS), np.zeros(HOURS)
    for event in events:
        if event.event == "remove":
            losses[int(start_hour + event.time_s / 3600) % HOURS] += 1
    times, counts = counts_of(events)
    ends = [*times[1:], trace.duration_s]
    for time_s, end_s, count in zip(times, ends, counts, strict=True):
        now_h, end_h = time_s / 3600, end_s / 3600
        while now_h < end_h - 1e-12:
            next_h = min(end_h, math.floor(now_h + 1e-9) + 1.0)
            vm_hours[int(start_hour + now_h + 1e-9) % HOURS] += count * (next_h - now_h)
            now_h = next_h
    expected = vm_hours * statistics.losses_per_vm_h
    factors = (losses + _PRIOR_LOSSES) / (expected + _PRIOR_LOSSES)
    return tuple(round(float(factor), 4) for factor in factors / factors.mean())


def _together(revocations: list[Revocation], zones: list[str], duration_s: float, window_s: float) -> float:
    """Return the probability, beyond chance, that a revocation in one zone hits another one at the same time."""
    if len(zones) < 2:
        return 0.0
    times = {zone: np.array([each.time_s for each in revocations if each.zone == zone]) for zone in zones}
    pairs = hits = chance = 0.0
    for zone in zones:
        for other in zones:
            if other != zone and len(times[zone]):
                near = np.searchsorted(times[other], times[zone] + window_s, "left") > np.searchsorted(
                    times[other], times[zone] - window_s, "right"
                )
                pairs += len(near)
                hits += float(near.sum())
                chance += len(near) * -math.expm1(-len(times[other]) * 2 * window_s / duration_s)
    beyond = (hits - chance) / pairs if pairs else 0.0
    return _together_of(max(0.0, min(1.0, beyond)), len(zones))


def _together_of(linked: float, num_zones: int) -> float:
    """Return the probability of joint revocations with which equal zones have this share of linked revocations.

    A revocation that hits a zone began there, or in another zone, from which it may hit both.
    """
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        share = middle * (2 + (num_zones - 2) * middle) / (1 + (num_zones - 1) * middle)
        low, high = (middle, high) if share < linked else (low, middle)
    return low
