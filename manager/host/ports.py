"""Ports on which a run on VMs of a provider listens, where the user fixes them so that a firewall can name them.

A block of ``NUM_PORTS`` from ``vms.first_port`` on, the same on each VM and on the manager's machine. Tensors between
workers (gloo, NCCL, pre-copied units) are not in it: they take what the kernel gives out.

Also the names by which the manager and the process with the local Ray nodes know one another.
"""

from __future__ import annotations

from dataclasses import dataclass

from morph.contract.cluster import NUM_PORTS

RAY_PORTS = {
    "node_manager_port": "--node-manager-port",
    "object_manager_port": "--object-manager-port",
    "runtime_env_agent_port": "--runtime-env-agent-port",
    "dashboard_agent_listen_port": "--dashboard-agent-listen-port",
    "metrics_agent_port": "--dashboard-agent-grpc-port",
    "metrics_export_port": "--metrics-export-port",
}
"""Of each node of Ray: the parameter, and the option of ``ray start``; in the order of their ports."""
FIRST_OF_RAY, FIRST_OF_WORKERS = 10, 20


@dataclass(frozen=True)
class Ports:
    """``first``: of the block; 0: any free port for everything, which is then said by 0."""

    first: int = 0

    @property
    def head(self) -> int:
        """Of Ray's head node."""
        return self._at(0)

    @property
    def notices(self) -> int:
        """To which the VMs' agents come."""
        return self._at(1)

    @property
    def store(self) -> int:
        """Of the rendezvous store."""
        return self._at(2)

    @property
    def workers(self) -> int:
        """At which workers call the manager."""
        return self._at(3)

    def of_node(self) -> dict[str, int]:
        """Those of a node of Ray, by parameter; none where they are not fixed."""
        if not self.first:
            return {}
        fixed = {name: self._at(FIRST_OF_RAY + index) for index, name in enumerate(RAY_PORTS)}
        return {**fixed, "min_worker_port": self._at(FIRST_OF_WORKERS), "max_worker_port": self._at(NUM_PORTS - 1)}

    def options(self) -> list[str]:
        """The same as options of ``ray start``."""
        names = {**RAY_PORTS, "min_worker_port": "--min-worker-port", "max_worker_port": "--max-worker-port"}
        return [f"{names[name]}={port}" for name, port in self.of_node().items()]

    def of_manager(self) -> list[int]:
        """All that must be free on the manager's machine, but for Ray's workers'; none where not fixed."""
        node = {name: port for name, port in self.of_node().items() if name in RAY_PORTS}
        return [self.head, self.notices, self.store, self.workers, *node.values()] if self.first else []

    def _at(self, index: int) -> int:
        return self.first + index if self.first else 0


VM_RESOURCE = "morph_vm_"
RAY_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's own default of 15 lets anything else on the machine stop training
    "RAY_automatic_object_spilling_enabled": "0",  # it takes workers, which the head node has none of
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # a raylet that died refuses five looks within seconds; one that cannot be reached has almost a minute, for Morph's
    # own heartbeats know a lost node sooner, and tell it from a network that is gone
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "5",
}
"""Environment of every process of Ray, on every node."""
LOOPBACK = "127.0.0.1"
"""Of local Ray nodes; see ``ray_environment.stay_on_loopback``."""
