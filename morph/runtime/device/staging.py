"""Copies between a device and pinned host memory, beside what the device computes.

One stream for each direction, and one thread that waits for the device so that nobody else does: what is to be done
with a copy on the host (handing it to gloo) is done there, in the order in which the copies were requested.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from morph.runtime.device.devices import CudaDevice, Device, Event


@dataclass(frozen=True)
class _Wanted:
    """Something to be done once the device has come to ``event``; until then ``kept`` is not let go."""

    event: Event
    then: Callable[[], None]
    failed: Callable[[Exception], None]
    kept: tuple[Tensor, ...]


class EventThread:
    """A thread that waits for events of a device in the order in which they were given, so that nobody else does."""

    def __init__(self, name: str) -> None:
        self._waiting: queue.SimpleQueue[_Wanted] = queue.SimpleQueue()
        threading.Thread(target=self._work_off, name=name, daemon=True).start()

    def after(
        self,
        event: Event,
        then: Callable[[], None],
        failed: Callable[[Exception], None],
        kept: tuple[Tensor, ...],
    ) -> None:
        """Call ``then`` there once the device has come to an event; returns at once.

        ``failed`` is called instead if the device is lost before that, or with what ``then`` raised.
        """
        self._waiting.put(_Wanted(event, then, failed, kept))

    def _work_off(self) -> None:
        while True:
            wanted = self._waiting.get()
            try:
                wanted.event.wait()
                wanted.then()
            except Exception as error:  # whoever waits for it is told
                wanted.failed(error)
            del wanted


class Staging:
    """The copy streams of one device, for the life of the process."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._out, self._in = device.stream(), device.stream()
        self._events = EventThread("morph-staging")

    def to_host(
        self, tensors: Sequence[Tensor], then: Callable[[Sequence[Tensor]], None], failed: Callable[[Exception], None]
    ) -> None:
        """Enqueue copies of device tensors behind what the calling thread has enqueued so far; returns at once.

        Args:
            tensors: Contiguous. They are kept until they are copied, and nobody may change them before.
            then: Called with the copies, in another thread, once they are there.
            failed: Called instead if the device is lost before that, or with what ``then`` raised.
        """
        self._out.wait(self.device.current.record())
        hosts = [self.device.pinned(tensor.shape, tensor.dtype) for tensor in tensors]
        for host, tensor in zip(hosts, tensors, strict=True):
            self._out.copy(host, tensor)
        self._events.after(self._out.record(), lambda: then(hosts), failed, tuple(tensors))

    def to_device(self, hosts: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Event]:
        """Enqueue copies of pinned tensors into device memory of their own; returns at once, with the event after.

        Whoever uses them has its stream wait for the event first (``arrived``).
        """
        made = tuple(self.empty(host.shape, host.dtype) for host in hosts)
        for tensor, host in zip(made, hosts, strict=True):
            self.fill(tensor, host)
        return made, self.filled()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Device memory for ``fill``."""
        return self._in.empty(shape, dtype)

    def fill(self, into: Tensor, host: Tensor) -> None:
        """Enqueue a copy of pinned memory into memory, or a part of it, that ``empty`` gave."""
        self._in.copy(into, host)

    def filled(self) -> Event:
        """The event behind every ``fill`` so far."""
        return self._in.record()

    def place(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy host tensors to the device, for the calling thread's stream; returns at once."""
        hosts = [
            tensor if tensor.is_pinned() else self.device.pinned(tensor.shape, tensor.dtype).copy_(tensor)
            for tensor in batch.values()
        ]
        tensors, event = self.to_device(hosts)
        self.arrived(tensors, event)
        return dict(zip(batch, tensors, strict=True))

    def arrived(self, tensors: Sequence[Tensor], event: Event) -> None:
        """Let the calling thread's stream use tensors that ``to_device`` made."""
        current = self.device.current
        current.wait(event)
        for tensor in tensors:
            current.use(tensor)


def placed(batch: Mapping[str, Tensor], device: torch.device) -> Mapping[str, Tensor]:
    """Host tensors on a device; on the CPU as they are. The host waits for no copy."""
    return batch if device.type == "cpu" else staging_of(device).place(batch)


@cache
def staging_of(device: torch.device) -> Staging:
    """The staging of one of this process's CUDA devices."""
    return Staging(CudaDevice(device))


def staging_for(device: torch.device) -> Staging | None:
    """The staging of a device whose memory the network cannot read; None on the CPU."""
    return None if device.type == "cpu" else staging_of(device)
