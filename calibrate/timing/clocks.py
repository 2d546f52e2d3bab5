"""The clocks of measurements: a thread's processor time on a CPU, events on a CUDA stream.

On a CPU, time in which another process has the core does not count. On a GPU, which a worker has for itself, work on
the host between two events counts, as it does in training.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from morph.runtime.device.devices import usable_device

Mark = Any
"""A point in time of one clock; only its clock can read it."""


class Clock(Protocol):
    """Takes marks, cheaply, and reads them later."""

    def settle(self) -> None:
        """Block until the device has done all requested work."""

    def mark(self) -> Mark:
        """Return the device's present moment: after all work requested so far."""

    def between_s(self, start: Mark, end: Mark) -> float:
        """Return the seconds between two marks. Call ``settle`` before."""


class CpuClock:
    """The calling thread's processor time."""

    def settle(self) -> None:
        """See ``Clock.settle``: nothing is ever outstanding."""

    def mark(self) -> Mark:
        return time.thread_time()

    def between_s(self, start: Mark, end: Mark) -> float:
        return float(end - start)


class CudaClock:
    """Events on a device's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch ships no types for it
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between_s(self, start: Mark, end: Mark) -> float:
        return float(start.elapsed_time(end)) / 1e3


def clock_of(device: torch.device) -> Clock:
    """Return the clock for work on a device."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def devices_of(kind: str) -> tuple[torch.device, ...]:
    """Return the devices of a kind that measure side by side; the cores of a CPU share caches, so count as one."""
    if kind == "cuda":
        usable_device(kind, field="device")
        return tuple(torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    return (usable_device(kind, field="device"),)


def use_device(device: torch.device) -> None:
    """Make a GPU the default of this process, so that code without a device opens no context on another GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def finish_work(device: torch.device) -> None:
    """Block until a device has done all requested work: a copy to a GPU may return before it is made."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def give_back_memory(device: torch.device) -> None:
    """Release memory that the allocator keeps: memory for one m is of no use for the next."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
