"""Modules that run in forks of a process that has loaded torch, which takes each new process seconds.

They replace ``subprocess`` where a test does not examine how such a process starts; other tests do that. Each is a
process of ``multiprocessing``. ``tests/forked_scripts.py`` is for programs that must look like a user's own in process
lists: by command line, children and files.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from tests.forked_scripts import begin
from tests.members import FORKS
from tests.waiting import BOUND_S


class Descriptors:
    """File descriptors of this process that it passes on to a process that it starts."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def __getstate__(self) -> Any:
        return [reduction.DupFd(number) for number in self.numbers]

    def __setstate__(self, state: Any) -> None:
        self.numbers = tuple(one.detach() for one in state)


class ForkedModule:
    """The part of ``Popen`` that tests need for ``python -m MODULE``, or ``-c``: pipes, passed descriptors, its end."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: IO[bytes] | int,
        stdout: IO[bytes] | int | None = None,
        stderr: IO[bytes] | int | None = None,
        pass_fds: Sequence[int] = (),
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
    ) -> None:
        self.returncode: int | None = None
        self.stdin, self.stdout, self.stderr = None, None, None
        theirs: list[int] = []
        for number, stream in enumerate((stdin, stdout, stderr)):
            if stream == subprocess.PIPE:
                read, write = os.pipe()
                theirs.append(read if number == 0 else write)
                ours = os.fdopen(write, "wb") if number == 0 else os.fdopen(read, "rb")
                setattr(self, ("stdin", "stdout", "stderr")[number], ours)
            elif stream == subprocess.DEVNULL:
                theirs.append(os.open(os.devnull, os.O_RDWR))
            else:
                file = number if stream is None else stream
                theirs.append(os.dup(file if isinstance(file, int) else file.fileno()))
        passed = Descriptors(*theirs, *pass_fds)
        arguments = (command[1:], (0, 1, 2, *pass_fds), passed, dict(env or os.environ), cwd, start_new_session)
        self._process = FORKS.Process(target=_run, args=arguments, daemon=True)
        self._process.start()
        for descriptor in theirs:
            os.close(descriptor)
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def kill(self) -> None:
        if self.poll() is None:
            self._process.kill()

    def terminate(self) -> None:
        if self.poll() is None:
            self._process.terminate()

    def poll(self) -> int | None:
        if self.returncode is None and (code := self._process.exitcode) is not None:
            self.returncode = code
            self._process.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("a module", timeout or 0.0)
        return code


def run_python(*arguments: str, cwd: Path | None = None, timeout: float = BOUND_S) -> tuple[int, str, str]:
    """Run ``python ARGUMENTS``, ``-m`` or ``-c``, to its end; return its exit code, and its output on both streams."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        command = [sys.executable, *arguments]
        code = ForkedModule(command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, cwd=cwd).wait(timeout)
        for file in (output, errors):
            file.seek(0)
        return code, output.read().decode(), errors.read().decode()


SUBPROCESS = SimpleNamespace(
    Popen=ForkedModule,
    PIPE=subprocess.PIPE,
    DEVNULL=subprocess.DEVNULL,
    TimeoutExpired=subprocess.TimeoutExpired,
)
"""Replaces the module ``subprocess``."""


def _run(
    command: Sequence[str],
    wanted: Sequence[int],
    passed: Descriptors,
    environment: Mapping[str, str],
    cwd: Path | None,
    start_new_session: bool,
) -> None:
    """Act as ``python`` with such a command; passed descriptors get the numbers in ``wanted``."""
    if start_new_session:
        os.setsid()
    if cwd is not None:
        os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    aside = [fcntl.fcntl(number, fcntl.F_DUPFD, max(wanted) + 1) for number in passed.numbers]
    for number in passed.numbers:
        os.close(number)
    for number, descriptor in zip(wanted, aside, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = os.fdopen(0, closefd=False)
    begin(command)
