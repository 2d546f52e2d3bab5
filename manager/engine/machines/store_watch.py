"""Watches the rendezvous store's process: if it is gone, it is started again at the address that workers know."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from manager.engine.loop.event_queue import EventQueue
from manager.host.processes import runs
from manager.journal.records import Fact
from morph.contract.errors import ClusterError, ClusterLost

LOOK_EVERY_S = 0.5
RETRY_S = 60.0
PAUSE_S = 0.2
CLOSE_TIMEOUT_S = 10.0


@dataclass
class Store:
    """A rendezvous store in its own process on this machine. ``port``, ``pid``: 0 until they are known.

    ``start_at``: starts the store at a host and port, ending an earlier one, and returns its process id and port.
    """

    start_at: Callable[[str, int], tuple[int, int]]
    host: str
    port: int = 0
    pid: int = 0

    def start(self) -> None:
        """Start the store, at ``port`` once that is known; ClusterError on failure."""
        self.pid, self.port = self.start_at(self.host, self.port)


class StoreWatch:
    """Restarts the store in a thread when the store's process is gone, and notes both in the journal.

    Workers use the store only while groups are formed. If they do so while the store is down, they retry for longer
    than a restart takes; a generation whose groups were being formed is dissolved, and the next one finds the new
    store.
    """

    def __init__(self, store: Store, event_queue: EventQueue) -> None:
        self._store = store
        self._event_queue = event_queue
        self._over = threading.Event()
        self._starting: threading.Thread | None = None
        self._failed: ClusterError | None = None
        self._looked_s = -LOOK_EVERY_S

    def check(self) -> None:
        """Look at the store every ``LOOK_EVERY_S``, never blocking; ClusterLost if no restart works in ``RETRY_S``."""
        if self._failed is not None:
            raise ClusterLost(f"the rendezvous store is gone and cannot be started again: {self._failed}")
        now_s = time.monotonic()
        if now_s < self._looked_s + LOOK_EVERY_S or (self._starting is not None and self._starting.is_alive()):
            return
        self._looked_s = now_s
        if not runs(self._store.pid):
            self._event_queue.put(Fact(name="store_lost", detail=f"its process {self._store.pid} is gone"))
            self._starting = threading.Thread(target=self._start, name="morph-store", daemon=True)
            self._starting.start()

    def close(self) -> None:
        """Stop restarting; waits up to ``CLOSE_TIMEOUT_S`` for an attempt in progress."""
        self._over.set()
        if self._starting is not None:
            self._starting.join(CLOSE_TIMEOUT_S)

    def _start(self) -> None:
        until_s = time.monotonic() + RETRY_S
        while not self._over.is_set():
            try:
                self._store.start()
            except ClusterError as error:
                if time.monotonic() >= until_s:
                    self._failed = error
                    return
                self._over.wait(PAUSE_S)
            else:
                detail = f"{self._store.host}:{self._store.port}, process {self._store.pid}"
                self._event_queue.put(Fact(name="store_started_again", detail=detail))
                return
