"""Tensors with values on a device other than the host, on which the host's forbidden accesses to memory fail.

They use torch's slot for foreign backends (PrivateUse1); autograd, optimizers and views are torch's own. Each storage
has an address that nobody can read, and host memory that only this module finds, in which operations are computed. So
torch refuses ``.numpy()`` and buffers, a process that reads at an address ends, and this module refuses operations that
mix devices. A copy between host and device outside a ``Stream`` (``copies_allowed``) is an error, except for the few
bytes of ``.tolist()`` and similar calls.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_map

NAME = "gpu"
aten = torch.ops.aten
_SET = aten.set_.source_Storage_storage_offset
_COPIES_OF = aten._copy_from.default, aten._copy_from_and_resize.default
_VIEWS = {
    aten.as_strided.default,
    aten.view.default,
    aten.view.dtype,
    aten._reshape_alias.default,
    aten.view_as_real.default,
    aten.view_as_complex.default,
    aten.unfold.default,
    aten.alias.default,
    aten.detach.default,
    _SET,
}
LOOK_BYTES = 512
"""The most bytes that may be read as by ``.tolist()``: largest magnitudes, norms and losses."""
_LIBRARIES: list[torch.library.Library] = []
"""Keeps registrations alive."""


class PageableCopy(AssertionError):
    """The host itself copied from or to a device's memory, during which the device is idle."""


class _Module(backend_registration._DummyBackendModule):
    def is_available(self) -> bool:
        """Return False, so that torch computes no constants on the device."""
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Accept a seed: operations draw from the host's generator."""

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        """Return no state of its own, as ``torch.random.fork_rng`` asks for in tests that run in the same process."""
        return torch.empty(0)

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        """Accept it."""


class _Copies(threading.local):
    allowed = False


_COPIES = _Copies()


@cache
def gpu() -> torch.device:
    """Return the device; the first call registers it with this process for good."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    everything = torch.library.Library("_", "IMPL")
    _LIBRARIES.append(everything)
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    everything.fallback(_run, "PrivateUse1")
    own = property(Tensor.data.__get__, _set_data)  # type: ignore[attr-defined]
    torch.nn.Parameter.data = own  # type: ignore[assignment]
    return torch.device(NAME, 0)


def _set_data(parameter: Tensor, value: Tensor) -> None:
    """Set data as torch does for its own devices: a parameter may move from one to another."""
    if is_on_device(parameter) == is_on_device(value):
        Tensor.data.__set__(parameter, value)  # type: ignore[attr-defined]
    else:
        torch._C._swap_tensor_impl(parameter, torch.nn.Parameter(value, parameter.requires_grad))


@contextmanager
def copies_allowed() -> Iterator[None]:
    """Let this thread copy between the host and the device."""
    before, _COPIES.allowed = _COPIES.allowed, True
    try:
        yield
    finally:
        _COPIES.allowed = before


def on_device(tensor: Tensor) -> Tensor:
    """Return a tensor of the device in the memory of a host tensor."""
    gpu()
    return _wrapped(tensor)


def placed(tensor: Tensor) -> Tensor:
    """Return a tensor of the device with the numbers of a host tensor."""
    return on_device(tensor.clone())


def read(tensor: Tensor) -> Tensor:
    """Return a host tensor with the numbers of a tensor of the device."""
    return memory_of(tensor).clone()


def memory_of(tensor: Tensor) -> Tensor:
    """Return a device tensor's content as a host tensor in the same memory, or a host tensor itself."""
    if tensor.device.type != NAME:
        return tensor
    block = tensor.untyped_storage().block  # type: ignore[attr-defined]
    found = torch.empty(0, dtype=tensor.dtype)
    return found.set_(block.memory, tensor.storage_offset(), tensor.size(), tensor.stride())


class _Addresses:
    """Addresses for the device's memory, each used once, at which the host can read nothing: the process would end."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._next = libc.mmap(None, _ADDRESS_BYTES, _PROT_NONE, flags, -1, 0)
        assert self._next != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> int:
        """Return an address that is aligned as torch's allocator aligns it on a CUDA device."""
        with self._lock:
            found, self._next = self._next, self._next + (num_bytes // ALIGNMENT + 1) * ALIGNMENT
        return int(found)


_ADDRESS_BYTES = 1 << 44
_PROT_NONE, _MAP_NORESERVE = 0, 0x4000
ALIGNMENT = 512


class _Block:
    """Memory of the device for as long as a tensor uses it."""

    def __init__(self, memory: torch.UntypedStorage) -> None:
        self.memory = memory
        _BLOCKS.add(self)


_BLOCKS: weakref.WeakSet[_Block] = weakref.WeakSet()


def live_bytes() -> int:
    """Return the bytes of the device's memory in use by tensors."""
    return sum(block.memory.nbytes() for block in list(_BLOCKS))


@cache
def _addresses() -> _Addresses:
    return _Addresses()


def _wrapped(host: Tensor, into: Tensor | None = None) -> Tensor:
    memory = host.untyped_storage()
    address = _addresses().take(memory.nbytes())
    storage = torch._C._construct_storage_from_data_pointer(address, torch.device(NAME, 0), memory.nbytes())
    storage.block = _Block(memory)  # type: ignore[attr-defined]
    made = torch._C._acc.create_empty_tensor([0], host.dtype) if into is None else into
    place = host.storage_offset(), host.size(), host.stride()
    return _alike(_SET, made, storage, *place)


def _alike(view: Any, *args: Any) -> Tensor:
    """Make a view of a tensor of the device as torch does for any device, without access to its memory."""
    own = torch._C.DispatchKey.CPU if view is _SET else torch._C.DispatchKey.Meta
    return view._op_dk(own, *args)


def is_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


def _run(operation: Any, *args: Any, **kwargs: Any) -> Any:
    if operation in _VIEWS:
        return _alike(operation, *args, **kwargs)
    given = [one for one in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    hosts = [one for one in given if not is_on_device(one) and one.dim()]
    if operation in _COPIES_OF:
        return _copied(*args[:2])
    if hosts and len(hosts) < len(given):
        raise RuntimeError(f"{operation}: expected all tensors to be on the same device")
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device("cpu"), "pin_memory": False}
    own_args, own_kwargs = tree_map(lambda one: memory_of(one) if isinstance(one, Tensor) else one, (args, kwargs))
    return _returned(operation, args, kwargs, operation(*own_args, **own_kwargs))


def _copied(source: Tensor, into: Tensor) -> Tensor:
    if is_on_device(source) != is_on_device(into) and source.nbytes > LOOK_BYTES and not _COPIES.allowed:
        raise PageableCopy(f"{tuple(source.shape)} {source.dtype} from {source.device} to {into.device}")
    memory_of(into).copy_(memory_of(source))
    return into


def _returned(operation: Any, args: Sequence[Any], kwargs: dict[str, Any], found: Any) -> Any:
    """Return an operation's results: the tensor to which it wrote, or new ones."""
    schema = operation._schema
    written = {}
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written.update(dict.fromkeys(argument.alias_info.before_set, value))
    several = isinstance(found, tuple) and len(schema.returns) > 1
    results = []
    for told, value in zip(schema.returns, found if several else (found,), strict=True):
        names = () if told.alias_info is None else told.alias_info.before_set
        same = next((written[name] for name in names if name in written), None)
        if same is None:
            same = tree_map(lambda one: _wrapped(one) if isinstance(one, Tensor) else one, value)
        elif is_on_device(same) and same.shape != value.shape:  # an output that was made without a size
            _wrapped(value, same)
        results.append(same)
    return tuple(results) if several else (results[0] if results else None)
