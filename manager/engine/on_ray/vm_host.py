"""The process that owns the local Ray nodes.

``python -m manager.engine.on_ray.vm_host FD PATIENCE_S WORKERS_FD HOST PORT FIRST`` starts it. FD: see
``control_socket``. WORKERS_FD: a socket at which workers call, which it keeps for the managers. HOST and PORT: of the
head node; FIRST: of the ports of its other processes. 0: any free one.

A process of its own, because the nodes must die with the thread that started them (the kernel's
parent-death signal), Ray wants that of the head node to be a main thread, and Ctrl-C in the user's terminal must reach
the manager alone. They outlive a manager that was killed for ``PATIENCE_S``, in which another may take over. Then, or
at ``{"end": true}``, every node is ended; if no manager asked for that, the Ray directory, with the token, is removed.

Every manager is greeted with that socket and ``{"host": pid, "address": .., "head": {name: pid}, "store": pid, "vms":
{"vm0": [pids]}}``. Requests: ``{"add": "vm0"}``, answered with ``{"name": "vm0", "pids": [..]}`` or ``{"name": "vm0",
"error": ".."}`` as soon as the VM is up, or dead, whatever else boots meanwhile; ``{"store": host, "port": 0}``, for
which an earlier store ends, answered with ``{"store": pid, "port": 4711}`` or ``{"store": 0, "error": ".."}``; and
``{"settled": true}``. ``{"gone": "vm0"}`` tells of a VM that was up and whose raylet ended.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any

import psutil
from ray._private import services
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray.cluster_utils import Cluster

from manager.engine.local_vms.control_socket import ControlSocket, hear, tell
from manager.engine.on_ray.agents import start_agents_of_ours
from manager.host.gone import wait_gone
from manager.host.ports import LOOPBACK, VM_RESOURCE, Ports
from morph.contract.errors import ClusterError

OBJECT_STORE_BYTES = 80 * 1024 * 1024
HEAD_STORE_BYTES = 512 * 1024 * 1024
"""At most: the code of the job waits in it for workers that are set up, and no worker spills it to disk."""
END_TIMEOUT_S = 10.0
NODE_TIMEOUT_S = 60.0
LOOK_EVERY_S = 0.1
NO_WORKERS = str(Path(__file__).with_name("no_workers.py"))
LOG = "vm_host.log"
_PARAMS: Any = RayParams  # whose types are wrong


class _Node(Node):
    """A Ray node that hands out its raylet's process as soon as there is one: the constructor waits on for Ray."""

    def __init__(self, params: RayParams, started: Callable[[int], None]) -> None:
        self._started = started
        super().__init__(params, head=False, shutdown_at_exit=False, spawn_reaper=True)

    def start_raylet(self, *args: Any, **kwargs: Any) -> None:
        super().start_raylet(*args, **kwargs)
        self._started(self.all_processes["raylet"][0].process.pid)


class _Nodes:
    """What runs: Ray's cluster, and the processes of each VM, raylet first. Each VM has a thread that ends with it."""

    def __init__(self, cluster: Any, calls: socket.socket) -> None:
        self._cluster, self._calls = cluster, calls
        self._vms: dict[str, list[int]] = {}
        self._booting: set[str] = set()
        self._manager: socket.socket | None = None
        self._store: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._launching = threading.Lock()
        self._storing = threading.Lock()
        self._numbers = count(1)

    def greet(self, manager: socket.socket) -> None:
        """Tell a manager what it must know, and from now on what happens."""
        with self._lock:
            self._manager = manager
            tell(
                manager,
                self._calls.fileno(),
                host=os.getpid(),
                address=self._cluster.address,
                head=_pids(self._cluster.head_node),
                store=self._store.pid if self._store else 0,
                vms=self._vms,
            )

    def part(self) -> None:
        """The manager is gone: nothing is told any more."""
        with self._lock:
            self._manager = None

    def start_store(self, host: str, port: int) -> None:
        """Start the rendezvous store; the answer follows."""
        threading.Thread(target=self._serve_store, args=(host, port), name="store", daemon=True).start()

    def _serve_store(self, host: str, port: int) -> None:
        with self._storing:
            if self._store is not None:
                self._store.kill()
                self._store.wait()
            command = [sys.executable, "-m", "morph.runtime.groups.store", host, str(port)]
            pipe = subprocess.PIPE  # at whose end the store ends
            self._store = store = subprocess.Popen(command, stdin=pipe, stdout=pipe)
            assert store.stdout is not None
            told = store.stdout.readline()
        with self._lock:
            if told:
                self._say(store=store.pid, port=int(told))
            else:
                self._say(store=0, error=f"it ended at once; see {LOG}")

    def add(self, name: str) -> None:
        """Bring up a VM; the answer follows. One that boots already, or is up, is not brought up twice."""
        with self._lock:
            if name in self._vms:
                self._say(name=name, pids=self._vms[name])
            elif name not in self._booting:
                self._booting.add(name)
                threading.Thread(target=self._boot, args=(name,), name=f"vm-{name}", daemon=True).start()

    def _boot(self, name: str) -> None:
        """Body of a VM's thread; the kernel ends the raylet with it."""
        ended = threading.Event()
        try:
            node = self._launched(name, ended)
        except Exception as error:
            self._did_not_come_up(name, f"{type(error).__name__}: {error}")
            return
        with self._lock:
            is_up = name in self._booting
            if is_up:
                self._booting.remove(name)
                self._vms[name] = list(_pids(node).values())
                self._say(name=name, pids=self._vms[name])
        ended.wait()
        if is_up:
            with self._lock:
                del self._vms[name]
                self._say(gone=name)
        node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)

    def _launched(self, name: str, ended: threading.Event) -> _Node:
        """A node that Ray knows. One is launched after the other, for Ray would give two the same files."""
        number = next(self._numbers)
        sockets = Path(self._cluster.head_node.get_sockets_dir_path())
        params = _PARAMS(
            num_cpus=1,
            num_gpus=0,
            resources={VM_RESOURCE + name: 1},
            object_store_memory=OBJECT_STORE_BYTES,
            node_ip_address=LOOPBACK,
            gcs_address=self._cluster.gcs_address,
            redis_address=self._cluster.redis_address,
            min_worker_port=0,
            max_worker_port=0,
            node_manager_port=0,
            dashboard_agent_listen_port=None,
            include_log_monitor=False,
            raylet_socket_name=str(sockets / f"raylet.{number}"),
            plasma_store_socket_name=str(sockets / f"plasma_store.{number}"),
        )
        self._launching.acquire()
        launched = ExitStack()
        launched.callback(self._launching.release)

        def started(raylet: int) -> None:
            launched.close()
            threading.Thread(target=self._watch, args=(name, raylet, ended), name=f"end-{name}", daemon=True).start()

        with launched:
            return _Node(params, started)

    def _watch(self, name: str, raylet: int, ended: threading.Event) -> None:
        """Wait for a raylet's end, and leave the zombie: until the manager was told, its number is nobody else's."""
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, raylet, os.WEXITED | os.WNOWAIT)
        self._did_not_come_up(name, "its raylet ended while it booted")
        ended.set()

    def _did_not_come_up(self, name: str, error: str) -> None:
        with self._lock:
            if name in self._booting:
                self._booting.remove(name)
                self._say(name=name, error=error)

    def _say(self, **entries: object) -> None:
        if self._manager is not None:
            with suppress(OSError):
                tell(self._manager, **entries)


def _start_no_server() -> None:
    """Ray's dashboard has a server, which is started without the dashboard too: the head node would wait for it."""

    def start_no_server(*_args: Any, **_settings: Any) -> tuple[None, None]:
        return None, None  # as where it does not come up

    vars(services)["start_api_server"] = start_no_server


def _start_head(calls: socket.socket, host: str, port: int, first_port: int) -> _Nodes:
    return _Nodes(
        Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "worker_path": NO_WORKERS,
                "setup_worker_path": NO_WORKERS,
                "object_store_memory": HEAD_STORE_BYTES,
                "include_dashboard": False,
                "include_log_monitor": False,  # it holds a file for each worker there ever was, and nobody reads them
                "no_monitor": True,  # of the autoscaler: its metrics are open to everybody, at a port of Ray's choice
                "node_ip_address": host,
                **({"gcs_server_port": port} if port else {}),
                **Ports(first_port).of_node(),
            },
        ),
        calls,
    )


def _started_head(calls: socket.socket, host: str, port: int, first_port: int) -> _Nodes:
    """A head node; one that does not come up is started once more, for a raylet gives up agents that need 15 s.

    Raises:
        ClusterError: this version of Ray is not known.
        Exception: whatever Ray raises the second time.
    """
    try:
        return _start_head(calls, host, port, first_port)
    except ClusterError:
        raise
    except Exception:
        traceback.print_exc()
        _end_children()
        return _start_head(calls, host, port, first_port)


def _wait_longer() -> None:
    """Ray gives a node 30 s to be known to its head, which a busy machine may need to load its processes alone."""
    get_node: Any = services.get_node

    def patiently(*args: Any) -> Any:
        until_s = time.monotonic() + NODE_TIMEOUT_S
        while True:
            try:
                return get_node(*args)
            except RuntimeError:
                if not any(map(_is_living_raylet, psutil.Process().children())):
                    raise ChildProcessError("its raylet ended while it booted") from None  # Ray would ask on
                if time.monotonic() > until_s:
                    raise
                time.sleep(LOOK_EVERY_S)

    vars(services)["get_node"] = patiently


def _is_living_raylet(child: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return child.name() == "raylet" and child.status() != psutil.STATUS_ZOMBIE
    return False


def _pids(node: Any) -> dict[str, int]:
    return {name: info.process.pid for name, infos in node.all_processes.items() for info in infos}


def _end_children() -> None:
    own, children = psutil.Process().children(), psutil.Process().children(recursive=True)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.send_signal(signal.SIGKILL)
    wait_gone(children, END_TIMEOUT_S)
    psutil.wait_procs(own, END_TIMEOUT_S)  # reaps them


def _attend(manager: socket.socket, nodes: _Nodes, control_socket: ControlSocket) -> bool:
    """Do what one manager asks for until it goes; returns whether it asked for the end."""
    with manager, suppress(OSError):
        try:
            nodes.greet(manager)
            while True:
                request, _ = hear(manager)
                if request is None or "end" in request:
                    return request is not None
                if "settled" in request:
                    control_socket.settle()
                elif "store" in request:
                    nodes.start_store(request["store"], request["port"])
                else:
                    nodes.add(request["add"])
        finally:
            nodes.part()
    return False


def main() -> None:
    """Serve managers until one asks for the end, or none comes any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control_socket = ControlSocket(socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2]))
    calls = socket.socket(fileno=int(sys.argv[3]))
    calls.set_inheritable(False)
    asked_to_end = False
    _wait_longer()
    start_agents_of_ours()
    _start_no_server()
    try:
        manager = control_socket.next()
        try:
            nodes = _started_head(calls, sys.argv[4], int(sys.argv[5]), int(sys.argv[6]))
        except Exception as error:
            if manager is not None:
                tell(manager, error=f"{type(error).__name__}: {error}")
            return
        while manager is not None and not asked_to_end:
            asked_to_end = _attend(manager, nodes, control_socket)
            manager = None if asked_to_end else control_socket.next()
    finally:
        control_socket.close()
        _end_children()
        if not asked_to_end and "RAY_TMPDIR" in os.environ:
            shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)
        os._exit(0)  # Ray's exit hooks would wait for nodes that are gone


if __name__ == "__main__":
    main()
