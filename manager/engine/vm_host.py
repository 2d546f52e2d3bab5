"""The process that owns the local Ray nodes: ``python -m manager.engine.vm_host``, spoken to in JSON lines.

A process of its own, because the nodes must die with the thread that started them (the kernel's
parent-death signal), Ray wants that to be a main thread, and Ctrl-C in the user's terminal must reach
the manager alone. It ends every node when its standard input closes: also when the manager is killed,
whose Ray directory, with the token, it then removes.

Requests: ``{"add": "vm0"}``. Answers: ``{"address": ..}`` once at the start, then per request
``{"name": "vm0", "pids": [..]}`` or ``{"name": "vm0", "error": ".."}``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from typing import Any

import psutil
from ray.cluster_utils import Cluster

from manager.engine.gone import wait_gone
from manager.engine.names import HEAD_RESOURCE, LOOPBACK, VM_RESOURCE

OBJECT_STORE_BYTES = 80 * 1024 * 1024
END_TIMEOUT_S = 10.0


def _start_head() -> Any:
    return Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "resources": {HEAD_RESOURCE: 1},
            "object_store_memory": OBJECT_STORE_BYTES,
            "include_dashboard": False,
            "node_ip_address": LOOPBACK,
        },
    )


def _add_vm(cluster: Any, name: str) -> list[int]:
    node = cluster.add_node(
        num_cpus=1,
        resources={VM_RESOURCE + name: 1},
        object_store_memory=OBJECT_STORE_BYTES,
        node_ip_address=LOOPBACK,
    )
    return [info.process.pid for infos in node.all_processes.values() for info in infos]


def _end_children() -> None:
    children = psutil.Process().children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(signal.SIGKILL)
    wait_gone(children, END_TIMEOUT_S)


def _answer(**entries: object) -> None:
    sys.__stdout__.write(json.dumps(entries) + "\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]


def main() -> None:
    """Serve requests until standard input closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    manager = os.getppid()
    try:
        try:
            cluster = _start_head()
        except Exception as error:
            _answer(error=f"{type(error).__name__}: {error}")
            return
        _answer(address=cluster.address)
        for line in sys.stdin:
            name = json.loads(line)["add"]
            try:
                _answer(name=name, pids=_add_vm(cluster, name))
            except Exception as error:
                _answer(name=name, error=f"{type(error).__name__}: {error}")
    finally:
        _end_children()
        if os.getppid() != manager and "RAY_TMPDIR" in os.environ:
            shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)
        os._exit(0)  # Ray's exit hooks would wait for nodes that are gone


if __name__ == "__main__":
    main()
