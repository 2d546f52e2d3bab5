"""Whether processes run, and waiting for those that were killed, whoever is their parent.

``psutil.wait_procs`` raises FileNotFoundError for a process that is being taken off the table at that very moment
(``pidfd_open``, Linux 6.15 and later), and then waits for none of the others.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil

POLL_S = 0.02


def runs(pid: int) -> bool:
    """Whether a process has not ended, reaped or not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_gone(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until every process has ended, reaped or not; after ``timeout_s`` return those that have not."""
    left, until_s = list(processes), time.monotonic() + timeout_s
    while left := [process for process in left if _lives(process)]:
        if time.monotonic() >= until_s:
            break
        time.sleep(POLL_S)
    return left


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
