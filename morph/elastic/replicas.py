"""Averages replicas that differ, as vectors, over a ring or with one other, and makes them equal again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from morph.elastic.settings import exchanged
from morph.elastic.state import TrainingState, as_real, is_averaged
from morph.runtime.groups.channels import Ring, Transfer


def as_vector(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Return a copy of all values as a vector [values] on the CPU: float32, float64 if one is wider, or ``dtype``."""
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    dtype = dtype or (torch.float64 if wide else torch.float32)
    if not tensors:
        return torch.zeros(0, dtype=dtype)
    return torch.cat([tensor.detach().reshape(-1).to("cpu", dtype) for tensor in tensors])


def move_to(tensors: Sequence[Tensor], vector: Tensor, part: float) -> None:
    """Move tensors in place by this fraction of the way to the values of a vector; 1: they get these values."""
    with torch.no_grad():
        for tensor, values in zip(tensors, torch.split(vector, [tensor.numel() for tensor in tensors]), strict=True):
            goal = values.view(tensor.shape).to(tensor.device, tensor.dtype)
            if part == 1.0:
                tensor.copy_(goal)
            else:
                tensor.lerp_(goal, part)  # a value that is already equal keeps its bits


class Sum:
    """A vector summed over the workers of a ring, in place and in the background."""

    def __init__(self, vector: Tensor, ring: Ring | None) -> None:
        self.vector = vector
        self._pending: Transfer | None = None
        if ring is not None and vector.numel():
            self._pending = ring.reduce(vector, torch.distributed.ReduceOp.SUM)

    def wait(self, what: str) -> Tensor:
        """Return the sum as a vector [values], the same bytes at every worker. ``what``: named if the wait times out.

        Raises GenerationAborted or PeerLost if the ring has ended.
        """
        if self._pending is not None:
            self._pending.wait(what)
        return self.vector


class _Value(NamedTuple):
    """One tensor of a replica's state, and the ranks that have it; the others contribute zeros for now."""

    tensor: Tensor
    holders: Sequence[int]


class Union:
    """Replicas that are being made equal: the mean of floating-point values, the first replica's integers.

    State that only some optimizers have (elsewhere the parameter got no gradient) becomes the mean over these. Raises
    GenerationAborted or PeerLost if the ring has ended.
    """

    def __init__(self, state: TrainingState, ring: Ring | None, rank: int, num_workers: int) -> None:
        self._state, self._parameters = state, state.optimized()
        kept: list[dict[str, Any]] = [state.optimizer.state.get(one, {}) for one in self._parameters]
        layouts = exchanged(ring, state.layout())
        holders: dict[tuple[int, str], list[int]] = {}
        self._new: dict[tuple[int, str], Any] = {}
        for member, layout in enumerate(layouts):
            for index, key, value in layout["numbers"]:
                if key not in kept[index]:
                    self._new.setdefault((index, key), value)
            for index, key, dtype, shape in layout["tensors"]:
                holders.setdefault((index, key), []).append(member)
                if key not in kept[index] and (index, key) not in self._new:
                    device = self._parameters[index].device if shape else "cpu"
                    self._new[index, key] = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
        values = [_Value(one, range(num_workers)) for one in state.model_tensors().values()]
        for (index, key), members in holders.items():
            values.append(_Value(kept[index][key] if key in kept[index] else self._new[index, key], members))
        self._means = [_Value(as_real(one), members) for one, members in values if is_averaged(one)]
        others = [one for one in values if not is_averaged(one.tensor)]
        self._others = [one.tensor for one in others]
        chosen = [one if members[0] == rank else torch.zeros_like(one) for one, members in others]
        means = as_vector([one.tensor for one in self._means])
        self._sums = [Sum(means, ring), Sum(as_vector(chosen, torch.int64), ring)]

    def wait(self) -> None:
        """Wait for all values; nothing is changed yet."""
        for sums in self._sums:
            sums.wait("the mean of all replicas")

    def apply(self) -> None:
        """Set this worker's state to the values that were waited for."""
        floats, chosen = (each.vector for each in self._sums)
        sizes = [mean.tensor.numel() for mean in self._means]
        for part, mean in zip(torch.split(floats, sizes), self._means, strict=True):
            part /= len(mean.holders)
        move_to([mean.tensor for mean in self._means], floats, 1.0)
        move_to(self._others, chosen, 1.0)
        for (index, key), value in self._new.items():
            self._state.optimizer.state[self._parameters[index]][key] = value
        self._state.exponents = {}
        self._state.differs = False
