"""Finds every process of one run from outside: those started with its environment, and their descendants."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress

import psutil

from manager.host.processes import lives

MARK = "MORPH_CHAOS_RUN"


class Family:
    """The processes of a run that was started with ``MARK`` set to ``mark``; other processes are never signalled."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._known: dict[int, psutil.Process] = {}
        self._strangers = set(psutil.process_iter())
        """Processes that existed before; inspecting them repeatedly would take longer than everything else here."""

    def look(self) -> list[psutil.Process]:
        """Return every living process of the run. Call this often: an orphan is known by the parent it had."""
        found = {process.pid: process for process in psutil.process_iter() if process not in self._strangers}
        for process in found.values():
            if process.pid not in self._known and self._is_marked(process):
                self._known[process.pid] = process
        for process in list(found.values()):
            with suppress(psutil.Error):
                parent = self._known.get(process.ppid())
                if parent is not None and parent == found.get(parent.pid):
                    self._known.setdefault(process.pid, process)
        self._known = {pid: process for pid, process in self._known.items() if lives(process)}
        return list(self._known.values())

    def named(self, *parts: str) -> list[psutil.Process]:
        """Return the processes whose command line contains all of these texts."""
        return [process for process in self.look() if all(part in line_of(process) for part in parts)]

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self._mark
        except psutil.Error:
            return False


def send(process: psutil.Process, number: signal.Signals) -> bool:
    """Signal a process unless it is gone or its id was reused; return whether it existed."""
    try:
        process.send_signal(number)
    except psutil.Error:
        return False
    return True


def end_all(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        send(process, signal.SIGKILL)


def line_of(process: psutil.Process) -> str:
    """Return a process's command line; empty if it has just ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def own_mark() -> str:
    """Return a mark that no other run on this machine has."""
    return f"{os.getpid()}-{os.urandom(4).hex()}"
