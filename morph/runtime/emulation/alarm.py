"""Calls back at given moments."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable


class Alarm:
    """One thread for any number of moments; it ends with the process."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        threading.Thread(target=self._run, name="morph-alarm", daemon=True).start()

    def at(self, moment_s: float, call: Callable[[], None]) -> None:
        """Call then, on the clock of ``time.perf_counter``, from the alarm's thread; returns at once."""
        with self._condition:
            heapq.heappush(self._heap, (moment_s, next(self._numbers), call))
            if self._heap[0][2] is call:
                self._condition.notify()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._heap or self._heap[0][0] > time.perf_counter():
                    self._condition.wait(self._heap[0][0] - time.perf_counter() if self._heap else None)
                call = heapq.heappop(self._heap)[2]
            call()
