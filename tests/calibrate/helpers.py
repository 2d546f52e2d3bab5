"""Finds the helper processes of a measurement from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from manager.host.processes import lives
from tests.waiting import BOUND_S, poll_until


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
        poll_until(are_there, "the helpers", every_s=0.1)  # listing all processes takes time from those that start
        parent.send_signal(ending)
        parent.wait(timeout=BOUND_S)
        poll_until(lambda: not any(map(lives, helpers)), "the end of the helpers", every_s=0.1)
        assert list(temporary.iterdir()) == []
    finally:
        parent.kill()
        parent.wait()
        for helper in helpers:
            if lives(helper):
                helper.kill()
