"""A run's spending limits (VMs, dollars an hour, dollars in all), and its earlier cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from manager.accounting.ledger import Ledger
from manager.accounting.spent import NS_PER_S, SHARES, UNITS_PER_USD
from manager.providers.interface.provider import Price, Vm
from morph.contract.cluster import Limits
from morph.contract.vm_names import vm_of

SECONDS_PER_H = 3600.0


@dataclass(frozen=True)
class Before:
    """The run's earlier cost in dollars, and VM-hours without a recorded price; both include the living ``vms``."""

    usd: float = 0.0
    unpriced_h: float = 0.0
    vms: Collection[str] = ()

    @classmethod
    def of(cls, ledger: Ledger, *, lives_on: bool) -> Before:
        """Return the cost in a run's account. ``lives_on``: whether the workers of the last session still live."""
        total = ledger.account().total
        return cls(
            usd=total.cost / UNITS_PER_USD,
            unpriced_h=total.unpriced_ns / (SHARES * NS_PER_S * 3600),
            vms=frozenset(map(vm_of, ledger.since_ns)) if lives_on else (),
        )


class Spending:
    """Adds up the cost of living VMs, and decides how many more are allowed. Thread-safe.

    ``clock``: returns the seconds of a monotonic clock. ``before``: the earlier cost; hours without a price are charged
    at the current price of a VM. ``wall_clock``: returns seconds since 1970, the unit of a VM's ``paid_since_s``.
    """

    def __init__(
        self,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        *,
        before: Before | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._wall_clock = wall_clock
        self._before = before or Before()
        self._counted = frozenset(self._before.vms)
        self._usd_per_h = 0.0
        self._spent_usd = self._before.usd
        self._since_s = clock()
        self._lock = threading.Lock()

    def spent_usd(self, price: Price) -> float:
        """Return the cost so far, under all managers of the run."""
        with self._lock:
            self._add_up()
            return self._spent_usd + self._before.unpriced_h * price.usd_per_h

    def living(self, vms: Sequence[Vm], price: Price | None) -> None:
        """Record which VMs exist from now on; those without a price cost ``price``, and queued ones nothing yet."""
        vms = [vm for vm in vms if not vm.waits]
        with self._lock:
            self._add_up()
            self._usd_per_h = sum(_usd_per_h(vm, price) for vm in vms)
            for vm in vms:
                if vm.name not in self._counted and vm.paid_since_s is not None:
                    paid_s = max(0.0, self._wall_clock() - vm.paid_since_s)
                    self._spent_usd += _usd_per_h(vm, price) * paid_s / SECONDS_PER_H
            self._counted |= {vm.name for vm in vms}  # a VM missing from one list is not new when it is back

    def allowed(self, count: int, living: Sequence[Vm], price: Price | None) -> tuple[int, str]:
        """Return how many of ``count`` further VMs, which cost at most ``price`` each, are allowed, and why not all."""
        limits = self._limits
        bounds = [(count, "")]
        if limits.max_vms is not None:
            bounds.append((limits.max_vms - len(living), f"vms.limits.max_vms is {limits.max_vms}"))
        if limits.usd_per_h is not None or limits.budget_usd is not None:
            if price is None:
                return 0, "vms.limits are in dollars, and the price of a VM is not known: set vms.usd_per_h"
            if limits.usd_per_h is not None and price.usd_per_h > 0:
                left = limits.usd_per_h - sum(_usd_per_h(vm, price) for vm in living)
                bounds.append((int(left / price.usd_per_h + 1e-9), f"vms.limits.usd_per_h is {limits.usd_per_h:g}"))
            if limits.budget_usd is not None and (spent_usd := self.spent_usd(price)) >= limits.budget_usd:
                sentence = f"{spent_usd:.2f} dollars are spent, vms.limits.budget_usd is {limits.budget_usd:g}"
                bounds.append((0, sentence))
        fewest, why = min(bounds, key=lambda bound: bound[0])
        return max(0, fewest), why

    def _add_up(self) -> None:
        now_s = self._clock()
        self._spent_usd += self._usd_per_h * (now_s - self._since_s) / SECONDS_PER_H
        self._since_s = now_s


def _usd_per_h(vm: Vm, price: Price | None) -> float:
    if vm.usd_per_h is not None:
        return vm.usd_per_h
    return 0.0 if price is None else price.usd_per_h
