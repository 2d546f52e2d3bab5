"""Checks whether processes run, and waits for killed processes, even if they have another parent.

``psutil.wait_procs`` raises FileNotFoundError if a process is being reaped at that very moment (``pidfd_open``, Linux
6.15 and later), and then does not wait for the others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

import psutil

POLL_S = 0.02


def runs(pid: int) -> bool:
    """Return whether a process still runs; a zombie has ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def patience_s(bound_s: float) -> float:
    """Return a bound (seconds) times the processes per core, so that a busy machine is not taken for a broken one."""
    return bound_s * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def wait_gone(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until every process has ended (as a zombie has); after ``timeout_s``, return those that have not."""
    left, until_s = list(processes), time.monotonic() + timeout_s
    while left := [process for process in left if lives(process)]:
        if time.monotonic() >= until_s:
            break
        time.sleep(POLL_S)
    return left


def session_of(leader: psutil.Process) -> list[psutil.Process]:
    """Return all processes of the session that ``leader`` began, itself first, even if it ended and left orphans."""
    if psutil.pid_exists(leader.pid) and not leader.is_running():
        return []  # another process has this number, which is impossible while any process of the session lives
    members = [process for process in psutil.process_iter() if _session_id(process.pid) == leader.pid]
    return sorted(members, key=lambda process: process.pid != leader.pid)


def _session_id(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:  # it ended
        return None


def lives(process: psutil.Process) -> bool:
    """Return whether this very process still runs; another process may have got its number."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
