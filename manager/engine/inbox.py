"""The driver's queue: events for the controller, and facts that are only written down."""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass

from manager.controller.events import Event, WorkerProbed
from manager.engine.paces import Paces
from manager.journal.records import Fact
from morph.contract.messages import Probed


@dataclass(frozen=True)
class Stamped:
    """An event or fact with the wall-clock second at which it was seen."""

    time_s: float
    item: Event | Fact


class Inbox:
    """Thread-safe; stamps what is put in. ``put`` may interrupt ``get`` in one thread, as a signal handler does."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Stamped] = queue.SimpleQueue()  # re-entrant; ``Queue`` is not
        self.paces = Paces()
        """Compute times, which wait beside the queue."""

    def put(self, item: Event | Fact) -> None:
        """Add an event or fact; never blocks."""
        self._queue.put(Stamped(time.time(), item))

    def put_probed(self, answer: Probed) -> None:
        """Add a probe's answer, and why it failed if it did."""
        if answer.error is not None:
            self.put(Fact(name="probe_failed", worker=answer.worker, detail=answer.error))
        self.put(WorkerProbed(worker=answer.worker, probe=answer.probe, slowdown=answer.slowdown))

    def __len__(self) -> int:
        """About how many entries wait."""
        return self._queue.qsize()

    def get(self, timeout_s: float) -> Stamped | None:
        """The oldest entry; None when none comes within ``timeout_s``."""
        try:
            return self._queue.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None
