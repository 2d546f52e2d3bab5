"""The manager's own work on checkpoints, in its own thread, because storage may take seconds or hang."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection
from functools import partial

from manager.controller.state.events import (
    MANIFEST_WRITER,
    CheckpointFailed,
    CheckpointFound,
    CheckpointNotFound,
    ManifestWritten,
)
from manager.engine.loop.event_queue import EventQueue
from manager.engine.loop.lease import Lease
from manager.journal.records import Fact
from morph.checkpoint.manifest import write_manifest
from morph.checkpoint.newest import newest_whole
from morph.checkpoint.retention import delete_superfluous, mark_best
from morph.checkpoint.storage import bounded
from morph.contract.checkpoint import Manifest
from morph.contract.errors import CheckpointDamaged
from morph.contract.evaluation import Best
from morph.contract.messages import Version
from morph.contract.rules import CheckpointRules

CLOSE_TIMEOUT_S = 15.0
DELETE_TIMEOUT_S = 600.0


class CheckpointStore:
    """Writes manifests, deletes old checkpoints and finds complete ones, one job after another in its own thread.

    One thread does all of it, so that no checkpoint is deleted while it is read. Each result goes to ``event_queue``.
    ``rules`` say which checkpoints are kept after a new one, and how long to wait for storage; the newest whose version
    ``back_steps`` divides is kept too. ``lease``: nothing is written without it; None: no other manager can write
    there.
    """

    def __init__(
        self,
        checkpoint_url: str,
        rules: CheckpointRules,
        event_queue: EventQueue,
        lease: Lease | None = None,
        back_steps: int | None = None,
    ) -> None:
        self._checkpoint_url = checkpoint_url
        self._back_steps = back_steps
        self._rules = rules
        self._event_queue = event_queue
        self._lease = lease
        self._wanted: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def write(self, manifest: Manifest, spared: Collection[Version] = ()) -> None:
        """Write a manifest (``ManifestWritten`` or ``CheckpointFailed`` follows); older ones go, unless ``spared``."""
        self._do(partial(self._write, manifest, spared))

    def find(self, at_most: int | None = None) -> None:
        """Find the newest undamaged one by reading all bytes; ``CheckpointFound`` or ``CheckpointNotFound`` follows."""
        self._do(partial(self._find, at_most))

    def mark(self, best: Best) -> None:
        """Mark the best checkpoint, if it exists, in place of the last best one; returns at once."""
        self._do(partial(self._mark, best))

    def check(self) -> None:
        """Raise CheckpointsTaken if, as far as is known, another manager holds the checkpoints."""
        if self._lease is not None:
            self._lease.check()

    def close(self) -> None:
        """Wait until all requests are done; gives up after ``CLOSE_TIMEOUT_S``. Safe to call twice."""
        if self._thread is not None:
            self._wanted.put(None)
            self._thread.join(CLOSE_TIMEOUT_S)
            self._thread = None

    def _do(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="morph-manifests", daemon=True)
            thread.start()
            self._thread = thread
        self._wanted.put(work)

    def _run(self) -> None:
        while (work := self._wanted.get()) is not None:
            work()

    def _write(self, manifest: Manifest, spared: Collection[Version]) -> None:
        try:
            write = partial(write_manifest, self._checkpoint_url, manifest)
            bounded(partial(self._held, write), self._rules.file_limit_s(0), "storage")
        except Exception as error:  # any storage's error; the controller keeps the previous checkpoint
            cause = f"{type(error).__name__}: {error}"
            self._event_queue.put(CheckpointFailed(worker=MANIFEST_WRITER, error=cause, version=manifest.version))
            return
        self._event_queue.put(ManifestWritten(version=manifest.version))
        try:
            bounded(
                partial(delete_superfluous, self._checkpoint_url, self._rules, self._back_steps, spared),
                DELETE_TIMEOUT_S,
                "storage",
            )
        except Exception as error:  # old files stay longer: the next checkpoint tries again
            fact = Fact(name="old_checkpoints_kept", detail=f"{type(error).__name__}: {error}")
            self._event_queue.put(fact)

    def _held(self, write: Callable[[], object]) -> None:
        if self._lease is not None:
            self._lease.hold()
        write()

    def _mark(self, best: Best) -> None:
        try:
            mark = partial(mark_best, self._checkpoint_url, best)
            bounded(partial(self._held, mark), self._rules.file_limit_s(0), "storage")
        except Exception as error:  # each kind of storage has its own errors; the next best one is marked
            self._event_queue.put(Fact(name="best_not_marked", detail=f"{type(error).__name__}: {error}"))

    def _find(self, at_most: int | None) -> None:
        limit_s = self._rules.file_limit_s
        try:
            manifest, passed_over = newest_whole(
                self._checkpoint_url, every_byte=True, limit_s=limit_s, at_most=at_most
            )
        except Exception as error:  # any error of storage
            damaged = isinstance(error, CheckpointDamaged)
            self._event_queue.put(CheckpointNotFound(error=str(error), damaged=damaged))
            return
        if manifest is None:  # a file system that is not mounted looks the same: its content is not known
            which = "any more" if at_most is None else f"up to version {at_most}"
            gone = f"{self._checkpoint_url}: there is no checkpoint {which}"
            self._event_queue.put(CheckpointNotFound(error=gone, damaged=False, none=at_most is not None))
            return
        self._event_queue.put(CheckpointFound(manifest=manifest, passed_over=passed_over))
