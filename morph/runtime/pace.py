"""How long a worker's micro-batches take: noted by the training thread, collected by the heartbeats."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from morph.contract.messages import MicroBatchTimes

MOST_KEPT = 16
"""Micro-batches that are kept until a heartbeat takes them; older ones are forgotten."""
DIGITS = 7


class _Note(NamedTuple):
    generation: int
    forward_s: float
    recompute_s: float
    backward_s: float


class Pace:
    """Times of the newest micro-batches. One thread notes and one collects; neither waits for the other."""

    def __init__(self) -> None:
        self._notes: deque[_Note] = deque(maxlen=MOST_KEPT)

    def note(self, generation: int, forward_s: float, recompute_s: float, backward_s: float) -> None:
        """Keep the times (seconds) of a micro-batch that was finished; about a microsecond."""
        self._notes.append(_Note(generation, forward_s, recompute_s, backward_s))

    def collect(self) -> MicroBatchTimes | None:
        """What was noted since the last call, of the newest generation; None: nothing."""
        notes: list[_Note] = []
        while self._notes:
            notes.append(self._notes.popleft())
        if not notes:
            return None
        generation = notes[-1].generation
        notes = [entry for entry in notes if entry.generation == generation]
        return MicroBatchTimes(
            generation=generation,
            forward_s=tuple(round(entry.forward_s, DIGITS) for entry in notes),
            recompute_s=tuple(round(entry.recompute_s, DIGITS) for entry in notes),
            backward_s=tuple(round(entry.backward_s, DIGITS) for entry in notes),
        )
