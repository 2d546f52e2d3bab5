"""The process that owns Ray's nodes on this machine and the process of Ray's driver.

``python -m manager.engine.on_ray.vm_host FD PATIENCE_S WORKERS_FD DIRECTORY HOST PORT FIRST`` starts it. FD: see
``control_socket``. WORKERS_FD: the socket that workers call, which this process keeps for the managers. DIRECTORY: the
run's directory with Ray's token. HOST and PORT: the address of the head node; HOST is empty if all VMs are on this
machine. FIRST: the first port of the head's other processes; 0: any free ones.

It is a separate process because Ctrl-C in the user's terminal must reach only the manager. If the manager is killed,
nodes live on for ``PATIENCE_S``, in which another manager may take over. Then, or at ``{"end": true}``, every node is
ended. The directory is removed too, unless a manager requested the end or got the message that the head node did not
start: that manager still needs the directory. If this process is killed, a helper process ends everything in its
session.

Every manager is greeted with that socket and ``{"host": pid, "address": .., "head": [pid, ..], "store": pid, "vms":
{"vm0": pid}}``, where ``head`` lists the processes without which there is no cluster, and a VM's pid is that of its
raylet. Requests: ``{"add": "vm0"}``, answered with ``{"name": "vm0", "pid": ..}`` once it boots, or with ``{"name":
"vm0", "error": ".."}``; ``{"driver": true}`` with a connection, for which a new process of ``driver`` starts on that
connection and an earlier one ends; ``{"store": host, "port": 0}``, for which an earlier store ends, answered with
``{"store": pid, "port": 4711}`` or ``{"store": 0, "error": ".."}``; and ``{"settled": true}``. ``{"gone": "vm0",
"why": ".."}`` reports a VM that ended.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

import psutil

from manager.engine.local_vms.control_socket import ControlSocket, hear, tell
from manager.host.ports import LOOPBACK, VM_RESOURCE, Ports, free_agent_ports
from manager.host.processes import wait_gone
from morph.contract.errors import ClusterError

OBJECT_STORE_BYTES = 80 * 1024 * 1024
END_TIMEOUT_S = 10.0
LOOK_EVERY_S = 0.05
LOG = "vm_host.log"
NODE_ID, LOG_OF_RAYLET = "--node_id=", "--stdout_filepath="
LONGEST_ERROR, LOG_BYTES = 300, 65_536
HEAD_PROCESSES = ("gcs_server", "raylet")
_SET_REAPER_OF_ORPHANS = 36
END_SESSION = """
import contextlib, os, signal, sys
sys.stdin.read()
own, session, left = os.getpid(), os.getsid(0), True
while left:
    left = False
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            if pid != own and os.getsid(pid) == session:
                with open(f"/proc/{pid}/stat") as stat:
                    left = left or stat.read().rpartition(")")[2].split()[0] != "Z"
                os.kill(pid, signal.SIGKILL)
"""
"""The program of a process that outlives this one by a moment: its pipe closes when this process is killed."""


class _Head(Protocol):
    """A head node. ``pids``: the processes without which it does not work."""

    address: str
    pids: list[int]

    def add(self, name: str) -> Any:
        """Start the node of a VM on this machine; block until Ray knows it. Return the argument for ``forget``."""

    def forget(self, node: Any) -> None:
        """Free this process's resources of a node whose raylet has ended."""


class _ConfinedHead:
    """``ray start --head`` for VMs elsewhere; it is confined to its folder, whatever those VMs make it run."""

    def __init__(self, directory: Path, host: str, port: int, first_port: int) -> None:
        if not port:
            with socket.create_server((host, 0)) as free:
                port = free.getsockname()[1]
        command = [
            *(sys.executable, "-m", "manager.engine.on_ray.node", f"--parent={os.getpid()}", f"--confined={directory}"),
            *("start", "--head", "--block", f"--node-ip-address={host}", f"--port={port}", "--disable-usage-stats"),
            *("--num-cpus=0", "--num-gpus=0", f"--object-store-memory={OBJECT_STORE_BYTES}"),
            f"--plasma-directory={directory / 'ray' / 'tmp'}",  # Ray's usual one is open to all
            "--include-dashboard=false",
            "--include-log-monitor=false",  # it keeps an unread file open for each worker ever started
            "--no-monitor",  # the autoscaler's metrics are open to all, at a port of Ray's choice
            *Ports(first_port).options(),
        ]
        self.address = f"{host}:{port}"
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
        self.pids = [self._process.pid]  # it ends when one of its processes does

    def add(self, name: str) -> Any:
        raise ClusterError(f"{name} would be a VM of this machine beside a provider's")

    def forget(self, node: Any) -> None:
        """Do nothing: this head has no nodes of VMs."""


class _LocalHead:
    """A cluster whose nodes are all on this machine and listen on loopback, for which ``ray start`` has no option.

    It is not confined: only its user has its token, and its workers run as that user. ``sockets``: a directory with a
    short path, below one that only its user may enter, because Ray opens it to all. Each node gets its own socket files
    there: if Ray chose free names, two nodes that start together would choose the same ones.
    """

    def __init__(self, sockets: Path) -> None:
        from ray.cluster_utils import Cluster

        self._sockets, self._numbers = sockets, itertools.count(1)
        self._cluster: Any = Cluster(
            shutdown_at_exit=False,  # signal handlers would restrict starting nodes to the main thread
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "object_store_memory": OBJECT_STORE_BYTES,
                "include_dashboard": False,
                "include_log_monitor": False,
                "no_monitor": True,
                "node_ip_address": LOOPBACK,
                **free_agent_ports(),
            },
        )
        self.address: str = self._cluster.address
        self.pids = [child.pid for child in psutil.Process().children() if child.name() in HEAD_PROCESSES]

    def add(self, name: str) -> Any:
        number = next(self._numbers)
        return self._cluster.add_node(
            wait=False,
            num_cpus=1,
            num_gpus=0,
            resources={VM_RESOURCE + name: 1},
            object_store_memory=OBJECT_STORE_BYTES,
            node_ip_address=LOOPBACK,
            **free_agent_ports(),
            raylet_socket_name=str(self._sockets / f"raylet-{number}"),
            plasma_store_socket_name=str(self._sockets / f"store-{number}"),
        )

    def forget(self, node: Any) -> None:
        self._cluster.remove_node(node, allow_graceful=False)


class _Nodes:
    """The running processes: the head node, VMs and the driver. Each VM has a thread that ends with it."""

    def __init__(self, directory: Path, head: _Head, calls: socket.socket) -> None:
        self._directory, self._head, self._calls = directory, head, calls
        self._vms: dict[str, int] = {}
        self._asked: set[str] = set()
        self._manager: socket.socket | None = None
        self._store: subprocess.Popen[bytes] | None = None
        self._driver: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._launching = threading.Lock()
        self._storing = threading.Lock()

    def greet(self, manager: socket.socket) -> None:
        """Greet a manager, and send it reports from now on."""
        with self._lock:
            self._manager = manager
            tell(
                manager,
                self._calls.fileno(),
                host=os.getpid(),
                address=self._head.address,
                head=self._head.pids,
                store=self._store.pid if self._store else 0,
                vms=self._vms,
            )

    def part(self) -> None:
        """Record that the manager is gone: no more reports are sent."""
        with self._lock:
            self._manager = None

    def start_driver(self, connection: int) -> None:
        """Restart the driver's process, connected to a manager by this file descriptor."""
        if self._driver is not None:
            self._driver.kill()
            self._driver.wait()
        command = [sys.executable, "-m", "manager.engine.on_ray.driver", str(connection), str(self._directory)]
        self._driver = driver = subprocess.Popen(
            [*command, self._head.address], stdin=subprocess.PIPE, pass_fds=[connection], process_group=0
        )
        threading.Thread(target=_tell_node_id, args=(driver,), name="node-id", daemon=True).start()

    def start_store(self, host: str, port: int) -> None:
        threading.Thread(target=self._serve_store, args=(host, port), name="store", daemon=True).start()

    def _serve_store(self, host: str, port: int) -> None:
        with self._storing:
            if self._store is not None:
                self._store.kill()
                self._store.wait()
            command = [sys.executable, "-m", "morph.runtime.groups.store", host, str(port)]
            pipe = subprocess.PIPE  # the store ends when this is closed
            self._store = store = subprocess.Popen(command, stdin=pipe, stdout=pipe)
            assert store.stdout is not None
            bound_port = store.stdout.readline()
        with self._lock:
            if bound_port:
                self._say(store=store.pid, port=int(bound_port))
            else:
                self._say(store=0, error=f"it ended at once; see {LOG}")

    def add(self, name: str) -> None:
        """Start a VM; the answer follows. An existing VM is not started twice."""
        with self._lock:
            if name in self._vms:
                self._say(name=name, pid=self._vms[name])
            elif name not in self._asked:
                self._asked.add(name)
                threading.Thread(target=self._run, args=(name,), name=f"vm-{name}", daemon=True).start()

    def _run(self, name: str) -> None:
        announced = threading.Event()
        self._launching.acquire()  # Ray would give two nodes that start together the same log files
        launched = ExitStack()
        launched.callback(self._launching.release)

        def watch() -> None:
            raylet, is_over = None, False
            while raylet is None and not is_over:
                is_over = over.wait(LOOK_EVERY_S)  # look once more: the node may have come up since
                raylet = _raylet_of(name)
            launched.close()
            if raylet is not None:
                self._watch(name, raylet)
            announced.set()

        over = threading.Event()
        threading.Thread(target=watch, name=f"raylet-{name}", daemon=True).start()
        node, error = None, "its raylet ended while it booted"
        try:
            node = self._head.add(name)
        except Exception as raised:  # Ray's errors have no common class
            error = f"{type(raised).__name__}: {raised}"
        over.set()
        announced.wait()
        if node is not None:
            with self._launching:  # Ray's collection of nodes is not thread-safe
                self._head.forget(node)
        with self._lock:
            if name in self._asked:
                self._asked.remove(name)
                self._say(name=name, error=error)

    def _watch(self, name: str, raylet: psutil.Process) -> None:
        """Report a raylet and wait for its end; it is reaped after the report, so that its number is not reused."""
        with self._lock:
            self._asked.remove(name)
            self._vms[name] = raylet.pid
            self._say(name=name, pid=raylet.pid)
        log, ended = _log_of(raylet), None
        with suppress(ChildProcessError):
            ended = os.waitid(os.P_PID, raylet.pid, os.WEXITED | os.WNOWAIT)
        why = _why(ended, log)
        with self._lock:
            del self._vms[name]
            self._say(gone=name, why=why)
        with suppress(ChildProcessError):
            os.waitpid(raylet.pid, 0)

    def _say(self, **entries: object) -> None:
        if self._manager is not None:
            with suppress(OSError):
                tell(self._manager, **entries)


def _raylet_of(name: str) -> psutil.Process | None:
    """Find the processes that Ray started for a VM, by the resource that tells nodes apart; "": for the head node."""
    for child in psutil.Process().children(recursive=not name):
        with suppress(psutil.NoSuchProcess):
            is_raylet = child.name() == "raylet" and child.status() != psutil.STATUS_ZOMBIE
            line = f"{' '.join(child.cmdline())},"
            if is_raylet and (f"{VM_RESOURCE}{name}," in line if name else VM_RESOURCE not in line):
                return child
    return None


def _log_of(raylet: psutil.Process) -> Path | None:
    with suppress(psutil.NoSuchProcess):
        named = [word for word in raylet.cmdline() if word.startswith(LOG_OF_RAYLET)]
        return Path(named[0].removeprefix(LOG_OF_RAYLET)) if named else None
    return None


def _why(ended: os.waitid_result | None, log: Path | None) -> str:
    """Return how a raylet ended, with the last error at the end of its log, which may be long."""
    errors: list[str] = []
    if log is not None:
        with suppress(OSError), log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_BYTES))
            errors = re.findall(r"^\[[^]]* [ECF] [^]]*\] (.*)", file.read().decode("utf-8", "replace"), re.MULTILINE)
    if ended is None or ended.si_code == os.CLD_EXITED:
        how = "" if ended is None else f"with status {ended.si_status}"
    else:
        how = f"by signal {ended.si_status}"
    return ": ".join(filter(None, (how, *(error[:LONGEST_ERROR] for error in errors[-1:]))))


def _tell_node_id(driver: subprocess.Popen[bytes]) -> None:
    """Tell a driver the head node's id once its raylet runs: Ray looks for a process that the driver cannot see."""
    assert driver.stdin is not None
    with driver.stdin as driver_input:
        while driver.poll() is None:
            raylet = _raylet_of("")
            with suppress(psutil.NoSuchProcess, OSError):
                for argument in [] if raylet is None else raylet.cmdline():
                    if argument.startswith(NODE_ID):
                        driver_input.write(argument.removeprefix(NODE_ID).encode() + b"\n")
                        return
            time.sleep(LOOK_EVERY_S)


def _end_children() -> None:
    own, children = psutil.Process().children(), psutil.Process().children(recursive=True)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.send_signal(signal.SIGKILL)
    wait_gone(children, END_TIMEOUT_S)
    psutil.wait_procs(own, END_TIMEOUT_S)  # reaps them


def _attend(manager: socket.socket, nodes: _Nodes, control_socket: ControlSocket) -> bool:
    """Serve one manager until it disconnects; returns whether it requested the end."""
    with manager, suppress(OSError):
        try:
            nodes.greet(manager)
            while True:
                request, descriptors = hear(manager, 1)
                try:
                    if request is None or "end" in request:
                        return request is not None
                    if "settled" in request:
                        control_socket.settle()
                    elif "store" in request:
                        nodes.start_store(request["store"], request["port"])
                    elif "add" in request:
                        nodes.add(request["add"])
                    elif descriptors:
                        nodes.start_driver(descriptors[0])
                finally:
                    for descriptor in descriptors:
                        os.close(descriptor)
        finally:
            nodes.part()
    return False


def main() -> None:
    """Serve managers until one requests the end, or none comes in time."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.argv[5] and sys.platform == "linux":  # orphans of confined processes then become this process's children
        ctypes.CDLL(None).prctl(_SET_REAPER_OF_ORPHANS, 1, 0, 0, 0)
    control_socket = ControlSocket(socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2]))
    calls = socket.socket(fileno=int(sys.argv[3]))
    calls.set_inheritable(False)
    directory, is_kept = Path(sys.argv[4]), False
    end_of_this, _ = os.pipe()  # the kernel closes the other end
    subprocess.Popen([sys.executable, "-I", "-S", "-c", END_SESSION], stdin=end_of_this)
    os.close(end_of_this)
    try:
        manager = control_socket.next()
        try:
            host, port, first_port = sys.argv[5], int(sys.argv[6]), int(sys.argv[7])
            head = _ConfinedHead(directory, host, port, first_port) if host else _LocalHead(directory / "sockets")
        except Exception as error:  # Ray's errors have no common class
            if manager is not None:
                is_kept = True  # the manager tries again in the same directory
                tell(manager, error=f"{type(error).__name__}: {error}")
            return
        nodes = _Nodes(directory, head, calls)
        while manager is not None and not is_kept:
            is_kept = _attend(manager, nodes, control_socket)
            manager = None if is_kept else control_socket.next()
    finally:
        control_socket.close()
        _end_children()
        if not is_kept:
            shutil.rmtree(directory, ignore_errors=True)
        os._exit(0)  # even if its threads still wait


if __name__ == "__main__":
    main()
