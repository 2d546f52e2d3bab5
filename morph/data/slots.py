"""The memory that a worker shares with one of its data workers, for samples that were read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

NUM_SLOTS = 2
"""Number of micro-batches, read or requested, that a data worker holds at once: it begins one while another waits."""
_ALIGNED = 64


class Slots:
    """The layout of ``NUM_SLOTS`` micro-batches in a byte tensor, after a count of the samples read.

    ``entries``: type (torch's name) and shape of each entry of a sample; the longest shape if lengths vary.
    """

    def __init__(self, micro_batch_size: int, entries: Mapping[str, tuple[str, Sequence[int]]]) -> None:
        self.micro_batch_size = micro_batch_size
        self.entries = dict(entries)
        self._kinds = {
            key: (getattr(torch, dtype), (micro_batch_size, *shape)) for key, (dtype, shape) in entries.items()
        }
        self.like = {
            key: torch.empty(shape[1:], dtype=dtype, device="meta") for key, (dtype, shape) in self._kinds.items()
        }
        """A sample without values, for its shapes."""
        sizes = [2 * torch.int64.itemsize * micro_batch_size]
        sizes += [dtype.itemsize * math.prod(shape) for dtype, shape in self._kinds.values()]
        starts = list(accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0))
        self._starts = dict(zip(self._kinds, starts[1:-1], strict=True))
        self._slot_bytes = starts[-1]
        self.num_bytes = _ALIGNED + NUM_SLOTS * self._slot_bytes

    def num_read(self, memory: Tensor) -> Tensor:
        """Return a view of the number of samples that the data worker has read so far, as int64 []."""
        return memory[: torch.int64.itemsize].view(torch.int64)[0]

    def samples(self, memory: Tensor, slot: int, count: int) -> Tensor:
        """Return a view of epoch and index of each sample of a slot's micro-batch, int64 [count, 2]."""
        return self._view(memory, slot, 0, torch.int64, (count, 2), (2, 1))

    def put(self, memory: Tensor, slot: int, key: str, tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Copy an entry into a slot; return its shape and stride, which affect the choice of kernels, and so the bits.

        Raises ValueError if the tensor is not one for which the slots were made.
        """
        dtype, shape = self._kinds[key]
        plain = type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.layout is torch.strided
        extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        fits = tensor.dim() == len(shape) and all(size <= most for size, most in zip(tensor.shape, shape, strict=True))
        if not plain or tensor.dtype != dtype or not fits or 0 < tensor.numel() < extent:
            kind = f"{type(tensor).__name__} {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
            raise ValueError(f"{key!r} is a {kind}, which data workers do not transfer")
        self._view(memory, slot, self._starts[key], dtype, tensor.shape, tensor.stride()).copy_(tensor.detach())
        return tuple(tensor.shape), tensor.stride()

    def get(
        self, memory: Tensor, slot: int, key: str, shape: Sequence[int], stride: Sequence[int], *, pinned: bool
    ) -> Tensor:
        """Return a copy of a slot's entry: with its stride, or contiguous in pinned memory for copies to devices."""
        dtype, _ = self._kinds[key]
        source = self._view(memory, slot, self._starts[key], dtype, shape, stride)
        if pinned:
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=True).copy_(source)
        return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype).copy_(source)

    def _view(
        self, memory: Tensor, slot: int, start: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
    ) -> Tensor:
        first = _ALIGNED + slot * self._slot_bytes + start
        flat = memory[first : first + dtype.itemsize * math.prod(shape)].view(dtype)
        return flat.as_strided(tuple(shape), tuple(stride))
