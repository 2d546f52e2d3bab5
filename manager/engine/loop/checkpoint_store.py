"""What the manager itself does with the run's checkpoints, beside the driver: storage may take seconds or hang."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
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
from morph.contract.rules import CheckpointRules

CLOSE_TIMEOUT_S = 15.0
DELETE_TIMEOUT_S = 600.0


class CheckpointStore:
    """Writes manifests, deletes old checkpoints and finds whole ones, one after the other in a thread of its own.

    So none is deleted while it is looked at. What came of each goes to ``event_queue``; ``rules`` say which checkpoints
    stay after a new one, and how long storage is waited for; the newest of those that ``back_steps`` divides stays too.
    ``lease``: without it nothing is written; None: nobody else can write there.
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

    def write(self, manifest: Manifest) -> None:
        """Write a manifest; ``ManifestWritten`` or ``CheckpointFailed`` follows. Returns at once."""
        self._do(partial(self._write, manifest))

    def find(self, at_most: int | None = None) -> None:
        """Find the newest checkpoint of which every byte is right; ``at_most``: up to this version.

        ``CheckpointFound`` or ``CheckpointNotFound`` follows. Returns at once.
        """
        self._do(partial(self._find, at_most))

    def mark(self, best: Best) -> None:
        """Mark the best checkpoint, if it is there, in place of the one that was; returns at once."""
        self._do(partial(self._mark, best))

    def check(self) -> None:
        """See that the checkpoints are still this manager's, as far as is known.

        Raises:
            CheckpointsTaken: they are not.
        """
        if self._lease is not None:
            self._lease.check()

    def close(self) -> None:
        """Wait until what was requested is done; gives up after ``CLOSE_TIMEOUT_S``. Safe to call twice."""
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

    def _write(self, manifest: Manifest) -> None:
        try:
            bounded(partial(self._write_held, manifest), self._rules.file_limit_s(0), "storage")
        except Exception as error:  # each kind of storage has its own; the controller keeps the previous checkpoint
            told = f"{type(error).__name__}: {error}"
            self._event_queue.put(CheckpointFailed(worker=MANIFEST_WRITER, error=told, version=manifest.version))
            return
        self._event_queue.put(ManifestWritten(version=manifest.version))
        try:
            bounded(
                partial(delete_superfluous, self._checkpoint_url, self._rules, self._back_steps),
                DELETE_TIMEOUT_S,
                "storage",
            )
        except Exception as error:  # old files stay a while longer: the next checkpoint tries again
            fact = Fact(name="old_checkpoints_kept", detail=f"{type(error).__name__}: {error}")
            self._event_queue.put(fact)

    def _write_held(self, manifest: Manifest) -> None:
        if self._lease is not None:
            self._lease.hold()
        write_manifest(self._checkpoint_url, manifest)

    def _mark_held(self, best: Best) -> None:
        if self._lease is not None:
            self._lease.hold()
        mark_best(self._checkpoint_url, best)

    def _mark(self, best: Best) -> None:
        try:
            bounded(partial(self._mark_held, best), self._rules.file_limit_s(0), "storage")
        except Exception as error:  # each kind of storage has its own; the next one that is best is marked
            self._event_queue.put(Fact(name="best_not_marked", detail=f"{type(error).__name__}: {error}"))

    def _find(self, at_most: int | None) -> None:
        limit_s = self._rules.file_limit_s
        try:
            found, passed_over = newest_whole(self._checkpoint_url, every_byte=True, limit_s=limit_s, at_most=at_most)
        except Exception as error:  # each kind of storage has its own
            damaged = isinstance(error, CheckpointDamaged)
            self._event_queue.put(CheckpointNotFound(error=str(error), damaged=damaged))
            return
        if found is None:  # as a file system looks that is not mounted: nothing is known of what was there
            which = "any more" if at_most is None else f"up to version {at_most}"
            gone = f"{self._checkpoint_url}: there is no checkpoint {which}"
            self._event_queue.put(CheckpointNotFound(error=gone, damaged=False, none=at_most is not None))
            return
        self._event_queue.put(CheckpointFound(manifest=found, passed_over=passed_over))
