"""Counts node-time and its cost in whole numbers, so that parts add up to their whole exactly, also in dollars."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from manager.controller.state.events import Paid
from morph.contract.base import Value
from morph.contract.errors import InputError

NS_PER_S = 1_000_000_000
SHARES = 720_720
"""The shares of a VM: a multiple of every whole number up to 16, so that up to 16 nodes have equal whole shares."""
NANO_USD = 1_000_000_000
UNITS_PER_USD = SHARES * NANO_USD * 3600 * NS_PER_S
"""The units of cost in a dollar; a unit is one share of a VM for a nanosecond, at a billionth of a dollar an hour."""


@dataclass(frozen=True, slots=True)
class Spent:
    """An amount of node-time, and its cost.

    ``vm_ns``: nanoseconds of VM shares, where one of k nodes has a k-th of the VM. ``unpriced_ns``: the part of these
    without a known price; ``cost``: that of the rest, in the units of ``UNITS_PER_USD``.
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
        """Return ``counter`` / ``denominator`` of the amount, rounded down."""
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
    """Return the node-time and cost of one nanosecond of a node."""
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
    """Return the error for an on-demand price with no known price paid to compare it with."""
    return InputError("is not given", field="--price", allowed="dollars per VM and hour, with --on-demand-price")
