"""Where the sums of gradients lie: tensors of one unit one behind the other, in memory that steps hand on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

import torch
from torch import Tensor

SLACK = 64
"""Elements behind a part's sums, so that they can be cut into equal shares for as many workers without a copy."""

_HOST = torch.device("cpu")


def reals(tensor: Tensor) -> Tensor:
    """Return a tensor's numbers flat; of each complex one its real part, then its imaginary part."""
    plain = tensor.detach() if tensor.requires_grad else tensor
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj().resolve_neg())
    return (plain.resolve_neg() if plain.is_neg() else plain).reshape(-1)


def from_reals(flat: Tensor, like: Tensor) -> Tensor:
    """Return what ``reals`` made flat, as a view in the shape of a tensor, and complex if that is."""
    return (torch.view_as_complex(flat.view(-1, 2)) if like.is_complex() else flat).view(like.shape)


def num_reals(tensor: Tensor) -> int:
    """Return how many numbers ``reals`` makes of a tensor."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


class Memory:
    """Flat memory of one step, with what a step before it has left: new pages cost as much as passes over them do.

    Args:
        device: Where it is, unless said otherwise.
        left: What nothing reads or writes any more.
        is_tight: What was given back, and is too small for what is taken next, is let go.
    """

    def __init__(self, device: torch.device = _HOST, left: Iterable[Tensor] = (), *, is_tight: bool = False) -> None:
        self.device = device
        self._is_tight = is_tight
        self._free = list(left)
        self.used: dict[int, Tensor] = {}
        """By address, all that was taken, and may be left to the next step when this one is over."""

    def take(self, size: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """Return a flat tensor of so many elements, of which nothing is read before it is written to."""
        device = device or self.device
        alike = [one for one in self._free if (one.dtype, one.device) == (dtype, device)]
        fits = [one for one in alike if len(one) >= size]
        if self._is_tight and not fits:
            for one in alike:
                self.used.pop(one.data_ptr(), None)  # tensors of shapes alone have no address
            self._free = [one for one in self._free if all(one is not other for other in alike)]
            alike.clear()
        found = min(fits, key=len) if fits else torch.empty(size, dtype=dtype, device=device)
        self._free = [one for one in self._free if one is not found]
        self.used[found.data_ptr()] = found
        return found[:size]

    def give_back(self, taken: Tensor) -> None:
        """What was taken is not needed any more within this step."""
        self._free.append(self.used.get(taken.data_ptr(), taken))


class Part:
    """Tensors of one unit whose means have one type: their sums, of ``reals``, lie one behind the other.

    Args:
        names: Of the tensors.
        like: What each mean is like, in shape and type.
        dtype: Of the sums.
        memory: From which they are taken.
    """

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
        """Flat; there once they are reduced."""
        self.sum_of_means = math.nan
        """Of those that tell of all others: finite only if all are; not a number where nobody has looked yet."""

    @property
    def sums(self) -> Tensor:
        """Flat; zero where nothing was added."""
        return self._filled()[: self.size]

    def _filled(self) -> Tensor:
        for name in self._unwritten:
            self._slices[name].zero_()
        self._unwritten.clear()
        return self._memory

    def sum_of(self, name: str) -> tuple[Tensor, bool]:
        """A tensor's sum, to be added to now; and whether that is the first time, and it holds anything."""
        is_first = name in self._unwritten
        self._unwritten.discard(name)
        return self._slices[name], is_first

    def shares(self, num: int) -> Tensor:
        """The sums as so many equal shares: of shape (num, elements), with zeros behind the last."""
        length = -(-self.size // num)
        missing = max(0, num * length - len(self._memory))
        memory = torch.nn.functional.pad(self._filled(), (0, missing)) if missing else self._filled()
        return memory[: num * length].view(num, length)

    def tensors_between(self, first: int, end: int) -> Iterator[tuple[str, int, int]]:
        """The tensors, by name, that have elements in this range of the part, with the range of these."""
        for name, tensor_end, size in zip(self.names, accumulate(self.sizes), self.sizes, strict=True):
            begin, until = max(first, tensor_end - size), min(end, tensor_end)
            if begin < until:
                yield name, begin, until
