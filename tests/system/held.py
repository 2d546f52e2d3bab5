"""The tiny job with a gate: its workers train no further than some steps until the test lets them.

So a run cannot end before the test has seen the effect of its faults, however fast steps are, and needs few steps.
"""

from __future__ import annotations

import json
import os
import shutil
from itertools import count
from pathlib import Path

from filelock import FileLock, Timeout

from tests.system.harness import JOB
from tests.waiting import PATIENCE

CODE = """
import json, os, sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from time import monotonic, sleep

from neighbour import CountingText, TinyGPT, job, loss, optimizer

@cache
def held():
    return json.loads(Path({held!r}).read_text())

@cache
def is_worker():  # a command reads samples too, where it cuts the job anew, also one within the test's process
    return Path(sys.argv[0]).stem not in ("main", "morph") and os.getpid() != held()["test"]

def most_read():
    try:
        return int(Path(held()["allowed"]).read_text())
    except FileNotFoundError:
        return held()["most_read"]

def is_held():
    return HeldText.num_read > most_read() and not Path(held()["gate"]).exists()

class HeldText(CountingText):
    num_read = 0

    def __getitem__(self, index):
        HeldText.num_read += 1
        until_s = monotonic() + {bound_s}
        while is_worker() and is_held() and monotonic() < until_s:
            sleep(0.02)
        if is_worker():
            sleep(held()["pause_s"])
        return super().__getitem__(index)

job = replace(job, dataset=HeldText)
"""
ORDER_S = 500 * PATIENCE
"""How long a worker is held at most, and the bound of orders in runs of such a job (``policy.order_timeout_s``)."""
BEAT_S = 30 * PATIENCE
"""Their ``policy.heartbeat_timeout_s``: Ray's nodes that boot beside a worker may delay it for seconds."""


class HeldJob:
    """A job in ``train.py``, which imports ``neighbour.py``, in a folder that no other living ``HeldJob`` uses.

    Folders are used again for later jobs with the same code to the byte, so that a manager need not examine this code
    again. Settings of the test are in ``directory``, which is made here. ``code``: a folder for the code of this job
    alone. ``most_steps``: the number of steps after which a worker's process is held if it reads every sample; a
    process that reads half of the samples does twice as many. ``step_s``: the least time of such a step, spent asleep,
    so that a run needs fewer steps while the test waits for something.
    """

    def __init__(
        self,
        directory: Path,
        gate: Path,
        most_steps: int,
        batch_size: int = 12,
        step_s: float = 0.0,
        code: Path | None = None,
    ) -> None:
        self._gate, self._batch_size = gate, batch_size
        self._allowed = gate.with_name(f"{gate.name}-read")
        folder, held = code or self._free_folder(), directory / "held.json"
        self.file = folder / "train.py"
        self.path = f"{self.file}:job"
        for made in (directory, folder):
            made.mkdir(exist_ok=True)
        numbers = {"most_read": most_steps * batch_size, "pause_s": step_s / batch_size, "test": os.getpid()}
        held.write_text(json.dumps({"gate": str(gate), "allowed": str(self._allowed), **numbers}), encoding="utf-8")
        link = folder / held.name
        if link != held:
            link.unlink(missing_ok=True)
            link.symlink_to(held)
        shutil.copy(JOB.rpartition(":")[0], folder / "neighbour.py")
        self.file.write_text(CODE.format(held=str(link), bound_s=ORDER_S), encoding="utf-8")

    def begin(self) -> None:
        """Hold workers again as at first, for another run of the same job, whose cut is cached."""
        self.hold()
        self._allowed.unlink(missing_ok=True)

    def let_go(self) -> None:
        """Let all workers continue to train, even those that begin later."""
        self._gate.touch()

    def hold(self) -> None:
        """Hold workers that begin from now on."""
        self._gate.unlink(missing_ok=True)

    def allow(self, most_steps: int) -> None:
        """Let each worker's process do up to this many steps; this replaces the earlier limit."""
        written = self._allowed.with_suffix(".part")
        written.write_text(str(most_steps * self._batch_size), encoding="ascii")
        written.replace(self._allowed)

    def _free_folder(self) -> Path:
        base = Path(os.environ["MORPH_DATA_DIR"]) / "held-jobs"  # shared by all processes that run these tests
        base.mkdir(parents=True, exist_ok=True)
        for number in count():
            self._lock = FileLock(base / f"{number}.lock")
            try:
                self._lock.acquire(timeout=0)
            except Timeout:  # another living job uses it
                continue
            return base / str(number)
        raise AssertionError
