"""Writes units of a checkpoint in the background, so that training waits only for the copy in memory.

What was written of the newest versions is remembered: a manager that takes over is told of it again, and a unit that is
asked for again is not written twice. Its tensors stay in host memory too, so that a worker that must go back to a
checkpoint reads from storage only what others wrote.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping

from torch import Tensor

from morph.checkpoint.unit_files import write_unit
from morph.contract.messages import Heartbeat, UnitWritten
from morph.runtime.groups.faults import FaultPlan

KEPT_VERSIONS = 2


class CheckpointWriter:
    """One background thread that writes what it is handed, in order."""

    def __init__(self, worker: str, url: str, faults: FaultPlan) -> None:
        self._worker = worker
        self._url = url
        self._faults = faults
        self._queue: queue.Queue[tuple[int, str, Mapping[str, Tensor], int]] = queue.Queue()
        self._returns: list[int] = []
        self._condition = threading.Condition()
        self._written: list[UnitWritten] = []
        self._error: str | None = None
        self._woken = False
        self._waiting: set[tuple[int, str]] = set()
        self._recent: dict[tuple[int, str], UnitWritten] = {}
        self._copies: dict[tuple[int, str], Mapping[str, Tensor]] = {}
        threading.Thread(target=self._run, name="morph-checkpoint", daemon=True).start()

    def hand_over(self, version: int, unit: str, tensors: Mapping[str, Tensor]) -> None:
        """Queue one unit's copy for writing."""
        with self._condition:
            self._waiting.add((version, unit))
            self._queue.put((version, unit, tensors, len(self._returns)))

    def wake(self) -> None:
        """Let ``collect`` return now: there is other news."""
        with self._condition:
            self._woken = True
            self._condition.notify_all()

    def has(self, version: int, unit: str) -> bool:
        """Whether a unit was handed over and not given up: then it is, or will be, told of, once more if need be."""
        with self._condition:
            self._tell_again([entry for key, entry in self._recent.items() if key == (version, unit)])
            return (version, unit) in self._waiting or (version, unit) in self._recent

    def copy(self, version: int, unit: str, sha256: str) -> dict[str, Tensor] | None:
        """A copy of what this worker wrote, if it is what a manifest names; None: it is not, or no longer here."""
        with self._condition:
            written = self._recent.get((version, unit))
            if written is None or written.sha256 != sha256:
                return None
            return {name: tensor.clone() for name, tensor in self._copies[version, unit].items()}

    def forget_after(self, version: int) -> None:
        """The job went back to this version: what was or will be written of later ones is of a history that is void."""
        with self._condition:
            self._returns.append(version)
            self._waiting = {key for key in self._waiting if key[0] <= version}
            self._recent = {key: entry for key, entry in self._recent.items() if key[0] <= version}
            self._copies = {key: copied for key, copied in self._copies.items() if key[0] <= version}
            self._written = [entry for entry in self._written if entry.version <= version]

    def tell_again(self) -> None:
        """Report what was written of the newest versions once more: whoever was told may be gone."""
        with self._condition:
            self._tell_again(list(self._recent.values()))

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
            version, unit, tensors, num_returns = self._queue.get()
            if self._is_void(version, num_returns):
                continue
            try:
                self._faults.reach("checkpoint", version)
                written = write_unit(self._url, version, unit, self._worker, tensors)
            except Exception as error:  # reported to the manager, which keeps the previous checkpoint
                with self._condition:
                    if self._is_void(version, num_returns):
                        continue
                    self._waiting.discard((version, unit))
                    self._error = f"unit {unit}, version {version}: {type(error).__name__}: {error}"
                    self._condition.notify_all()
                continue
            with self._condition:
                if self._is_void(version, num_returns):
                    continue  # the file stays, and no manifest names it
                self._waiting.discard((version, unit))
                self._remember(written, tensors)
                self._tell_again([written])

    def _is_void(self, version: int, num_returns: int) -> bool:
        """Whether the job went back to before this version since it was handed over."""
        return any(version > returned for returned in self._returns[num_returns:])

    def _remember(self, written: UnitWritten, tensors: Mapping[str, Tensor]) -> None:
        self._recent[written.version, written.unit] = written
        self._copies[written.version, written.unit] = tensors
        oldest = sorted({version for version, _ in self._recent})[-KEPT_VERSIONS:][0]
        self._recent = {key: entry for key, entry in self._recent.items() if key[0] >= oldest}
        self._copies = {key: copied for key, copied in self._copies.items() if key[0] >= oldest}

    def _tell_again(self, entries: list[UnitWritten]) -> None:
        self._written += [entry for entry in entries if entry not in self._written]
        self._condition.notify_all()
