"""The tiny job with a gate: its workers train no further than some steps until the test lets them.

A run of it is not over before what the test did to it is known, however fast its steps are, and needs few of them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.system.harness import JOB

CODE = """
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep

from neighbour import CountingText, TinyGPT, job, loss, optimizer

class HeldText(CountingText):
    num_read = 0

    def __getitem__(self, index):
        HeldText.num_read += 1
        until_s = monotonic() + 120
        while HeldText.num_read > {most_read} and not Path({gate!r}).exists() and monotonic() < until_s:
            sleep(0.02)
        return super().__getitem__(index)

job = replace(job, dataset=HeldText)
"""


class HeldJob:
    """``train.py`` in a folder of its own, and ``neighbour.py``, which it imports.

    ``most_steps``: as many does each worker's process that reads every sample do while it is held; one that reads half
    of them does twice as many.
    """

    def __init__(self, directory: Path, gate: Path, most_steps: int, batch_size: int = 12) -> None:
        self._gate = gate
        self.file = directory / "train.py"
        self.path = f"{self.file}:job"
        directory.mkdir()
        shutil.copy(JOB.rpartition(":")[0], directory / "neighbour.py")
        code = CODE.format(gate=str(gate), most_read=most_steps * batch_size)
        self.file.write_text(code, encoding="utf-8")

    def let_go(self) -> None:
        """Let the workers train on, those that begin later too."""
        self._gate.touch()

    def hold(self) -> None:
        """Hold workers that begin from now on."""
        self._gate.unlink(missing_ok=True)
