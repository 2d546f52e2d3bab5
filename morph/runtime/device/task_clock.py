"""When a device begins and ends what it is given: the host's clock where it computes itself, else the device's events.

A device such as a GPU is given work long before it does it, so the host's clock around a task says how long it took to
launch. An event is put into the same queue and takes the time when the device comes to it; it is read when it is over,
without stopping the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

Mark = Any
"""A moment in a device's work: seconds of ``time.perf_counter``, or an event."""


class TaskClock(Protocol):
    """Marks moments in what a device is given to do, and tells how far apart they were. One thread uses it."""

    def mark(self) -> Mark:
        """The moment at which the device has done everything that it was given so far; returns at once."""

    def is_over(self, mark: Mark) -> bool:
        """Whether the device has come to it; returns at once."""

    def wait(self, mark: Mark) -> None:
        """Block until the device has come to it, without a bound: for a thread that may be left behind."""

    def seconds(self, start: Mark, end: Mark) -> float:
        """From one to the other, both of which are over."""


class HostClock:
    """Of a device that has done a task when the call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def is_over(self, mark: float) -> bool:  # noqa: ARG002
        """See ``TaskClock.is_over``: always."""
        return True

    def wait(self, mark: float) -> None:
        """See ``TaskClock.wait``: there is nothing to wait for."""

    def seconds(self, start: float, end: float) -> float:
        return end - start


class DeviceEvent(Protocol):
    """What is used of ``torch.cuda.Event``, once it was recorded."""

    def query(self) -> bool:
        """Whether the device has come to it."""

    def synchronize(self) -> None:
        """Block until it has."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this one to another."""


class EventClock:
    """Of a device that works through a queue.

    Args:
        recorded: Puts a fresh event that takes the time into the device's queue.
    """

    def __init__(self, recorded: Callable[[], DeviceEvent]) -> None:
        self._recorded = recorded

    def mark(self) -> DeviceEvent:
        return self._recorded()

    def is_over(self, mark: DeviceEvent) -> bool:
        return mark.query()

    def wait(self, mark: DeviceEvent) -> None:
        mark.synchronize()

    def seconds(self, start: DeviceEvent, end: DeviceEvent) -> float:
        return start.elapsed_time(end) / 1e3


def clock_of(device: torch.device) -> TaskClock:
    """Return the clock of a device: its events where it works through a queue."""
    return HostClock() if device.type == "cpu" else EventClock(partial(_recorded, device))


def _recorded(device: torch.device) -> DeviceEvent:
    event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call] # torch ships no types for it
    event.record(torch.cuda.current_stream(device))
    return event
