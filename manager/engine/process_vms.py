"""VMs that are plain processes of this machine, one worker each, forked from one process that has imported all."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from manager.engine.process_pool import Lanes
from morph.contract.errors import ClusterError

log = logging.getLogger(__name__)

START_TIMEOUT_S = 90.0
FORK_TIMEOUT_S = 20.0
SEND_TIMEOUT_S = 5.0
STORE_TIMEOUT_S = 30.0
END_TIMEOUT_S = 15.0
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class ProcessVms:
    """A host of such VMs; see ``VmHost``. ``add_vm`` may be called from one thread at a time, the rest from any.

    Args:
        log_path: What workers write to standard error goes there.
        namespace_of: The network namespace of a VM's host; None: this machine's own network.
        remove_if_killed: A directory to remove should this process be killed.
        connect: Makes a connection to the worker of a VM: this process's end and the worker's.
    """

    def __init__(
        self,
        log_path: Path,
        namespace_of: Callable[[str], str | None] = lambda _vm: None,
        remove_if_killed: Path | None = None,
        connect: Callable[[str], tuple[socket.socket, socket.socket]] = lambda _vm: socket.socketpair(),
    ) -> None:
        self._log_path = log_path
        self._namespace_of = namespace_of
        self._remove_if_killed = remove_if_killed
        self._connect = connect
        self._host: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._lock = threading.Lock()
        self._pids: dict[str, int] = {}
        self._lanes: dict[str, Lanes] = {}
        self._store: Connection | None = None

    def start(self) -> None:
        """Start the process that is forked from: some seconds.

        Raises:
            ClusterError: when it does not come up within ``START_TIMEOUT_S``.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = [str(theirs.fileno())] + ([str(self._remove_if_killed)] if self._remove_if_killed else [])
        with self._log_path.open("ab") as errors, theirs:
            self._host = subprocess.Popen(
                [sys.executable, "-m", "manager.engine.process_host", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **_ENVIRONMENT},
                start_new_session=True,  # Ctrl-C in the terminal is for the manager alone
            )
        self._requests = ours
        self._answer("the process that workers are forked from", START_TIMEOUT_S)

    def start_store(self, host: str, namespace: str | None = None) -> int:
        """Start the rendezvous store in a process of its own; returns its port.

        Raises:
            ClusterError: when it does not come up within ``STORE_TIMEOUT_S``.
        """
        ours, theirs = _bounded(*socket.socketpair())
        with theirs:
            self._ask({"store": host, "namespace": namespace}, [theirs])
        self._store = ours
        try:
            if ours.poll(STORE_TIMEOUT_S):
                return int(ours.recv_bytes())
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
        host, self._host = self._host, None
        if self._requests is not None:
            with contextlib.suppress(OSError):
                self._requests.send(json.dumps({"end": True}).encode())
            self._requests.close()
        if self._store is not None:
            self._store.close()
        if host is None:
            return
        try:
            host.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            log.warning("the process that workers were forked from did not end within %g s", END_TIMEOUT_S)
            self.prepare_kill(list(self._pids))()
            host.kill()
            host.wait(END_TIMEOUT_S)
        for lanes in self._lanes.values():
            lanes.orders.close()
            lanes.control.close()

    def _ask(self, request: dict[str, Any], ends: Sequence[socket.socket]) -> int:
        requests = self._requests
        if requests is None or self._host is None:
            raise ClusterError("the cluster is closed")
        try:
            socket.send_fds(requests, [json.dumps(request).encode()], [end.fileno() for end in ends])
        except OSError as error:
            raise ClusterError(f"no worker can be forked: {error}; see {self._log_path}") from error
        return int(self._answer("a worker to be forked", FORK_TIMEOUT_S)["pid"])

    def _answer(self, what: str, timeout_s: float) -> dict[str, Any]:
        assert self._requests is not None
        self._requests.settimeout(timeout_s)
        try:
            message = self._requests.recv(65536)
        except OSError as error:
            raise ClusterError(f"waited {timeout_s:g} s for {what}; see {self._log_path}") from error
        if not message:
            raise ClusterError(f"the process that workers are forked from ended; see {self._log_path}")
        answer: dict[str, Any] = json.loads(message)
        if "error" in answer:
            raise ClusterError(f"no worker can be forked: {answer['error']}")
        return answer


def _bounded(ours: socket.socket, theirs: socket.socket) -> tuple[Connection, socket.socket]:
    """This process's end of a connection, whose sends give up after ``SEND_TIMEOUT_S``, and the other one."""
    seconds = int(SEND_TIMEOUT_S)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))
    return Connection(ours.detach()), theirs
