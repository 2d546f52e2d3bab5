"""Ctrl-C and SIGKILL end everything, and the same command goes on with the same result."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from manager.report.reading import read_report
from morph.checkpoint.manifest import complete_versions, read_manifest, version_url
from morph.checkpoint.stored import SET_ASIDE
from morph.checkpoint.unit_files import read_unit
from morph.contract.profile import load_profile
from tests.system.commands import RunningMorph
from tests.system.harness import JOB, uninterrupted

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

STEPS, LONG_STEPS = 80, 400
"""Of a run; of one that is not to be over before the death of Ray's processes is known."""
CLUSTER = """
vms: {{num_vms: 2, launcher: {launcher}}}
policy: {{checkpoint_every_steps: 5, takeover_patience_s: {patience_s}}}
"""


HEAD_NODE = ("ray::RuntimeEnvAgent", "manager.engine.on_ray.vm_host")
"""Processes with which it dies, each the first of its kind; ``test_takeover`` kills the GCS."""


@pytest.fixture(scope="module")
def reference(calibrated: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of every unit after ``STEPS`` uninterrupted steps."""
    num_sections = load_profile(calibrated).num_sections
    return uninterrupted(STEPS, tmp_path_factory.mktemp("uninterrupted"), num_sections)


class Run:
    """One run directory, and the command that works on it."""

    def __init__(
        self, folder: Path, profile: Path, steps: int, patience_s: float = 0.0, launcher: str = "processes"
    ) -> None:
        self.directory = folder / "run"
        self._cluster = folder / "cluster.yaml"
        self._cluster.write_text(CLUSTER.format(patience_s=patience_s, launcher=launcher), encoding="utf-8")
        self._profile, self._steps = profile, steps

    def start(self) -> RunningMorph:
        return RunningMorph(
            *("run", JOB, "--profile", self._profile, "--cluster", self._cluster),
            *("--steps", self._steps, "--run-dir", self.directory, "--verbose"),
        )

    def resume(self) -> RunningMorph:
        """``morph resume`` of it."""
        return RunningMorph("resume", self.directory)

    def newest(self) -> int:
        """Version of the newest checkpoint, every byte of which is checked."""
        url = str(self.directory / "checkpoints")
        version = complete_versions(url)[-1]
        manifest = read_manifest(url, version)
        for entry in manifest.units:
            read_unit(url, manifest, entry.unit)
        return version

    def digests(self) -> dict[str, str]:
        manifest = read_manifest(str(self.directory / "checkpoints"), self.newest())
        return {entry.unit: entry.sha256 for entry in manifest.units}

    def finish_from(self, version: int, command: Callable[[], RunningMorph] | None = None) -> None:
        """Give the same command again; checks that it goes on from ``version`` and reaches the last step.

        ``command``: another one instead.
        """
        with (command or self.start)() as again:
            assert again.wait_for_line("finished") is not None
            assert again.wait_for_end() == 0, again.output
        report = read_report(self.directory)
        assert (report.outcome, report.version, report.num_sessions) == ("finished", self._steps, 2)
        resumed = [shape for shape in report.shapes if shape.first_version == version]
        assert resumed, f"no shape began at version {version}: {report.shapes}"
        assert {record.step for record in report.steps} == set(range(self._steps))
        assert [record.step for record in report.steps][-(self._steps - version) :] == list(range(version, self._steps))


@pytest.fixture
def run(calibrated: Path, tmp_path: Path) -> Run:
    return Run(tmp_path, calibrated, STEPS)


def test_ctrl_c_saves_ends_everything_and_morph_resume_goes_on_to_the_same_weights(
    run: Run, reference: dict[str, str]
) -> None:
    with run.start() as command:
        command.wait_for_line("the checkpoint of version")
        assert command.ports() != set()
        command.press_ctrl_c()
        assert command.wait_for_end() == 130, command.output
        assert command.ports() == set()
        version = run.newest()
        assert 5 <= version < STEPS
        assert f"stopped; the same command goes on from version {version}" in command.output
        assert "Traceback" not in command.output
    assert read_report(run.directory).version == version  # nothing that was decided is lost
    run.finish_from(version, run.resume)
    assert run.digests() == reference


def test_a_killed_manager_without_patience_takes_all_along_and_the_same_command_goes_on_from_the_newest_checkpoint(
    run: Run, reference: dict[str, str]
) -> None:
    with run.start() as command:
        command.wait_for_line("the checkpoint of version")
        command.kill()
        assert command.wait_for_end() == -signal.SIGKILL
    version = run.newest()
    assert version >= 5
    run.finish_from(version)
    assert run.digests() == reference


@pytest.mark.parametrize("again", [Run.start, Run.resume], ids=["the same command", "morph resume"])
def test_another_command_takes_over_from_a_killed_one_and_loses_nothing(
    again: Callable[[Run], RunningMorph], calibrated: Path, tmp_path: Path, reference: dict[str, str]
) -> None:
    run = Run(tmp_path, calibrated, STEPS, patience_s=60.0)
    with run.start() as command:
        command.wait_for_line("the checkpoint of version")
        command.kill()
        with again(run) as other:
            assert "2 VMs of this run live: going on with them" in other.wait_for_line("of this run live")
            assert "2 workers live" in other.wait_for_line("a new manager took over")
            other.wait_for_line("finished")
            assert other.wait_for_exit() == 0, other.output
        assert command.wait_for_end() == -signal.SIGKILL  # and nothing of it is left
    report = read_report(run.directory)
    assert (report.outcome, report.version, report.num_sessions) == ("finished", STEPS, 1)
    assert [record.step for record in report.steps] == list(range(STEPS))
    assert len(report.shapes) == 1
    assert run.digests() == reference


def test_a_flipped_bit_in_the_newest_checkpoint_costs_the_steps_since_the_one_before_and_changes_no_weight(
    run: Run, reference: dict[str, str]
) -> None:
    with run.start() as command:
        for _ in range(2):
            command.wait_for_line("the checkpoint of version")
        command.press_ctrl_c()
        assert command.wait_for_end() == 130, command.output
    url = str(run.directory / "checkpoints")
    before, newest = complete_versions(url)[-2:]
    folder = Path(version_url(url, newest))
    damaged = folder / read_manifest(url, newest).units[-1].file
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))  # only who reads all of it sees it
    with run.resume() as command:
        assert "differs from its manifest" in command.wait_for_line("the run goes on from its newest checkpoint")
        told = command.wait_for_line("is passed over")
        assert damaged.name in told
        assert f"version {newest} is passed over, and version {before} is the newest that is whole" in told
        command.wait_for_line("finished")
        assert command.wait_for_end() == 0, command.output
        assert "Traceback" not in command.output
    report = read_report(run.directory)
    assert (report.outcome, report.version) == ("finished", STEPS)
    assert [record.step for record in report.steps][-(STEPS - before) :] == list(range(before, STEPS))
    assert (folder / SET_ASIDE).exists() or not folder.exists()  # until its turn comes to be deleted
    assert run.digests() == reference


def test_a_run_whose_machine_is_gone_goes_on_elsewhere_from_its_checkpoints_and_its_job_alone(
    calibrated: Path, tmp_path: Path, reference: dict[str, str]
) -> None:
    lost, url = tmp_path / "lost", tmp_path / "storage"
    lost.mkdir()
    shutil.copy(calibrated, lost / "profile.json")
    (lost / "cluster.yaml").write_text(CLUSTER.format(patience_s=0.0, launcher="processes"), encoding="utf-8")
    with RunningMorph(
        *("run", JOB, "--profile", lost / "profile.json", "--cluster", lost / "cluster.yaml", "--steps", STEPS),
        *("--run-dir", lost / "run", "--checkpoint-url", url, "--verbose"),
    ) as command:
        command.wait_for_line("the checkpoint of version")
        command.kill()
        assert command.wait_for_end() == -signal.SIGKILL
    shutil.rmtree(lost)
    version = complete_versions(str(url))[-1]
    elsewhere = url.rename(tmp_path / "elsewhere")
    with RunningMorph(
        *("resume", f"file://{elsewhere}", "--job", JOB, "--run-dir", tmp_path / "run", "--verbose")
    ) as command:
        command.wait_for_line(f"goes on in {tmp_path / 'run'}, from version {version}")
        command.wait_for_line("finished")
        assert command.wait_for_end() == 0, command.output
        assert "Traceback" not in command.output
    report = read_report(tmp_path / "run")
    assert (report.outcome, report.version) == ("finished", STEPS)
    assert [record.step for record in report.steps] == list(range(version, STEPS))
    assert {entry.unit: entry.sha256 for entry in read_manifest(str(elsewhere), STEPS).units} == reference


@pytest.mark.timeout(600)  # three sessions
def test_without_its_head_node_a_run_goes_on_by_itself_on_another_one(calibrated: Path, tmp_path: Path) -> None:
    run = Run(tmp_path, calibrated, LONG_STEPS, launcher="ray")
    with run.start() as command:
        command.wait_for_line("the checkpoint of version")
        for pid in command.running("dashboard.py"):
            os.kill(pid, signal.SIGKILL)  # which changes nothing
        for part in HEAD_NODE:
            command.wait_for_line("the checkpoint of version")
            os.kill(command.running(part)[0], signal.SIGKILL)
            line = command.wait_for_line("Ray's head node is gone")
            assert "the run goes on from its newest checkpoint at once" in line
        assert command.wait_for_line("finished") is not None
        assert command.wait_for_end() == 0, command.output
        assert "Traceback" not in command.output
    report = read_report(run.directory)
    assert (report.outcome, report.version, report.num_sessions) == ("finished", LONG_STEPS, 1 + len(HEAD_NODE))
    num_sections = load_profile(calibrated).num_sections
    assert run.digests() == uninterrupted(LONG_STEPS, tmp_path / "uninterrupted", num_sections)


def test_a_second_ctrl_c_ends_everything_too(run: Run) -> None:
    with run.start() as command:
        command.wait_for_line("the checkpoint of version")
        command.press_ctrl_c()
        command.wait_for_line("SIGINT: the run ends at the next step boundary")
        command.press_ctrl_c()
        assert command.wait_for_end() == 130, command.output
        assert "the same command goes on from" in command.output
        assert "Traceback" not in command.output
    assert run.newest() >= 5


def test_a_stop_before_the_first_step_leaves_what_the_same_command_starts_from(
    calibrated: Path, tmp_path: Path
) -> None:
    run = Run(tmp_path, calibrated, steps=8)
    with run.start() as command:
        command.wait_for_line("vm0 appeared")
        command.press_ctrl_c()
        assert command.wait_for_end() == 130, command.output
        assert "stopped; the same command goes on from version 0" in command.output
        assert "Traceback" not in command.output
    assert complete_versions(str(run.directory / "checkpoints")) == ()
    run.finish_from(0)
