"""Counts what a step asks of a device: copies, synchronisations, kernels and bytes, and which line asks."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[2]
Kind = Literal["to device", "to host", "sync"]
aten = torch.ops.aten
NUMBER = 0.5
"""What a number that a fake tensor does not have is taken to be."""
_MAKES_NO_CONTENTS = {
    aten.detach.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
}
_ASKS_THE_DEVICE = {aten.nonzero.default, aten.equal.default, aten._unique2.default, aten.masked_select.default}


@dataclass(frozen=True, order=True)
class Site:
    """Where something is asked of the device: a file below the repository's root and a function of it."""

    kind: Kind
    pinned: bool
    file: str
    function: str


@dataclass
class Counts:
    """Of one step. ``touched_bytes``, by phase: what kernels on the device read and write, each as if by itself."""

    sites: Counter[Site] = field(default_factory=Counter)
    site_bytes: Counter[Site] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    touched_bytes: Counter[str] = field(default_factory=Counter)
    host_touched_bytes: Counter[str] = field(default_factory=Counter)
    wire_bytes: Counter[str] = field(default_factory=Counter)
    matmul_flops: Counter[str] = field(default_factory=Counter)


class Counting(TorchDispatchMode):
    """Counts operations on fake tensors; entered within a ``FakeTensorMode``."""

    def __init__(self, device: torch.device, pinned: set[int]) -> None:
        super().__init__()
        self.counts = Counts()
        self._device, self._pinned = device, pinned
        self._phase = "compute"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count as this phase of the step."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def asked(self, kind: Kind, num_bytes: int, *, pinned: bool = False) -> None:
        """Count one."""
        site = Site(kind, pinned, *_caller())
        self.counts.sites[site] += 1
        self.counts.site_bytes[site] += num_bytes

    def kernel(self, touched_bytes: int) -> None:
        """Count one on the device that touches so much."""
        self.counts.kernels[self._phase] += 1
        self.counts.touched_bytes[self._phase] += touched_bytes

    def is_on_device(self, tensor: Tensor) -> bool:
        """Whether a tensor lies there."""
        return tensor.device.type == self._device.type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            if self.is_on_device(args[0]):
                self.asked("sync", args[0].element_size())
            return _number(args[0].dtype)
        if func in _ASKS_THE_DEVICE and self.is_on_device(args[0]):
            self.asked("sync", args[0].nbytes)
        found = func(*args, **kwargs)
        self._count(func, args, kwargs, found)
        return found

    def _count(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        if func in (aten._to_copy.default, aten.copy_.default):
            source, into = (args[1], args[0]) if func is aten.copy_.default else (args[0], found)
            if self.is_on_device(source) != self.is_on_device(into):
                kind: Kind = "to host" if self.is_on_device(source) else "to device"
                pinned = id(into if kind == "to host" else source) in self._pinned
                self.asked(kind, into.nbytes, pinned=pinned)
                return
        if _touches_nothing(func) or not (given or made):
            return
        touched = sum(tensor.nbytes for tensor in (*given, *made))
        if any(self.is_on_device(tensor) for tensor in (*given, *made)):
            self.kernel(touched)
        else:
            self.counts.host_touched_bytes[self._phase] += touched
        if func in (aten.mm.default, aten.addmm.default, aten.bmm.default):
            left = given[-2]
            self.counts.matmul_flops[self._phase] += 2 * left.numel() * int(found.shape[-1])


class Numbers(TorchFunctionMode):
    """Gives numbers where code asks a fake tensor for all of its numbers at once."""

    def __init__(self, counting: Counting) -> None:
        super().__init__()
        self._counting = counting
        self._patch = mock.patch.object(
            FakeTensor, "tolist", lambda tensor: self._tolist(tensor)
        )  # its own asks for one number at a time

    def __enter__(self) -> Numbers:
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def _tolist(self, tensor: Tensor) -> Any:
        self._ask(tensor)
        return np.full(tuple(tensor.shape), _number(tensor.dtype)).tolist()

    def _ask(self, tensor: Tensor) -> None:
        if self._counting.is_on_device(tensor):
            self._counting.asked("sync", tensor.nbytes)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.numpy:  # no elements: whoever loops over them is done at once
            self._ask(args[0])
            self._counting.counts.host_touched_bytes[self._counting._phase] += args[0].nbytes
            return np.empty(0, dtype=str(args[0].dtype).removeprefix("torch."))
        return func(*args, **(kwargs or {}))


def _number(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return False
    return NUMBER if dtype.is_floating_point else 0


def _touches_nothing(func: Any) -> bool:
    """Whether it makes a view or memory without contents, or asks where a tensor is."""
    return func.is_view or func.namespace == "prim" or func in _MAKES_NO_CONTENTS


def _caller() -> tuple[str, str]:
    """File and function of the product's innermost frame."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path.is_relative_to(ROOT / "morph"):
            return str(path.relative_to(ROOT)), frame.f_code.co_qualname.partition(".<locals>")[0]
        frame = frame.f_back  # type: ignore[assignment]
    return "the job or torch", "?"
