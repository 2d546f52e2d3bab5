"""The process that owns the local Ray nodes: ``python -m manager.engine.vm_host FD PATIENCE_S HOST PORT FIRST``.

FD: see ``door``. HOST and PORT: of the head node; FIRST: of the ports of its other processes. 0: any free port.

A process of its own, because the nodes must die with the thread that started them (the kernel's
parent-death signal), Ray wants that to be a main thread, and Ctrl-C in the user's terminal must reach
the manager alone. They outlive a manager that was killed for ``PATIENCE_S``, in which another may take over. Then, or
at ``{"end": true}``, every node is ended; if no manager asked for that, the Ray directory, with the token, is removed.

Every manager is greeted with ``{"host": pid, "address": .., "head": {name: pid}, "vms": {"vm0": [pids]}}``. Requests:
``{"add": "vm0"}``, answered with ``{"name": "vm0", "pids": [..]}`` or ``{"name": "vm0", "error": ".."}``, and
``{"settled": true}``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
from dataclasses import dataclass, field
from typing import Any

import psutil
from ray.cluster_utils import Cluster

from manager.engine.door import Door, hear, tell
from manager.engine.gone import wait_gone
from manager.engine.names import HEAD_RESOURCE, LOOPBACK, VM_RESOURCE
from manager.engine.ports import Ports

OBJECT_STORE_BYTES = 80 * 1024 * 1024
END_TIMEOUT_S = 10.0


@dataclass
class _Nodes:
    """What runs: Ray's cluster, and the processes of each VM, raylet first."""

    cluster: Any
    vms: dict[str, list[int]] = field(default_factory=dict)

    def greeting(self) -> dict[str, object]:
        """What a manager must know."""
        return {
            "host": os.getpid(),
            "address": self.cluster.address,
            "head": _pids(self.cluster.head_node),
            "vms": {name: pids for name, pids in self.vms.items() if all(map(_runs, pids))},
        }

    def add(self, name: str) -> dict[str, object]:
        """Bring up a VM, and answer."""
        try:
            self._forget_killed()
            node = self.cluster.add_node(
                num_cpus=1,
                resources={VM_RESOURCE + name: 1},
                object_store_memory=OBJECT_STORE_BYTES,
                node_ip_address=LOOPBACK,
                include_log_monitor=False,
            )
        except Exception as error:
            return {"name": name, "error": f"{type(error).__name__}: {error}"}
        self.vms[name] = list(_pids(node).values())
        return {"name": name, "pids": self.vms[name]}

    def _forget_killed(self) -> None:
        """Reap nodes that were killed and let go of what Ray keeps of each: a zombie, a connection and its thread."""
        for node in [node for node in self.cluster.worker_nodes if not any(map(_runs, _pids(node).values()))]:
            self.cluster.remove_node(node, allow_graceful=False)
            node._gcs_client = None  # Ray's exit hooks, which never run here, hold the node itself
        self.vms = {name: pids for name, pids in self.vms.items() if any(map(_runs, pids))}


def _start_head(host: str, port: int, first_port: int) -> _Nodes:
    return _Nodes(
        Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "resources": {HEAD_RESOURCE: 1},
                "object_store_memory": OBJECT_STORE_BYTES,
                "include_dashboard": False,
                "include_log_monitor": False,  # it holds a file for each worker there ever was, and nobody reads them
                "no_monitor": True,  # of the autoscaler: its metrics are open to everybody, at a port of Ray's choice
                "node_ip_address": host,
                **({"gcs_server_port": port} if port else {}),
                **Ports(first_port).of_node(),
            },
        )
    )


def _pids(node: Any) -> dict[str, int]:
    return {name: info.process.pid for name, infos in node.all_processes.items() for info in infos}


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _end_children() -> None:
    children = psutil.Process().children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(signal.SIGKILL)
    wait_gone(children, END_TIMEOUT_S)


def _attend(manager: socket.socket, nodes: _Nodes, door: Door) -> bool:
    """Do what one manager asks for until it goes; returns whether it asked for the end."""
    with manager, contextlib.suppress(OSError):
        tell(manager, **nodes.greeting())
        while True:
            request, _ = hear(manager)
            if request is None or "end" in request:
                return request is not None
            if "settled" in request:
                door.settle()
            else:
                tell(manager, **nodes.add(request["add"]))
    return False


def main() -> None:
    """Serve managers until one asks for the end, or none comes any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    door = Door(socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2]))
    asked_to_end = False
    try:
        manager = door.next()
        try:
            nodes = _start_head(sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
        except Exception as error:
            if manager is not None:
                tell(manager, error=f"{type(error).__name__}: {error}")
            return
        while manager is not None and not asked_to_end:
            asked_to_end = _attend(manager, nodes, door)
            manager = None if asked_to_end else door.next()
    finally:
        door.close()
        _end_children()
        if not asked_to_end and "RAY_TMPDIR" in os.environ:
            shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)
        os._exit(0)  # Ray's exit hooks would wait for nodes that are gone


if __name__ == "__main__":
    main()
