"""The interface of a device for transports: streams, events and pinned host memory.

Work that is enqueued on a stream runs later, in order; only an event tells that it is done.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from morph.contract.errors import ConfigError

_HANDLE = struct.Struct("<QQQHH")
"""Size and offset in bytes, the number of torch's reference counter, and the lengths of the two names that follow."""


def usable_device(
    name: str, *, source: str | None = None, field: str = "vms.device", numbered: bool = False
) -> torch.device:
    """Return the device ``cpu`` or ``cuda`` (if ``numbered``, also ``cuda:1``), if this process can compute on it."""
    cuda = torch.cuda.is_available()
    devices = ["cpu", *["cuda"] * cuda]
    devices += [f"cuda:{number}" for number in range(torch.cuda.device_count()) if cuda and numbered]
    if name in devices:
        return torch.device(name)
    why = ""
    if name.partition(":")[0] == "cuda" and not cuda:
        lacks = "finds none" if torch.backends.cuda.is_built() else "is built without CUDA"  # type: ignore[no-untyped-call]
        why = f": torch {torch.__version__} {lacks}"
    raise ConfigError(
        f"this machine has no such device{why}", source=source, field=field, value=name, allowed=", ".join(devices)
    )


def check_kernels(device: torch.device, field: str = "vms.device") -> None:
    """Refuse a CUDA device that is absent, or for which this torch has no kernels: the first launch would fail."""
    if device.type != "cuda":
        return
    usable_device(str(device), field=field, numbered=True)
    capability, built_for = torch.cuda.get_device_capability(device), torch.cuda.get_arch_list()
    if not has_kernels(capability, built_for):
        raise ConfigError(
            f"torch {torch.__version__} has no kernels for this device, {torch.cuda.get_device_name(device)}",
            field=field,
            value=f"cuda, compute capability {capability[0]}.{capability[1]}",
            allowed=f"those that torch was built for: {', '.join(built_for)}; see docs/how-it-works/gpu.md",
        )


def has_kernels(capability: tuple[int, int], built_for: Sequence[str]) -> bool:
    """Return whether code for these architectures runs on a device; no architectures allow no conclusion.

    Binary code (``sm_86``) needs the same major number and no lower minor one, with a letter (``sm_90a``) only that
    device; code that the driver compiles (``compute_90``) any newer one.
    """
    major, minor = capability
    for name in built_for:
        kind, _, number = name.partition("_")
        digits = number.rstrip("abcdefghijklmnopqrstuvwxyz")
        if not digits.isdigit():
            continue
        made = (int(digits[:-1] or 0), int(digits[-1]))
        if made == capability:
            return True
        if digits == number and (made <= capability if kind == "compute" else made[0] == major and made[1] <= minor):
            return True
        if number.endswith("f") and made[0] == major and made[1] <= minor:  # of the family
            return True
    return not built_for


class Event(Protocol):
    """A place in a stream."""

    @property
    def done(self) -> bool:
        """Return whether the device has reached the event, without waiting."""

    def wait(self) -> None:
        """Block without a bound, in a thread that may be left behind, until the device has reached the event."""


class Stream(Protocol):
    """Work in order."""

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Enqueue a copy between host and device, or within the device. Neither tensor may change before it is done."""

    def wait(self, event: Any) -> None:
        """Let everything enqueued from now on wait for an event of the same device; the host does not wait."""

    def record(self) -> Event:
        """Return an event after everything enqueued so far."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return device memory for this stream's work. Another stream that uses it calls ``use``."""

    def use(self, tensor: Tensor) -> None:
        """Keep the memory of another stream's tensor after its release until this stream's work so far is done."""

    def computing(self) -> AbstractContextManager[object]:
        """Let the calling thread compute on this stream, and allocate memory for it."""

    def run(self, work: Callable[[], object]) -> None:
        """Enqueue the operations of ``work``, which may read results that this stream has not computed yet."""


class Device(Protocol):
    """One device of this process."""

    @property
    def kind(self) -> torch.device:
        """The torch device of its tensors."""

    @property
    def current(self) -> Stream:
        """The stream on which the calling thread computes."""

    def stream(self) -> Stream:
        """Return a further stream."""

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return host memory from and to which the device copies by itself; reused once no copy uses it.

        Allocators may round up to a power of two and keep it: request large amounts in pieces.
        """

    def release(self) -> None:
        """Return unused device and pinned memory to other processes; waits for the device."""


class SharingDevice(Device, Protocol):
    """A device whose memory other processes of the same machine can read."""

    def shared(self, num_bytes: int) -> tuple[Tensor, bytes]:
        """Return device memory, as bytes, and the handle for other processes. Raises RuntimeError if not possible."""

    def opened(self, handle: bytes) -> Tensor:
        """Return another process's memory, as bytes, to read; it stays until released, even if that process ends.

        The release may wait for the device. Raises RuntimeError, OSError or ValueError.
        """


class CudaEvent:
    """See ``Event``. A waiting thread sleeps, and lets other Python threads run."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    @property
    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()


class CudaStream:
    """See ``Stream``."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def copy(self, into: Tensor, source: Tensor) -> None:
        """See ``Stream.copy``. torch's allocator of pinned memory reuses the memory once this stream is done."""
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)

    def wait(self, event: CudaEvent) -> None:
        self._stream.wait_event(event.event)

    def record(self) -> CudaEvent:
        return CudaEvent(self._stream)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        with torch.cuda.stream(self._stream):
            return torch.empty(tuple(shape), dtype=dtype, device=self._stream.device)

    def use(self, tensor: Tensor) -> None:
        tensor.record_stream(self._stream)

    def computing(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def run(self, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self._stream):
            work()


class CudaDevice:
    """See ``Device``."""

    def __init__(self, kind: torch.device) -> None:
        self.kind = torch.device(kind.type, torch.cuda.current_device() if kind.index is None else kind.index)

    @property
    def current(self) -> CudaStream:
        return CudaStream(torch.cuda.current_stream(self.kind))

    def stream(self) -> CudaStream:
        return CudaStream(torch.cuda.Stream(self.kind))  # type: ignore[no-untyped-call]

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See ``Device.pinned``: torch's caching allocator is the ring of buffers."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def release(self) -> None:
        torch.cuda.empty_cache()
        empty_host_cache = getattr(torch.accelerator, "empty_host_cache", None)  # torch 2.9 has none
        if empty_host_cache is not None:
            empty_host_cache()

    def shared(self, num_bytes: int) -> tuple[Tensor, bytes]:
        """See ``SharingDevice.shared``. torch keeps the memory for good if a process that opened it is killed."""
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.kind)
        storage: Any = memory.untyped_storage()  # torch ships no types for it
        _, handle, size, offset, counter, counter_at, _, _ = storage._share_cuda_()
        return memory, _HANDLE.pack(size, offset, counter_at, len(handle), len(counter)) + handle + counter

    def opened(self, handle: bytes) -> Tensor:
        """See ``SharingDevice.opened``. The memory, of any device, is mapped for this one, without waiting."""
        try:
            size, offset, counter_at, *lengths = _HANDLE.unpack_from(handle)
        except struct.error as error:
            raise ValueError(f"{len(handle)} bytes are not a handle") from error
        end = _HANDLE.size + lengths[0]
        memory, counter = handle[_HANDLE.size : end], handle[end : end + lengths[1]]
        shared: Any = torch.UntypedStorage._new_shared_cuda  # torch ships no types for it
        storage = shared(self.kind.index, memory, size, offset, counter, counter_at, b"", False)
        return torch.empty(0, dtype=torch.uint8, device=self.kind).set_(storage, 0, (size,), (1,))


@cache
def device_for(kind: torch.device) -> SharingDevice:
    """Return the CUDA device of this process that holds a tensor."""
    return CudaDevice(kind)
