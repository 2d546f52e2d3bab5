"""Statistics of a trace: numbers of VMs, losses, replacements and prices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from morph.contract.trace import Trace, TraceEvent

WINDOW_S = 60.0
"""Seconds within which losses in a zone count as simultaneous: published traces have one sample per minute."""
ALL = "all"


@dataclass(frozen=True)
class Revocation:
    """VMs of one zone that are lost at once."""

    time_s: float
    zone: str
    size: int


@dataclass(frozen=True)
class TraceStatistics:
    """Statistics of one zone, or of all. Lifetimes are in hours, each with whether the VM was revoked at its end."""

    zone: str
    hours: float
    vm_hours: float
    peak: int
    first: int
    num_added: int
    num_lost: int
    num_noticed: int
    sizes: dict[int, int]
    lifetimes: tuple[tuple[float, bool], ...]
    lead_s: float | None
    usd_per_h: float | None
    usd_range: tuple[float, float] | None

    @property
    def mean_vms(self) -> float:
        """The mean number of VMs."""
        return self.vm_hours / self.hours if self.hours else 0.0

    @property
    def losses_per_vm_h(self) -> float:
        """How often one VM is lost, per hour."""
        return self.num_lost / self.vm_hours if self.vm_hours else 0.0

    @property
    def bulk_share(self) -> float:
        """Share of lost VMs that were lost together with others of their zone."""
        return 1 - self.sizes.get(1, 0) / self.num_lost if self.num_lost else 0.0

    @property
    def replacement_s(self) -> float | None:
        """Mean time for which a lost VM is missing from the peak (Little's law); None: none was lost."""
        return (self.peak - self.mean_vms) * self.hours * 3600 / self.num_lost if self.num_lost else None

    @property
    def median_life_h(self) -> float | None:
        """Median lifetime (Kaplan-Meier); None: more than half of the VMs survived."""
        return next((hours for hours, share in survival(self.lifetimes) if share <= 0.5), None)


def statistics_of(trace: Trace, window_s: float = WINDOW_S) -> dict[str, TraceStatistics]:
    """Return statistics by zone, and of all zones if there are several (under ``ALL``)."""
    zones = list(dict.fromkeys(event.zone for event in trace.events))
    revocations = revocations_of(trace, window_s)
    by_zone = {
        zone: _of(zone, [event for event in trace.events if event.zone == zone], trace, revocations) for zone in zones
    }
    return by_zone if len(zones) == 1 else by_zone | {ALL: _of(ALL, trace.events, trace, revocations)}


def revocations_of(trace: Trace, window_s: float = WINDOW_S) -> list[Revocation]:
    """Return the revocations of a trace in order of time, with losses within ``window_s`` grouped."""
    revocations: list[Revocation] = []
    newest: dict[str, int] = {}
    for event in trace.events:
        if event.event == "add":
            continue
        place = newest.get(event.zone)
        if place is not None and event.time_s - revocations[place].time_s < window_s:
            revocations[place] = Revocation(revocations[place].time_s, event.zone, revocations[place].size + 1)
        else:
            newest[event.zone] = len(revocations)
            revocations.append(Revocation(event.time_s, event.zone, 1))
    return revocations


def counts_of(events: Iterable[TraceEvent]) -> tuple[list[float], list[int]]:
    """Return the times (seconds) at which VMs come or go, and the number of VMs from each time on."""
    times, counts, now = [0.0], [0], 0
    for event in events:
        now += 1 if event.event == "add" else -1
        if event.time_s == times[-1]:
            counts[-1] = now
        else:
            times.append(event.time_s)
            counts.append(now)
    return times, counts


def survival(lifetimes: Sequence[tuple[float, bool]]) -> list[tuple[float, float]]:
    """Return (hours, share of VMs that survive longer) at each loss (Kaplan and Meier, 1958)."""
    curve, share, left = [], 1.0, len(lifetimes)
    for hours, lost in sorted(lifetimes, key=lambda life: (life[0], not life[1])):
        if lost:
            share *= 1 - 1 / left
            curve.append((hours, share))
        left -= 1
    return curve


def _of(zone: str, events: Sequence[TraceEvent], trace: Trace, revocations: Iterable[Revocation]) -> TraceStatistics:
    end_s = trace.duration_s
    added_s: dict[str, float] = {}
    lifetimes: list[tuple[float, bool]] = []
    leads: list[float] = []
    for event in events:
        if event.event == "add":
            added_s[event.node_id] = event.time_s
        else:
            lifetimes.append(((event.time_s - added_s.pop(event.node_id)) / 3600, True))
            leads += [] if event.notice_s is None else [event.notice_s]
    lifetimes += [((end_s - since_s) / 3600, False) for since_s in added_s.values()]
    times, counts = counts_of(events)
    vm_s = sum(
        count * (later - time_s) for (time_s, later), count in zip(pairwise([*times, end_s]), counts, strict=True)
    )
    usd = [price.usd_per_h for price in trace.prices if zone in (price.zone, ALL)]
    return TraceStatistics(
        zone=zone,
        hours=end_s / 3600,
        vm_hours=vm_s / 3600,
        peak=max(counts),
        first=counts[0],
        num_added=sum(event.event == "add" for event in events),
        num_lost=sum(lost for _, lost in lifetimes),
        num_noticed=len(leads),
        sizes=dict(sorted(Counter(each.size for each in revocations if zone in (each.zone, ALL)).items())),
        lifetimes=tuple(lifetimes),
        lead_s=float(np.mean(leads)) if leads else None,
        usd_per_h=float(np.mean(usd)) if usd else None,
        usd_range=(min(usd), max(usd)) if usd else None,
    )
