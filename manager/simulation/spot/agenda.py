"""What happens when, in virtual time."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Generic, TypeVar

What = TypeVar("What")


class Agenda(Generic[What]):
    """Things that are due, ordered by time and, at the same time, by when they were put down."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], What]]] = []
        self._numbers = itertools.count()

    def put(self, time_s: float, what: Callable[[], What]) -> None:
        """Note what is to be called at a time."""
        heapq.heappush(self._due, (time_s, next(self._numbers), what))

    @property
    def next_s(self) -> float:
        """When the next thing is due; infinity: nothing is."""
        return self._due[0][0] if self._due else math.inf

    def take(self) -> Callable[[], What]:
        """Take the next one off."""
        return heapq.heappop(self._due)[2]
