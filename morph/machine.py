"""The memory and the cores of this machine, or of its container."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import psutil

CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Memory limits of control groups, versions 2 and 1."""
CORE_LIMIT = Path("/sys/fs/cgroup/cpu.max")
"""A container's limit on processor time: microseconds in each period, or "max", and the period."""


def num_cores(limit: Path = CORE_LIMIT) -> int:
    """Return the number of cores that this process may use: those it may run on, or fewer by its container's limit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        quota, period = limit.read_text(encoding="ascii").split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def machine_memory_bytes(limits: Sequence[Path] = CONTAINER_LIMITS) -> int:
    """Return the machine's memory, or its container's limit."""
    least = int(psutil.virtual_memory().total)
    for path in limits:
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            least = min(least, max(1, int(path.read_text(encoding="ascii"))))
    return least


def available_bytes() -> int:
    """Return the free memory of this machine, within its container's limit."""
    used = int(psutil.Process().memory_info().rss)
    return min(int(psutil.virtual_memory().available), machine_memory_bytes() - used)
