"""Lets a joiner get the state while the others train: it gets a copy and applies the gradients of each later step.

The member that lets joiners in keeps copy and gradients for as long as a joiner needs them. While models differ there
are no common gradients to apply, so a joiner gets the state only when it enters the ring.
"""

from __future__ import annotations

import torch
from torch import Tensor

from morph.elastic.shelf import Shelf
from morph.elastic.state import TrainingState

SNAPSHOT, STEP = "snapshot", "step/"
"""Names on the shelf: the copy (empty if joiners enter without it); and, with a number of steps, the next step."""
MOST_STATES, LEAST_BOUND_BYTES = 2, 256 * 2**20
"""Limits of the kept steps: a multiple of the copy's size, or a number of bytes, whichever is more."""


class CatchUpLog:
    """The copy and the steps kept for joiners. Only the training thread of the member that lets joiners in uses it."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._names: list[str] = []
        self._num_bytes = self._most_bytes = self._num_steps = 0
        self._is_refused = False

    @property
    def is_open(self) -> bool:
        """Whether steps are being kept."""
        return self._most_bytes > 0

    def covers(self, num_steps: int) -> bool:
        """Whether a joiner can get from the copy to the state after this many steps."""
        return self.is_open and self._num_steps == num_steps

    def boundary(self, state: TrainingState, step: tuple[Tensor, ...], *, is_wanted: bool, is_apart: bool) -> None:
        """Keep a completed step, and start or stop keeping steps when joiners arrive or have entered.

        ``step``: the step as ``TrainingState`` packs it, if the log was open when the step was computed; else empty.
        """
        if not is_wanted:
            self.close()
            self._is_refused = False
        elif is_apart:
            self._refuse()
        elif self._is_refused:
            return
        elif not self.is_open:
            copy = state.pack(with_carried=False)  # it changes between steps, so joiners get it as they enter
            self._most_bytes = max(MOST_STATES * len(copy), LEAST_BOUND_BYTES)
            self._num_steps = state.num_steps
            self._put(SNAPSHOT, copy)
        elif step:
            self._put(f"{STEP}{state.num_steps - 1}", *step)
            self._num_bytes += sum(map(len, step))
            self._num_steps = state.num_steps
            if self._num_bytes > self._most_bytes:
                self._refuse()

    def _refuse(self) -> None:
        """Stop keeping steps: the joiners get the state when they enter."""
        if not self._is_refused:
            self.close()
            self._put(SNAPSHOT, torch.empty(0, dtype=torch.uint8))
        self._is_refused = True

    def close(self) -> None:
        """Discard everything that is kept."""
        for name in self._names:
            self._shelf.drop(name)
        self._names.clear()
        self._num_bytes = self._most_bytes = 0

    def _put(self, name: str, *parts: Tensor) -> None:
        self._shelf.put(name, *parts)
        self._names.append(name)
