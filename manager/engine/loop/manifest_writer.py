"""Writes manifests and drops old checkpoints beside the driver: storage may take seconds, and no pause waits for it."""

from __future__ import annotations

import queue
import threading
from functools import partial

from manager.controller.state.events import MANIFEST_WRITER, CheckpointFailed, ManifestWritten
from manager.engine.loop.event_queue import EventQueue
from manager.journal.records import Fact
from morph.checkpoint.manifest import write_manifest
from morph.checkpoint.retention import delete_superfluous
from morph.checkpoint.storage import bounded
from morph.contract.checkpoint import Manifest
from morph.contract.rules import CheckpointRules

CLOSE_TIMEOUT_S = 15.0
DELETE_TIMEOUT_S = 600.0


class ManifestWriter:
    """Writes one manifest after the other in a thread of its own; what came of each goes to ``event_queue``.

    ``rules`` say which checkpoints stay after each.
    """

    def __init__(self, checkpoint_url: str, rules: CheckpointRules, event_queue: EventQueue) -> None:
        self._checkpoint_url = checkpoint_url
        self._rules = rules
        self._event_queue = event_queue
        self._wanted: queue.SimpleQueue[Manifest | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def write(self, manifest: Manifest) -> None:
        """Write a manifest; ``ManifestWritten`` or ``CheckpointFailed`` follows. Returns at once."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="morph-manifests", daemon=True)
            thread.start()
            self._thread = thread
        self._wanted.put(manifest)

    def close(self) -> None:
        """Wait until what was asked for is done; gives up after ``CLOSE_TIMEOUT_S``. Safe to call twice."""
        if self._thread is not None:
            self._wanted.put(None)
            self._thread.join(CLOSE_TIMEOUT_S)
            self._thread = None

    def _run(self) -> None:
        while (manifest := self._wanted.get()) is not None:
            self._write(manifest)

    def _write(self, manifest: Manifest) -> None:
        try:
            bounded(partial(write_manifest, self._checkpoint_url, manifest), self._rules.file_timeout_s, "storage")
        except Exception as error:  # each kind of storage has its own; the controller keeps the previous checkpoint
            told = f"{type(error).__name__}: {error}"
            self._event_queue.put(CheckpointFailed(worker=MANIFEST_WRITER, error=told, version=manifest.version))
            return
        self._event_queue.put(ManifestWritten(version=manifest.version))
        try:
            bounded(partial(delete_superfluous, self._checkpoint_url, self._rules), DELETE_TIMEOUT_S, "storage")
        except Exception as error:  # old files stay a while longer: the next checkpoint tries again
            fact = Fact(name="old_checkpoints_kept", detail=f"{type(error).__name__}: {error}")
            self._event_queue.put(fact)
