"""A command in a terminal of its own, which can be inspected: sockets, environments, files, output."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from types import TracebackType

import psutil

from manager.host.processes import wait_gone
from tests.system.commands import BOUND_S, LINE_TIMEOUT_S, ROOT, environment_of_commands
from tests.system.exposure import RECORDED, Listening, recorded, shown_by


def _as_in_a_terminal() -> None:
    """Take the terminal, and hear its hang-up even if the tests were started with ``nohup``."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class WatchedMorph:
    """A Morph command with a controlling terminal; the secrets that it makes are recorded for the test.

    It is a context manager that leaves none of the command's processes.
    """

    def __init__(self, secrets_path: Path, *arguments: object) -> None:
        self._secrets_path = secrets_path
        self._terminal, inside = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-c", RECORDED, str(secrets_path), *map(str, arguments)],
            cwd=ROOT,
            env=environment_of_commands(),
            stdin=inside,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
            preexec_fn=_as_in_a_terminal,
        )
        os.close(inside)
        self._wake, self._woken = os.pipe()[::-1]
        self._output = b""
        self._more = threading.Condition()
        self._ended = False
        self._family: dict[int, psutil.Process] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> WatchedMorph:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.family():
            if process.is_running():
                process.kill()
        self._process.wait(BOUND_S)
        self.close_terminal()

    @property
    def output(self) -> str:
        """Everything that it showed so far."""
        return self._output.decode(errors="replace")

    @property
    def secrets(self) -> list[str]:
        return recorded(self._secrets_path)

    def wait_for(self, part: str, timeout_s: float = LINE_TIMEOUT_S) -> None:
        """Block until the output contains ``part``."""
        with self._more:
            self._more.wait_for(lambda: self._ended or part in self.output, timeout_s)
        assert part in self.output, self.output

    def family(self) -> list[psutil.Process]:
        """The command and every process that there ever was below it."""
        try:
            top = psutil.Process(self._process.pid)
            for process in (top, *top.children(recursive=True)):
                self._family.setdefault(process.pid, process)
        except psutil.NoSuchProcess:
            pass
        return list(self._family.values())

    def listening(self) -> frozenset[Listening]:
        return shown_by(self.family()).listening

    def close_terminal(self) -> None:
        """Send SIGHUP to the processes of the session, as when the window is closed."""
        if self._reader.is_alive() and self._wake >= 0:
            os.write(self._wake, b"x")  # a terminal that somebody reads stays open
            self._reader.join(BOUND_S)
        for descriptor in (self._terminal, self._wake, self._woken):
            if descriptor >= 0:
                os.close(descriptor)
        self._terminal = self._wake = self._woken = -1

    def wait_for_end(self) -> int:
        """Return the exit code once nothing of the command is left."""
        family = self.family()
        until_s = time.monotonic() + 2 * BOUND_S
        code = self._process.wait(2 * BOUND_S)
        assert wait_gone(family[1:], until_s - time.monotonic()) == [], self.output
        return code

    def _read(self) -> None:
        chunk = b"-"
        while chunk:
            ready, _, _ = select.select([self._terminal, self._woken], [], [])
            try:
                chunk = os.read(self._terminal, 65536) if self._terminal in ready else b""
            except OSError:  # no process has the terminal any more
                chunk = b""
            with self._more:
                self._output += chunk
                self._ended = not chunk
                self._more.notify_all()
