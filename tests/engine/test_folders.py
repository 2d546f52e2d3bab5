"""Temporary files of killed processes, and their removal."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from manager.host import folders
from manager.host.folders import LOCK, OWN_SOCKET, RAYS_SOCKET, make_folder, remove, sweep
from manager.host.processes import wait_gone
from morph.contract.errors import ConfigError
from tests.system.commands import COMMAND, ROOT
from tests.waiting import BOUND_S

MANAGER = """
import subprocess, sys
from manager.host.folders import holding, make_folder
folder = make_folder()
(folder / "token").write_text("secret")
owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=0, pass_fds=holding(folder / "control_socket"))
print(folder, owner.pid, flush=True)
input()
"""


class Run:
    """A manager with its folder, and the process that owns its VMs; both do nothing."""

    def __init__(self, temporary: Path, ending: ExitStack) -> None:
        environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
        self.manager = subprocess.Popen(
            [sys.executable, "-c", MANAGER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        ending.callback(self.manager.wait, BOUND_S)
        ending.callback(self.manager.kill)
        assert self.manager.stdout is not None
        ending.callback(self.manager.stdin.close)  # this ends the owner
        ending.callback(self.manager.stdout.close)
        folder, owner = self.manager.stdout.readline().split()
        self.folder, self.owner = Path(folder), int(owner)

    def kill(self, *pids: int) -> None:
        processes = [psutil.Process(pid) for pid in pids]
        for process in processes:
            process.send_signal(signal.SIGKILL)
        self.manager.wait(BOUND_S)
        assert wait_gone(processes, BOUND_S) == []


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with ExitStack() as ending:
        yield Run(tmp_path, ending)


@pytest.fixture
def long_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for temporary files with a name as long as those of batch systems."""
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.mark.parametrize("name", [OWN_SOCKET, RAYS_SOCKET])
def test_sockets_work_however_long_the_temporary_folders_name_is(long_name: Path, name: str) -> None:
    folder = make_folder(name)
    try:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
        assert list(long_name.iterdir()) == []
        sweep()
        assert path.exists(), "it is held"
        os.close(folders._held.pop(folder))
        sweep()
        assert not folder.exists()
    finally:
        remove(folder)


def test_a_name_too_long_for_sockets_is_refused_without_another_folder(
    long_name: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make_folder().parent == long_name
    monkeypatch.setattr(folders, "_SHORT", ())
    with pytest.raises(ConfigError, match=r"TMPDIR: sockets cannot lie below it.*; allowed: .* at most 77 bytes"):
        make_folder(OWN_SOCKET)


def test_a_folder_stays_while_the_manager_or_its_vms_owner_lives(run: Run) -> None:
    sweep()
    assert (run.folder / "token").is_file()
    run.kill(run.manager.pid)
    sweep()
    assert (run.folder / "token").is_file(), "another manager may take over"


def test_the_next_command_removes_what_processes_killed_together_left(run: Run) -> None:
    run.kill(run.owner, run.manager.pid)
    environment = {**os.environ, "TMPDIR": str(run.folder.parent), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*COMMAND, "status", "nowhere"], env=environment, capture_output=True, text=True, timeout=BOUND_S
    )
    assert "nowhere" in done.stderr
    assert not run.folder.exists()


def test_a_folder_written_to_during_removal_is_removed_by_the_next_command(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's agents live and log a moment longer than their node."""
    run.kill(run.owner, run.manager.pid)
    (run.folder / "ray").mkdir()
    rmtree = shutil.rmtree

    def write_then_remove(path: Path, ignore_errors: bool) -> None:
        rmtree(path, ignore_errors=ignore_errors)
        (run.folder / "late.log").write_text("dying")

    monkeypatch.setattr(shutil, "rmtree", write_then_remove)
    sweep()
    assert (run.folder / "late.log").exists()
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    sweep()
    assert not run.folder.exists()


def test_a_folder_stays_while_a_process_has_its_files_open(run: Run) -> None:
    run.kill(run.owner, run.manager.pid)
    log = run.folder / "agent.log"
    code = "import sys; out = open(sys.argv[1], 'w'); print(flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, str(log)], **pipes) as agent:  # type: ignore[call-overload]
        assert agent.stdout.read(1)
        sweep()
        assert log.is_file()
        agent.kill()
    sweep()
    assert not run.folder.exists()


def test_agents_of_ray_that_outlive_a_dead_run_s_nodes_are_ended(run: Run) -> None:
    run.kill(run.owner, run.manager.pid)
    with (run.folder / "agent.log").open("w") as log:
        agent = subprocess.Popen(["ray::DashboardAgent", "1000"], executable=shutil.which("sleep"), stdout=log)
    try:
        sweep()
        assert agent.wait(BOUND_S) == -signal.SIGKILL
        assert not run.folder.exists()
    finally:
        agent.kill()


def test_agents_of_a_run_whose_manager_may_return_live_on(run: Run) -> None:
    run.kill(run.manager.pid)
    with (run.folder / "agent.log").open("w") as log:
        agent = subprocess.Popen(["ray::DashboardAgent", "1000"], executable=shutil.which("sleep"), stdout=log)
    try:
        sweep()
        assert agent.poll() is None
    finally:
        agent.kill()
        agent.wait(BOUND_S)


def test_folders_that_may_belong_to_a_living_run_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    elsewhere = tmp_path / "elsewhere"
    for folder in (tmp_path / "morph-of-another-tool", tmp_path / "other-1", elsewhere):
        folder.mkdir()
    (tmp_path / "morph-file").touch()
    (tmp_path / "other-1" / LOCK).touch()
    (elsewhere / LOCK).touch()
    (tmp_path / "morph-link").symlink_to(elsewhere)
    before = sorted(tmp_path.rglob("*"))
    sweep()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder to somebody else")
def test_the_folder_of_another_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / "morph-theirs"
    folder.mkdir()
    (folder / LOCK).touch()
    os.chown(folder, 12345, 12345)
    sweep()
    assert (folder / LOCK).is_file()


def test_control_sockets_are_in_a_folder_that_only_their_user_can_enter() -> None:
    before = os.umask(0)
    try:
        folder = make_folder(OWN_SOCKET)
    finally:
        os.umask(before)
    try:
        assert (stat.S_IMODE(folder.stat().st_mode), folder.stat().st_uid) == (0o700, os.geteuid())
    finally:
        remove(folder)
