"""What a run's time went into and what that cost. Integers inside: the parts add up to the whole exactly."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from manager.accounting.spent import NS_PER_S, UNITS_PER_USD, Prices, Spent, nano_usd
from morph.contract.base import Value


class Part(StrEnum):
    """What a node's time is spent on, from when it is paid for (its appearance, where none is requested) to its end.

    ``COMPUTE``: forward, recompute and backward of steps that count. ``BUBBLE``: the rest of those steps: waiting for
    messages, reducing, the manager's round. ``LOST``: steps that were given up or whose result was lost, and attempts
    that overflowed. ``MORPH``: forming another shape. ``CHECKPOINT``: the last commit and its files, for which training
    is over. ``WAITING``: ready while no shape is formed. ``WARMING``: booting, and until its worker is ready.
    ``SPARE``: ready and without a place, or without a worker on a VM whose others live. ``UNMANAGED``: whatever they
    did after their manager was killed, until another took over or they were gone.
    """

    COMPUTE = "compute"
    BUBBLE = "bubble"
    LOST = "lost"
    MORPH = "morph"
    CHECKPOINT = "checkpoint"
    WAITING = "waiting"
    WARMING = "warming"
    SPARE = "spare"
    UNMANAGED = "unmanaged"


class Bill(Value):
    """What a run cost, by part, in units of which ``UNITS_PER_USD`` are a dollar. ``total`` is summed apart."""

    parts: dict[Part, int]
    total: int = Field(ge=0)

    def part_usd(self, part: Part) -> float:
        """Dollars of one part."""
        return self.parts[part] / UNITS_PER_USD

    @property
    def total_usd(self) -> float:
        """All dollars."""
        return self.total / UNITS_PER_USD


class Account(Value):
    """Node-time of a run, by part, with what it costs. ``total`` is summed apart, over the nodes' lives.

    ``dearest``: nano-dollars an hour of the dearest VM that was granted; None: none had a price.
    """

    parts: dict[Part, Spent]
    total: Spent
    dearest: int | None = None

    @property
    def parts_ns(self) -> dict[Part, int]:
        """Node-nanoseconds by part."""
        return {part: spent.node_ns for part, spent in self.parts.items()}

    @property
    def total_ns(self) -> int:
        """All node-nanoseconds."""
        return self.total.node_ns

    def part_s(self, part: Part) -> float:
        """Node-seconds of one part."""
        return self.parts[part].node_ns / NS_PER_S

    def share(self, part: Part) -> float:
        """Share of the whole, 0 to 1; 0 when there is no whole yet."""
        return self.parts[part].node_ns / self.total_ns if self.total_ns else 0.0

    @property
    def total_s(self) -> float:
        """All node-seconds."""
        return self.total_ns / NS_PER_S

    def bill(self, prices: Prices | None = None) -> Bill | None:
        """What is paid for it; None when no price is known, neither the VMs' own nor one that the user gives.

        Where the user gives none, VMs without a price of their own count as the dearest one that has one.
        """
        total = self.total.paid(prices, self.dearest)
        parts = {part: spent.paid(prices, self.dearest) for part, spent in self.parts.items()}
        known = {part: units for part, units in parts.items() if units is not None}
        return None if total is None else Bill(parts=known, total=total)

    def on_demand_usd(self, prices: Prices | None) -> float | None:
        """What the same VMs cost on demand; None when the user does not say."""
        if prices is None or prices.on_demand_usd_per_h is None:
            return None
        return self.total.vm_ns * nano_usd(prices.on_demand_usd_per_h) / UNITS_PER_USD
