"""Errors inside workers: which are retried, which lose the worker, and what the user sees when one ends the run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from manager.controller.state.actions import Finish
from manager.controller.state.events import WorkerAnswered
from manager.controller.state.state import Phase
from manager.engine.loop.driver import Observed
from manager.engine.machines.machines import Processes
from manager.run.session import run_session
from manager.run_dir import RunDir
from morph.checkpoint.manifest import complete_versions, read_manifest
from morph.contract.faults import Fault
from morph.contract.messages import Failed
from morph.jobs.snapshot import collect, pack
from tests.system.ahead_runs import Case, real
from tests.system.conftest import REFERENCE_STEPS
from tests.system.harness import JOB, cut_for_workers

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

JOB_FILE = """
import dataclasses, os

import neighbour

class Data(neighbour.CountingText):
    def __getitem__(self, index):
        {fail}
        return super().__getitem__(index)

job = dataclasses.replace(neighbour.job, dataset=Data)
"""
ONCE = """
        try:
            os.unlink({armed!r})
        except FileNotFoundError:
            pass
        else:
            raise OSError("the file server did not answer")
"""
ALWAYS = """
        if os.path.exists({armed!r}):
            raise ValueError("bad sample")
"""


@dataclass
class Ended:
    """How a run ended, with its last checkpoint and the messages of its failed orders."""

    finish: Finish
    version: int
    digests: dict[str, str]
    causes: list[tuple[str, str]]
    lost: set[str]


def failing_run(directory: Path, fail: str, at_version: int, faults: tuple[Fault, ...] = ()) -> Ended:
    """Run the tiny job on four plain processes; its data set fails from a version on."""
    armed = directory / "armed"
    shutil.copy(JOB.rpartition(":")[0], directory / "neighbour.py")
    (directory / "job.py").write_text(JOB_FILE.format(fail=fail.format(armed=str(armed)).strip()), encoding="utf-8")
    job_path = f"{directory / 'job.py'}:job"
    cut = cut_for_workers(job_path)
    shapes = {4: "2x2", 3: "3x1", 2: "2x1", 1: "1x1"}
    case = Case(shapes, num_vms=4, steps=REFERENCE_STEPS, faults=faults)
    spec, facts = real(case, directory / "workers.log")
    machines = Processes(directory / "workers.log", job_path=job_path)
    spec = replace(spec, job_path=job_path, machines=machines, code=pack(job_path, collect(job_path)), cut=cut)
    ended = Ended(Finish(outcome="failed", sentence=""), 0, {}, [], set())
    arm: list[Callable[[], object]] = [armed.touch]

    def observe(observed: Observed) -> None:
        event, state = observed.event, observed.decision.state
        print(f"v{state.version} {event.kind} -> {observed.decision.reason.sentence}")
        if isinstance(event, WorkerAnswered) and isinstance(event.answer, Failed):
            ended.causes.append((event.worker, event.answer.cause))
        ended.lost = {f"vm{number}" for number in range(4)} - set(state.workers)
        if arm and state.phase is Phase.TRAINING and state.version == at_version:
            arm.pop()()

    with RunDir(directory / "run", facts) as opened:
        ended.finish = run_session(spec, opened, observe)
        manifest = read_manifest(opened.checkpoint_url, complete_versions(opened.checkpoint_url)[-1])
    ended.version = manifest.version
    ended.digests = {entry.unit: entry.sha256 for entry in manifest.units}
    return ended


def test_a_transient_error_loses_no_worker_and_a_failed_device_its_own(
    reference: dict[str, str], tmp_path: Path
) -> None:
    # at each of these steps, because a worker may be left out of a shape or two after its first error
    faults = (
        *(Fault(worker="vm1", phase="backward", step=step, kind="out_of_memory") for step in range(5, 12)),
        *(Fault(worker="vm2", phase="forward", step=step, kind="lost_device") for step in range(8, 14)),
    )
    ended = failing_run(tmp_path, ONCE, at_version=2, faults=faults)
    assert ended.finish.outcome == "finished", ended.finish.sentence
    assert ended.causes[0][1] == "job"
    assert ("vm1", "memory") in ended.causes
    assert ("vm2", "device") in ended.causes
    assert ended.lost == {"vm1", "vm2"}
    assert ended.digests == reference


def test_a_repeated_error_ends_the_run_saved_with_the_users_traceback(tmp_path: Path) -> None:
    ended = failing_run(tmp_path, ALWAYS, at_version=3)
    assert ended.finish.outcome == "failed"
    assert len({worker for worker, _ in ended.causes}) > 1
    assert "ValueError: bad sample (as before on vm" in ended.finish.sentence
    assert f'File "{tmp_path / "job.py"}", line 9, in __getitem__' in ended.finish.traceback
    assert "raise ValueError(" in ended.finish.traceback
    assert "morph/" not in ended.finish.traceback
    step = ended.version
    assert step >= 3
    assert f"failed at step {step}:" in ended.finish.sentence
    assert ended.finish.sentence.endswith(f"version {step} is saved")
