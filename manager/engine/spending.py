"""What a run may cost: how many VMs, dollars an hour, and dollars in all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from manager.providers.provider import Price
from morph.contract.cluster import Limits

SECONDS_PER_H = 3600.0


class Spending:
    """Adds up what the VMs cost while they live, and says how many more are allowed. Thread-safe.

    Args:
        limits: The user's.
        clock: Seconds, never going back.
        before_s: Node-seconds that the run had before; they cost what a VM costs now.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic, *, before_s: float = 0.0) -> None:
        self._limits = limits
        self._clock = clock
        self._usd_per_h = 0.0
        self._spent_usd = 0.0
        self._before_h = before_s / SECONDS_PER_H
        self._since_s = clock()
        self._lock = threading.Lock()

    def spent_usd(self, price: Price) -> float:
        """So far, by all managers of the run."""
        with self._lock:
            self._add_up()
            return self._spent_usd + self._before_h * price.usd_per_h

    def living(self, num_vms: int, price: Price | None) -> None:
        """Take note of how many VMs there are from now on."""
        with self._lock:
            self._add_up()
            self._usd_per_h = num_vms * price.usd_per_h if price is not None else 0.0

    def allowed(self, count: int, num_living: int, price: Price | None) -> tuple[int, str]:
        """Return how many of ``count`` further VMs may be asked for, and what forbids the rest."""
        limits = self._limits
        bounds = [(count, "")]
        if limits.max_vms is not None:
            bounds.append((limits.max_vms - num_living, f"vms.limits.max_vms is {limits.max_vms}"))
        if limits.usd_per_h is not None or limits.budget_usd is not None:
            if price is None:
                return 0, "vms.limits are in dollars, and the price of a VM is not known: set vms.usd_per_h"
            if limits.usd_per_h is not None and price.usd_per_h > 0:
                most = int(limits.usd_per_h / price.usd_per_h + 1e-9)
                bounds.append((most - num_living, f"vms.limits.usd_per_h is {limits.usd_per_h:g}"))
            if limits.budget_usd is not None and (spent_usd := self.spent_usd(price)) >= limits.budget_usd:
                sentence = f"{spent_usd:.2f} dollars are spent, vms.limits.budget_usd is {limits.budget_usd:g}"
                bounds.append((0, sentence))
        fewest, why = min(bounds, key=lambda bound: bound[0])
        return max(0, fewest), why

    def _add_up(self) -> None:
        now_s = self._clock()
        self._spent_usd += self._usd_per_h * (now_s - self._since_s) / SECONDS_PER_H
        self._since_s = now_s
