"""Threads that do one thing after another, or each thing in one of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable

Task = Callable[[], None]


class SerialExecutor:
    """Tasks are done in the order put, until ``stop``.

    Args:
        name: Of the thread.
        failed: Told what a task raised; the next one is done all the same.
        idle: Done when no task was put for ``idle_every_s``; None: nothing.
        idle_every_s: In seconds; None: never.
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
        """Have something done; returns at once."""
        self._tasks.put(task)

    def stop(self) -> None:
        """Begin no further task; returns at once."""
        self._over.set()
        self._tasks.put(None)

    def join(self, until_s: float) -> bool:
        """Wait for the task under way until this second of the monotonic clock; returns whether it is over."""
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
            except Exception as error:  # whatever it is: without this thread nothing of its kind is done any more
                self._failed(error)


MOST_AT_ONCE = 32


class ParallelExecutor:
    """Tasks are done beside one another, up to ``MOST_AT_ONCE`` of them, until ``stop``.

    Args:
        name: Of the threads.
        failed: Told what a task raised.
    """

    def __init__(self, name: str, failed: Callable[[Exception], None]) -> None:
        self._name, self._failed = name, failed
        self._tasks: deque[Task] = deque()
        self._num_threads, self._over = 0, False
        self._changed = threading.Condition()

    def put(self, task: Task) -> None:
        """Have something done; returns at once."""
        with self._changed:
            if self._over:
                return
            self._tasks.append(task)
            if self._num_threads < MOST_AT_ONCE:
                self._num_threads += 1
                threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def stop(self) -> None:
        """Begin no further task; returns at once."""
        with self._changed:
            self._over = True
            self._tasks.clear()

    def join(self, until_s: float) -> bool:
        """Wait until nothing is left to do, until this second of the monotonic clock; returns whether nothing is."""
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
