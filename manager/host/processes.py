"""Whether processes run, and waiting for those that were killed, whoever is their parent.

``psutil.wait_procs`` raises FileNotFoundError for a process that is being taken off the table at that very moment
(``pidfd_open``, Linux 6.15 and later), and then waits for none of the others.
"""

from __future__ import annotations

import os
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
    while left := [process for process in left if lives(process)]:
        if time.monotonic() >= until_s:
            break
        time.sleep(POLL_S)
    return left


def session_of(leader: psutil.Process) -> list[psutil.Process]:
    """Every process of the session that one began, also when that one ended and others are orphans; itself first."""
    if psutil.pid_exists(leader.pid) and not leader.is_running():
        return []  # the number is another's by now, which it is not as long as anything of the session lives
    members = [process for process in psutil.process_iter() if _session_id(process.pid) == leader.pid]
    return sorted(members, key=lambda process: process.pid != leader.pid)


def _session_id(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:  # it ended
        return None


def lives(process: psutil.Process) -> bool:
    """Whether this very process has not ended, reaped or not; its number may be another's since."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
