"""The tiny job with a gate: its workers train no further than some steps until the test lets them.

A run of it is not over before what the test did to it is known, however fast its steps are, and needs few of them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.system.harness import JOB

CODE = """
import sys
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep

from neighbour import CountingText, TinyGPT, job, loss, optimizer

IS_WORKER = "morph.cli" not in sys.modules  # the command reads samples too, where it cuts the job anew

def most_read():
    try:
        return int(Path({allowed!r}).read_text())
    except FileNotFoundError:
        return {most_read}

class HeldText(CountingText):
    num_read = 0

    def __getitem__(self, index):
        HeldText.num_read += 1
        until_s = monotonic() + {bound_s}
        while IS_WORKER and HeldText.num_read > most_read() and not Path({gate!r}).exists() and monotonic() < until_s:
            sleep(0.02)
        if IS_WORKER:
            sleep({pause_s})
        return super().__getitem__(index)

job = replace(job, dataset=HeldText)
"""
BOUND_S = 500
"""Also the bound of orders in runs of such a job (``policy.order_timeout_s``), where it may be held for long."""


class HeldJob:
    """``train.py`` in a folder of its own, and ``neighbour.py``, which it imports.

    ``most_steps``: as many does each worker's process that reads every sample do while it is held; one that reads half
    of them does twice as many. ``step_s``: what a step takes such a process at least, asleep: a run that goes on while
    something else takes its time needs fewer of them.
    """

    def __init__(self, directory: Path, gate: Path, most_steps: int, batch_size: int = 12, step_s: float = 0.0) -> None:
        self._gate, self._batch_size = gate, batch_size
        self._allowed = gate.with_name(f"{gate.name}-read")
        self.file = directory / "train.py"
        self.path = f"{self.file}:job"
        directory.mkdir()
        shutil.copy(JOB.rpartition(":")[0], directory / "neighbour.py")
        files = {"gate": str(gate), "allowed": str(self._allowed)}
        numbers = {"most_read": most_steps * batch_size, "bound_s": BOUND_S, "pause_s": step_s / batch_size}
        code = CODE.format(**files, **numbers)
        self.file.write_text(code, encoding="utf-8")

    def begin(self) -> None:
        """Hold workers again, as at first: for another run of the same job, whose cut is kept."""
        self.hold()
        self._allowed.unlink(missing_ok=True)

    def let_go(self) -> None:
        """Let the workers train on, those that begin later too."""
        self._gate.touch()

    def hold(self) -> None:
        """Hold workers that begin from now on."""
        self._gate.unlink(missing_ok=True)

    def allow(self, most_steps: int) -> None:
        """Let each worker's process do so many steps in place of as many as was said before."""
        written = self._allowed.with_suffix(".part")
        written.write_text(str(most_steps * self._batch_size), encoding="ascii")
        written.replace(self._allowed)
