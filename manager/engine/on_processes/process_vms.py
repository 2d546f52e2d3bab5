"""VMs that are plain processes of this machine, each with one worker, forked from one process that has all imports."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from manager.engine.local_vms.host_line import HostLine
from manager.engine.on_processes import HOST
from manager.host.environment import handed_on
from manager.host.folders import OWN_SOCKET, hold, make_folder
from manager.host.processes import runs
from morph.contract.errors import ClusterError, ClusterLost
from morph.link.home import Home

log = logging.getLogger(__name__)

START_TIMEOUT_S = 90.0
FORK_TIMEOUT_S = 20.0
STORE_TIMEOUT_S = 30.0
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class ProcessVms:
    """A host of VMs that are processes; see ``VmHost``. All methods may be called from any thread.

    A fork takes milliseconds, so VMs are started one after another. ``line``: the connection to the process that forks
    workers; its control socket is in ``directory``. ``log_path``: receives the workers' standard error. ``home``:
    returns where a VM's worker connects. ``namespace_of``: returns the network namespace of a VM's host; None: this
    machine's own network. ``pids``: the VMs that exist. ``order``: a pipe on which the forking process waits for the
    job whose modules it imports; None: it has imported them.
    """

    boots_at_once = 1

    def __init__(
        self,
        line: HostLine,
        directory: Path,
        log_path: Path,
        home: Callable[[str], Home],
        namespace_of: Callable[[str], str | None],
        pids: Mapping[str, int],
        order: int | None = None,
    ) -> None:
        self._line, self._directory, self._log_path = line, directory, log_path
        self._home, self._namespace_of, self._order = home, namespace_of, order
        self._lock, self._asking = threading.Lock(), threading.Lock()
        self._pids, self._is_closed = dict(pids), False

    @classmethod
    def begin(
        cls,
        workers: socket.socket,
        log_path: Path,
        home: Callable[[str], Home],
        namespace_of: Callable[[str], str | None] = lambda _vm: None,
        remove_if_killed: Path | None = None,
        patience_s: float = 0.0,
    ) -> ProcessVms:
        """Start the process that forks workers, and that keeps open the socket to which they connect.

        It imports what every worker needs, in seconds, and does nothing else until ``start``. If this process is
        killed, everything outlives it by ``patience_s``, and the directory ``remove_if_killed`` is removed.
        """
        directory = make_folder(OWN_SOCKET)
        removed = [str(path) for path in (directory, remove_if_killed) if path is not None]
        environment = {**handed_on(os.environ), **_ENVIRONMENT}
        theirs, order = os.pipe()
        try:
            arguments = [str(workers.fileno()), *removed]
            socket_path = directory / OWN_SOCKET
            line = HostLine.start(HOST, socket_path, patience_s, log_path, arguments, environment, workers, theirs)
        except BaseException:
            os.close(order)
            shutil.rmtree(directory, ignore_errors=True)
            raise
        finally:
            os.close(theirs)
        return cls(line, directory, log_path, home, namespace_of, {}, order)

    @classmethod
    def take_over(
        cls,
        line: HostLine,
        control_socket: Path,
        vms: Mapping[str, int],
        log_path: Path,
        home: Callable[[str], Home],
        namespace_of: Callable[[str], str | None] = lambda _vm: None,
    ) -> ProcessVms:
        """Continue with the host that another manager left, and its VMs."""
        hold(control_socket.parent)
        return cls(line, control_socket.parent, log_path, home, namespace_of, vms)

    def start(self, job_path: str = "") -> None:
        """Have the forking process import the job's modules, if any; ClusterError after ``START_TIMEOUT_S``."""
        self._log_path.touch()
        self._tell({"job": job_path, "log": str(self._log_path.absolute())})
        self._line.greeting(START_TIMEOUT_S)

    @property
    def control_socket(self) -> Path:
        """The place where another manager finds the host."""
        return self._directory / OWN_SOCKET

    def settle(self) -> None:
        """Record that another manager could find the host from now on."""
        self._line.settle()

    @property
    def pid(self) -> int:
        """The process that owns the VMs."""
        return self._line.pid

    def check(self) -> None:
        """Check that the process that owns the VMs lives; ClusterLost if it is gone, and every VM with it."""
        if not runs(self.pid):
            raise ClusterLost("the process that owns the VMs is gone, and every VM with it")

    def start_store(self, host: str, port: int = 0, namespace: str | None = None) -> tuple[int, int]:
        """Start the store, ending an earlier one; returns pid and port. ClusterError after ``STORE_TIMEOUT_S``."""
        connection, theirs = socket.socketpair()
        with theirs:
            pid = self._ask({"store": host, "port": port, "namespace": namespace}, [theirs])
        with Connection(connection.detach()) as ours:
            try:
                if ours.poll(STORE_TIMEOUT_S):
                    return pid, int(ours.recv_bytes())
            except EOFError:
                pass
        raise ClusterError(f"the rendezvous store did not start within {STORE_TIMEOUT_S:g} s; see {self._log_path}")

    def add_vm(self, name: str) -> None:
        """Start a VM and its worker's process, in milliseconds; ClusterError if the process cannot be forked."""
        home = self._home(name).model_dump_json()
        pid = self._ask({"worker": name, "namespace": self._namespace_of(name), "home": home})
        with self._lock:
            self._pids[name] = pid

    def start_worker(self, worker: str, vm: str) -> None:
        """Do nothing: a VM starts with its worker."""

    def kill(self, worker: str) -> None:
        """End a worker, and its VM with it."""
        self.prepare_kill([worker])()

    def has_ended(self, worker: str) -> bool:
        with self._lock:
            pid = self._pids.get(worker)
        return pid is None or not runs(pid)

    def adopt(self) -> Collection[str]:
        with self._lock:
            return tuple(self._pids)

    def prepare_kill(self, names: Sequence[str]) -> Callable[[], None]:
        def kill() -> None:
            with self._lock:
                pids = [self._pids.pop(name) for name in names if name in self._pids]
            for pid in pids:  # the parent reaps none of them before the end, so no other process gets their pids
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        return kill

    def vm_pids(self, name: str) -> list[int]:
        """Return the process ids of a VM."""
        with self._lock:
            return [self._pids[name]] if name in self._pids else []

    def close(self) -> None:
        """End every process. Safe to call twice."""
        is_closed, self._is_closed = self._is_closed, True
        if is_closed:
            return
        self._tell(None)
        if not self._line.end():
            self.prepare_kill(list(self._pids))()
            self._line.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _tell(self, order: dict[str, str] | None) -> None:
        """Send the host process that was begun its order, once; None: close the pipe, which ends that process."""
        pipe, self._order = self._order, None
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError), open(pipe, "wb") as stdin:  # noqa: PTH123 (a descriptor)
                stdin.write(json.dumps(order).encode() + b"\n" if order else b"")

    def _ask(self, request: dict[str, Any], ends: Sequence[socket.socket] = ()) -> int:
        if self._is_closed:
            raise ClusterError("the cluster is closed")
        try:
            with self._asking:
                self._line.send(request, [end.fileno() for end in ends])
                return int(self._line.receive("a worker to be forked", FORK_TIMEOUT_S)["pid"])
        except ClusterError as error:
            raise ClusterError(f"no worker can be forked: {error}") from error
