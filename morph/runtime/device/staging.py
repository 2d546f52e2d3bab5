"""Copies between a device and host memory while the device computes.

Messages between stages have a stream for each direction, and a thread that waits for the device and hands each copy on
the host to gloo, in order. Sums to be reduced have their own stream, and data for which no step waits two more; these
are copied in pieces through a few pinned buffers, so that no message waits for more. The rest of the runtime uses
``on_host``, ``to_host``, ``fill`` and ``moved``, which are plain copies on the host.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby

import torch
from torch import Tensor

from morph.runtime.device.devices import Device, Event, device_for
from morph.runtime.groups.channels import as_bytes
from morph.runtime.groups.interrupt import Interrupt

PIECE_BYTES = 1 << 24
"""Bytes of a piece: enough to keep the bus busy, but so few that a message waits at most a millisecond for one."""
PIECES_UNDER_WAY = 2
"""Number of buffers: the device fills one while the host is busy with the other."""


def _there(host: Tensor, event: Event, _kept: Tensor) -> Tensor:
    event.wait()
    return host


@dataclass(frozen=True)
class _Wanted:
    """An action to do once the device has reached ``event``; until then ``kept`` is held."""

    event: Event
    then: Callable[[], None]
    failed: Callable[[Exception], None]
    kept: tuple[Tensor, ...]


class EventThread:
    """A thread that waits for events of a device in their order, in place of other threads."""

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
        """Call ``then`` in that thread once the device has reached an event, or ``failed`` with the error."""
        self._waiting.put(_Wanted(event, then, failed, kept))

    def _work_off(self) -> None:
        while True:
            wanted = self._waiting.get()
            try:
                wanted.event.wait()
                wanted.then()
            except Exception as error:  # the waiting thread gets the error
                wanted.failed(error)
            del wanted


class Staging:
    """The copy streams of one device, for the life of the process."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._out, self._in = device.stream(), device.stream()
        self._out_sums, self._out_beside, self._in_beside = device.stream(), device.stream(), device.stream()
        self._events, self._events_beside = EventThread("morph-staging"), EventThread("morph-staging-beside")

    def to_host(
        self,
        tensors: Sequence[Tensor],
        then: Callable[[Sequence[Tensor]], None],
        failed: Callable[[Exception], None],
        beside: Event | None = None,
    ) -> None:
        """Enqueue copies of contiguous device tensors after the calling thread's work; they may not change before that.

        ``then`` gets the complete copies, in another thread; ``failed`` an error of it or the device. ``beside``: an
        event after which sums are copied on a stream of their own, so that no message waits for them.
        """
        stream, events = (self._out, self._events) if beside is None else (self._out_sums, self._events_beside)
        stream.wait(self.device.current.record() if beside is None else beside)
        hosts = [self.device.pinned(tensor.shape, tensor.dtype) for tensor in tensors]
        for host, tensor in zip(hosts, tensors, strict=True):
            stream.copy(host, tensor)
        events.after(stream.record(), lambda: then(hosts), failed, tuple(tensors))

    def joined_to_host(
        self, pieces: Sequence[Tensor], then: Callable[[Sequence[Tensor]], None], failed: Callable[[Exception], None]
    ) -> None:
        """Do the same for bytes of this device or the host, which become one tensor, while the device computes."""
        self._out_beside.wait(self.device.current.record())
        host = self._gathered(pieces)
        self._events_beside.after(self._out_beside.record(), lambda: then([host]), failed, tuple(pieces))

    def _gathered(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return one pinned tensor of bytes; it is complete once the stream has done the copies enqueued here."""
        host = self.device.pinned((sum(len(piece) for piece in pieces),), torch.uint8)
        for piece, into in zip(pieces, torch.split(host, [len(piece) for piece in pieces]), strict=True):
            if piece.device.type == "cpu":
                into.copy_(piece)
            else:
                self._out_beside.copy(into, piece)
        return host

    def bytes_on_host(self, tensors: Iterable[Tensor], ready: Event) -> Iterator[Tensor]:
        """Yield the bytes of device tensors piece by piece, once ``ready``; a piece belongs to one tensor."""
        self._out_beside.wait(ready)
        under_way: deque[tuple[Tensor, Event, Tensor]] = deque()
        for tensor in tensors:
            with self._out_beside.computing():
                flat = as_bytes(tensor.detach().contiguous())
            for piece in torch.split(flat, PIECE_BYTES) if len(flat) else ():
                under_way.append((self._gathered([piece]), self._out_beside.record(), piece))
                if len(under_way) == PIECES_UNDER_WAY:
                    yield _there(*under_way.popleft())
        while under_way:
            yield _there(*under_way.popleft())

    def fill_beside(self, into: Tensor, source: Tensor) -> None:
        """Copy a contiguous host tensor into one of the device, after the calling thread's work; blocks until then."""
        stream, under_way = self._in_beside, deque[Event]()
        stream.wait(self.device.current.record())
        stream.use(into)
        flat, given = as_bytes(into), as_bytes(source)
        for place, piece in zip(torch.split(flat, PIECE_BYTES), torch.split(given, PIECE_BYTES), strict=True):
            if len(under_way) == PIECES_UNDER_WAY:
                under_way.popleft().wait()
            stream.copy(place, self.device.pinned(piece.shape, piece.dtype).copy_(piece))
            under_way.append(stream.record())
        if under_way:
            under_way[-1].wait()

    def to_device(self, hosts: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Event]:
        """Enqueue copies of pinned tensors into new device memory; return them and the event after the copies."""
        made = tuple(self.empty(host.shape, host.dtype) for host in hosts)
        for tensor, host in zip(made, hosts, strict=True):
            self.fill(tensor, host)
        return made, self.filled()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return device memory for ``fill``."""
        return self._in.empty(shape, dtype)

    def fill(self, into: Tensor, host: Tensor) -> None:
        """Enqueue a copy of pinned memory into memory from ``empty``, or into a part of it."""
        self._in.copy(into, host)

    def filled(self) -> Event:
        """Return the event after every ``fill`` so far."""
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
    """Return host tensors on a device; on the CPU as they are. The host does not wait for copies."""
    return batch if device.type == "cpu" else staging_of(device).place(batch)


def staging_of(device: torch.device) -> Staging:
    """Return the staging of one of this process's CUDA devices."""
    return _staging(device_for(device).kind)


@cache
def _staging(kind: torch.device) -> Staging:
    return Staging(device_for(kind))


def staging_for(device: torch.device) -> Staging | None:
    """Return the staging of a device whose memory the network cannot read; None on the CPU and the meta device."""
    return None if device.type in ("cpu", "meta") else staging_of(device)


def release_unused(device: torch.device, interrupt: Interrupt) -> None:
    """Return unused device and pinned memory of this process to other processes. Raises as ``Interrupt.call``."""
    staging = staging_for(device)
    if staging is not None:
        interrupt.call(staging.device.release, "the device to return memory")


# Copies for which no step waits. Each blocks only the calling thread.


class Ready:
    """The completion of the work that the calling thread has enqueued so far for the devices of some tensors."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        kinds = {tensor.device for tensor in tensors}
        self._events = {kind: staging.device.current.record() for kind in kinds if (staging := staging_for(kind))}

    def of(self, device: torch.device) -> Event:
        """Return the event on this device."""
        return self._events[device]


def on_host(tensors: Iterable[Tensor], ready: Ready) -> Iterator[Tensor]:
    """Yield the bytes of tensors in pieces of host memory, in order, once ``ready``; they may not change meanwhile."""
    for kind, some in groupby(tensors, lambda tensor: tensor.device):
        staging = staging_for(kind)
        if staging is not None:
            yield from staging.bytes_on_host(some, ready.of(kind))
        else:
            yield from (as_bytes(tensor.detach().contiguous()) for tensor in some)


def to_host(tensors: Mapping[str, Tensor], ready: Ready | None = None) -> dict[str, Tensor]:
    """Copy tensors to new host memory. ``ready``: see ``on_host``; made now unless given."""
    ready = ready or Ready(tensors.values())
    made = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    there = [name for name, tensor in tensors.items() if tensor.device.type != "cpu"]
    for name in tensors.keys() - set(there):
        made[name].copy_(tensors[name].detach())
    places = (place for name in there for place in torch.split(as_bytes(made[name]), PIECE_BYTES) if len(place))
    for piece in on_host((tensors[name] for name in there), ready):
        next(places).copy_(piece)
    return made


def fill(into: Tensor, source: Tensor) -> None:
    """Copy a tensor into another of the same shape, on any devices; the type may differ."""
    if into.device == source.device or 0 in (into.numel(), source.numel()):
        into.copy_(source)
    elif into.device.type == "cpu":
        into.copy_(moved(source, into.device))
    elif into.is_contiguous() and into.dtype == source.dtype and into.shape == source.shape:
        staging_of(into.device).fill_beside(into.detach(), source.detach().contiguous())
    else:
        into.copy_(moved(source, into.device))


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device: itself if it is there already, else a copy in new memory."""
    if tensor.device == device:
        return tensor
    if device.type == "cpu":
        return to_host({"": tensor})[""]
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    fill(made, tensor)
    return made
