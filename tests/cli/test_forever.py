"""Unattended runs: ``--forever``, ``morph service``, and reports about a manager that has died."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from configparser import ConfigParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manager.commands.forever import Ended, ends
from manager.commands.service import STARTS, Kind, service_text
from manager.controller.state.config import ControllerConfig
from manager.controller.state.saves import NextSave
from manager.journal.journal import Journal
from manager.report.journal_reader import read_report
from manager.report.summary import with_its_manager
from manager.run_dir import GOES_ON, LOCK, SILENT_S, GoesOn, RunDir, RunFacts, of_manager
from morph.cli.main import app
from morph.cli.reading.errors import EXIT_GOES_ON, EXIT_INPUT, EXIT_INTERRUPTED
from simulator import plan_table, synthetic_profile
from tests.waiting import BOUND_S, poll_until

FACTS = RunFacts(job="job.py:job", fingerprint="f", micro_batch_size=2, batch_size=12, num_sections=5)
PROFILE = synthetic_profile(num_sections=3)
CONFIG = ControllerConfig(
    fingerprint=PROFILE.job.fingerprint,
    plans=plan_table(PROFILE, 1),
    units={"all": (0, 1, 2)},
    unit_bytes={"all": 1},
    num_steps=10,
    expected_nodes=1,
)

LIVES = """
import os, signal, sys
from pathlib import Path
import typer
from manager.commands.forever import kept_up, leave_word
from morph.contract.errors import RunFinished, TrainingStopped
from morph.contract.waits import Backoff

folder = Path(sys.argv[1])
try:
    with kept_up(True, Backoff(0.01, 1000.0)) as begun:
        number = len(list(folder.glob("life*")))
        (folder / f"life{number}").write_text(str(begun))
        leave_word(run_dir=folder, began=True)
        if number == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 1:
            raise TrainingStopped("the share is not mounted")
        if number == 2:
            leave_word(moved=True)
            leave_word(outcome="stopped", sentence="there were never 2 ready workers within 5 s")
            raise typer.Exit(130)
        if number == 3 and sys.argv[2] == "waits":
            signal.signal(signal.SIGINT, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            print("waits", flush=True)
            signal.pause()
        if sys.argv[2] == "was finished":
            raise RunFinished("has reached that step already", source="run", value=9)
        leave_word(outcome="finished", sentence="all 9 steps are done and saved")
except typer.Exit as end:
    sys.exit(end.exit_code)
except TrainingStopped:
    sys.exit(1)
"""


def lives(folder: Path, then: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LIVES, str(folder), then]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_run_forever_continues_and_says_each_time_why(tmp_path: Path) -> None:
    with lives(tmp_path, "ends") as parent:
        _, told = parent.communicate(timeout=BOUND_S)
    assert parent.returncode == 0
    assert told.splitlines() == [
        "its manager was killed by SIGKILL; the run continues in 0.01 s (--forever)",
        "the share is not mounted; the run continues in 0.02 s (--forever)",
        "there were never 2 ready workers within 5 s; the run continues in 0.01 s (--forever)",
    ]
    known = [(tmp_path / f"life{number}").read_text() for number in range(4)]
    assert known == ["None", str(tmp_path), str(tmp_path), str(tmp_path)]
    assert not (tmp_path / GOES_ON).exists()


def test_a_finished_run_that_is_started_again_has_ended_well(tmp_path: Path) -> None:
    with lives(tmp_path, "was finished") as parent:
        _, told = parent.communicate(timeout=BOUND_S)
    assert parent.returncode == 0
    assert told.splitlines()[-1] == "the run is finished: run has 9 steps"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_manager_and_is_the_end_even_if_the_manager_dies_of_it(
    tmp_path: Path, number: signal.Signals
) -> None:
    with lives(tmp_path, "waits") as parent:
        assert parent.stdout.readline() == "waits\n"
        parent.send_signal(number)
        parent.communicate(timeout=BOUND_S)
    assert parent.returncode == EXIT_INTERRUPTED
    assert not (tmp_path / "life4").exists()


@pytest.mark.parametrize(
    ("ended", "code", "begun", "is_end"),
    [
        (Ended(outcome="finished", sentence="all steps are saved"), 0, True, True),
        (Ended(outcome="stopped", sentence="SIGTERM; version 4 is saved"), EXIT_INTERRUPTED, True, True),
        (Ended(outcome="stopped", sentence="stopped by morph stop; version 4 is saved"), EXIT_GOES_ON, True, True),
        (Ended(outcome="stopped", sentence="24 hours: 2 are needed", at_limit=True), 130, True, True),
        (Ended(outcome="failed", sentence="model.py: cannot find vms.limits.txt"), 1, True, False),
        (Ended(outcome="error", sentence="cluster.yaml: vms.num: is not known"), EXIT_INPUT, False, True),
        (Ended(outcome="error", sentence="profile.json: cannot be read"), EXIT_INPUT, True, False),
        (Ended(outcome="failed", sentence="vm3 could not be set up"), 1, True, False),
        (Ended(outcome="taken", sentence="the checkpoints were taken over"), 1, True, True),
        (Ended(), 1, False, False),
    ],
)
def test_only_the_user_a_limit_or_a_run_that_never_began_end_it(
    ended: Ended, code: int, begun: bool, is_end: bool
) -> None:
    assert ends(ended, code, asked=False, has_begun=begun) is is_end
    assert ends(ended, code, asked=True, has_begun=begun)


def test_status_says_that_the_manager_is_gone_or_silent_here_and_elsewhere(tmp_path: Path) -> None:
    path, lock = tmp_path / "run", tmp_path / "run" / LOCK
    now_s = time.time()

    def told() -> str:
        shown = CliRunner().invoke(app, ["status", str(path)])
        assert shown.exit_code == 0
        return shown.stdout.splitlines()[0]

    with RunDir(path, FACTS):
        with Journal.open(path / "journal.sqlite") as journal:
            journal.append_config(1000.0, CONFIG)
        assert "running" in told()
        due = NextSave(due_s=now_s, interval_s=6.0, kind="insurance", why="w")
        managed = read_report(path).model_copy(update={"next_save": due})
        assert with_its_manager(managed, path).next_save == due
        os.utime(lock, (now_s - 95, now_s - 95))
        assert f"unmanaged (its manager, process {os.getpid()}, has given no sign of life for 9" in told()
        (path / GOES_ON).write_text(GoesOn(sentence="x", again_s=now_s).model_dump_json())
        assert "no sign of life" in told(), "a manager lives, whatever was waited for before"
        (path / GOES_ON).unlink()
    assert "unmanaged (no process manages it; the last entry of its journal is of 1970-01-01 00:16:40 UTC" in told()
    assert with_its_manager(managed, path).next_save is None, "nobody will save"
    (path / GOES_ON).write_text(GoesOn(sentence="it was killed", again_s=now_s).model_dump_json())
    assert "unmanaged (it was killed; it continues at" in told()
    (path / GOES_ON).write_text(GoesOn(sentence="it was killed", again_s=now_s - 2 * SILENT_S).model_dump_json())
    lock.write_text(f"4711\n{socket.gethostname()}\n")  # a killed manager leaves the file like this
    assert "its manager, process 4711, is gone; the last entry" in told()
    assert f"to go on: morph resume {path}" in told()
    lock.write_text("4711\nanother\n")
    assert of_manager(path, time.time()) == "", "its lock is not seen here, but it has just given a sign of life"
    os.utime(lock, (now_s - 95, now_s - 95))
    assert "its manager, process 4711 on another, is gone" in told()


def test_a_unit_of_systemd_starts_the_run_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with RunDir(tmp_path / "a 100% run", FACTS):
        pass
    shown = CliRunner().invoke(app, ["service", "a 100% run"])
    assert shown.exit_code == 0
    unit = ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(shown.stdout)
    started = shlex.split(unit["Service"]["ExecStart"].replace("%%", "%"))
    assert started[-4:] == ["resume", str(tmp_path / "a 100% run"), "--plain", "--forever"]
    assert unit["Service"]["WorkingDirectory"] == str(tmp_path)
    assert unit["Service"]["KillMode"] == "process", "else the VMs would be killed with a manager that dies"
    assert CliRunner().invoke(app, ["service", "elsewhere"]).exit_code == EXIT_INPUT


def test_names_in_a_script_of_slurm_are_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "o'clock #2 50%j"
    folder.mkdir()
    monkeypatch.chdir(folder)
    script = service_text(Kind.SLURM, "a b\\c #d", folder / "run", ["true"])
    given = dict(
        shlex.split(line)[1].partition("=")[::2] for line in script.splitlines() if line.startswith("#SBATCH --")
    )
    slashed = {name: value.replace("\\\\", "\\") for name, value in given.items()}  # these are sbatch's own escapes
    assert slashed["--job-name"] == "morph-a b\\c #d"
    assert slashed["--output"] == f"{folder}/morph-a b\\c #d-%j.log".replace("50%j", "50%%j")
    assert f"cd {shlex.quote(str(folder))} ||" in script


def with_stubs(folder: Path) -> dict[str, str]:
    """Return an environment whose scontrol and sleep only note what they were asked."""
    for name, noted in (("scontrol", "requeued"), ("sleep", "paused")):
        (folder / name).write_text(f'#!/bin/sh\necho "$@" >> {folder}/{noted}\n')
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "12"}


def test_a_job_of_slurm_that_fails_is_queued_again_after_growing_pauses_up_to_a_limit(tmp_path: Path) -> None:
    known = with_stubs(tmp_path)
    (tmp_path / "manager").write_text("exit 1")
    script = tmp_path / "job.sbatch"
    script.write_text(service_text(Kind.SLURM, "tiny", tmp_path, ["sh", str(tmp_path / "manager")]))

    def paused() -> list[int]:
        for path in (found := [tmp_path / name for name in ("requeued", "paused")]):
            path.unlink(missing_ok=True)
        for _ in range(STARTS):
            assert subprocess.run(["bash", str(script)], env=known, check=False, timeout=BOUND_S).returncode == 1
        assert found[0].read_text() == "requeue 12\n" * (STARTS - 1)
        return [int(line) for line in found[1].read_text().splitlines()]

    pauses = [30, 60, 120, 240, 480, 960, 1920] + [3600] * (STARTS - 8)
    assert paused() == pauses
    assert paused() == pauses, "its user started it anew"
    unit = service_text(Kind.SYSTEMD, "tiny", tmp_path, ["true"])
    for line in (
        *("RestartSec=30", "RestartMaxDelaySec=3600", f"StartLimitBurst={STARTS}", "StartLimitIntervalSec=86400"),
        *("RestartPreventExitStatus=2", "SuccessExitStatus=75 130", "Restart=on-failure"),
    ):
        assert f"\n{line}\n" in unit


@pytest.mark.parametrize(
    ("signals", "code", "requeued"),
    [(["USR2"], 130, True), (["TERM"], 130, False), ([], 1, True), ([], 0, False), ([], EXIT_INPUT, False)],
)
def test_a_job_of_slurm_stops_before_its_time_and_is_queued_again(
    tmp_path: Path, signals: list[str], code: int, requeued: bool
) -> None:
    stops = f"trap 'exit 130' TERM; touch {tmp_path}/ready; while :; do /bin/sleep 0.05; done"
    command = ["sh", "-c", stops if signals else f"exit {code}"]
    script = tmp_path / "job.sbatch"
    script.write_text(service_text(Kind.SLURM, "tiny", tmp_path, command))
    known = with_stubs(tmp_path)
    with subprocess.Popen(["bash", str(script)], env=known) as job:
        if signals:
            poll_until(lambda: (tmp_path / "ready").exists(), "the manager's start")
        for name in signals:
            job.send_signal(getattr(signal, f"SIG{name}"))
        assert job.wait(BOUND_S) == code
    assert (tmp_path / "requeued").exists() is requeued
    assert not requeued or (tmp_path / "requeued").read_text() == "requeue 12\n"
