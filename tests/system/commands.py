"""Morph's commands as processes of their own, as a user starts them."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil
import pytest
from filelock import FileLock

from manager.host.folders import PREFIX
from manager.host.processes import lives, wait_gone
from tests.forked_scripts import Nursery
from tests.system.exposure import RECORDED
from tests.waiting import BOUND_S, PATIENCE

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "morph.cli.main")
KEPT = ("RAY_USAGE_STATS_ENABLED",)
COMMAND_TIMEOUT_S = 500.0 * PATIENCE
LINE_TIMEOUT_S = 500.0 * PATIENCE
PROCESS_HOST = "manager.engine.on_processes.process_host"
NURSERY: Nursery | None = None
"""Forks the commands that tests observe while they run; set during a test."""


def ended(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with these variables in addition."""
    command, variables = [*COMMAND, *map(str, arguments)], environment_of_commands() | environment
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)


def morph(*arguments: object, code: int = 0) -> str:
    """Run a command to its end and return what it wrote to standard output."""
    done = ended(*arguments)
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout


def of_all_workers(factory: pytest.TempPathFactory) -> Path:
    """Return the temporary folder that all processes running these tests share."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def calibrated_once(folder: Path, *job_and_options: object) -> Path:
    """Return a job's profile in this folder; the first of all processes that share the folder measures it."""
    folder.mkdir(exist_ok=True)
    path = folder / "profile.json"
    with FileLock(folder.with_suffix(".lock"), timeout=COMMAND_TIMEOUT_S):
        if not path.exists():
            output = morph("calibrate", *job_and_options, "-o", path)
            assert f"written: {path}" in output.replace("\n", "")
    return path


def environment_of_commands() -> dict[str, str]:
    """Return the environment of a command of this tree, without variables of a cluster of this process."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_") or name in KEPT}
    return {**own, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"}


class RunningMorph:
    """A command in a session of its own, as in a terminal; a context manager that leaves none of its processes.

    ``secrets_path``: a file to which the command's own process writes every secret that it makes. ``walks_path``: see
    ``tests.system.traced``.
    """

    def __init__(self, *arguments: object, secrets_path: Path | None = None, walks_path: Path | None = None) -> None:
        program = COMMAND if secrets_path is None else (sys.executable, "-c", RECORDED, str(secrets_path))
        if walks_path is not None:
            program = (sys.executable, "-m", "tests.system.traced", str(walks_path))
        assert NURSERY is not None
        reads, writes = os.pipe()
        with Path(os.devnull).open("rb") as nothing:
            self._process = NURSERY.popen(
                [*program, *map(str, arguments)],
                cwd=ROOT,
                env=environment_of_commands(),
                files={0: nothing.fileno(), 1: writes, 2: writes},
                forks_hosts=True,
            )
        os.close(writes)
        self._output = os.fdopen(reads, encoding="utf-8")
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._seen: list[str] = []
        self._family: dict[int, psutil.Process] = {}
        self._directory: Path | None = None
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> RunningMorph:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._record()
        self._process.kill()
        for process in self._family.values():
            _kill_with_children(process)
        self._process.wait(BOUND_S)
        wait_gone(self._family.values(), BOUND_S)
        if self._directory is not None:  # it is there only if the test failed, because its owner was killed
            shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def output(self) -> str:
        """Everything that it wrote so far, standard error included."""
        return "\n".join(self._seen)

    def wait_for_line(self, part: str) -> str:
        until_s = time.monotonic() + LINE_TIMEOUT_S
        while (line := self._next(until_s, part)) is not None:
            self._record()
            if part in line:
                return line
        raise AssertionError(f"ended without a line with {part!r}:\n{self.output}")

    def wait_for_lines(self, *parts: str) -> None:
        """Block until each of these is in a line, which may have come before, in whatever order."""
        for part in parts:
            if not any(part in line for line in self._seen):
                self.wait_for_line(part)

    def press_ctrl_c(self) -> None:
        """Send SIGINT to the whole foreground process group, like a terminal."""
        os.killpg(self._process.pid, signal.SIGINT)

    def family(self) -> list[psutil.Process]:
        """Return every living process below the command."""
        self._record()
        return [process for process in self._family.values() if lives(process)]

    def kill(self) -> None:
        """Send SIGKILL only to the command's own process."""
        self._process.kill()

    def wait_for_exit(self) -> int:
        """Return the exit code, without checking for processes that are left."""
        return self._process.wait(BOUND_S)

    def processes(self, name: str) -> list[int]:
        self._record()
        return [pid for pid, process in self._family.items() if lives(process) and process.name() == name]

    def running(self, part: str) -> list[int]:
        """Return ids of its processes whose command line contains this, in the order of their start."""
        self._record()
        found: list[tuple[float, int]] = []
        for process in self._family.values():
            with suppress(psutil.NoSuchProcess):  # also if it has ended but was not reaped
                if any(part in word for word in process.cmdline()):
                    found.append((process.create_time(), process.pid))
        return [pid for _, pid in sorted(found)]

    def wait_for_end(self) -> int:
        """Return the exit code; check that no process, directory or listening port of the command is left."""
        until_s = time.monotonic() + BOUND_S
        code = self._process.wait(BOUND_S)
        left = wait_gone(self._family.values(), until_s - time.monotonic())
        assert left == [], f"left behind: {left}\n{self.output}"
        while self._next(until_s, "the end of its output") is not None:
            pass
        assert self._directory is not None
        assert _processes_of(self._directory) == []
        assert not self._directory.exists()
        return code

    def ports(self) -> set[int]:
        self._record()
        connections = psutil.net_connections(kind="tcp")
        listening = [found for found in connections if found.status == "LISTEN" and found.pid in self._family]
        return {found.laddr.port for found in listening if found.laddr}

    def _next(self, until_s: float, what: str) -> str | None:
        try:
            line = self._lines.get(timeout=max(0.0, until_s - time.monotonic()))
        except queue.Empty:
            raise AssertionError(f"waited {LINE_TIMEOUT_S:g} s for {what!r}:\n{self.output}") from None
        if line is not None:
            self._seen.append(line)
        return line

    def _read(self) -> None:
        with self._output as lines:
            for line in lines:
                self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def _record(self) -> None:
        """Record every process below the command, and the directory that they share."""
        try:
            processes = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        for process in processes:
            self._family.setdefault(process.pid, process)
            if self._directory is None and (directory := _directory_of(process)):
                self._directory = Path(directory)


def _kill_with_children(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        for one in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                one.kill()


def _directory_of(process: psutil.Process) -> str | None:
    """Return the folder of a process's manager, which all inherit from the manager's first child."""
    try:
        words = process.cmdline()
        if PROCESS_HOST in words:
            return next((word for word in words if Path(word).name.startswith(PREFIX)), None)
        return process.environ().get("RAY_TMPDIR")
    except psutil.Error:
        return None


def _processes_of(directory: Path) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if _directory_of(process) == str(directory)]
