"""``morph inject`` takes VMs of a real run: with a notice no step is lost, without one some are, and no bit changes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from manager.report.journal_reader import read_report
from morph.checkpoint.manifest import complete_versions, read_manifest
from morph.contract.profile import load_profile
from tests.system.commands import RunningMorph, morph
from tests.system.harness import uninterrupted
from tests.system.held import BEAT_S, HeldJob
from tests.waiting import START_S

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

BOUNDS = f"takeover_patience_s: 0, start_patience_s: {START_S}, heartbeat_timeout_s: {BEAT_S}"
CLUSTER = f"vms: {{num_vms: 2, keep: 2}}\npolicy: {{checkpoint_every_steps: 3, {BOUNDS}}}\n"
MANY_STEPS = 1_000_000
BY_NAME, BY_LIFETIMES = "by name, no notice", "lifetimes of 1s on average, seed 1, a notice of 1 s"


@pytest.fixture(scope="module")
def sleeping(tmp_path_factory: pytest.TempPathFactory) -> HeldJob:
    """Return the job, which sleeps for most of each step, so that fewer steps suffice while VMs take their time."""
    folder = tmp_path_factory.mktemp("sleeping")
    return HeldJob(folder / "code", folder / "gate", MANY_STEPS, step_s=0.5)


def test_a_run_whose_vms_are_injected_ends_with_undisturbed_weights(
    calibrated: Path, sleeping: HeldJob, tmp_path: Path
) -> None:
    run_dir, cluster = tmp_path / "run", tmp_path / "cluster.yaml"
    cluster.write_text(CLUSTER, encoding="utf-8")
    command = ("run", sleeping.path, "--profile", calibrated, "--cluster", cluster, "--steps", MANY_STEPS)
    with RunningMorph(*command, "--run-dir", run_dir, "--verbose", "-P", 2) as run:  # each of two VMs is needed
        run.wait_for_line("the checkpoint of version")
        with RunningMorph("inject", run_dir, "--mttp", "30d") as patient:
            vm = "tiny-gpt-1-0"
            assert f"{vm}  taken, without a notice" in morph("inject", run_dir, "--vm", vm, "--notice", "0s")
            run.wait_for_line(f"{vm} lost")
            by_lifetimes = morph("inject", run_dir, "--mttp", "1s", "--notice", "1s", "--seed", 1, "--count", 2)
            _, *taken, last = by_lifetimes.splitlines()
            assert last == "2 VMs were taken"
            patient.wait_for_line("VMs that may be taken now: ")
            assert "the run has ended" in morph("stop", run_dir)
            assert run.wait_for_end() == 75, run.output
            assert "stopped by morph stop; " in run.output  # the last VM may be lost before the newest version is saved
            assert "SIGTERM" not in run.output
            patient.wait_for_line("the run has ended")
            assert patient.wait_for_exit() == 0
    noticed = {line.split()[2] for line in taken}
    report = read_report(run_dir)
    forced = [change for change in report.morphs if vm in change.lost_workers]
    assert [(change.planned, change.injected) for change in forced] == [(False, (vm,))]
    assert {worker for change in report.morphs for worker in change.injected} <= {vm, *noticed}
    told = morph("events", run_dir)
    assert [told.count(f"{vm}: {BY_NAME}"), told.count(BY_LIFETIMES)] == [1, 2]
    assert f"{vm} lost (injected)" in told
    url = str(run_dir / "checkpoints")
    newest = read_manifest(url, complete_versions(url)[-1])
    assert newest.version <= report.version  # a stop while nothing trains may save less than was decided
    alone = uninterrupted(newest.version, tmp_path / "undisturbed", load_profile(calibrated).num_sections)
    assert {entry.unit: entry.sha256 for entry in newest.units} == alone


def test_a_noticed_vms_only_copies_are_saved_before_it_is_taken(
    calibrated: Path, sleeping: HeldJob, tmp_path: Path
) -> None:
    """A replacement comes only when the VM is gone, because two VMs are the most; no checkpoint is due by itself."""
    run_dir, cluster = tmp_path / "run", tmp_path / "cluster.yaml"
    cluster.write_text(
        "vms: {num_vms: 2, keep: 2, limits: {max_vms: 2}}\n"
        f"policy: {{checkpoint_every_steps: 1000000, {BOUNDS}, redundancy: off,\n"
        "  rules: {requests: {backoff_s: 0.5}}}\n",
        encoding="utf-8",
    )
    command = ("run", sleeping.path, "--profile", calibrated, "--cluster", cluster, "--steps", MANY_STEPS)
    vm = "tiny-gpt-1-0"
    with RunningMorph(*command, "--run-dir", run_dir, "--plain", "-P", 2) as run:
        run.wait_for_line("training  2x1  ")
        assert f"{vm}  taken, with a notice of 8 s" in morph("inject", run_dir, "--vm", vm, "--notice", "8s")
        run.wait_for_line(f"{vm} lost (injected); 2x1 -> 2x1")
        run.press_ctrl_c()
        assert run.wait_for_end() == 130, run.output
    told = morph("events", run_dir, "--verbose")
    complete = r"the checkpoint of version (\d+) is complete"
    assert re.search(complete, told[: told.index("vm_killed")]), told
    report = read_report(run_dir)
    back = re.search(r"back to version (\d+), the newest checkpoint", told)
    assert (report.steps_redone > 0) == (back is not None), told
    if back:  # a checkpoint that was under way may become complete while the loss is handled
        newest_saved = re.findall(complete, told[: back.start()])[-1]
        assert back.group(1) == newest_saved, told
        assert report.steps_redone < int(newest_saved)
    url = str(run_dir / "checkpoints")
    newest = read_manifest(url, complete_versions(url)[-1])
    assert (newest.kind, newest.version) == ("final", report.version)
    alone = uninterrupted(report.version, tmp_path / "undisturbed", load_profile(calibrated).num_sections)
    assert {entry.unit: entry.sha256 for entry in newest.units} == alone
