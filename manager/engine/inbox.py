"""The driver's queue: events for the controller, and facts that are only written down."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import TypeAdapter

from manager.controller.events import AheadReported, CheckpointFailed, Event, NobodyHeard, UnitsWritten, WorkerProbed
from manager.engine.clock import RunClock
from manager.engine.paces import Paces
from manager.journal.records import Fact
from morph.contract.messages import Answer, Heartbeat, Probed

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


class Inbox:
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
            self.put(CheckpointFailed(worker=worker, error=beat.checkpoint_error))
        if beat.ahead is not None:
            self.put(AheadReported(worker=worker, report=beat.ahead))

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
