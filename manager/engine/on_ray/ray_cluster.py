"""A Ray cluster whose head node is on this machine, and local VMs, each a Ray node of its own.

A VM is one raylet and the processes that it starts. ``prepare_kill`` kills them all at once with SIGKILL, as a
revocation does. A separate process (``vm_host``) owns the nodes and the process that is Ray's driver; nothing outlives
``close`` or this process. Ray itself is not imported here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil

from manager.engine.local_vms.host_line import HostLine
from manager.engine.on_ray.driver_line import DriverLine
from manager.engine.on_ray.ray_environment import environment
from manager.host.folders import OWN_SOCKET
from manager.host.processes import patience_s, runs, session_of, wait_gone
from morph.contract.errors import ClusterError, ClusterLost

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
START_TRIES = 3
TAKE_OVER_TIMEOUT_S = 30.0
ADD_TIMEOUT_S, HEADROOM, NUM_RECENT = 120.0, 4.0, 8
"""A boot may take this, or this many times the longest of so many recent boots; longer while the machine is busy."""
STORE_TIMEOUT_S = 60.0
END_TIMEOUT_S = 15.0
LOOK_EVERY_S = 1.0
START_LOOK_EVERY_S = 0.2


class RayCluster:
    """A head node and VMs. Several threads may call ``add_vm`` and ``prepare_kill`` at the same time.

    ``directory``: the result of ``ray_environment.prepare``; Ray's sessions are below it. ``patience_s``: how long
    everything outlives this process if it is killed. ``host``: the address of the head node for VMs elsewhere; empty:
    all VMs are on this machine. ``port``: its port, and ``first_port``: the first one of its other processes; 0: any
    free ones. ``gone``: called, in a thread of this object, with a VM that ended by itself after it was up.
    """

    boots_at_once = max(1, min(4, os.cpu_count() or 1))

    def __init__(
        self,
        directory: Path,
        patience_s: float = 0.0,
        host: str = "",
        port: int = 0,
        first_port: int = 0,
        gone: Callable[[str], None] = lambda _vm: None,
    ) -> None:
        self._directory = directory
        self._where = (host, str(port), str(first_port))
        self._gone = gone
        self.address = ""
        self.driver = DriverLine(self._launch_driver)
        self._patience_s = patience_s
        self._line: HostLine | None = None
        self._host: psutil.Process | None = None
        self._head: list[int] = []
        self._looked_s = -LOOK_EVERY_S
        self._vms: dict[str, int] = {}
        self._up: set[str] = set()
        self._boots: dict[str, str] = {}
        self._recent_boots_s: deque[float] = deque(maxlen=NUM_RECENT)
        self._given_up: set[str] = set()
        self._store_asked: Future[tuple[int, int]] | None = None
        self._lock = threading.Lock()

    @property
    def control_socket(self) -> Path:
        """The place where another manager finds the nodes' host; no process of Ray here can reach it."""
        return self._directory.parent / OWN_SOCKET

    def start(self, workers: socket.socket) -> None:
        """Start the head node and a driver. ``workers``: the socket that they call, which the nodes' host keeps.

        A failed start is tried again, because on a busy machine Ray gives up a node that needs more than 30 s.
        ClusterError if Ray does not come up within ``START_TIMEOUT_S``.
        """
        for tries_left in reversed(range(START_TRIES)):
            try:
                self._start_once(workers)
                return
            except ClusterError as error:
                self.close()
                if not tries_left:
                    raise ClusterError(f"Ray did not start: {error}") from error
                log.warning("Ray did not start, and is tried again: %s", error)
                self.driver = DriverLine(self._launch_driver)

    def _start_once(self, workers: socket.socket) -> None:
        self.control_socket.unlink(missing_ok=True)
        directory = self._directory.parent
        arguments = (str(workers.fileno()), str(directory), *self._where)
        env = environment(self._directory, on_loopback=not self._where[0])
        log_path = directory / "vm_host.log"
        self._line = HostLine.start(
            "manager.engine.on_ray.vm_host", self.control_socket, self._patience_s, log_path, arguments, env, workers
        )
        self._host = psutil.Process(self._line.pid)
        self._connect(self._line.greeting(START_TIMEOUT_S), START_TIMEOUT_S)

    def take_over(self, line: HostLine, greeting: Mapping[str, Any]) -> None:
        """Connect to the nodes that another manager left, not ``start``; ClusterError if that fails: all is ended."""
        self._line = line
        try:
            self._host = psutil.Process(line.pid)
            self._up = set(greeting["vms"])
            self._connect(greeting, TAKE_OVER_TIMEOUT_S)
        except psutil.NoSuchProcess as error:
            self.close()
            raise ClusterError("the process that owned its VMs is gone") from error
        except ClusterError:
            self.close()
            raise

    def settle(self) -> None:
        """Record that another manager could find the host from now on."""
        assert self._line is not None
        self._line.settle()

    def _connect(self, greeting: Mapping[str, Any], timeout_s: float) -> None:
        self._head = greeting["head"]
        self.check_head()
        self.address = greeting["address"]
        self._vms = dict(greeting["vms"])
        assert self._line is not None
        self._line.listen(self._told)
        self.driver.start()
        until_s = time.monotonic() + timeout_s
        while not self.driver.wait_for_nodes(lambda nodes: nodes is not None, START_LOOK_EVERY_S):
            if not self._head_runs():
                raise ClusterError(f"its head node ended; see {self._directory.parent / 'vm_host.log'}")
            if time.monotonic() > until_s:
                raise ClusterError(f"its driver was not connected within {timeout_s:g} s")

    def _launch_driver(self, connection: int) -> None:
        if self._line is None or not self._head_runs():
            raise ClusterError("the cluster is closed")
        self._line.send({"driver": True}, [connection])

    def check_head(self) -> None:
        """Check that the head node lives, once in ``LOOK_EVERY_S``.

        ClusterLost if one of its processes is gone; Ray can then start nothing, and soon ends its nodes.
        """
        now_s = time.monotonic()
        if now_s < self._looked_s + LOOK_EVERY_S:
            return
        self._looked_s = now_s
        if not self._head_runs():
            raise ClusterLost("Ray's head node is gone, and every VM with it")

    def _head_runs(self) -> bool:
        return all(map(runs, self._head))

    def add_vm(self, name: str) -> None:
        """Bring up a VM; blocks some seconds, until Ray knows it. ClusterError after ``ADD_TIMEOUT_S``."""
        began_s = time.monotonic()
        with self._lock:
            bound_s = patience_s(max(ADD_TIMEOUT_S, HEADROOM * max(self._recent_boots_s, default=0.0)))
        try:
            if self._line is None:
                raise ClusterError("the cluster is closed")
            with self._lock:
                self._boots[name] = ""
            self._line.send({"add": name})
            is_over = self.driver.wait_for_nodes(
                lambda nodes: bool(self._boots[name]) or name in (nodes or {}), bound_s
            )
            with self._lock:
                error = self._boots[name]
                if is_over and not error:
                    self._up.add(name)
                    self._recent_boots_s.append(time.monotonic() - began_s)
        except ClusterError as error_of_host:
            raise ClusterError(f"VM {name} did not come up: {error_of_host}") from error_of_host
        finally:
            with self._lock:
                self._boots.pop(name, None)
        if error:
            raise ClusterError(f"VM {name} did not come up: {error}")
        if not is_over:
            self._given_up.add(name)
            self.prepare_kill([name])()
            raise ClusterError(f"VM {name} did not come up within {bound_s:.0f} s")

    def _told(self, packet: dict[str, Any]) -> None:
        """Handle a message from the process that owns the nodes; an empty message means that this process is gone."""
        if "store" in packet or not packet:
            with self._lock:
                requested, self._store_asked = self._store_asked, None
            if requested is not None and packet.get("store"):
                requested.set_result((packet["store"], packet["port"]))
            elif requested is not None:
                requested.set_exception(ClusterError(packet.get("error", "the process that owns the VMs ended")))
        if "name" in packet and "error" in packet:
            with self._lock:
                self._boots.update({packet["name"]: packet["error"]} if packet["name"] in self._boots else {})
            self.driver.notify()
        elif "name" in packet:
            with self._lock:
                self._vms[packet["name"]] = packet["pid"]
            if packet["name"] in self._given_up:
                self.prepare_kill([packet["name"]])()
        if "gone" in packet:
            self._take_end(packet["gone"], packet.get("why", ""))
        elif not packet:
            with self._lock:
                self._boots = dict.fromkeys(self._boots, "the process that owns the VMs ended")
            self.driver.notify()

    def _take_end(self, name: str, why: str) -> None:
        with self._lock:
            was_wanted = self._vms.pop(name, None) is not None and name in self._up
            self._up.discard(name)
            if name in self._boots:
                self._boots[name] = f"its raylet ended while it booted {why}".rstrip()
        self.driver.notify()
        if was_wanted:
            self._gone(name)

    def start_store(self, host: str, port: int = 0) -> tuple[int, int]:
        """Start the rendezvous store, ending an earlier one; returns its process and port.

        ClusterError if it does not come up within ``STORE_TIMEOUT_S``, or longer on a busy machine.
        """
        line, requested, bound_s = self._line, Future[tuple[int, int]](), patience_s(STORE_TIMEOUT_S)
        with self._lock:
            self._store_asked = requested
        try:
            if line is None:
                raise ClusterError("the cluster is closed")
            line.send({"store": host, "port": port})
            return requested.result(bound_s)
        except TimeoutError as error:
            raise ClusterError(f"the rendezvous store did not start within {bound_s:.0f} s") from error
        except ClusterError as error:
            raise ClusterError(f"the rendezvous store did not start: {error}") from error

    def joined(self) -> dict[str, str]:
        """Return the workers whose VMs are in the cluster now, with addresses; ClusterError if there is no driver."""
        return self.driver.nodes

    def prepare_kill(self, names: Sequence[str]) -> Callable[[], None]:
        """Find all processes of some VMs, in up to 0.1 s; calling the result kills them all at once, with SIGKILL."""
        pids = [pid for name in names for pid in self.vm_pids(name)]

        def kill() -> None:
            with self._lock:
                for name in names:
                    self._vms.pop(name, None)
                    self._up.discard(name)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        return kill

    def vm_pids(self, name: str) -> list[int]:
        """Return the process ids of a VM, the raylet first."""
        with self._lock:
            root = self._vms.get(name)
        return [process.pid for process in _tree(root)] if root is not None else []

    def close(self) -> None:
        """End every process of the cluster and remove its files. Safe to call twice."""
        line, self._line = self._line, None
        self.driver.close()
        if line is not None:
            nodes = session_of(self._host) if self._host is not None else []
            if not line.end():
                line.kill()
            for process in nodes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            wait_gone(nodes, END_TIMEOUT_S)
        with self._lock:
            self._vms.clear()
        self.control_socket.unlink(missing_ok=True)
        for session in self._directory.glob("session_*"):
            if session.is_symlink():
                session.unlink()
            else:
                shutil.rmtree(session, ignore_errors=True)


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
