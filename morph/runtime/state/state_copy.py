"""A copy of a unit's state that is made while training goes on, and before anything in it changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from torch import Tensor


class StateCopy:
    """Tensors to be copied to host memory, by whichever thread asks first; the others wait for it.

    A state changes only when a step is applied, a whole forward and backward after it was handed over: who is about to
    change it calls ``finish``, and waits only for what is not copied by then.

    Args:
        tensors: Not copied yet; nobody may change them before ``finish`` returns.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._lock = threading.Lock()
        self._tensors: Mapping[str, Tensor] | None = tensors
        self._copied: dict[str, Tensor] | None = None
        self.waited_s = 0.0
        """For how long training stood in ``finish``."""

    def take(self) -> dict[str, Tensor] | None:
        """Return the copies, made now if they are not made yet; None: they are not wanted any more."""
        with self._lock:
            if self._tensors is not None:
                self._copied = {name: to_host(tensor) for name, tensor in self._tensors.items()}
                self._tensors = None
            return self._copied

    def lend(self) -> Mapping[str, Tensor]:
        """Return the tensors themselves, for who is through with them before they change; nothing is copied then."""
        with self._lock:
            tensors, self._tensors = self._tensors, None
            assert tensors is not None, "the tensors are copied already"
            return tensors

    def finish(self) -> None:
        """The tensors are about to change: return once they are copied."""
        start_s = time.perf_counter()
        self.take()
        self.waited_s += time.perf_counter() - start_s

    def drop(self) -> None:
        """The tensors are about to change, and nobody wants a copy of them: return once nobody reads them."""
        with self._lock:
            self._tensors = None


def to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to host memory."""
    return tensor.detach().to("cpu", copy=True).contiguous()
