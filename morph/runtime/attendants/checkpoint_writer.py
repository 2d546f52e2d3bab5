"""Copies units of a checkpoint and writes them in the background: training waits only for tensors about to change.

The written units of the newest versions are remembered, for a manager that takes over or requests one again, with their
tensors in host memory, for a return to a checkpoint.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from morph.checkpoint.manifest import run_that_holds, write_manifest
from morph.checkpoint.storage import bounded, is_local
from morph.checkpoint.unit_files import write_unit
from morph.contract.checkpoint import Manifest, UnitFile
from morph.contract.errors import CheckpointError
from morph.contract.messages import CommitOrder, Heartbeat, ReshapeOrder, StepOrder, UnitWritten
from morph.contract.rules import CheckpointRules
from morph.cutting import CutModel
from morph.jobs.job import Job
from morph.runtime.groups.faults import FaultPlan
from morph.runtime.state.unit_state import StateCopy, UnitState, update_rules
from morph.runtime.step.generation import Generation
from morph.runtime.step.training_step import Attendant, Units

# Version 0 of a run, written from given parameters instead of the job's seed.

KEPT_VERSIONS = 2
PAUSES_S = (0.5, 1.5, 4.0)
"""Seconds between attempts to write a file to network storage."""


class Parameters(Protocol):
    """Parameters by name; each is made or read when it is requested."""

    def __getitem__(self, name: str) -> Tensor: ...


def write_initial_checkpoint(
    job: Job,
    model: CutModel,
    parameters: Parameters,
    checkpoint_url: str,
    *,
    frozen: str = "",
    prepare: Callable[[UnitState], None] | None = None,
) -> Manifest:
    """Write every unit, then the manifest; only one unit is in memory at a time.

    ``frozen``: digest of the frozen weights beside the checkpoint; ``prepare``: changes a unit further.
    """
    num_micro_batches = job.batch_size // model.micro_batch_size
    rules = update_rules(job, torch.device("cpu"), frozen=frozen)
    files: list[UnitFile] = []
    for unit in model.units:
        state = UnitState(
            unit,
            {name: parameters[name] for name in unit.names},
            job.optimizer,
            num_micro_batches=num_micro_batches,
            exact=job.accumulation == "exact",
            rules=rules,
        )
        if prepare is not None:
            prepare(state)
        written = write_unit(checkpoint_url, 0, unit.id, "import", state.tensors())
        files.append(UnitFile(**written.model_dump(exclude={"worker", "version", "stall_s"})))
    manifest = Manifest(fingerprint=model.fingerprint, version=0, units=_sorted(files), kind="imported")
    write_manifest(checkpoint_url, manifest)
    return manifest


def _sorted(files: Iterable[UnitFile]) -> tuple[UnitFile, ...]:
    return tuple(sorted(files, key=lambda entry: entry.unit))


@dataclass(frozen=True)
class Handed:
    """A unit to be copied and written. ``num_returns``: how many times the job had gone back before."""

    version: int
    unit: str
    copy: StateCopy
    num_returns: int


class CheckpointWriter(Attendant):
    """One background thread copies the units that are handed over and another writes them, both in order.

    Remaining units of older versions are dropped when a newer version is handed over, unless the newer one names them.
    ``rules``: bounds on writing one file, all tries together; ``on_processor``: writing takes processor time from
    training, which counts as a stall.
    """

    def __init__(
        self,
        worker: str,
        url: str,
        faults: FaultPlan,
        rules: CheckpointRules = CheckpointRules(),  # noqa: B008 (frozen)
        *,
        on_processor: bool = False,
    ) -> None:
        self._worker = worker
        self._url = url
        self._faults = faults
        self._rules = rules
        self._on_processor = on_processor
        self.lease = ""
        """Name of the run's lease of the checkpoints' storage; empty: no other run writes there."""
        self._looked_at: int | None = None
        self._to_copy: queue.SimpleQueue[Handed] = queue.SimpleQueue()
        self._to_write: queue.SimpleQueue[tuple[Handed, dict[str, Tensor], float]] = queue.SimpleQueue()
        self._returns: list[int] = []
        self._condition = threading.Condition()
        self._written: list[UnitWritten] = []
        self._error: tuple[int, str] | None = None
        self._woken = False
        self._waiting: set[tuple[int, str]] = set()
        self._recent: dict[tuple[int, str], UnitWritten] = {}
        self._copies: dict[tuple[int, str], Mapping[str, Tensor]] = {}
        threading.Thread(target=self._copy_all, name="morph-copies", daemon=True).start()
        threading.Thread(target=self._write_all, name="morph-checkpoint", daemon=True).start()

    def at_version(self, current: Generation, order: StepOrder | CommitOrder, held: Units) -> None:  # noqa: ARG002
        """Write the units that the order names."""
        self.hand_over_units(current.units, order.checkpoint_units, order.earlier_checkpoints)

    def before_reshape(self, order: ReshapeOrder) -> None:
        self.forget_after(order.version)

    def hand_over_units(self, units: Units, names: Iterable[str], earlier: Collection[int]) -> None:
        """Queue units at their present version: see ``hand_over``."""
        for name in names:
            self.hand_over(units[name].version, name, units[name].copy_later(), earlier)

    def hand_over(self, version: int, unit: str, copy: StateCopy, earlier: Collection[int] = ()) -> None:
        """Queue one unit for copying and writing; drop waiting units of older versions, except ``earlier``."""
        with self._condition:
            wanted = {key for key in self._waiting if key[0] >= version or key[0] in earlier}
            self._waiting = wanted | {(version, unit)}
            self._to_copy.put(Handed(version, unit, copy, len(self._returns)))

    def wake(self) -> None:
        """Let ``collect`` return now, because there is other news."""
        with self._condition:
            self._woken = True
            self._condition.notify_all()

    def has(self, version: int, unit: str) -> bool:
        """Return whether a unit was handed over and not given up; if so, it will be reported, again if necessary."""
        with self._condition:
            self._tell_again([entry for key, entry in self._recent.items() if key == (version, unit)])
            return (version, unit) in self._waiting or (version, unit) in self._recent

    def copy(self, version: int, unit: str, sha256: str) -> dict[str, Tensor] | None:
        """Return this worker's copy of a unit that it wrote; None if it does not match the manifest or is gone."""
        with self._condition:
            written = self._recent.get((version, unit))
            if written is None or written.sha256 != sha256:
                return None
            return {name: tensor.clone() for name, tensor in self._copies[version, unit].items()}

    def forget_after(self, version: int) -> None:
        """Discard units of later versions, because the job went back to this version."""
        with self._condition:
            self._returns.append(version)
            self._waiting = {key for key in self._waiting if key[0] <= version}
            self._recent = {key: entry for key, entry in self._recent.items() if key[0] <= version}
            self._copies = {key: copied for key, copied in self._copies.items() if key[0] <= version}
            self._written = [entry for entry in self._written if entry.version <= version]

    def tell_again(self) -> None:
        """Report the written units of the newest versions again, because the manager may be a new one."""
        with self._condition:
            self._tell_again(list(self._recent.values()))

    def collect(self, wait_s: float) -> Heartbeat:
        """Return the units written since the last call; blocks up to ``wait_s`` for something to report."""
        with self._condition:
            self._condition.wait_for(lambda: bool(self._written or self._error or self._woken), wait_s)
            self._woken = False
            version, error = self._error or (None, None)
            beat = Heartbeat(
                worker=self._worker, written=tuple(self._written), checkpoint_error=error, error_version=version
            )
            self._written.clear()
            self._error = None
            return beat

    def _copy_all(self) -> None:
        while True:
            handed = self._to_copy.get()
            started_s = time.thread_time()
            try:
                if not self._is_wanted(handed):
                    handed.copy.drop()
                copied = handed.copy.take()
            except Exception as error:  # the device is lost, or memory ran out
                self._end(handed, None, error)
                continue
            if copied is not None:
                self._to_write.put((handed, copied, time.thread_time() - started_s))

    def _write_all(self) -> None:
        while True:
            handed, copied, copy_s = self._to_write.get()
            if not self._is_wanted(handed):
                continue
            start_s = time.monotonic()
            written, error = self._write(handed, copied, copy_s)
            if written is not None and self._rules.bytes_per_s is not None:
                self._pause(handed, start_s + written.size_bytes / self._rules.bytes_per_s - time.monotonic())
            self._end(handed, copied, written or error)

    def _check_lease(self, version: int) -> None:
        """Check, before a version's first file, that no other run took over the storage. Raises CheckpointError."""
        if self.lease and version != self._looked_at:
            holder = run_that_holds(self._url)
            if holder not in (None, self.lease):
                raise CheckpointError(f"{self._url}: its checkpoints were taken over by another run")
            self._looked_at = version

    def _end(self, handed: Handed, copied: Mapping[str, Tensor] | None, result: UnitWritten | Exception | None) -> None:
        """Report the result for a unit that is still wanted. Other files stay, but no manifest names them."""
        with self._condition:
            if not self._is_wanted(handed):
                return
            self._waiting.discard((handed.version, handed.unit))
            if isinstance(result, UnitWritten) and copied is not None:
                self._remember(result, copied)
                self._tell_again([result])
            else:  # reported to the manager, which keeps the previous checkpoint
                error = f"unit {handed.unit}, version {handed.version}: {type(result).__name__}: {result}"
                self._error = handed.version, error
                self._condition.notify_all()

    def _write(
        self, handed: Handed, copied: Mapping[str, Tensor], copy_s: float
    ) -> tuple[UnitWritten | None, Exception | None]:
        """Write one file; if the network may have failed, try again after each of ``PAUSES_S``."""

        def write() -> UnitWritten:
            started_s = time.thread_time()
            self._faults.reach("checkpoint", handed.version)
            self._check_lease(handed.version)
            written = write_unit(self._url, handed.version, handed.unit, self._worker, copied)
            busy_s = copy_s + time.thread_time() - started_s if self._on_processor else 0.0
            return written.model_copy(update={"stall_s": handed.copy.waited_s + busy_s})

        num_bytes = sum(tensor.nbytes for tensor in copied.values())
        limit_s, begun_s = self._rules.file_limit_s(num_bytes), time.monotonic()
        for pause_s in [*(() if is_local(self._url) else PAUSES_S), None]:
            try:
                return bounded(write, limit_s, "storage", spent_s=time.monotonic() - begun_s), None
            except Exception as error:
                if pause_s is None or time.monotonic() + pause_s >= begun_s + limit_s:
                    return None, error
            self._pause(handed, pause_s)
            if not self._is_wanted(handed):
                break
        return None, None

    def _pause(self, handed: Handed, pause_s: float) -> None:
        """Wait, at most for as long as this unit is wanted."""
        with self._condition:
            self._condition.wait_for(lambda: not self._is_wanted(handed), max(0.0, pause_s))

    def _is_wanted(self, handed: Handed) -> bool:
        """Return whether a unit is still to be written: not discarded, and not older than the last handed version."""
        returns = self._returns[handed.num_returns :]
        return (handed.version, handed.unit) in self._waiting and all(handed.version <= version for version in returns)

    def _remember(self, written: UnitWritten, tensors: Mapping[str, Tensor]) -> None:
        self._recent[written.version, written.unit] = written
        self._copies[written.version, written.unit] = tensors
        oldest = sorted({version for version, _ in self._recent})[-KEPT_VERSIONS:][0]
        self._recent = {key: entry for key, entry in self._recent.items() if key[0] >= oldest}
        self._copies = {key: copied for key, copied in self._copies.items() if key[0] >= oldest}

    def _tell_again(self, entries: list[UnitWritten]) -> None:
        self._written += [entry for entry in entries if entry not in self._written]
        self._condition.notify_all()
