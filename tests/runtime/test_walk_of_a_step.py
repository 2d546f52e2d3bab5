"""CONTRIBUTING.md names the files that a worker's step goes through, as a trace of real steps finds them."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import pytest

from tests.crew import Crew
from tests.members import ThreadMember
from tests.system.harness import JOB, TinyJob
from tests.test_contributing import REPOSITORY, STEP, TEXT

FIRST = "morph/runtime/process/worker.py"


class Traced(ThreadMember):
    """A worker that notes which files its steps enter, after two steps in a shape, which may import modules."""

    entered: ClassVar[set[str]] = set()
    num_steps = 0

    def carry_out(self, method: str, *arguments: object) -> Any:
        self.num_steps = 0 if method == "reshape" else self.num_steps + 1
        for module in (sys, threading):
            module.setprofile(_note if self.num_steps == 3 else None)
        try:
            return super().carry_out(method, *arguments)
        finally:
            for module in (sys, threading):
                module.setprofile(None)


def _note(frame: FrameType, event: str, _argument: object) -> None:
    if event == "call":
        Traced.entered.add(frame.f_code.co_filename)


@pytest.mark.slow
def test_the_walk_of_a_mini_batch_names_every_file_that_a_step_enters(tmp_path: Path, job: TinyJob) -> None:
    crew = Crew(job, ("w0", "w1"), Traced)
    try:
        crew.set_up(JOB, job.fingerprint, tmp_path)
        for shape in ("2x1", "1x2"):
            crew.reshape(shape, ("w0", "w1"))
            crew.train(crew.version + 3)
    finally:
        crew.close()
    root = f"{REPOSITORY}/"
    entered = {file.removeprefix(root) for file in Traced.entered if file.startswith(f"{root}morph/")}
    walk = [file for _, file in STEP.findall(re.split(r"\*\*A killed worker\*\*", TEXT)[0])]
    named = {file for file in walk[walk.index(FIRST) :] if file.startswith("morph/")}
    assert named <= entered <= set(walk)
