"""An accelerator that torch knows and nobody has: its tensors have shapes and no numbers.

It takes torch's slot for backends that others bring (PrivateUse1), because a build without CUDA refuses a backward of
CUDA tensors, fake ones too. Operators, autograd and optimizers treat it as a device other than the CPU: what mixes
devices is refused, and what a number is asked of has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_map

from morph.runtime.device.devices import Event, Passed

NAME = "gpu"


class _Module(backend_registration._DummyBackendModule):
    def is_available(self) -> bool:
        """No: torch then computes no constants there."""
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """What autocast may be asked for."""
        return [torch.float16, torch.bfloat16]


@cache
def accelerator() -> torch.device:
    """The device; registers it with this process, once and for good."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    _register_autocast()
    return torch.device(NAME, 0)


_LIBRARIES: list[torch.library.Library] = []
"""What is registered lasts as long as these."""


def _register_autocast() -> None:
    """Autocast as on CUDA for what makes up nearly all of a step: matrix products and attention."""
    everything, products = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _LIBRARIES.extend((everything, products))
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    for name in ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "scaled_dot_product_attention"):
        operation = getattr(torch.ops.aten, name).default

        def run(*args: Any, operation: Any = operation, **kwargs: Any) -> Any:
            wanted = torch.get_autocast_dtype(NAME)
            with torch._C._ExcludeDispatchKeyGuard(keys):
                args, kwargs = tree_map(lambda value: _cast(value, wanted), (args, kwargs))
                return operation(*args, **kwargs)

        products.impl(name, run, "AutocastPrivateUse1")


def _cast(value: Any, wanted: torch.dtype) -> Any:
    is_wide = isinstance(value, Tensor) and value.dtype == torch.float32
    return value.to(wanted) if is_wide else value


class ShapeStream:
    """See ``morph.runtime.device.devices.Stream``: there is nothing to wait for."""

    def copy(self, into: Tensor, source: Tensor) -> None:
        """See ``Stream.copy``."""
        into.copy_(source, non_blocking=True)

    def wait(self, event: Event) -> None:
        """See ``Stream.wait``."""

    def record(self) -> Event:
        """See ``Stream.record``."""
        return Passed()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See ``Stream.empty``."""
        return torch.empty(tuple(shape), dtype=dtype, device=accelerator())

    def use(self, tensor: Tensor) -> None:
        """See ``Stream.use``."""


class ShapeDevice:
    """See ``morph.runtime.device.devices.Device``."""

    def __init__(self) -> None:
        self.kind = accelerator()
        self.current = ShapeStream()
        self.pinned_tensors: set[int] = set()
        self._kept: list[Tensor] = []

    def stream(self) -> ShapeStream:
        """See ``Device.stream``."""
        return self.current

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See ``Device.pinned``."""
        made = torch.empty(tuple(shape), dtype=dtype)
        self._kept.append(made)
        self.pinned_tensors.add(id(made))
        return made
