"""Finds the helper processes of a measurement from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from manager.host.processes import lives

BOUND_S = 120.0


def helpers_of(pid: int, module: str) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            if module in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


def check_that_none_outlives(script: str, num_helpers: int, module: str, ending: signal.Signals, folder: Path) -> None:
    """Start helpers, end their parent with a signal, and check that no helper and no temporary file is left."""
    temporary = folder / "temporary"
    temporary.mkdir()
    with (folder / "said").open("wb") as said:
        parent = subprocess.Popen(
            [sys.executable, "-c", script], stdout=said, stderr=said, env={**os.environ, "TMPDIR": str(temporary)}
        )
    helpers: list[psutil.Process] = []

    def are_there() -> bool:
        helpers[:] = helpers_of(parent.pid, module)
        return len(helpers) == num_helpers + 1  # the helpers, and the process that forked them

    try:
        _wait_until(are_there)
        parent.send_signal(ending)
        parent.wait(timeout=BOUND_S)
        _wait_until(lambda: not any(map(lives, helpers)))
        assert list(temporary.iterdir()) == []
    finally:
        parent.kill()
        parent.wait()
        for helper in helpers:
            if lives(helper):
                helper.kill()


def _wait_until(reached: Callable[[], bool]) -> None:
    """Poll rarely, because listing all processes takes processor time from those that start."""
    end_s = time.monotonic() + BOUND_S
    while not reached():
        assert time.monotonic() < end_s, f"not within {BOUND_S:g} s"
        time.sleep(0.1)
