"""Estimates the life of the next VM of a kind, from the lives of earlier VMs. Pure.

The kinds are nested: zone in region in size in provider. The estimate of the loss rate begins with published traces (a
Gamma prior) and proceeds from the widest kind to the narrowest. Each step adds the lives of this kind that are not of
the next narrower kind, and limits the weight of everything known so far to that of the prior, which reflects how much
kinds differ in the traces. So a zone with many lives follows its own losses, a zone with few follows its region's, and
no life counts twice. Shares are estimated in the same way (Beta); times are medians of the narrowest kind with
``ENOUGH`` of them. Losses of several VMs at once are not independent: losses and hours are both divided by the mean
number of VMs lost together.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from pydantic import Field

from manager.controller.state.config import ExpectedLosses
from manager.controller.state.events import NodeFacts
from manager.report.lives import Life
from morph.contract.base import Value

PRIOR = ExpectedLosses()
WEIGHT_LOSSES = 3.9
"""The weight of the prior's ``bulk_share``, by its spread among traces; ``WEIGHT_EVENTS``: of ``bulk_fraction``."""
WEIGHT_EVENTS = 4.9
MOST_WEIGHT_VM_H = 100.0
"""The largest weight of the estimate in a run, so that an unusual day soon shows in the run's own estimate."""
ENOUGH = 5
INTERVAL = 0.9


class Seen(Value):
    """Sums over some lives. ``together``: VMs lost together, by loss; ``bulk_fractions``: shares of VMs, by event."""

    num_vms: int = 0
    hours: float = 0.0
    num_lost: int = 0
    num_noticed: int = 0
    together: int = 0
    num_bulk: int = 0
    num_bulk_events: float = 0.0
    bulk_fractions: float = 0.0


class Estimate(Value):
    """The estimate for a kind of VM, and the amount of data behind it.

    ``low_per_vm_h`` to ``high_per_vm_h``: the rate is in this interval with a probability of ``INTERVAL``. ``num_...``:
    the number of observations of the narrowest kind that each figure used; 0: only the prior. ``lead_s``: None if no
    notice was ever given.
    """

    expected: ExpectedLosses
    low_per_vm_h: float
    high_per_vm_h: float
    lead_s: float | None
    num_allocations: int
    num_preparations: int
    num_notices: int


class KindSeen(Value):
    """The observations of one kind of VM, and its estimate. Times are medians; None: there were none."""

    facts: NodeFacts
    seen: Seen
    mean_lifetime_h: float | None = Field(description="VM-hours over losses; None: no VM was lost")
    lead_s: float | None
    allocation_s: float | None
    preparation_s: float | None
    usd_per_h: float | None = Field(description="last seen")
    estimate: Estimate


def seen(lives: Sequence[Life]) -> Seen:
    """Add up some lives."""
    bulk = [life for life in lives if life.is_lost and life.lost_with > 1]
    return Seen(
        num_vms=len(lives),
        hours=sum(life.hours for life in lives),
        num_lost=sum(life.is_lost for life in lives),
        num_noticed=sum(life.is_lost and life.lead_s is not None for life in lives),
        together=sum(max(1, life.lost_with) for life in lives if life.is_lost),
        num_bulk=len(bulk),
        num_bulk_events=sum(1 / life.lost_with for life in bulk),
        bulk_fractions=sum(1 / life.lost_of for life in bulk),
    )


def estimate(lives: Sequence[Life], facts: NodeFacts) -> Estimate:
    """Return the estimate for VMs of a kind, from its provider's; facts without a size, region or zone mean any."""
    most = max((number for number, field in enumerate(facts.model_dump().values(), 1) if field), default=1)
    depths = [min(most, _depth(life.facts, facts)) for life in lives]
    steps = [[life for life, at in zip(lives, depths, strict=True) if at == depth] for depth in range(1, most + 1)]
    sums = [seen(step) for step in steps]
    num_lost = sum(group.num_lost for group in sums)
    dispersion = sum(group.together for group in sums) / num_lost if num_lost else 1.0
    rate, weight = _posterior(
        [(group.num_lost / dispersion, group.hours / dispersion) for group in sums], PRIOR.per_vm_h, PRIOR.weight_vm_h
    )
    share, _ = _posterior([(group.num_bulk, group.num_lost) for group in sums], PRIOR.bulk_share, WEIGHT_LOSSES)
    events = [(group.bulk_fractions, group.num_bulk_events) for group in sums]
    fraction, _ = _posterior(events, PRIOR.bulk_fraction, WEIGHT_EVENTS)
    allocation_s, num_allocations = _median([[life.allocation_s for life in step] for step in steps])
    preparation_s, num_preparations = _median([[life.preparation_s for life in step] for step in steps])
    lead_s, num_notices = _median([[life.lead_s for life in step if life.is_lost] for step in steps], enough=1)
    hours = sum(group.hours for group in sums)
    named = " ".join(filter(None, (facts.provider, facts.size, facts.region, facts.zone)))
    expected = ExpectedLosses(
        per_vm_h=rate,
        weight_vm_h=min(weight, MOST_WEIGHT_VM_H),
        bulk_share=share,
        bulk_fraction=min(1.0, fraction),
        allocation_s=PRIOR.allocation_s if allocation_s is None else allocation_s,
        preparation_s=PRIOR.preparation_s if preparation_s is None else preparation_s,
        source=f"{hours:.3g} VM-hours of {named or 'VMs'} in earlier runs, and {PRIOR.source}"
        if hours
        else PRIOR.source,
    )
    tail = (1 - INTERVAL) / 2
    return Estimate(
        expected=expected,
        low_per_vm_h=gamma_quantile(tail, rate * weight) / weight,
        high_per_vm_h=gamma_quantile(1 - tail, rate * weight) / weight,
        lead_s=lead_s,
        num_allocations=num_allocations,
        num_preparations=num_preparations,
        num_notices=num_notices,
    )


def kinds(lives: Sequence[Life]) -> tuple[KindSeen, ...]:
    """Return the observations and the estimate of each kind of VM, by name."""
    by_facts: dict[NodeFacts, list[Life]] = {}
    for life in lives:
        by_facts.setdefault(life.facts, []).append(life)
    of_kinds = []
    for facts, own in sorted(by_facts.items(), key=lambda kind: tuple(kind[0].model_dump().values())):
        seen_of_kind = seen(own)
        priced = [life for life in own if life.usd_per_h is not None]
        of_kinds.append(
            KindSeen(
                facts=facts,
                seen=seen_of_kind,
                mean_lifetime_h=seen_of_kind.hours / seen_of_kind.num_lost if seen_of_kind.num_lost else None,
                lead_s=_median([[life.lead_s for life in own if life.is_lost]], enough=1)[0],
                allocation_s=_median([[life.allocation_s for life in own]], enough=1)[0],
                preparation_s=_median([[life.preparation_s for life in own]], enough=1)[0],
                usd_per_h=max(priced, key=lambda life: life.begun_s).usd_per_h if priced else None,
                estimate=estimate(lives, facts),
            )
        )
    return tuple(of_kinds)


def gamma_quantile(probability: float, shape: float) -> float:
    """Return the quantile of a Gamma distribution with scale 1, to a millionth of it; 0 if the shape is 0."""
    if shape <= 0:
        return 0.0
    low, high = 0.0, shape + 1.0
    while _gamma_below(high, shape) < probability:
        high *= 2
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _gamma_below(middle, shape) < probability else (low, middle)
    return high


def _gamma_below(x: float, shape: float) -> float:
    """Return the regularised lower incomplete gamma function, by its series: Abramowitz and Stegun, 6.5.29."""
    if x <= 0:
        return 0.0
    term = total = 1.0
    number = 0
    while term > 1e-12 * total:
        number += 1
        term *= x / (shape + number)
        total += term
    return min(1.0, total * math.exp(shape * math.log(x) - x - math.lgamma(shape + 1)))


def _depth(facts: NodeFacts, requested: NodeFacts) -> int:
    """Return how many of provider, size, region and zone match, from the left; an empty one means any."""
    if facts.provider != requested.provider:
        return 0
    depth = 0
    for ours, theirs in zip(facts.model_dump().values(), requested.model_dump().values(), strict=True):
        if theirs not in ("", ours):
            break
        depth += 1
    return depth


def _posterior(steps: Sequence[tuple[float, float]], mean: float, most: float) -> tuple[float, float]:
    """Combine (events, exposure) from the widest kind to the narrowest; returns mean and weight.

    ``most``: the weight of the prior, and the limit for the weight of all earlier steps.
    """
    weight = most
    for events, exposure in steps:
        weight = min(weight, most)
        mean = (mean * weight + events) / (weight + exposure)
        weight += exposure
    return mean, weight


def _median(steps: Sequence[Sequence[float | None]], enough: int = ENOUGH) -> tuple[float | None, int]:
    """Return the median of the narrowest kind with enough values, and their number; None and 0: no kind has enough."""
    known: list[float] = []
    for step in reversed(steps):
        known += [value for value in step if value is not None]
        if len(known) >= enough:
            return statistics.median(known), len(known)
    return None, 0
