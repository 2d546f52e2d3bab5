"""Hosts that the static provider reaches through a stand-in for ssh; each has its own home and address."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path

import psutil

from manager.host.processes import lives
from tests.waiting import BOUND_S

SSH = """#!/bin/sh
# arguments: options, --, host, remote line
while [ "$1" != -- ]; do shift; done
HOME="$MORPH_TEST_HOSTS/$2"; export HOME; mkdir -p "$HOME"; cd "$HOME"
unset RAY_TMPDIR RAY_AUTH_MODE RAY_AUTH_TOKEN_PATH
exec sh -c "$3"
"""
TEMPORARY = "--temp-dir=/tmp/morph-"


class Hosts:
    """Some hosts; a node on one is a process group of its own, as over ssh."""

    def __init__(self, directory: Path, number: int, num_gpus: int = 1) -> None:
        self.directory, self._seen = directory, dict[int, psutil.Process]()
        self._temporary: set[str] = set()
        directory.mkdir()
        program = directory / "bin" / "ssh"
        program.parent.mkdir()
        program.write_text(SSH, encoding="utf-8")
        program.chmod(0o755)
        each = f"num_gpus: {num_gpus}"
        entries = [f"  - {{address: h{index}, node_address: 127.0.0.{11 + index}, {each}}}" for index in range(number)]
        self.file = directory / "hosts.yaml"
        self.file.write_text("\n".join(["usd_per_h: 0.5", "hosts:", *entries, ""]), encoding="utf-8")

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables with which a command reaches them."""
        path = f"{self.directory / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return {"PATH": path, "MORPH_TEST_HOSTS": str(self.directory)}

    def nodes(self) -> dict[str, int]:
        """Return the nodes that were started and have not ended, with their process groups."""
        found = {}
        for path in self.directory.glob("h*/.morph/nodes/*/pid"):
            with contextlib.suppress(OSError, ValueError):
                found[path.parent.name] = int(path.read_text())
        return found

    def note(self) -> dict[str, int]:
        """Record every process of every node; return the nodes."""
        nodes = self.nodes()
        for pid in nodes.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                root = psutil.Process(pid)
                self._seen |= {process.pid: process for process in (root, *root.children(recursive=True))}
        for process in self._seen.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                arguments = [part for part in process.cmdline() if part.startswith(TEMPORARY)]
                self._temporary |= {part.partition("=")[2] for part in arguments}
        return nodes

    def temporary(self) -> list[Path]:
        """Return existing folders that nodes made outside their own ones."""
        return [path for path in map(Path, sorted(self._temporary)) if path.exists()]

    def temporary_of(self, node: str) -> set[Path]:
        """Return the folders that a living node made outside its own."""
        lines: list[str] = []
        for process in self.processes(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                lines += process.cmdline()
        return {Path(part.partition("=")[2]) for part in lines if part.startswith(TEMPORARY)}

    def processes(self, node: str) -> list[psutil.Process]:
        """Return the living processes of a node."""
        root = psutil.Process(self.note()[node])
        return [root, *root.children(recursive=True)]

    def kill(self, node: str) -> None:
        """Let a host die: everything of its node ends at once."""
        for process in self.processes(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)

    def wait_until_empty(self) -> list[psutil.Process]:
        """Wait until no process of a node is left; return those that are left after ``BOUND_S``."""
        until_s = time.monotonic() + BOUND_S
        while left := [process for process in self._seen.values() if lives(process)]:
            if time.monotonic() > until_s:
                break
            time.sleep(0.05)
        return left

    def close(self) -> None:
        """End all remaining processes, and remove the folders of hosts that died."""
        self.note()
        for process in self._seen.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                if lives(process):
                    process.kill()
        self.wait_until_empty()
        for folder in self._temporary:
            shutil.rmtree(folder, ignore_errors=True)
