"""VMs that are plain processes of this machine, one worker each, forked from one process that has imported all."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from manager.engine.folders import hold, make_folder
from manager.engine.gone import runs
from manager.engine.handed_on import handed_on
from manager.engine.host_line import HostLine
from manager.engine.process_pool import Lanes
from morph.contract.errors import ClusterError, ClusterLost

log = logging.getLogger(__name__)

START_TIMEOUT_S = 90.0
FORK_TIMEOUT_S = 20.0
SEND_TIMEOUT_S = 5.0
STORE_TIMEOUT_S = 30.0
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class ProcessVms:
    """A host of such VMs; see ``VmHost``. All may be called from any thread.

    A fork takes milliseconds: one VM after the other.

    Args:
        log_path: What workers write to standard error goes there.
        namespace_of: The network namespace of a VM's host; None: this machine's own network.
        remove_if_killed: A directory to remove should this process be killed.
        patience_s: How long everything outlives this process, should it be killed.
        connect: Makes a connection to the worker of a VM: this process's end and the worker's.
    """

    boots_at_once = 1

    def __init__(
        self,
        log_path: Path,
        namespace_of: Callable[[str], str | None] = lambda _vm: None,
        remove_if_killed: Path | None = None,
        patience_s: float = 0.0,
        connect: Callable[[str], tuple[socket.socket, socket.socket]] = lambda _vm: socket.socketpair(),
    ) -> None:
        self._log_path = log_path
        self._namespace_of = namespace_of
        self._remove_if_killed = remove_if_killed
        self._patience_s = patience_s
        self._connect = connect
        self._directory: Path | None = None
        self._line: HostLine | None = None
        self._lock, self._asking = threading.Lock(), threading.Lock()
        self._pids: dict[str, int] = {}
        self._lanes: dict[str, Lanes] = {}

    def start(self) -> None:
        """Start the process that is forked from: some seconds.

        Raises:
            ClusterError: when it does not come up within ``START_TIMEOUT_S``.
        """
        self._directory = make_folder()
        removed = [str(path) for path in (self._directory, self._remove_if_killed) if path is not None]
        environment = {**handed_on(os.environ), **_ENVIRONMENT}
        self._line = HostLine.start(
            "manager.engine.process_host", self.door, self._patience_s, self._log_path, removed, environment
        )
        self._line.greeting(START_TIMEOUT_S)

    def take_over(self, line: HostLine, door: Path, vms: dict[str, int]) -> None:
        """Instead of ``start``: go on with the host that another manager left."""
        hold(door.parent)
        self._directory, self._line, self._pids = door.parent, line, dict(vms)

    @property
    def door(self) -> Path:
        """Where another manager finds the host."""
        assert self._directory is not None, "the host is not started"
        return self._directory / "door"

    def settle(self) -> None:
        """From now on another manager would find it."""
        assert self._line is not None
        self._line.settle()

    @property
    def pid(self) -> int:
        """The process that owns them."""
        return self._line.pid if self._line is not None else 0

    def check(self) -> None:
        """See that the process that owns them lives.

        Raises:
            ClusterLost: it is gone, and every VM with it.
        """
        if not runs(self.pid):
            raise ClusterLost("the process that owns the VMs is gone, and every VM with it")

    def start_store(self, host: str, port: int = 0, namespace: str | None = None) -> tuple[int, int]:
        """Start the rendezvous store in a process of its own, ending an earlier one; returns its process and port.

        Raises:
            ClusterError: when it does not come up within ``STORE_TIMEOUT_S``.
        """
        ours, theirs = _bounded(*socket.socketpair())
        with theirs:
            pid = self._ask({"store": host, "port": port, "namespace": namespace}, [theirs])
        with ours:
            try:
                if ours.poll(STORE_TIMEOUT_S):
                    return pid, int(ours.recv_bytes())
            except EOFError:
                pass
        raise ClusterError(f"the rendezvous store did not start within {STORE_TIMEOUT_S:g} s; see {self._log_path}")

    def add_vm(self, name: str) -> None:
        """Bring up a VM and its worker's process: milliseconds.

        Raises:
            ClusterError: when it cannot be forked.
        """
        (orders, their_orders), (control, their_control) = (_bounded(*self._connect(name)) for _ in range(2))
        with their_orders, their_control:
            request = {"worker": name, "namespace": self._namespace_of(name)}
            pid = self._ask(request, [their_orders, their_control])
        with self._lock:
            self._pids[name], self._lanes[name] = pid, Lanes(orders, control)

    def rejoin_all(self) -> dict[str, Lanes]:
        """New connections to every worker that another manager left; without those that do not take them."""
        with self._lock:
            names = list(self._pids)
        rejoined: dict[str, Lanes] = {}
        for name in names:
            try:
                rejoined[name] = self.rejoin(name)
            except ClusterError:
                self.prepare_kill([name])()
        return rejoined

    def rejoin(self, name: str) -> Lanes:
        """New connections to a worker that lives, which the caller closes.

        Raises:
            ClusterError: it does not take them, or its host is out of reach.
        """
        (orders, their_orders), (control, their_control) = (_bounded(*self._connect(name)) for _ in range(2))
        with their_orders, their_control:
            try:
                self._ask({"rejoin": name}, [their_orders, their_control])
            except ClusterError:
                orders.close()
                control.close()
                raise
        return Lanes(orders, control)

    def lanes(self, name: str) -> Lanes:
        """The connections to a VM's worker, which the caller closes; once."""
        with self._lock:
            return self._lanes.pop(name)

    def prepare_kill(self, names: Sequence[str]) -> Callable[[], None]:
        """See ``VmHost.prepare_kill``."""

        def kill() -> None:
            with self._lock:
                pids = [self._pids.pop(name) for name in names if name in self._pids]
            for pid in pids:  # the process that forked them waits for none of them before the end: pids stay theirs
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        return kill

    def vm_pids(self, name: str) -> list[int]:
        """Process ids of a VM."""
        with self._lock:
            return [self._pids[name]] if name in self._pids else []

    def close(self) -> None:
        """End every process. Safe to call twice."""
        line, self._line = self._line, None
        if line is not None and not line.end():
            self.prepare_kill(list(self._pids))()
            line.kill()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        for lanes in self._lanes.values():
            lanes.orders.close()
            lanes.control.close()

    def _ask(self, request: dict[str, Any], ends: Sequence[socket.socket]) -> int:
        line = self._line
        if line is None:
            raise ClusterError("the cluster is closed")
        try:
            with self._asking:
                line.send(request, [end.fileno() for end in ends])
                return int(line.receive("a worker to be forked", FORK_TIMEOUT_S)["pid"])
        except ClusterError as error:
            raise ClusterError(f"no worker can be forked: {error}") from error


def _bounded(ours: socket.socket, theirs: socket.socket) -> tuple[Connection, socket.socket]:
    """This process's end of a connection, whose sends give up after ``SEND_TIMEOUT_S``, and the other one."""
    seconds = int(SEND_TIMEOUT_S)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))
    return Connection(ours.detach()), theirs
