"""From repeated measurements to a robust centre and spread."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from morph.contract.profile import Timing


def compute_clock_s() -> float:
    """Return this thread's processor time: another process that takes the core for a while does not count.

    With one thread it is what the work takes on a core of its own.
    """
    return time.thread_time()


def timing(samples_s: Sequence[float]) -> Timing:
    """Return median and median absolute deviation of durations in seconds; at least one is needed."""
    centre = median(samples_s)
    spread = median(abs(sample - centre) for sample in samples_s)
    return Timing(median_s=max(0.0, centre), mad_s=spread, num_samples=len(samples_s))


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep Python's collector out of the measurements."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
