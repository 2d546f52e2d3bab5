"""Times real work on a worker without a place in the shape, so that the manager sees whether it has recovered."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from morph.contract.messages import Probed, ProbeOrder
from morph.runtime.device.task_clock import core_clock

MICRO_BATCHES = 5
LIMIT_S = 10.0
"""Seconds. A probe ends after this time, with the micro-batches done so far."""


class Prober:
    """Carries out probes in the order lane; ``leave`` may be called from any thread."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._left = 0

    def leave(self, probe: int) -> None:
        """End this probe and earlier ones at the next micro-batch, because an order waits."""
        self._left = max(self._left, probe)

    def run(self, order: ProbeOrder, micro_batch: Callable[[], float]) -> Probed:
        """Run some micro-batches, each of which returns its seconds; the first one warms up and does not count."""
        until_s = time.monotonic() + LIMIT_S
        times_s: list[float] = []
        with core_clock() as core_times:
            for number in range(1 + MICRO_BATCHES):
                if self._left >= order.probe or (times_s and time.monotonic() > until_s):
                    break
                begun = core_times()
                took_s = micro_batch()
                queued_s = core_times().since(begun).queued_s
                if order.waited_s is not None and queued_s is not None:
                    took_s = max(0.0, took_s - queued_s) + order.waited_s
                if number:
                    times_s.append(took_s)
        middle = statistics.fmean if order.by_sums else statistics.median
        slowdown = middle(times_s) / order.healthy_s if times_s else None
        return Probed(worker=self._worker, probe=order.probe, slowdown=slowdown)
