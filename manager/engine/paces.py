"""Compute times of all workers, gathered from heartbeats until the driver takes them: one event an interval."""

from __future__ import annotations

import threading

from manager.controller.events import ComputeTimesSeen, WorkerTimes
from morph.contract.messages import MicroBatchTimes, WorkerId

MOST_KEPT = 32
"""Micro-batches of one worker that are kept; older ones are forgotten."""


class Paces:
    """Thread-safe; holds a bounded number of times for each worker, also if nobody takes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times: dict[WorkerId, WorkerTimes] = {}

    def add(self, worker: WorkerId, times: MicroBatchTimes) -> None:
        """Keep what a heartbeat brought; times of an older generation than the newest are dropped."""
        compute_s = tuple(sum(pair) for pair in zip(times.forward_s, times.backward_s, strict=True))
        with self._lock:
            before = self._times.get(worker)
            if before is not None and before.generation == times.generation:
                compute_s = before.compute_s + compute_s
            self._times[worker] = WorkerTimes(
                worker=worker, generation=times.generation, compute_s=compute_s[-MOST_KEPT:]
            )

    def take(self) -> ComputeTimesSeen | None:
        """Everything since the last call; None: nothing."""
        with self._lock:
            times, self._times = tuple(self._times.values()), {}
        return ComputeTimesSeen(times=times) if times else None
