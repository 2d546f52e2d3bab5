"""Asking the manager of a run directory to stop, from another process of its machine."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from manager.host.signals import ASKED
from morph.contract.errors import RunDirError, WaitTimeout

POLL_S = 0.1


class NotRunning(RunDirError):
    """Nobody manages the run."""


def holder_of(run_dir: Path) -> int | None:
    """Return the process that manages a run now; None when nobody does.

    Raises:
        RunDirError: the lock cannot be read.
    """
    try:
        lock_file = (run_dir / "run.lock").open(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunDirError(f"its lock cannot be read: {error.strerror}", source=str(run_dir)) from error
    with lock_file:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            written = lock_file.read().strip()
            return int(written) if written.isdecimal() else None
        return None


def living_holder_of(run_dir: Path) -> int:
    """Return the process that manages a run now.

    Raises:
        NotRunning: nobody does.
        RunDirError: the lock cannot be read.
    """
    holder = holder_of(run_dir)
    if holder is None:
        raise NotRunning("is not running: no process manages it", source=str(run_dir))
    return holder


def ask_to_stop(run_dir: Path) -> int:
    """Send the manager the signal that asks for a saved end; returns its process id.

    Raises:
        RunDirError: nobody manages the run, or the process is not ours to ask.
    """
    holder = living_holder_of(run_dir)
    try:
        os.kill(holder, ASKED)
    except ProcessLookupError as error:
        raise NotRunning("is not running: its manager just ended", source=str(run_dir)) from error
    except PermissionError as error:
        raise others_process(holder, run_dir) from error
    return holder


def others_process(holder: int, run_dir: Path) -> RunDirError:
    """Return what is to be raised where the manager is not ours to ask."""
    return RunDirError(f"process {holder} belongs to another user", source=str(run_dir))


def wait_for_end(run_dir: Path, timeout_s: float) -> None:
    """Block until nobody manages the run any more.

    Raises:
        WaitTimeout: it goes on for longer than ``timeout_s``.
    """
    until_s = time.monotonic() + timeout_s
    while holder_of(run_dir) is not None:
        if time.monotonic() >= until_s:
            raise WaitTimeout(f"{run_dir}: waited {timeout_s:g} s for the run to end; it goes on")
        time.sleep(POLL_S)
