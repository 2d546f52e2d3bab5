"""A device for tests that computes only when told to, which exposes code that does not wait for it.

Its tensors are those of ``device_tensors``: the host can read them only through a stream's copy to or from pinned
memory. Operations that a thread calls are computed at once; copies and events that a transport enqueues happen at
``tick``. Until a copy has happened, its destination holds poison (NaN). If the owner of a source frees or changes it
before the copy, the result is wrong, as on a real device.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from tests.device.device_tensors import copies_allowed, gpu, is_on_device, live_bytes, memory_of, on_device
from tests.waiting import BOUND_S

POISON = 0xFF
"""The value of every byte: NaN in floating point, -1 in integers."""


class DeviceLost(RuntimeError):
    """A synchronisation ended because the operation in which the device hung was aborted."""


def poison(tensor: Tensor) -> None:
    memory_of(tensor).view(-1).view(torch.uint8).fill_(POISON)


def _mapped(file: int) -> Tensor:
    return on_device(torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8))


def _is_pinned(tensor: Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "is_pinned_by_fake", False)


class FakeEvent:
    """See ``Event``."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.done = False

    def wait(self) -> None:
        """Hang until a tick or ``abort``."""
        with self._device.condition:
            if not self._device.condition.wait_for(lambda: self.done or self._device.aborted, BOUND_S):
                raise TimeoutError("nobody ticks the fake device")
            if not self.done:
                raise DeviceLost("the device was aborted")


class FakeStream:
    """See ``Stream``. Each entry is a function that returns whether it could be done."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.entries: deque[Callable[[], bool]] = deque()

    def copy(self, into: Tensor, source: Tensor) -> None:
        assert into.is_contiguous()
        assert source.is_contiguous()
        assert into.shape == source.shape
        assert into.dtype == source.dtype
        assert all(is_on_device(one) or _is_pinned(one) for one in (into, source)), "the device reads pageable memory"
        poison(into)
        # its allocator keeps pinned memory, and nothing keeps device memory
        kept = None if is_on_device(source) else source
        found = weakref.ref(source)

        def act() -> bool:
            still_there = kept if kept is not None else found()
            assert still_there is not None, "the source of a copy was let go before it was copied"
            with copies_allowed():
                into.copy_(still_there)
            self._device.num_copies += 1
            self._device.copied_bytes += into.nbytes
            return True

        self._put(act)

    def wait(self, event: FakeEvent) -> None:
        """Let the device reach the event now, because operations on the waiting stream compute at once."""
        if self is self._device.at_once:
            self._device.num_stalls += not event.done
            self._device.run_until(event)
        else:
            self._put(lambda: event.done)

    def record(self) -> FakeEvent:
        event = FakeEvent(self._device)

        def act() -> bool:
            event.done = True
            return True

        self._put(act)
        return event

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._device.poisoned(shape, dtype)

    def use(self, tensor: Tensor) -> None:
        self._device.used.append(tensor.data_ptr())

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Return a context in which operations compute at once, and work for the current stream is queued here."""
        before, self._device.stream_of.current = self._device.current, self
        try:
            yield
        finally:
            self._device.stream_of.current = before

    def run(self, work: Callable[[], object]) -> None:
        def act() -> bool:
            work()
            return True

        self._put(act)

    def _put(self, act: Callable[[], bool]) -> None:
        with self._device.condition:
            self.entries.append(act)


class FakeDevice:
    """See ``Device``.

    ``live_at_release``: the bytes of tensors each time that unused memory was released. ``num_stalls``: how often a
    computation had to wait for something else.
    """

    def __init__(self) -> None:
        self.kind = gpu()
        self.live_at_release: list[int] = []
        self.num_stalls = 0
        self.most_pinned_bytes = 0
        self.condition = threading.Condition(threading.RLock())
        self.aborted = self.hung = False
        self.at_once = FakeStream(self)
        self.stream_of = threading.local()
        self.streams = [self.at_once]
        self.used: list[int] = []
        self.num_copies = self.copied_bytes = self.num_syncs = 0
        self.failures: list[BaseException] = []
        self.shares = self.opens = True
        """Whether memory can be shared with other processes, and theirs can be opened."""
        self._shared: list[int] = []

    @property
    def current(self) -> FakeStream:
        return getattr(self.stream_of, "current", self.at_once)

    def stream(self) -> FakeStream:
        self.streams.append(FakeStream(self))
        return self.streams[-1]

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        made = torch.empty(tuple(shape), dtype=dtype)
        made.untyped_storage().is_pinned_by_fake = True  # type: ignore[attr-defined]
        self.most_pinned_bytes = max(self.most_pinned_bytes, made.nbytes)
        poison(made)
        return made

    def release(self) -> None:
        self.live_at_release.append(live_bytes())

    def poisoned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory in which nothing has been written yet."""
        made = torch.empty(tuple(shape), dtype=dtype, device=self.kind)
        poison(made)
        return made

    def shared(self, num_bytes: int) -> tuple[Tensor, bytes]:
        """See ``SharingDevice.shared``: poisoned memory with a name for as long as this process lives."""
        if not self.shares:
            raise RuntimeError("memory of this device cannot be shared")
        self._shared.append(os.memfd_create("fake-device"))
        os.ftruncate(self._shared[-1], num_bytes)
        made = _mapped(self._shared[-1])
        poison(made)
        return made, f"/proc/{os.getpid()}/fd/{self._shared[-1]}".encode()

    def opened(self, handle: bytes) -> Tensor:
        if not self.opens:
            raise RuntimeError("memory of another process cannot be opened")
        file = os.open(handle, os.O_RDWR)
        try:
            return _mapped(file)
        finally:
            os.close(file)

    def tick(self) -> bool:
        """Let every stream do its next entry, if possible; return whether any did."""
        with self.condition:
            if self.hung or self.aborted:
                return False
            did = False
            for stream in self.streams:
                if stream.entries and stream.entries[0]():
                    stream.entries.popleft()
                    did = True
            self.condition.notify_all()
            return did

    def run_until(self, event: FakeEvent) -> None:
        """Tick until the device has reached an event."""
        with self.condition:
            while not event.done:
                assert self.tick(), "the device waits for something that nobody has enqueued"

    def hang(self) -> None:
        self.hung = True

    def abort(self) -> None:
        with self.condition:
            self.aborted = True
            self.condition.notify_all()


@contextmanager
def only_device(device: FakeDevice) -> Iterator[FakeDevice]:
    """Let this process find a ticking device wherever it looks for the device of a tensor."""
    from morph.runtime.device import staging

    ticking = Ticking(device)
    staging._staging.cache_clear()
    with mock.patch.object(staging, "device_for", return_value=device):
        try:
            yield device
        finally:
            staging._staging.cache_clear()
            ticking.stop()


class Ticking:
    """Ticks devices in a thread of its own, because real devices run by themselves."""

    def __init__(self, *devices: FakeDevice) -> None:
        self._devices, self._over = devices, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and raise any error of a device."""
        self._over.set()
        self._thread.join(BOUND_S)
        for device in self._devices:
            for failure in device.failures:
                raise failure

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                did = [device.tick() for device in self._devices]
                if not any(did):
                    time.sleep(0.0005)
            except AssertionError as failure:
                self._devices[0].failures.append(failure)
                return
