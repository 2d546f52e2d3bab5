"""A Ray cluster on this machine whose nodes stand for spot VMs.

A VM is one raylet and what it starts. ``prepare_kill`` takes them all away with SIGKILL at once, as a
revocation does. The nodes belong to a process of their own (``vm_host``); nothing outlives ``close``,
nor this process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray

from manager.engine.gone import wait_gone
from morph.contract.errors import ClusterError

log = logging.getLogger(__name__)

START_TIMEOUT_S = 90.0
ADD_TIMEOUT_S = 60.0
END_TIMEOUT_S = 15.0


class RayCluster:
    """Head node and VMs. ``add_vm`` may be called from one thread at a time, ``prepare_kill`` from any.

    Args:
        directory: What ``ray_environment.prepare`` returned; Ray's sessions lie below it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._host: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._vms: dict[str, list[int]] = {}
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the head node and connect to it.

        Raises:
            ClusterError: when Ray does not come up within ``START_TIMEOUT_S``.
        """
        log_path = self._directory / "vm_host.log"
        with log_path.open("a", encoding="utf-8") as errors:
            self._host = subprocess.Popen(
                [sys.executable, "-m", "manager.engine.vm_host"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # Ctrl-C in the terminal is for the manager alone
            )
        threading.Thread(target=self._read, args=(self._host,), name="morph-vm-host", daemon=True).start()
        try:
            answer = self._wait("the head node to start", START_TIMEOUT_S)
            if "error" in answer:
                raise ClusterError(f"Ray did not start: {answer['error']}")
            _silence_ray()
            ray.init(address=answer["address"], log_to_driver=False, logging_level=logging.ERROR, namespace="morph")
        except (ClusterError, ConnectionError) as error:
            self.close()
            raise error if isinstance(error, ClusterError) else ClusterError(f"Ray did not start: {error}") from error

    def add_vm(self, name: str) -> None:
        """Bring up a VM; blocks until Ray knows it, some seconds.

        Raises:
            ClusterError: when the node does not come up within ``ADD_TIMEOUT_S``.
        """
        host = self._host
        if host is None or host.stdin is None:
            raise ClusterError(f"VM {name} did not come up: the cluster is closed")
        with contextlib.suppress(BrokenPipeError, ValueError):  # ValueError: closed meanwhile; the answer says so
            host.stdin.write(json.dumps({"add": name}) + "\n")
            host.stdin.flush()
        answer = self._wait(f"VM {name} to come up", ADD_TIMEOUT_S, name)
        if "error" in answer:
            raise ClusterError(f"VM {name} did not come up: {answer['error']}")
        with self._lock:
            self._vms[name] = answer["pids"]

    def prepare_kill(self, names: Sequence[str]) -> Callable[[], None]:
        """Find everything that runs on some VMs; calling the result takes them all away at once, with SIGKILL.

        Looking for processes takes up to a tenth of a second, in which no VM of several should outlive the others.
        """
        pids = [pid for name in names for pid in self.vm_pids(name)]

        def kill() -> None:
            with self._lock:
                for name in names:
                    self._vms.pop(name, None)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        return kill

    def vm_pids(self, name: str) -> list[int]:
        """Process ids of a VM, raylet first."""
        with self._lock:
            roots = self._vms.get(name, [])
        return [process.pid for root in roots for process in _tree(root)]

    def close(self) -> None:
        """End every process of the cluster and remove its files. Safe to call twice."""
        host = self._host
        self._host = None
        if ray.is_initialized():
            ray.shutdown()
        if host is not None:
            nodes = _tree(host.pid)
            if host.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    host.stdin.close()
            try:
                host.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                log.warning("the process with the local Ray nodes did not end within %g s", END_TIMEOUT_S)
            for process in nodes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            wait_gone(nodes, END_TIMEOUT_S)
            host.wait(END_TIMEOUT_S)
        with self._lock:
            self._vms.clear()
        for session in self._directory.glob("session_*"):
            if session.is_symlink():
                session.unlink()
            else:
                shutil.rmtree(session, ignore_errors=True)

    def _read(self, host: subprocess.Popen[str]) -> None:
        assert host.stdout is not None
        with host.stdout as lines:
            for line in lines:
                if line.startswith("{"):
                    self._answers.put(json.loads(line))
        self._answers.put({"error": "the process with the local Ray nodes ended"})

    def _wait(self, what: str, timeout_s: float, name: str | None = None) -> dict[str, Any]:
        """The next answer; with ``name``, passing over late ones about VMs that were given up."""
        until_s = time.monotonic() + timeout_s
        try:
            while True:
                answer = self._answers.get(timeout=max(0.0, until_s - time.monotonic()))
                if name is None or answer.get("name", name) == name:
                    return answer
        except queue.Empty:
            raise ClusterError(f"waited {timeout_s:g} s for {what}") from None


def _silence_ray() -> None:
    """Keep Ray from printing every worker's death into the user's terminal: the manager tells of it itself."""
    from ray._private import worker

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda data, ignore_prefix: log.debug("%s %s", data, ignore_prefix)


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
