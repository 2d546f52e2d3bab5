"""Times of a worker's micro-batches: recorded by the training thread, collected by the heartbeats.

A worker without a place in the shape times real work instead, so that the manager sees whether it has recovered."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from morph.contract.messages import Probed, ProbeOrder
from morph.contract.timeline import MicroBatchTimes
from morph.runtime.device.task_clock import CoreTimes, core_clock

MOST_KEPT = 16
"""The number of micro-batches that are kept until a heartbeat takes them; older ones are dropped."""
DIGITS = 7
MICRO_BATCHES = 5
LIMIT_S = 10.0
"""Seconds. A probe ends after this time, with the micro-batches done so far."""


class _Note(NamedTuple):
    generation: int
    forward_s: float
    recompute_s: float
    backward_s: float
    cores: CoreTimes | None


class Pace:
    """Times of the newest micro-batches. One thread records and one collects; neither waits for the other."""

    def __init__(self) -> None:
        self._notes: deque[_Note] = deque(maxlen=MOST_KEPT)

    def note(
        self,
        generation: int,
        forward_s: float,
        recompute_s: float,
        backward_s: float,
        cores: CoreTimes | None = None,
    ) -> None:
        """Record the times (seconds) of a finished micro-batch; this takes about a microsecond."""
        self._notes.append(_Note(generation, forward_s, recompute_s, backward_s, cores))

    def collect(self) -> MicroBatchTimes | None:
        """Return the times since the last call, of the newest generation; None: there are none."""
        notes: list[_Note] = []
        while self._notes:
            notes.append(self._notes.popleft())
        if not notes:
            return None
        generation = notes[-1].generation
        notes = [entry for entry in notes if entry.generation == generation]
        cores = [entry.cores for entry in notes if entry.cores is not None]
        return MicroBatchTimes(
            generation=generation,
            forward_s=tuple(round(entry.forward_s, DIGITS) for entry in notes),
            recompute_s=tuple(round(entry.recompute_s, DIGITS) for entry in notes),
            backward_s=tuple(round(entry.backward_s, DIGITS) for entry in notes),
            processor_s=tuple(round(each.processor_s, DIGITS) for each in cores),
            queued_s=tuple(round(each.queued_s, DIGITS) for each in cores if each.queued_s is not None),
        )


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
