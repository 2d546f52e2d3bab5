"""A run trains on the code with which it began, whatever happens to the files meanwhile."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from manager.controller.state.state import Phase
from manager.engine.loop.driver import Observed
from manager.engine.machines.machines import Processes
from morph.contract.faults import Fault
from morph.contract.trace import Trace, TraceEvent
from tests.system.harness import JOB, TinyJob, managed, uninterrupted

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

STEPS = 8
JOB_FILE = """
from dataclasses import replace

from small_gpt import job as tiny


def dataset():
    from samples import Samples

    return Samples()


job = replace(tiny, dataset=dataset)
"""
SAMPLES = """
from small_gpt import CountingText


class Samples(CountingText):
    def __getitem__(self, index):
        return super().__getitem__(index)
"""


@pytest.fixture
def job_path(tmp_path: Path) -> str:
    """Write the tiny job in three files, of which the data set's is imported when it is built."""
    folder = tmp_path / "job"
    folder.mkdir()
    shutil.copy(JOB.rpartition(":")[0], folder / "small_gpt.py")
    (folder / "train.py").write_text(JOB_FILE, encoding="utf-8")
    (folder / "samples.py").write_text(SAMPLES, encoding="utf-8")
    return f"{folder / 'train.py'}:job"


def test_a_replacement_after_an_edit_trains_on_the_initial_code(
    job_path: str, tiny_job: TinyJob, tmp_path: Path
) -> None:
    """One of two workers dies; the third, without which the run cannot continue, is set up after the edit."""
    undisturbed = uninterrupted(STEPS, tmp_path / "reference")
    folder = Path(job_path).parent

    def edit(observed: Observed) -> None:
        if observed.decision.state.phase is Phase.TRAINING:
            text = SAMPLES.replace("(index)", "((index + 1) % 96)")
            (folder / "samples.py").write_text(text, encoding="utf-8")

    events = [TraceEvent(time_s=0, event="add", node_id=f"vm{index}") for index in range(2)]
    result = managed(
        tiny_job,
        tmp_path / "run",
        shapes={2: "2x1"},
        trace=Trace(events=(*events, TraceEvent(time_s=0.1, event="add", node_id="vm2"))),
        num_steps=STEPS,
        faults=(Fault(worker="vm1", phase="forward", step=3),),
        checkpoint_every=2,
        observe=edit,
        job_path=job_path,
        machines=Processes(tmp_path / "workers.log"),
    )
    assert result.outcome == "finished"
    assert any("WorkerReady" in line or "vm2 is ready" in line for line in result.history)
    assert "(index + 1)" in (folder / "samples.py").read_text(encoding="utf-8")
    assert result.digests() == undisturbed
