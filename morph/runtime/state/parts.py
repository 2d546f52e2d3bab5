"""The memory of gradient sums: a unit's tensors are consecutive, and each step reuses the memory of the last."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

import torch
from torch import Tensor

SLACK = 64
"""Elements after a part's sums, so that up to this many workers get equal shares without a copy."""

_HOST = torch.device("cpu")


def reals(tensor: Tensor) -> Tensor:
    """Return a tensor's numbers flat; a complex number as its real part, then its imaginary part."""
    plain = tensor.detach() if tensor.requires_grad else tensor
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj().resolve_neg())
    return (plain.resolve_neg() if plain.is_neg() else plain).reshape(-1)


def from_reals(flat: Tensor, like: Tensor) -> Tensor:
    """Return the flat result of ``reals`` as a view in the shape of a tensor, complex if the tensor is."""
    return (torch.view_as_complex(flat.view(-1, 2)) if like.is_complex() else flat).view(like.shape)


def num_reals(tensor: Tensor) -> int:
    """Return the number of elements that ``reals`` makes of a tensor."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


class Memory:
    """Flat memory of one step, taken from an earlier step: new pages cost as much as passes over them.

    ``left``: memory that nothing reads or writes any longer. ``is_tight``: whether to release returned memory that is
    too small for the next request.
    """

    def __init__(self, device: torch.device = _HOST, left: Iterable[Tensor] = (), *, is_tight: bool = False) -> None:
        self.device = device
        self._is_tight = is_tight
        self._free = list(left)
        self.used: dict[int, Tensor] = {}
        """All taken memory by address; the next step may reuse it."""

    def take(self, size: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """Return a flat tensor of this many elements; its initial contents are undefined."""
        device = device or self.device
        alike = [block for block in self._free if (block.dtype, block.device) == (dtype, device)]
        fits = [block for block in alike if len(block) >= size]
        if self._is_tight and not fits:
            for buffer in alike:
                self.used.pop(buffer.data_ptr(), None)  # meta tensors have no address
            self._free = [buffer for buffer in self._free if all(buffer is not other for other in alike)]
            alike.clear()
        block = min(fits, key=len) if fits else torch.empty(size, dtype=dtype, device=device)
        self._free = [buffer for buffer in self._free if buffer is not block]
        self.used[block.data_ptr()] = block
        return block[:size]

    def give_back(self, taken: Tensor) -> None:
        """Return memory that is no longer needed in this step."""
        self._free.append(self.used.get(taken.data_ptr(), taken))


class UnitPart:
    """Tensors of one unit whose means have one type; their sums (``dtype``) are consecutive in memory."""

    def __init__(self, names: tuple[str, ...], like: Mapping[str, Tensor], dtype: torch.dtype, memory: Memory) -> None:
        self.names = names
        self.mean_dtype = like[names[0]].dtype.to_real()
        self.sizes = [num_reals(like[name]) for name in names]
        self.size = sum(self.sizes)
        self._memory = memory.take(self.size + SLACK, dtype)
        self._memory[self.size :].zero_()
        self._slices = dict(zip(names, torch.split(self._memory[: self.size], self.sizes), strict=True))
        self._unwritten = set(names)
        self.means: Tensor | None = None
        """Means, flat; present once they are reduced."""
        self.sum_of_means = math.nan
        """The sum of the means that stand for all others: finite only if all are finite; NaN before the check."""

    @property
    def sums(self) -> Tensor:
        """Sums, flat; zero if nothing was added."""
        return self._filled()[: self.size]

    def _filled(self) -> Tensor:
        for name in self._unwritten:
            self._slices[name].zero_()
        self._unwritten.clear()
        return self._memory

    def sum_of(self, name: str) -> tuple[Tensor, bool]:
        """Return a tensor's sum to add to, and whether it is the first addition, so that the contents are undefined."""
        is_first = name in self._unwritten
        self._unwritten.discard(name)
        return self._slices[name], is_first

    def shares(self, num: int) -> Tensor:
        """Return the sums as ``num`` equal shares, of shape (num, elements), padded with zeros."""
        length = -(-self.size // num)
        missing = max(0, num * length - len(self._memory))
        memory = torch.nn.functional.pad(self._filled(), (0, missing)) if missing else self._filled()
        return memory[: num * length].view(num, length)

    def tensors_between(self, first: int, end: int) -> Iterator[tuple[str, int, int]]:
        """Yield the names of tensors with elements in this range of the part, with the ranges of those elements."""
        for name, tensor_end, size in zip(self.names, accumulate(self.sizes), self.sizes, strict=True):
            begin, until = max(first, tensor_end - size), min(end, tensor_end)
            if begin < until:
                yield name, begin, until
