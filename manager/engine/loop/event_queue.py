"""The driver's queue: events for the controller, and facts that are only written down.

Compute times of all workers, which heartbeats bring, are gathered into one event an interval.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import TypeAdapter

from manager.controller.state.events import (
    CheckpointFailed,
    ComputeTimesSeen,
    Event,
    NobodyHeard,
    PreCopyReported,
    UnitsWritten,
    WorkerProbed,
    WorkerTimes,
)
from manager.journal.records import Fact
from morph.contract.messages import Answer, Heartbeat, Probed, WorkerId
from morph.contract.timeline import MicroBatchTimes

# The clock of a run: seconds as the wall clock said when the run began, counted on by the monotonic clock.


class RunClock:
    """Nobody moves it: neither who sets this machine's clock, nor a manager's death. Wall time is for people alone.

    Args:
        epoch_s: ``epoch_s`` of the manager that began the session, where its VMs live: this machine was not started
            anew since, so that both read one monotonic clock. None: a session begins.
        not_before_s: It begins no earlier, whatever the wall clock says: the journal's last line.
        wall: Seconds since 1970.
        monotonic: Seconds that only grow.
    """

    def __init__(
        self,
        epoch_s: float | None = None,
        not_before_s: float = 0.0,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic = monotonic
        self.epoch_s = max(wall(), not_before_s) - monotonic() if epoch_s is None else epoch_s

    def now_s(self) -> float:
        """Seconds since 1970, as far as the wall clock was right when the session began."""
        return self.epoch_s + self._monotonic()


_ANSWER: TypeAdapter[Answer | Probed] = TypeAdapter(Answer | Probed)


@dataclass(frozen=True)
class Stamped:
    """An event or fact with the second of the run's clock at which it was seen."""

    time_s: float
    item: Event | Fact


def read_answer(worker: str, message: bytes) -> Answer | Probed:
    """Read what a worker answered to an order.

    Raises:
        ValueError: it is no answer, or speaks for another worker.
    """
    answer = _ANSWER.validate_json(message)
    if answer.worker != worker:
        raise ValueError(f"it answers for {answer.worker}")
    return answer


class EventQueue:
    """Thread-safe; stamps what is put in. ``put`` may interrupt ``get`` in one thread, as a signal handler does.

    ``now_s``: the run's clock, by which all that the controller sees is stamped.
    """

    def __init__(self, now_s: Callable[[], float] | None = None) -> None:
        self.now_s = now_s or RunClock().now_s
        self._queue: queue.SimpleQueue[Stamped] = queue.SimpleQueue()  # re-entrant; ``Queue`` is not
        self.paces = Paces()
        """Compute times, which wait beside the queue."""

    def put(self, item: Event | Fact) -> None:
        """Add an event or fact; never blocks."""
        self._queue.put(Stamped(self.now_s(), item))

    def put_probed(self, answer: Probed) -> None:
        """Add a probe's answer, and why it failed if it did."""
        if answer.error is not None:
            self.put(Fact(name="probe_failed", worker=answer.worker, detail=answer.error))
        self.put(WorkerProbed(worker=answer.worker, probe=answer.probe, slowdown=answer.slowdown))

    def put_beat(self, worker: str, beat: Heartbeat) -> None:
        """Add what a heartbeat brings."""
        if beat.times is not None:
            self.paces.add(worker, beat.times)
        if beat.written:
            self.put(UnitsWritten(worker=worker, written=beat.written))
        if beat.checkpoint_error:
            self.put(CheckpointFailed(worker=worker, error=beat.checkpoint_error, version=beat.error_version))
        for note in beat.notes:
            self.put(Fact(name="data_workers", worker=worker, detail=note))
        if beat.ahead is not None:
            self.put(PreCopyReported(worker=worker, report=beat.ahead))

    def put_unheard(self, lasted_s: float) -> None:
        """Add that for so long nobody could be heard."""
        self.put(NobodyHeard(lasted_s=lasted_s))

    def __len__(self) -> int:
        """About how many entries wait."""
        return self._queue.qsize()

    def get(self, timeout_s: float) -> Stamped | None:
        """The oldest entry; None when none comes within ``timeout_s``."""
        try:
            return self._queue.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None


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
        device_s = times.processor_s
        with self._lock:
            before = self._times.get(worker)
            if before is not None and before.generation == times.generation:
                compute_s, device_s = before.compute_s + compute_s, before.device_s + device_s
            self._times[worker] = WorkerTimes(
                worker=worker,
                generation=times.generation,
                compute_s=compute_s[-MOST_KEPT:],
                device_s=device_s[-MOST_KEPT:],
            )

    def take(self) -> ComputeTimesSeen | None:
        """Everything since the last call; None: nothing."""
        with self._lock:
            times, self._times = tuple(self._times.values()), {}
        return ComputeTimesSeen(times=times) if times else None
