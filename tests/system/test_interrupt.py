"""After Ctrl-C or SIGKILL nothing is left, and the same command continues to the same result."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from manager.report.journal_reader import read_report
from morph.checkpoint.manifest import complete_versions, read_manifest, version_url
from morph.checkpoint.unit_files import read_unit
from morph.checkpoint.versions import SET_ASIDE
from morph.contract.profile import load_profile
from tests.system.commands import RunningMorph
from tests.system.harness import uninterrupted
from tests.system.held import BEAT_S, ORDER_S, HeldJob
from tests.waiting import START_S

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]

STEPS, MANY_STEPS = 18, 36
"""``MANY_STEPS`` is for a run that is held and stopped three times."""
HELD_AFTER = 7
"""Steps: enough for two checkpoints, and far fewer than remain."""
FIRST_HELD_AFTER = 5
"""Steps: enough for one checkpoint; the next one may begin only when that is complete."""
STOPS = "SIGINT: the run ends at the next step boundary"
CLUSTER = """
vms: {{num_vms: {num_vms}, launcher: {launcher}}}
policy: {{checkpoint_every_steps: 3, takeover_patience_s: {patience_s}, order_timeout_s: {order_s},
  start_patience_s: {start_s}, heartbeat_timeout_s: {beat_s}}}
"""
BOUNDS = {"order_s": ORDER_S, "start_s": START_S, "beat_s": BEAT_S}


@pytest.fixture(scope="module")
def references(calibrated: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str]]:
    """Return digests of every unit after ``STEPS`` and after ``MANY_STEPS`` uninterrupted steps."""
    folder, num_sections = tmp_path_factory.mktemp("uninterrupted"), load_profile(calibrated).num_sections
    return {steps: uninterrupted(steps, folder / str(steps), num_sections) for steps in (STEPS, MANY_STEPS)}


@pytest.fixture(scope="module")
def one_job(tmp_path_factory: pytest.TempPathFactory) -> HeldJob:
    folder = tmp_path_factory.mktemp("held")
    return HeldJob(folder / "code", folder / "gate", HELD_AFTER)


@pytest.fixture
def job(one_job: HeldJob) -> HeldJob:
    one_job.begin()
    return one_job


class Run:
    """One run directory, and the commands that work on it; its job is held only when the test says so."""

    def __init__(
        self,
        job: HeldJob,
        folder: Path,
        profile: Path,
        patience_s: float = 0.0,
        launcher: str = "processes",
        num_vms: int = 2,
        num_steps: int = STEPS,
    ) -> None:
        self.directory, self._num_steps = folder / "run", num_steps
        self.job = job
        self.job.let_go()
        self._cluster = folder / "cluster.yaml"
        self._profile, self._launcher, self._num_vms = profile, launcher, num_vms
        self.be_patient(patience_s)

    def be_patient(self, patience_s: float) -> None:
        """Set how long later commands and VMs wait for another manager."""
        cluster = CLUSTER.format(**BOUNDS, patience_s=patience_s, launcher=self._launcher, num_vms=self._num_vms)
        self._cluster.write_text(cluster, encoding="utf-8")

    def start(self) -> RunningMorph:
        return RunningMorph(
            *("run", self.job.path, "--profile", self._profile, "--cluster", self._cluster),
            *("--steps", self._num_steps, "--run-dir", self.directory, "--verbose"),
        )

    def resume(self) -> RunningMorph:
        return RunningMorph("resume", self.directory, "--verbose")

    def versions(self) -> tuple[int, ...]:
        """Return the complete checkpoints, after checking every byte of the newest."""
        url = str(self.directory / "checkpoints")
        versions = complete_versions(url)
        for version in versions[-1:]:
            manifest = read_manifest(url, version)
            for entry in manifest.units:
                read_unit(url, manifest, entry.unit)
        return versions

    def truncate(self) -> Path:
        """Damage the newest checkpoint in a way that is detected before any worker starts; return the file."""
        url = str(self.directory / "checkpoints")
        newest = complete_versions(url)[-1]
        damaged = Path(version_url(url, newest)) / read_manifest(url, newest).units[-1].file
        damaged.write_bytes(damaged.read_bytes()[:-1])
        return damaged

    def digests(self) -> dict[str, str]:
        manifest = read_manifest(str(self.directory / "checkpoints"), self.versions()[-1])
        return {entry.unit: entry.sha256 for entry in manifest.units}

    def steps(self) -> list[int]:
        return [record.step for record in read_report(self.directory).steps]


def test_a_run_that_is_stopped_and_killed_repeatedly_ends_with_equal_weights(
    calibrated: Path, job: HeldJob, tmp_path: Path, references: dict[int, dict[str, str]]
) -> None:
    """Five sessions: stopped before the first step, by Ctrl-C, by Ctrl-C twice, killed, and to the end.

    In the second session two managers are killed, and others take over without any loss: the same command, then ``morph
    resume``.
    """
    run = Run(job, tmp_path, calibrated, patience_s=200.0, num_steps=MANY_STEPS)
    with run.start() as command:
        command.wait_for_line("vm0 appeared")
        command.press_ctrl_c()
        assert command.wait_for_end() == 130, command.output
        assert "stopped; the same command continues from step 0" in command.output
        assert "Traceback" not in command.output
    assert run.versions() == ()

    num_shapes = len(read_report(run.directory).shapes)
    run.job.hold()
    with run.start() as first:
        first.wait_for_line("the checkpoint of version")
        assert first.ports() != set()
        first.kill()
        with run.start() as second:
            assert "2 VMs of this run live: going on with them" in second.wait_for_line("of this run live")
            assert "2 workers live" in second.wait_for_line("a new manager took over")
            second.kill()
            with run.resume() as command:
                assert "2 VMs of this run live: going on with them" in command.wait_for_line("of this run live")
                assert "2 workers live" in command.wait_for_line("a new manager took over")
                command.press_ctrl_c()
                command.wait_for_line(STOPS)
                run.job.let_go()
                told = command.wait_for_line("stopped; the same command continues from step")
                assert command.wait_for_exit() == 130, command.output
                assert command.ports() == set()
                stopped = run.versions()[-1]
                assert 3 <= stopped < MANY_STEPS
                assert f"continues from step {stopped}" in told
                assert "Traceback" not in command.output
        assert first.wait_for_end() == -signal.SIGKILL  # and nothing of it is left
        assert first.ports() == set()
    report = read_report(run.directory)
    assert report.version == stopped  # no decided step is lost
    assert len(report.shapes) == num_shapes + 1
    assert run.steps() == list(range(stopped))

    run.job.hold()
    with run.resume() as command:
        command.wait_for_line("the checkpoint of version")
        command.press_ctrl_c()
        command.wait_for_line(STOPS)
        command.press_ctrl_c()
        assert command.wait_for_end() == 130, command.output
        assert "the same command continues from" in command.output
        assert "Traceback" not in command.output
    stopped_again = run.versions()[-1]
    assert stopped < stopped_again < MANY_STEPS

    run.be_patient(0.0)
    run.job.allow(FIRST_HELD_AFTER)
    with run.start() as command:  # its manager dies, and without patience everything with it
        for most_steps in (FIRST_HELD_AFTER, HELD_AFTER):
            run.job.allow(most_steps)
            command.wait_for_line("the checkpoint of version")
        command.kill()
        assert command.wait_for_end() == -signal.SIGKILL
    run.job.let_go()
    before, newest = run.versions()[-2:]
    assert stopped_again < newest
    done = run.steps()
    damaged = run.truncate()

    with run.resume() as command:
        told = command.wait_for_line("is skipped")
        assert damaged.name in told
        assert f"version {newest} is skipped, and version {before} is the newest whole version" in told
        command.wait_for_line("finished")
        assert command.wait_for_end() == 0, command.output
        assert "Traceback" not in command.output
    assert (damaged.parent / SET_ASIDE).exists() or not damaged.parent.exists()  # until its turn comes to be deleted
    report = read_report(run.directory)
    assert (report.outcome, report.version) == ("finished", MANY_STEPS)
    began = {shape.first_version for shape in report.shapes}
    assert {0, stopped, stopped_again, before} <= began, report.shapes
    assert set(done) == set(range(max(done) + 1))
    assert run.steps() == [*done, *range(before, MANY_STEPS)]
    assert run.digests() == references[MANY_STEPS]


def test_a_run_continues_elsewhere_from_its_checkpoints_and_its_job_alone(
    calibrated: Path, job: HeldJob, tmp_path: Path, references: dict[int, dict[str, str]]
) -> None:
    lost, url = tmp_path / "lost", tmp_path / "storage"
    lost.mkdir()
    shutil.copy(calibrated, lost / "profile.json")
    cluster = CLUSTER.format(**BOUNDS, patience_s=0.0, launcher="processes", num_vms=1)
    (lost / "cluster.yaml").write_text(cluster, encoding="utf-8")
    with RunningMorph(
        *("run", job.path, "--profile", lost / "profile.json", "--cluster", lost / "cluster.yaml", "--steps", STEPS),
        *("--run-dir", lost / "run", "--checkpoint-url", url, "--verbose"),
    ) as command:
        command.wait_for_line("the checkpoint of version")
        command.kill()
        assert command.wait_for_end() == -signal.SIGKILL
    job.let_go()
    shutil.rmtree(lost)
    version = complete_versions(str(url))[-1]
    elsewhere = url.rename(tmp_path / "elsewhere")
    with RunningMorph(
        *("resume", f"file://{elsewhere}", "--job", job.path, "--run-dir", tmp_path / "run", "--verbose")
    ) as command:
        command.wait_for_line(f"goes on in {tmp_path / 'run'}, from version {version}")
        command.wait_for_line("finished")
        assert command.wait_for_end() == 0, command.output
        assert "Traceback" not in command.output
    report = read_report(tmp_path / "run")
    assert (report.outcome, report.version) == ("finished", STEPS)
    assert [record.step for record in report.steps] == list(range(version, STEPS))
    assert {entry.unit: entry.sha256 for entry in read_manifest(str(elsewhere), STEPS).units} == references[STEPS]


@pytest.mark.parametrize(
    "killed",
    [
        pytest.param(("gcs_server",), id="gcs"),
        pytest.param(
            ("ray::RuntimeEnvAgent", "manager.engine.on_ray.vm_host"), id="agent-and-owner", marks=pytest.mark.long
        ),
    ],
)
def test_a_run_that_lost_its_head_node_continues_on_another(
    calibrated: Path, job: HeldJob, tmp_path: Path, references: dict[int, dict[str, str]], killed: tuple[str, ...]
) -> None:
    """Its VMs, one here, are lost with the head node, and start again.

    ``killed``: processes that die with the head node, each the first of its kind.
    """
    run = Run(job, tmp_path, calibrated, launcher="ray", num_vms=1)
    run.job.hold()
    run.job.allow(FIRST_HELD_AFTER)
    with run.start() as command:
        command.wait_for_line("the checkpoint of version")
        run.job.allow(HELD_AFTER)
        for part in killed:
            command.wait_for_line("the checkpoint of version")
            os.kill((command.processes(part) or command.running(part))[0], signal.SIGKILL)
            line = command.wait_for_line("Ray's head node is gone")
            assert "the run goes on from its newest checkpoint at once" in line
        run.job.let_go()
        assert command.wait_for_line("finished") is not None
        assert command.wait_for_end() == 0, command.output
        assert "Traceback" not in command.output
    report = read_report(run.directory)
    assert (report.outcome, report.version, report.num_sessions) == ("finished", STEPS, 1 + len(killed))
    assert run.digests() == references[STEPS]
