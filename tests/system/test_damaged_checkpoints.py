"""The newest checkpoint is damaged, or one worker cannot read it, when state is lost: the run continues."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manager.controller.state.events import CheckpointFound, ManifestWritten, WorkerAnswered
from manager.controller.state.state import Phase
from manager.engine.loop.driver import Observed
from morph.checkpoint.manifest import MANIFEST, complete_versions, version_url
from morph.cli.main import app
from morph.contract.checkpoint import Manifest
from morph.contract.messages import WorkerReady
from tests.system.harness import JOB, TinyJob, constant_vms, managed, uninterrupted

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

OPEN_ENDED = 100_000
"""Steps of a run that ends when all faults have happened, however long a checkpoint takes."""


def _flip(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


DAMAGES: tuple[tuple[Callable[[Path], None], str], ...] = (
    (_flip, "differs from its manifest"),
    (_truncate, "by its manifest"),
    (Path.unlink, "the file is missing"),
    (_flip, MANIFEST),
    (_truncate, MANIFEST),
    (Path.unlink, "is gone"),
)
"""Each damage with its message; the last three are to the manifest, the others to the file of a unit."""
UNREADABLE_JOB = """
import os, runpy
from pathlib import Path

from morph.contract.errors import CheckpointError
from morph.runtime.reshape import moves

read, first = moves.read_unit, Path({first!r})

def read_unit(*given):
    try:
        with first.open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        pass
    if first.read_text() == str(os.getpid()):
        raise CheckpointError("no route to the storage")
    return read(*given)

if os.getpid() != {manager}:
    moves.read_unit = read_unit
job = runpy.run_path({tiny!r})["job"]
"""
"""The tiny job, but the first worker that reads a checkpoint never can."""


class Vandal:
    """Damages the newest checkpoint once an older one is complete, and kills the last stage's worker, repeatedly."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.pids: dict[str, int] = {}
        self.killed: list[str] = []
        self.damaged: list[int] = []
        self.found: list[CheckpointFound] = []
        self.present: list[set[str]] = []

    def __call__(self, observed: Observed) -> None:
        event, state = observed.event, observed.decision.state
        if isinstance(event, WorkerAnswered) and isinstance(event.answer, WorkerReady):
            self.pids[event.worker] = event.answer.pid
        if isinstance(event, CheckpointFound):
            self.found.append(event)
            self.present.append(set(state.workers))
        others = len(complete_versions(self.url)) - 1
        if isinstance(event, ManifestWritten) and others and len(self.killed) == len(self.found) < len(DAMAGES):
            assert state.saving.checkpoint is not None
            (slot,) = (slot for slot in state.slots if slot.stage == 1)
            self._damage(state.saving.checkpoint, set(state.member_units[slot.worker]))
            self.killed.append(slot.worker)
            os.kill(self.pids[slot.worker], signal.SIGKILL)
        if len(self.found) == len(DAMAGES) and state.phase is Phase.TRAINING and state.stop_reason is None:
            observed.request_stop("all was damaged")

    def _damage(self, manifest: Manifest, lost: set[str]) -> None:
        damage, told = DAMAGES[len(self.killed)]
        file = next(entry.file for entry in manifest.units if entry.unit in lost and "+" not in entry.unit)
        of_manifest = told in (MANIFEST, "is gone")
        damage(Path(version_url(self.url, manifest.version)) / (MANIFEST if of_manifest else file))
        self.damaged.append(manifest.version)


def test_a_damaged_newest_checkpoint_costs_no_correct_weights(tiny_job: TinyJob, tmp_path: Path) -> None:
    """Each time one of two members is killed and a standby takes its place; the other has its own part in memory."""
    vandal = Vandal(str(tmp_path / "run" / "checkpoints"))
    num_vms = 2 + len(DAMAGES)
    result = managed(
        tiny_job,
        tmp_path / "run",
        shapes={2: "2x1"},
        trace=constant_vms(num_vms),
        num_steps=OPEN_ENDED,
        checkpoint_every=2,
        observe=vandal,
        redundancy="off",
    )
    assert result.outcome == "stopped"
    assert result.digests() == uninterrupted(result.manifest.version, tmp_path / "reference")
    assert len(vandal.found) == len(DAMAGES)
    for index, (found, version) in enumerate(zip(vandal.found, vandal.damaged, strict=True)):
        told = " ".join(found.passed_over) or f"version {version} is gone"
        assert DAMAGES[index][1] in told
        if DAMAGES[index][1] != "is gone":
            assert f"version {version} is skipped, and version {found.manifest.version} is the newest" in told
        assert found.manifest.version < version
        assert vandal.present[index] == set(vandal.pids) - set(vandal.killed[: index + 1])  # no other worker was ended
    events = CliRunner().invoke(app, ["events", str(tmp_path / "run")]).output
    told = re.findall(r"(?:skipped|gone), and version \d+ is the newest whole version; \d+ more steps? ", events)
    assert len(told) == len(DAMAGES)


def test_units_that_one_worker_cannot_read_are_read_by_another(tiny_job: TinyJob, tmp_path: Path) -> None:
    """Both members are killed at once; one of their two successors never reaches storage."""
    first, job_path = tmp_path / "first", tmp_path / "job.py"
    tiny = JOB.rpartition(":")[0]
    job_path.write_text(UNREADABLE_JOB.format(first=str(first), manager=os.getpid(), tiny=tiny), encoding="utf-8")
    pids: dict[str, int] = {}
    killed: set[str] = set()
    present: set[str] = set()

    def observe(observed: Observed) -> None:
        event, state = observed.event, observed.decision.state
        if isinstance(event, WorkerAnswered) and isinstance(event.answer, WorkerReady):
            pids[event.worker] = event.answer.pid
        if isinstance(event, ManifestWritten) and not killed:
            killed.update(state.member_units)
            for worker in killed:
                os.kill(pids[worker], signal.SIGKILL)
        present.clear()
        present.update(state.workers)
        restored = killed and not killed & present and state.phase is Phase.TRAINING
        if restored and state.stop_reason is None:
            observed.request_stop("others took their places")

    result = managed(
        tiny_job,
        tmp_path / "run",
        shapes={2: "2x1"},
        trace=constant_vms(4),
        num_steps=OPEN_ENDED,
        checkpoint_every=4,
        observe=observe,
        job_path=f"{job_path}:job",
        redundancy="off",
    )
    assert result.outcome == "stopped"
    assert result.digests() == uninterrupted(result.manifest.version, tmp_path / "reference")
    (unable,) = (worker for worker, pid in pids.items() if str(pid) == first.read_text())
    assert any(f"others read what {unable} could not" in line for line in result.history)
    assert present == set(pids) - killed
    assert unable in present
