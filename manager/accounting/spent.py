"""Node-time and what it costs, in whole numbers, so that parts add up to their whole exactly, in dollars too."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from manager.controller.state.events import Paid
from morph.contract.base import Value
from morph.contract.errors import InputError

NS_PER_S = 1_000_000_000
SHARES = 720_720
"""Parts of a VM; every number of nodes on one VM up to 16 divides it."""
NANO_USD = 1_000_000_000
UNITS_PER_USD = SHARES * NANO_USD * 3600 * NS_PER_S
"""A cost of one is a billionth of a dollar an hour, for one nanosecond of one share of a VM."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Some time of some nodes.

    ``node_ns``: nanoseconds of nodes. ``vm_ns``: of shares of their VMs, of which a node that is one of k has a k-th.
    ``unpriced_ns``: those of them whose price is not known. ``cost``: of the others, see ``UNITS_PER_USD``.
    """

    node_ns: int = 0
    vm_ns: int = 0
    unpriced_ns: int = 0
    cost: int = 0

    def __add__(self, other: Spent) -> Spent:
        """Both together."""
        return Spent(
            self.node_ns + other.node_ns,
            self.vm_ns + other.vm_ns,
            self.unpriced_ns + other.unpriced_ns,
            self.cost + other.cost,
        )

    def __sub__(self, other: Spent) -> Spent:
        """What is left without the other."""
        return self + other * -1

    def __mul__(self, times: int) -> Spent:
        """So many times as much."""
        return Spent(self.node_ns * times, self.vm_ns * times, self.unpriced_ns * times, self.cost * times)

    def part(self, counter: int, denominator: int) -> Spent:
        """This share of it, rounded down."""
        return Spent(
            self.node_ns * counter // denominator,
            self.vm_ns * counter // denominator,
            self.unpriced_ns * counter // denominator,
            self.cost * counter // denominator,
        )

    def at_most(self, whole: Spent) -> Spent:
        """This, in no respect more than the whole that it is a part of."""
        return Spent(
            min(self.node_ns, whole.node_ns),
            min(self.vm_ns, whole.vm_ns),
            min(self.unpriced_ns, whole.unpriced_ns),
            min(self.cost, whole.cost),
        )

    def paid(self, prices: Prices | None, dearest: int | None) -> int | None:
        """Return what it costs in units; None: nobody says.

        Args:
            prices: The user's: for VMs without a price of their own, or for all.
            dearest: Nano-dollars an hour of the dearest VM that was granted, which counts where nothing else is known.
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
    """Return what one nanosecond of a node is."""
    shares = max(1, SHARES // paid.num_nodes)
    if paid.usd_per_h is None:
        return Spent(1, shares, shares, 0)
    return Spent(1, shares, 0, shares * nano_usd(paid.usd_per_h))


class Prices(Value):
    """Dollars per VM and hour as the user gives them: what is paid, and what the same VM costs on demand.

    None: not given. What is paid counts for VMs whose provider says no price, or, ``for_all``, for every one.
    """

    paid_usd_per_h: float | None = Field(default=None, ge=0)
    on_demand_usd_per_h: float | None = Field(default=None, ge=0)
    for_all: bool = False


def prices_of(price: float | None, on_demand_price: float | None) -> Prices | None:
    """Return the prices given on the command line, which count for all VMs; None for none."""
    if price is None and on_demand_price is None:
        return None
    return Prices(paid_usd_per_h=price, on_demand_usd_per_h=on_demand_price, for_all=price is not None)


def no_price() -> InputError:
    """Return the error of a price to compare with where none that is paid is known."""
    return InputError("is not given", field="--price", allowed="dollars per VM and hour, with --on-demand-price")
