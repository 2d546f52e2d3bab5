"""Counts the uses of a run's time and their cost as integers, so that the parts add up to the whole exactly."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from manager.accounting.spent import NS_PER_S, UNITS_PER_USD, Prices, Spent, nano_usd
from morph.contract.base import Value


class TimeUse(StrEnum):
    """The uses of a worker's time, from when it begins to cost money (or appears, if VMs are not requested) to its end.

    docs/guides/watch.md describes each.
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

    @property
    def words(self) -> str:
        """The use in words that need no explanation."""
        return _IN_WORDS[self]


_IN_WORDS = {
    TimeUse.COMPUTE: "computing",
    TimeUse.BUBBLE: "waiting within steps",
    TimeUse.LOST: "interrupted or undone steps",
    TimeUse.MORPH: "changing shape",
    TimeUse.CHECKPOINT: "last save",
    TimeUse.WAITING: "waiting to train",
    TimeUse.WARMING: "starting",
    TimeUse.SPARE: "no place in the shape",
    TimeUse.UNMANAGED: "no manager",
}


class Bill(Value):
    """The cost of a run by part; ``UNITS_PER_USD`` of its units are a dollar. ``total`` is summed separately."""

    parts: dict[TimeUse, int]
    total: int = Field(ge=0)

    def part_usd(self, part: TimeUse) -> float:
        """Return the dollars of one part."""
        return self.parts[part] / UNITS_PER_USD

    @property
    def total_usd(self) -> float:
        """All dollars."""
        return self.total / UNITS_PER_USD


class Account(Value):
    """The workers' time in a run, by part, with its cost. ``total`` is summed separately, over the workers' lives.

    ``dearest``: the highest price of a granted VM, in nano-dollars an hour; None: none had a price.
    """

    parts: dict[TimeUse, Spent]
    total: Spent
    dearest: int | None = None

    @property
    def parts_ns(self) -> dict[TimeUse, int]:
        """Worker-nanoseconds by part."""
        return {part: spent.node_ns for part, spent in self.parts.items()}

    @property
    def total_ns(self) -> int:
        """All worker-nanoseconds."""
        return self.total.node_ns

    def part_s(self, part: TimeUse) -> float:
        """Return the worker-seconds of one part."""
        return self.parts[part].node_ns / NS_PER_S

    def share(self, part: TimeUse) -> float:
        """Return the share of the whole, 0 to 1; 0 if there is no time yet."""
        return self.parts[part].node_ns / self.total_ns if self.total_ns else 0.0

    @property
    def total_s(self) -> float:
        """All worker-seconds."""
        return self.total_ns / NS_PER_S

    def bill(self, prices: Prices | None = None) -> Bill | None:
        """Return the price paid; VMs without one get the user's, else the highest known one. None: none is known."""
        total = self.total.paid(prices, self.dearest)
        parts = {part: spent.paid(prices, self.dearest) for part, spent in self.parts.items()}
        known = {part: units for part, units in parts.items() if units is not None}
        return None if total is None else Bill(parts=known, total=total)

    def on_demand_usd(self, prices: Prices | None) -> float | None:
        """Return the price of the same VMs on demand; None if the user does not give it."""
        if prices is None or prices.on_demand_usd_per_h is None:
            return None
        return self.total.vm_ns * nano_usd(prices.on_demand_usd_per_h) / UNITS_PER_USD
