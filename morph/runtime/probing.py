"""Timing real work on a worker that has no place in the shape, for the manager to see whether it is well again."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from morph.contract.messages import Probed, ProbeOrder

MICRO_BATCHES = 5
LIMIT_S = 10.0
"""A probe ends after this, with the micro-batches that were done by then."""


class Prober:
    """Carries out probes in the order lane; ``leave`` may be called from any thread."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._left = 0

    def leave(self, probe: int) -> None:
        """End this probe and those before it at the next micro-batch: an order waits behind it."""
        self._left = max(self._left, probe)

    def run(self, order: ProbeOrder, micro_batch: Callable[[], float]) -> Probed:
        """Run some micro-batches, each of which returns its seconds; the first one warms up and does not count."""
        until_s = time.monotonic() + LIMIT_S
        times_s: list[float] = []
        for number in range(1 + MICRO_BATCHES):
            if self._left >= order.probe or (times_s and time.monotonic() > until_s):
                break
            took_s = micro_batch()
            if number:
                times_s.append(took_s)
        slowdown = statistics.median(times_s) / order.healthy_s if times_s else None
        return Probed(worker=self._worker, probe=order.probe, slowdown=slowdown)
