"""Times the tasks of a device: by the host's clock if the host computes, else by events in the device's queue."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

Mark = Any
"""A moment in a device's work: seconds of ``time.perf_counter``, or an event."""


class TaskClock(Protocol):
    """Marks moments in a device's work, and measures the time between them. Only one thread uses it."""

    def mark(self) -> Mark:
        """Mark the moment at which the device has done all work so far; returns at once."""

    def is_over(self, mark: Mark) -> bool:
        """Return at once whether the device has reached the moment."""

    def wait(self, mark: Mark) -> None:
        """Block until the device has reached the moment, without a bound: for a thread that may be left behind."""

    def seconds(self, start: Mark, end: Mark) -> float:
        """Return the seconds between two moments that are both over."""


class HostClock:
    """The clock of a device that has finished a task when the call for it returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def is_over(self, mark: float) -> bool:  # noqa: ARG002
        """See ``TaskClock.is_over``: always."""
        return True

    def wait(self, mark: float) -> None:
        """See ``TaskClock.wait``: there is nothing to wait for."""

    def seconds(self, start: float, end: float) -> float:
        return end - start


class EventClock:
    """The clock of a device that works through a queue; ``recorded``: records an event, as ``torch.cuda.Event``."""

    def __init__(self, recorded: Callable[[], Mark]) -> None:
        self._recorded = recorded

    def mark(self) -> Mark:
        return self._recorded()

    def is_over(self, mark: Mark) -> bool:
        return bool(mark.query())

    def wait(self, mark: Mark) -> None:
        mark.synchronize()

    def seconds(self, start: Mark, end: Mark) -> float:
        return float(start.elapsed_time(end)) / 1e3


class CoreTimes(NamedTuple):
    """How the calling thread spent time on a processor (seconds); ``queued_s``: ready, while others had the cores."""

    processor_s: float
    queued_s: float | None

    def since(self, before: CoreTimes) -> CoreTimes:
        """Return the times since an earlier reading of the same clock."""
        return CoreTimes(self.processor_s - before.processor_s, _both(self.queued_s, before.queued_s, -1))

    def plus(self, other: CoreTimes) -> CoreTimes:
        """Return the sums; ``queued_s`` is None if one of them is."""
        return CoreTimes(self.processor_s + other.processor_s, _both(self.queued_s, other.queued_s, 1))


def _both(one_s: float | None, other_s: float | None, sign: int) -> float | None:
    return None if one_s is None or other_s is None else one_s + sign * other_s


@contextmanager
def core_clock() -> Iterator[Callable[[], CoreTimes]]:
    """Yield a function that returns the ``CoreTimes`` of this thread so far; a call takes about two microseconds."""
    try:
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # another system than Linux, or a kernel without these statistics
        yield lambda: CoreTimes(time.thread_time(), None)
        return
    try:
        yield lambda: CoreTimes(time.thread_time(), int(os.pread(file, 64, 0).split()[1]) / 1e9)
    finally:
        os.close(file)


def linger(clock: TaskClock, start: Mark, slowness: float) -> None:
    """Wait after a task that began at ``start``, so that it takes ``slowness`` (at least 1) times as long."""
    end = clock.mark()
    clock.wait(end)
    time.sleep((slowness - 1) * clock.seconds(start, end))


def clock_of(device: torch.device) -> TaskClock:
    """Return the clock of a device: by events if it works through a queue."""
    return HostClock() if device.type == "cpu" else EventClock(partial(_recorded, device))


def _recorded(device: torch.device) -> Mark:
    event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call] # torch ships no types for it
    event.record(torch.cuda.current_stream(device))
    return event
