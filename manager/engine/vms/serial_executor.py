"""Executors that run tasks one after another, or each in its own thread."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable

Task = Callable[[], None]
MOST_AT_ONCE = 32


class SerialExecutor:
    """Runs tasks in the order in which they are submitted, until ``stop``.

    ``failed``: called with a task's error; the next task still runs. ``idle``: called if no task was submitted
    for ``idle_every_s`` seconds; None: never.
    """

    def __init__(
        self,
        name: str,
        failed: Callable[[Exception], None],
        idle: Task | None = None,
        idle_every_s: float | None = None,
    ) -> None:
        self._failed, self._idle = failed, idle
        self._idle_every_s = idle_every_s if idle is not None else None
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, task: Task) -> None:
        """Put a task; returns at once."""
        self._tasks.put(task)

    def stop(self) -> None:
        """Start no more tasks; returns at once."""
        self._over.set()
        self._tasks.put(None)

    def join(self, until_s: float) -> bool:
        """Wait for the running task until this time on the monotonic clock; returns whether it is over."""
        self._thread.join(max(0.0, until_s - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=self._idle_every_s)
            except queue.Empty:
                task = self._idle
            if task is None:
                return
            if self._over.is_set():
                continue
            try:
                task()
            except Exception as error:  # any error: without this thread no more tasks would run
                self._failed(error)


class ParallelExecutor:
    """Runs tasks in parallel, up to ``MOST_AT_ONCE`` of them, until ``stop``; ``failed`` gets a task's error."""

    def __init__(self, name: str, failed: Callable[[Exception], None]) -> None:
        self._name, self._failed = name, failed
        self._tasks: deque[Task] = deque()
        self._num_threads, self._over = 0, False
        self._changed = threading.Condition()

    def put(self, task: Task) -> None:
        """Put a task; returns at once."""
        with self._changed:
            if self._over:
                return
            self._tasks.append(task)
            if self._num_threads < MOST_AT_ONCE:
                self._num_threads += 1
                threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def stop(self) -> None:
        """Start no more tasks; returns at once."""
        with self._changed:
            self._over = True
            self._tasks.clear()

    def join(self, until_s: float) -> bool:
        """Wait until no task is left, at most until this time on the monotonic clock; returns whether none is left."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_threads, max(0.0, until_s - time.monotonic()))

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._tasks:
                    self._num_threads -= 1
                    self._changed.notify_all()
                    return
                task = self._tasks.popleft()
            try:
                task()
            except Exception as error:
                self._failed(error)
