"""Writes units of a checkpoint in the background, so that training waits only for the copy in memory."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping

from torch import Tensor

from morph.checkpoint.unit_files import write_unit
from morph.contract.messages import Heartbeat, UnitWritten
from morph.runtime.faults import FaultPlan


class CheckpointWriter:
    """One background thread that writes what it is handed, in order."""

    def __init__(self, worker: str, url: str, faults: FaultPlan) -> None:
        self._worker = worker
        self._url = url
        self._faults = faults
        self._queue: queue.Queue[tuple[int, str, Mapping[str, Tensor]]] = queue.Queue()
        self._condition = threading.Condition()
        self._written: list[UnitWritten] = []
        self._error: str | None = None
        self._woken = False
        threading.Thread(target=self._run, name="morph-checkpoint", daemon=True).start()

    def hand_over(self, version: int, unit: str, tensors: Mapping[str, Tensor]) -> None:
        """Queue one unit's copy for writing."""
        self._queue.put((version, unit, tensors))

    def wake(self) -> None:
        """Let ``collect`` return now: there is other news."""
        with self._condition:
            self._woken = True
            self._condition.notify_all()

    def collect(self, wait_s: float) -> Heartbeat:
        """What was written since the last call; blocks up to ``wait_s`` for something to report."""
        with self._condition:
            self._condition.wait_for(lambda: bool(self._written or self._error or self._woken), wait_s)
            self._woken = False
            beat = Heartbeat(worker=self._worker, written=tuple(self._written), checkpoint_error=self._error)
            self._written.clear()
            self._error = None
            return beat

    def _run(self) -> None:
        while True:
            version, unit, tensors = self._queue.get()
            try:
                self._faults.reach("checkpoint", version)
                written = write_unit(self._url, version, unit, self._worker, tensors)
            except Exception as error:  # reported to the manager, which keeps the previous checkpoint
                with self._condition:
                    self._error = f"unit {unit}, version {version}: {type(error).__name__}: {error}"
                    self._condition.notify_all()
                continue
            with self._condition:
                self._written.append(written)
                self._condition.notify_all()
