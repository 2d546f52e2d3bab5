"""Bytes that a mini-batch sends from one zone to another: between stages, and in reductions.

In a reduction over D members, of which n_1, n_2, ... are in each zone, every member gets a D-th of the sums of every
other member and sends a D-th of the means back. With S bytes of sums and means, (D^2 - n_1^2 - n_2^2 - ...) S / D bytes
cross from one zone to another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from morph.contract.pool import type_and_zone
from simulator.costs.answer import SimulatedKind
from simulator.costs.reductions import reduced_units

_MEAN_BYTES = 4
"""Bytes of the mean gradient of one parameter."""


def bytes_between_zones(kinds: Sequence[SimulatedKind]) -> float:
    """Return the bytes that one mini-batch of these pipelines sends from one zone to another."""
    sections = kinds[0].outcome.costs.sections
    zones = [_zone_of_section(kind) for kind in kinds]
    if len({zone for of_kind in zones for zone in of_kind}) < 2:
        return 0.0
    total = 0.0
    for kind, of_kind in zip(kinds, zones, strict=True):
        crossed = sum(
            float(sections.sent_bytes[section])
            for section in range(sections.num_sections - 1)
            if of_kind[section] != of_kind[section + 1]
        )
        total += 2 * crossed * sum(kind.outcome.counts)  # the gradient is as large as the activation
    profile = sections.profile
    of_sums = 1 + _MEAN_BYTES / profile.accumulator_bytes_per_parameter
    for unit in reduced_units(profile):
        members = Counter[str]()
        for kind, of_kind in zip(kinds, zones, strict=True):
            stages = {int(kind.outcome.costs.reduced.stage[section]): of_kind[section] for section in unit.sections}
            members.update(dict(Counter(zone for zone in stages.values() for _ in kind.outcome.counts)))
        number = members.total()
        total += (number**2 - sum(here**2 for here in members.values())) / number * unit.reduced_bytes * of_sums
    return total


def usd_between_zones(kinds: Sequence[SimulatedKind], usd_per_gb: float) -> float:
    """Return the price (USD) of the bytes of :func:`bytes_between_zones`, given the price of 10^9 bytes."""
    return usd_per_gb / 1e9 * bytes_between_zones(kinds)


def _zone_of_section(kind: SimulatedKind) -> list[str]:
    costs = kind.outcome.costs
    zones = [type_and_zone(node_type)[1] for node_type in kind.type_of_stage]
    return [zones[stage] for stage in costs.reduced.stage.tolist()]
