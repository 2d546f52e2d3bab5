"""Measures the most memory that a piece of work takes at once, beyond that in use before."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Run ``work`` once and return the most bytes allocated on CUDA, or of live tensors on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = int(torch.cuda.memory_allocated(device))
        work()
        torch.cuda.synchronize(device)
        most = int(torch.cuda.max_memory_allocated(device))
        return max(0, most - before)
    live = LiveBytes()
    with live:
        work()
    return live.peak


def held_bytes(make: Callable[[], object], device: torch.device) -> int:
    """Run ``make`` once and return the bytes of those tensors it made that live as long as its result."""
    if device.type == "cuda":
        before = int(torch.cuda.memory_allocated(device))
        made = make()
        held = int(torch.cuda.memory_allocated(device)) - before
    else:
        live = LiveBytes()
        with live:
            made = make()
        held = live.now
    del made
    return max(0, held)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch ships no types for it
    """Counts bytes of storages that operations make while they live: ``now``, and at most (``peak``); no others."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as above
        self.now = 0
        self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for given in tree_leaves((args, kwargs)):
            if isinstance(given, Tensor):
                self._know(given, counts=False)
        result = func(*args, **kwargs)
        for made in tree_leaves(result):
            if isinstance(made, Tensor):
                self._know(made, counts=True)
        return result

    def _know(self, tensor: Tensor, *, counts: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if counts else 0

        def forget(_: object) -> None:
            del self._known[key]
            self.now -= size

        self._known[key] = weakref.ref(storage, forget)
        self.now += size
        self.peak = max(self.peak, self.now)
