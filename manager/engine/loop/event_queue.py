"""The driver's queue: events for the controller, and facts that are only journalled.

The compute times of all workers, which come with heartbeats, are gathered into one event per interval.
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

# The clock of a run: the wall clock's seconds when the run began, advanced by the monotonic clock.

_ANSWER: TypeAdapter[Answer | Probed] = TypeAdapter(Answer | Probed)
MOST_KEPT = 32
"""The number of micro-batches kept for one worker; older ones are dropped."""


class RunClock:
    """A clock that neither a change of this machine's clock nor a manager's death moves. Wall time is only for people.

    ``epoch_s``: that of the manager that began the session, if its VMs live: this machine was not restarted since, so
    both managers read the same monotonic clock. None: a session begins. ``not_before_s``: the earliest start, whatever
    ``wall`` (seconds since 1970) says: the time of the journal's last line.
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


@dataclass(frozen=True)
class Stamped:
    """An event or fact, with the time on the run's clock at which it was seen."""

    time_s: float
    item: Event | Fact


def read_answer(worker: str, message: bytes) -> Answer | Probed:
    """Read a worker's answer to an order; ValueError if it is not an answer, or is for another worker."""
    answer = _ANSWER.validate_json(message)
    if answer.worker != worker:
        raise ValueError(f"it answers for {answer.worker}")
    return answer


class EventQueue:
    """A thread-safe queue that stamps entries by the run's clock; a signal handler's ``put`` may interrupt ``get``."""

    def __init__(self, now_s: Callable[[], float] | None = None) -> None:
        self.now_s = now_s or RunClock().now_s
        self._queue: queue.SimpleQueue[Stamped] = queue.SimpleQueue()  # re-entrant; ``Queue`` is not
        self.paces = Paces()
        """The compute times, which wait outside of the queue."""

    def put(self, item: Event | Fact) -> None:
        """Add an event or fact; never blocks."""
        self._queue.put(Stamped(self.now_s(), item))

    def put_probed(self, answer: Probed) -> None:
        """Add a probe's answer, with the reason if it failed."""
        if answer.error is not None:
            self.put(Fact(name="probe_failed", worker=answer.worker, detail=answer.error))
        self.put(WorkerProbed(worker=answer.worker, probe=answer.probe, slowdown=answer.slowdown))

    def put_beat(self, worker: str, beat: Heartbeat) -> None:
        """Add the compute times of a heartbeat."""
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
        """Report that no worker could be heard for this time."""
        self.put(NobodyHeard(lasted_s=lasted_s))

    def __len__(self) -> int:
        """Return approximately how many entries wait."""
        return self._queue.qsize()

    def get(self, timeout_s: float) -> Stamped | None:
        """Return the oldest entry; None: none comes within ``timeout_s``."""
        try:
            return self._queue.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None


class Paces:
    """Holds a bounded number of times for each worker, even if they are never taken. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times: dict[WorkerId, WorkerTimes] = {}

    def add(self, worker: WorkerId, times: MicroBatchTimes) -> None:
        """Keep the times of a heartbeat; times of older generations are dropped."""
        compute_s = tuple(sum(pair) for pair in zip(times.forward_s, times.backward_s, strict=True))
        device_s, queued_s = times.processor_s, times.queued_s
        with self._lock:
            before = self._times.get(worker)
            if before is not None and before.generation == times.generation:
                compute_s, device_s = before.compute_s + compute_s, before.device_s + device_s
                queued_s = before.queued_s + queued_s
            self._times[worker] = WorkerTimes(
                worker=worker,
                generation=times.generation,
                compute_s=compute_s[-MOST_KEPT:],
                device_s=device_s[-MOST_KEPT:],
                queued_s=queued_s[-MOST_KEPT:],
            )

    def take(self) -> ComputeTimesSeen | None:
        """Return everything since the last call; None: nothing came."""
        with self._lock:
            times, self._times = tuple(self._times.values()), {}
        return ComputeTimesSeen(times=times) if times else None
