"""A Ray cluster on this machine whose nodes stand for spot VMs.

A VM is one raylet and what it starts. ``kill_vm`` takes them all away with SIGKILL at once, as a
revocation does. Nothing outlives ``close``: every process is a descendant of this one, is ended by
its id, and dies with this process (the kernel's parent-death signal) should it be killed itself.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil

from morph.contract.errors import ClusterError

log = logging.getLogger(__name__)

VM_RESOURCE = "morph_vm_"
HEAD_RESOURCE = "morph_head"
OBJECT_STORE_BYTES = 80 * 1024 * 1024
END_TIMEOUT_S = 10.0

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "token",
    "RAY_DEDUP_LOGS": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # a lost node should be known to Ray soon too, not after 14 s
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
}


class RayCluster:
    """Head node and VMs. ``start``, ``add_vm`` and ``close`` must be called from threads that live as long as the
    cluster does: the kernel ends a process when the *thread* that started it ends.
    """

    def __init__(self) -> None:
        self._cluster: Any = None
        self._vms: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._saved_environment: dict[str, str | None] = {}
        self._directory: Path | None = None

    def start(self) -> None:
        """Start the head node and connect to it.

        Raises:
            ClusterError: when Ray does not come up.
        """
        self._directory = Path(tempfile.mkdtemp(prefix="morph-"))  # short: Ray puts sockets below it
        token = self._directory / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32), encoding="utf-8")
        for key, value in {**_ENVIRONMENT, "RAY_AUTH_TOKEN_PATH": str(token)}.items():
            self._saved_environment[key] = os.environ.get(key)
            os.environ[key] = value
        import ray  # reads the environment when it is imported
        from ray.cluster_utils import Cluster

        try:
            self._cluster = Cluster(
                initialize_head=True,
                shutdown_at_exit=True,
                head_node_args={
                    "num_cpus": 0,
                    "resources": {HEAD_RESOURCE: 1},
                    "object_store_memory": OBJECT_STORE_BYTES,
                    "include_dashboard": False,
                    "temp_dir": str(self._directory),
                    "node_ip_address": "127.0.0.1",
                },
            )
            ray.init(
                address=self._cluster.address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                include_dashboard=False,
                namespace="morph",
            )
        except Exception as error:
            self.close()
            raise ClusterError(f"Ray did not start: {type(error).__name__}: {error}") from error

    def add_vm(self, name: str) -> None:
        """Bring up a VM; blocks until Ray knows it, some seconds.

        Raises:
            ClusterError: when the node does not come up.
        """
        try:
            node = self._cluster.add_node(
                num_cpus=1,
                resources={VM_RESOURCE + name: 1},
                object_store_memory=OBJECT_STORE_BYTES,
                node_ip_address="127.0.0.1",
                temp_dir=str(self._directory),
            )
        except Exception as error:
            raise ClusterError(f"VM {name} did not come up: {type(error).__name__}: {error}") from error
        with self._lock:
            self._vms[name] = node

    def kill_vm(self, name: str) -> bool:
        """Take a VM away without warning: SIGKILL to its raylet and everything below. False if there is none."""
        with self._lock:
            node = self._vms.pop(name, None)
        if node is None:
            return False
        _kill_trees([info.process.pid for infos in node.all_processes.values() for info in infos])
        return True

    def vm_pids(self, name: str) -> list[int]:
        """Process ids of a VM, raylet first."""
        with self._lock:
            node = self._vms.get(name)
        roots = [] if node is None else [info.process.pid for infos in node.all_processes.values() for info in infos]
        return [process.pid for root in roots for process in _tree(root)]

    def close(self) -> None:
        """End every process of the cluster and remove its files. Safe to call twice."""
        import ray

        doomed = [process for process in psutil.Process().children(recursive=True) if _is_ray(process)]
        if ray.is_initialized():
            ray.shutdown()
        if self._cluster is not None:
            # not Cluster.shutdown: it waits for each node in turn
            nodes = [self._cluster.head_node, *self._cluster.worker_nodes]
            pids = [info.process.pid for node in nodes if node for infos in node.all_processes.values() for info in infos]
            _kill_trees(pids)
            for node in nodes:
                if node is not None:
                    node.all_processes.clear()
            self._cluster = None
        _kill_and_reap(doomed)
        with self._lock:
            self._vms.clear()
        for key, value in self._saved_environment.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
        self._saved_environment = {}
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _is_ray(process: psutil.Process) -> bool:
    try:
        return any("ray" in part for part in process.cmdline()[:3]) or process.name().startswith("ray::")
    except psutil.NoSuchProcess:
        return False


def _kill_trees(pids: list[int]) -> None:
    """SIGKILL to processes and all their descendants, collected before the first is killed."""
    _kill_and_reap([process for pid in pids for process in _tree(pid)])


def _kill_and_reap(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(processes, timeout=END_TIMEOUT_S)
    if alive:
        log.warning("processes still there %g s after SIGKILL: %s", END_TIMEOUT_S, [process.pid for process in alive])
