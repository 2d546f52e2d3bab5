"""A Ray cluster on this machine whose nodes stand for spot VMs.

A VM is one raylet and what it starts. ``prepare_kill`` takes them all away with SIGKILL at once, as a
revocation does. The nodes belong to a process of their own (``vm_host``); nothing outlives ``close``,
nor this process.
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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import ray

from manager.engine.local_vms.host_line import HostLine
from manager.engine.on_ray.plain_answers import believe_no_names, take_bytes_alone
from manager.host.folders import OWN_SOCKET
from manager.host.gone import runs, session_of, wait_gone
from manager.host.handed_on import handed_on
from manager.host.ports import LOOPBACK, VM_RESOURCE
from morph.contract.errors import ClusterError, ClusterLost
from morph.contract.vm_names import workers_of
from morph.runtime.process.actor import WorkerActor

log = logging.getLogger(__name__)

START_TIMEOUT_S = 180.0
"""Of a head node, which may have to be started twice."""
ADD_TIMEOUT_S = 60.0
STORE_TIMEOUT_S = 60.0
END_TIMEOUT_S = 15.0
NAMESPACE = "morph"
LOOK_EVERY_S = 1.0
HEAD_PROCESSES = ("gcs_server", "raylet")


class RayCluster:
    """Head node and VMs. ``add_vm`` and ``prepare_kill`` may be called from any thread, and several at a time.

    Args:
        directory: What ``ray_environment.prepare`` returned; Ray's sessions lie below it.
        patience_s: How long everything outlives this process, should it be killed.
        host: The address of the head node; VMs elsewhere must reach it.
        port: Of the head node; 0: any free one.
        first_port: Of those on which the head node's other processes listen; 0: any free ones.
        gone: Told, in a thread of this object's, of a VM that was up and ended by itself.
    """

    boots_at_once = max(1, min(4, os.cpu_count() or 1))  # a raylet gives up what needs 15 s to start

    def __init__(
        self,
        directory: Path,
        patience_s: float = 0.0,
        host: str = LOOPBACK,
        port: int = 0,
        first_port: int = 0,
        gone: Callable[[str], None] = lambda _vm: None,
    ) -> None:
        self._directory = directory
        self._where = (host, str(port), str(first_port))
        self._gone = gone
        self.address = ""
        self._patience_s = patience_s
        self._line: HostLine | None = None
        self._host: psutil.Process | None = None
        self._head: dict[str, int] = {}
        self._looked_s = -LOOK_EVERY_S
        self._vms: dict[str, list[int]] = {}
        self._boots: dict[str, Future[list[int]]] = {}
        self._store_asked: Future[tuple[int, int]] | None = None
        self._given_up: set[str] = set()
        self._lock = threading.Lock()

    @property
    def control_socket(self) -> Path:
        """Where another manager finds the host of the nodes."""
        return self._directory / OWN_SOCKET

    def start(self, workers: socket.socket) -> None:
        """Start the head node and connect to it. ``workers``: where they call, which its host keeps.

        Raises:
            ClusterError: when Ray does not come up within ``START_TIMEOUT_S``.
        """
        self.control_socket.unlink(missing_ok=True)
        log_path = self._directory / "vm_host.log"
        arguments, env = (str(workers.fileno()), *self._where), handed_on(os.environ)
        self._line = HostLine.start(
            "manager.engine.on_ray.vm_host", self.control_socket, self._patience_s, log_path, arguments, env, workers
        )
        self._host = psutil.Process(self._line.pid)
        try:
            self._connect(self._line.greeting(START_TIMEOUT_S))
        except ClusterError as error:
            self.close()
            raise ClusterError(f"Ray did not start: {error}") from error

    def take_over(self, line: HostLine, greeting: Mapping[str, Any]) -> None:
        """Instead of ``start``: connect to the nodes that another manager left.

        Raises:
            ClusterError: when that fails; everything is ended then.
        """
        self._line = line
        try:
            self._host = psutil.Process(line.pid)
            self._connect(greeting)
        except psutil.NoSuchProcess as error:
            self.close()
            raise ClusterError("the process that owned its VMs is gone") from error
        except ClusterError:
            self.close()
            raise

    def settle(self) -> None:
        """From now on another manager would find it."""
        assert self._line is not None
        self._line.settle()

    def _connect(self, greeting: Mapping[str, Any]) -> None:
        self._head = {name: greeting["head"][name] for name in HEAD_PROCESSES}
        self.check_head()
        self.address = greeting["address"]
        _silence_ray()
        believe_no_names()
        try:
            ray.init(address=greeting["address"], log_to_driver=False, logging_level=logging.ERROR, namespace=NAMESPACE)
        except ConnectionError as error:
            raise ClusterError(str(error)) from error
        take_bytes_alone(WorkerActor)
        assert self._line is not None
        self._vms = dict(greeting["vms"])
        self._line.listen(self._told)

    def check_head(self) -> None:
        """See that the head node lives, once in ``LOOK_EVERY_S``.

        Raises:
            ClusterLost: one of its processes is gone: Ray can start nothing any more, and ends its nodes soon.
        """
        now_s = time.monotonic()
        if now_s < self._looked_s + LOOK_EVERY_S:
            return
        self._looked_s = now_s
        for name, pid in self._head.items():
            if not runs(pid):
                raise ClusterLost(f"Ray's head node is gone (its {name} died), and every VM with it")

    def add_vm(self, name: str) -> None:
        """Bring up a VM; blocks until Ray knows it, some seconds.

        Raises:
            ClusterError: when the node does not come up within ``ADD_TIMEOUT_S``.
        """
        line, boot = self._line, Future[list[int]]()
        with self._lock:
            self._boots[name] = boot
        try:
            if line is None:
                raise ClusterError("the cluster is closed")
            line.send({"add": name})
            boot.result(ADD_TIMEOUT_S)
        except TimeoutError as error:
            self._given_up.add(name)
            raise ClusterError(f"VM {name} did not come up within {ADD_TIMEOUT_S:g} s") from error
        except ClusterError as error:
            raise ClusterError(f"VM {name} did not come up: {error}") from error
        finally:
            with self._lock:
                self._boots.pop(name, None)

    def _told(self, packet: dict[str, Any]) -> None:
        """Take what the process that owns the nodes tells; nothing: it is gone."""
        if "store" in packet or not packet:
            with self._lock:
                asked, self._store_asked = self._store_asked, None
            if asked is not None and packet.get("store"):
                asked.set_result((packet["store"], packet["port"]))
            elif asked is not None:
                asked.set_exception(ClusterError(packet.get("error", "the process that owns the VMs ended")))
        if "store" in packet:
            return
        if "gone" in packet:
            with self._lock:
                was_wanted = self._vms.pop(packet["gone"], None) is not None
            if was_wanted:
                self._gone(packet["gone"])
            return
        with self._lock:
            if "pids" in packet:
                self._vms[packet["name"]] = packet["pids"]
            boots = [self._boots[packet["name"]]] if packet.get("name") in self._boots else []
            boots = boots if packet else list(self._boots.values())
        for boot in boots:
            if "pids" in packet:
                boot.set_result(packet["pids"])
            else:
                boot.set_exception(ClusterError(packet.get("error", "the process that owns the VMs ended")))
        if "pids" in packet and packet["name"] in self._given_up:
            self.prepare_kill([packet["name"]])()

    def start_store(self, host: str, port: int = 0) -> tuple[int, int]:
        """Start the rendezvous store, ending an earlier one; returns its process and port.

        Raises:
            ClusterError: it does not come up within ``STORE_TIMEOUT_S``.
        """
        line, asked = self._line, Future[tuple[int, int]]()
        with self._lock:
            self._store_asked = asked
        try:
            if line is None:
                raise ClusterError("the cluster is closed")
            line.send({"store": host, "port": port})
            return asked.result(STORE_TIMEOUT_S)
        except TimeoutError as error:
            raise ClusterError(f"the rendezvous store did not start within {STORE_TIMEOUT_S:g} s") from error
        except ClusterError as error:
            raise ClusterError(f"the rendezvous store did not start: {error}") from error

    def joined(self) -> dict[str, str]:
        """The workers for which there are VMs in the cluster now, whoever started these, with their addresses.

        Raises:
            ClusterError: Ray does not say.
        """
        try:
            list_nodes: Any = ray.nodes  # which has no types
            nodes = list_nodes()
        except Exception as error:  # Ray's own, which have no common class
            raise ClusterError(f"Ray does not say which nodes there are: {type(error).__name__}: {error}") from error
        return {
            worker: node["NodeManagerAddress"]
            for node in nodes
            if node["Alive"]
            for resource, num_devices in node["Resources"].items()
            if resource.startswith(VM_RESOURCE)
            for worker in workers_of(resource.removeprefix(VM_RESOURCE), int(num_devices))
        }

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
        line, self._line = self._line, None
        if ray.is_initialized():
            ray.shutdown()
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
