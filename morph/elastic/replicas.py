"""Replicas that differ: as vectors, averaged over a ring or with another one, and made equal again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from morph.elastic.state import TrainingState
from morph.runtime.groups.channels import Ring, Transfer


def as_vector(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Return a copy of all values on the CPU: float32, or float64 where one of them is wider; or in another dtype."""
    wide = any(one.dtype == torch.float64 for one in tensors)
    dtype = dtype or (torch.float64 if wide else torch.float32)
    if not tensors:
        return torch.zeros(0, dtype=dtype)
    return torch.cat([one.detach().reshape(-1).to("cpu", dtype) for one in tensors])


def move_to(tensors: Sequence[Tensor], vector: Tensor, part: float) -> None:
    """Move tensors, in place, this part of the way to the values of a vector; 1: they become those."""
    with torch.no_grad():
        for one, values in zip(tensors, torch.split(vector, [one.numel() for one in tensors]), strict=True):
            goal = values.view(one.shape).to(one.device, one.dtype)
            if part == 1.0:
                one.copy_(goal)
            else:
                one.copy_((1.0 - part) * one + part * goal)


class Sum:
    """A vector summed over the workers of a ring, in place and in the background."""

    def __init__(self, vector: Tensor, ring: Ring | None) -> None:
        self.vector = vector
        self._pending: Transfer | None = None
        if ring is not None and vector.numel():
            self._pending = ring.reduce(vector, torch.distributed.ReduceOp.SUM)

    def wait(self, what: str) -> Tensor:
        """Return the sum, the same bytes at every worker.

        Raises:
            GenerationAborted, PeerLost: the ring is no more.
        """
        if self._pending is not None:
            self._pending.wait(what)
        return self.vector


class Union:
    """Replicas on their way to become one: the mean of floating-point values, the first one's integers."""

    def __init__(self, state: TrainingState, ring: Ring | None, rank: int, num_workers: int) -> None:
        self._state, self._num_workers = state, num_workers
        tensors = state.tensors()
        self._floats = [one for one in tensors if one.is_floating_point()]
        self._others = [one for one in tensors if not one.is_floating_point()]
        chosen = as_vector(self._others, torch.int64)
        self._sums = [Sum(as_vector(self._floats), ring), Sum(chosen if rank == 0 else torch.zeros_like(chosen), ring)]

    def wait(self) -> None:
        """Wait for all values; nothing is changed yet.

        Raises:
            GenerationAborted, PeerLost: the ring is no more.
        """
        for one in self._sums:
            one.wait("the mean of all replicas")

    def apply(self) -> None:
        """Become what was waited for."""
        floats, chosen = self._sums
        move_to(self._floats, floats.vector / self._num_workers, 1.0)
        move_to(self._others, chosen.vector, 1.0)
        self._state.exponents = {}
        self._state.differs = False
