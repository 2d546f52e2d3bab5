"""How a joiner gets the state while the others train: a copy of it, and each later step's gradients, which it applies.

Whoever lets joiners in keeps both ready for as long as somebody wants them. Where models differ there is nothing to
apply: a joiner gets the state when it comes in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from morph.elastic.shelf import Shelf
from morph.elastic.state import TrainingState

SNAPSHOT, STEP = "snapshot", "step/"
"""Names on the shelf: the copy, without a byte where a joiner is to come in without one; and the step after so many."""
MOST_STATES, LEAST_BOUND_BYTES = 2, 256 * 2**20
"""Steps are kept up to so many times the bytes of the copy, or so many bytes."""


class CatchUpLog:
    """Used by the training thread of the member that lets in."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._names: list[str] = []
        self._num_bytes = self._most_bytes = self._num_steps = 0
        self._is_refused = False

    @property
    def is_open(self) -> bool:
        """Whether steps are kept."""
        return self._most_bytes > 0

    def covers(self, num_steps: int) -> bool:
        """Whether a joiner can get from the copy to the state after so many steps."""
        return self.is_open and self._num_steps == num_steps

    def boundary(self, state: TrainingState, step: tuple[Tensor, ...], *, is_wanted: bool, is_apart: bool) -> None:
        """After a step: keep it, and begin or end where joiners come or have come in.

        Args:
            state: After the step.
            step: As ``TrainingState`` packs it, if this was open when the step was computed; else nothing.
            is_wanted: Somebody is on the way.
            is_apart: Models differ.
        """
        if not is_wanted:
            self.close()
            self._is_refused = False
        elif is_apart:
            self._refuse()
        elif self._is_refused:
            return
        elif not self.is_open:
            copy = state.pack()
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
        """The joiners get the state when they come in."""
        if not self._is_refused:
            self.close()
            self._put(SNAPSHOT, torch.empty(0, dtype=torch.uint8))
        self._is_refused = True

    def close(self) -> None:
        """Keep nothing any more."""
        for name in self._names:
            self._shelf.drop(name)
        self._names.clear()
        self._num_bytes = self._most_bytes = 0

    def _put(self, name: str, *parts: Tensor) -> None:
        self._shelf.put(name, *parts)
        self._names.append(name)
