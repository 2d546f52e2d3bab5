"""Counts the uses of a run's time and their cost as integers, so that the parts add up to the whole exactly."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pydantic import Field

from manager.controller.state.events import Paid
from morph.contract.base import Value
from morph.contract.errors import InputError

NS_PER_S = 1_000_000_000
SHARES = 720_720
"""The shares of a VM; every number of nodes on one VM up to 16 divides it."""
NANO_USD = 1_000_000_000
UNITS_PER_USD = SHARES * NANO_USD * 3600 * NS_PER_S
"""The units of a dollar: one unit is a billionth of a dollar an hour, for one nanosecond of one share of a VM."""


@dataclass(frozen=True, slots=True)
class Spent:
    """An amount of node-time.

    ``vm_ns``: nanoseconds of VM shares, where one of k nodes has a k-th of the VM. ``unpriced_ns``: the part of these
    without a known price; ``cost``: of the rest, see ``UNITS_PER_USD``.
    """

    node_ns: int = 0
    vm_ns: int = 0
    unpriced_ns: int = 0
    cost: int = 0

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            self.node_ns + other.node_ns,
            self.vm_ns + other.vm_ns,
            self.unpriced_ns + other.unpriced_ns,
            self.cost + other.cost,
        )

    def __sub__(self, other: Spent) -> Spent:
        return self + other * -1

    def __mul__(self, times: int) -> Spent:
        return Spent(self.node_ns * times, self.vm_ns * times, self.unpriced_ns * times, self.cost * times)

    def part(self, counter: int, denominator: int) -> Spent:
        """Return this share of the amount, rounded down."""
        return Spent(
            self.node_ns * counter // denominator,
            self.vm_ns * counter // denominator,
            self.unpriced_ns * counter // denominator,
            self.cost * counter // denominator,
        )

    def at_most(self, whole: Spent) -> Spent:
        """Return this amount, with each field limited to that of a whole of which it is a part."""
        return Spent(
            min(self.node_ns, whole.node_ns),
            min(self.vm_ns, whole.vm_ns),
            min(self.unpriced_ns, whole.unpriced_ns),
            min(self.cost, whole.cost),
        )

    def paid(self, prices: Prices | None, dearest: int | None) -> int | None:
        """Return the cost in units; None: no price is known.

        ``dearest`` (nano-dollars an hour), the highest price of a granted VM, applies if no other price is known.
        """
        given = None if prices is None or prices.paid_usd_per_h is None else nano_usd(prices.paid_usd_per_h)
        if given is not None and prices is not None and prices.for_all:
            return self.vm_ns * given
        fallback = dearest if given is None else given
        if fallback is None:
            return None
        return self.cost + self.unpriced_ns * fallback


NOTHING = Spent()


def nano_usd(usd: float) -> int:
    """Return dollars in billionths."""
    return round(usd * NANO_USD)


def rate_of(paid: Paid) -> Spent:
    """Return the amount of one nanosecond of a node."""
    shares = max(1, SHARES // paid.num_nodes)
    if paid.usd_per_h is None:
        return Spent(1, shares, shares, 0)
    return Spent(1, shares, 0, shares * nano_usd(paid.usd_per_h))


class Prices(Value):
    """The user's prices in dollars per VM and hour: the price paid, and the on-demand price of the same VM.

    None: not given. The price paid applies to VMs whose provider gives no price, or with ``for_all`` to every VM.
    """

    paid_usd_per_h: float | None = Field(default=None, ge=0)
    on_demand_usd_per_h: float | None = Field(default=None, ge=0)
    for_all: bool = False


def prices_of(price: float | None, on_demand_price: float | None) -> Prices | None:
    """Return the prices given on the command line, which apply to all VMs; None if there are none."""
    if price is None and on_demand_price is None:
        return None
    return Prices(paid_usd_per_h=price, on_demand_usd_per_h=on_demand_price, for_all=price is not None)


def no_price() -> InputError:
    """Return the error for a price to compare with, if no price that is paid is known."""
    return InputError("is not given", field="--price", allowed="dollars per VM and hour, with --on-demand-price")


class Part(StrEnum):
    """The uses of a node's time, from when it begins to cost money (or appears, if VMs are not requested) to its end.

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
    Part.COMPUTE: "computing",
    Part.BUBBLE: "waiting within steps",
    Part.LOST: "work run again",
    Part.MORPH: "changing shape",
    Part.CHECKPOINT: "last save",
    Part.WAITING: "waiting to train",
    Part.WARMING: "starting",
    Part.SPARE: "no place in the shape",
    Part.UNMANAGED: "no manager",
}


class Bill(Value):
    """The cost of a run by part; ``UNITS_PER_USD`` of its units are a dollar. ``total`` is summed separately."""

    parts: dict[Part, int]
    total: int = Field(ge=0)

    def part_usd(self, part: Part) -> float:
        """Return the dollars of one part."""
        return self.parts[part] / UNITS_PER_USD

    @property
    def total_usd(self) -> float:
        """All dollars."""
        return self.total / UNITS_PER_USD


class Account(Value):
    """The node-time of a run, by part, with its cost. ``total`` is summed separately, over the nodes' lives.

    ``dearest``: the highest price of a granted VM, in nano-dollars an hour; None: none had a price.
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
        """Return the node-seconds of one part."""
        return self.parts[part].node_ns / NS_PER_S

    def share(self, part: Part) -> float:
        """Return the share of the whole, 0 to 1; 0 if there is no node-time yet."""
        return self.parts[part].node_ns / self.total_ns if self.total_ns else 0.0

    @property
    def total_s(self) -> float:
        """All node-seconds."""
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
