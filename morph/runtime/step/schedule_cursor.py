"""Chooses the next task of a stage: the plan's static order, with deviations if an input is late (Varuna 3.2). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Task(StrEnum):
    """The three tasks of a stage."""

    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"


@dataclass
class Progress:
    """The numbers of tasks of each kind that a stage has done in this step; micro-batches run in order."""

    forwards: int = 0
    recomputes: int = 0
    backwards: int = 0


class ScheduleCursor:
    """Walks through one stage's order string, over F, R and B (see ``Plan.orders``).

    ``opportunistic``, by Varuna's rules: prefer a backward whose gradient has arrived, and run a forward when the due
    task has no gradient, with at most ``window`` micro-batches in flight.
    """

    def __init__(self, order: str, window: int, *, opportunistic: bool) -> None:
        self._order = order
        self._window = window
        self._opportunistic = opportunistic
        self._recomputes = "R" in order
        self._count = order.count("F")
        self._position = 0
        self._ranks = _micro_batch_numbers(order)
        self.progress = Progress()

    @property
    def finished(self) -> bool:
        """Whether every task is done."""
        return self.progress.backwards == self._count

    @property
    def in_flight(self) -> int:
        """The number of micro-batches whose forward was run and whose backward was not."""
        return self.progress.forwards - self.progress.backwards

    def done(self, task: Task) -> None:
        """Record that a task was run."""
        if task is Task.FORWARD:
            self.progress.forwards += 1
        elif task is Task.RECOMPUTE:
            self.progress.recomputes += 1
        else:
            self.progress.backwards += 1

    def next_task(self, activations: int, gradients: int) -> Task | None:
        """Return the task to run now, given how many inputs and output gradients have arrived; None: wait."""
        if self.finished:
            return None
        state = self.progress
        forward_ready = activations > state.forwards
        backward_ready = gradients > state.backwards and state.forwards > state.backwards
        recomputed = not self._recomputes or state.recomputes > state.backwards
        if self._recomputes and recomputed:  # rule 2: only its backward may follow a recompute
            return Task.BACKWARD if backward_ready else None
        if self._opportunistic and backward_ready:  # rule 3
            return Task.BACKWARD if recomputed else Task.RECOMPUTE
        due = self._due()
        if due is Task.FORWARD:
            return Task.FORWARD if forward_ready else None
        if due is Task.BACKWARD and backward_ready:
            return Task.BACKWARD
        if self._opportunistic and forward_ready and self.in_flight < self._window:
            return Task.FORWARD
        return Task.RECOMPUTE if due is Task.RECOMPUTE else None  # rule 1: early, done when the gradient arrives

    def _due(self) -> Task:
        """Return the first task of the order that is not done yet."""
        state = self.progress
        done = {"F": state.forwards, "R": state.recomputes, "B": state.backwards}
        while self._ranks[self._position] < done[self._order[self._position]]:
            self._position += 1
        return Task(self._order[self._position])


def _micro_batch_numbers(order: str) -> list[int]:
    """Return the micro-batch to which each letter of an order belongs."""
    seen = dict.fromkeys("FRB", 0)
    numbers = []
    for letter in order:
        numbers.append(seen[letter])
        seen[letter] += 1
    return numbers
