"""The ports of a run on a provider's VMs, if the user fixes them for a firewall.

They are a block of ``NUM_PORTS`` from ``vms.first_port`` on, the same on each VM and on the manager's machine.
Connections for tensors between workers (gloo, NCCL, pre-copied units) do not use the block: the kernel chooses their
ports.

The module also has names that the manager shares with the process of the local Ray nodes.
"""

from __future__ import annotations

import itertools
import random
import socket
from dataclasses import dataclass
from pathlib import Path

from morph.contract.cluster import NUM_PORTS

RAY_PORTS = {
    "node_manager_port": "--node-manager-port",
    "object_manager_port": "--object-manager-port",
    "runtime_env_agent_port": "--runtime-env-agent-port",
    "dashboard_agent_listen_port": "--dashboard-agent-listen-port",
    "metrics_agent_port": "--dashboard-agent-grpc-port",
    "metrics_export_port": "--metrics-export-port",
}
"""The ports of each node of Ray, in order: the parameter, and the option of ``ray start``."""
AGENT_PORTS = ("runtime_env_agent_port", "dashboard_agent_listen_port", "metrics_agent_port", "metrics_export_port")
"""Those of the two agents of a node, which start beside its raylet."""
FIRST_OF_RAY, FIRST_OF_WORKERS = 10, 20
LOWEST, EPHEMERAL = 20_000, Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The lowest port that is drawn, above those of Ray's workers; and where Linux has the range that it draws from."""
VM_RESOURCE = "morph_vm_"
RAY_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's default of 15 lets anything else on the machine stop training
    # Morph's own bounds give up a boot; Ray's, of 5 to 60 s, would give up what is merely slow
    "RAY_agent_register_timeout_ms": "600000",
    # Ray sees only then that a worker's process died while it started, and starts another; Morph waits twice as long
    "RAY_worker_register_timeout_seconds": "150",
    "RAY_gcs_rpc_server_connect_timeout_s": "60",
    "RAY_automatic_object_spilling_enabled": "0",  # spilling needs workers, which the head node does not have
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # a dead raylet refuses five checks within seconds; an unreachable one gets almost a minute, because Morph's own
    # heartbeats detect a lost node sooner, and tell it from a network failure
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "5",
}
"""The environment of every process of Ray, on every node."""
LOOPBACK = "127.0.0.1"
"""The address of local Ray nodes; see ``ray_environment.stay_on_loopback``."""


@dataclass(frozen=True)
class Ports:
    """The ports of a run, from ``first`` on; if it is 0, no port is fixed, and all are 0."""

    first: int = 0

    @property
    def head(self) -> int:
        """The port of Ray's head node."""
        return self._at(0)

    @property
    def notices(self) -> int:
        """The port that the VMs' agents call."""
        return self._at(1)

    @property
    def store(self) -> int:
        """The port of the rendezvous store."""
        return self._at(2)

    @property
    def workers(self) -> int:
        """The port on which workers call the manager."""
        return self._at(3)

    def of_node(self) -> dict[str, int]:
        """Return the ports of a node of Ray by parameter, or nothing if they are not fixed."""
        if not self.first:
            return {}
        fixed = {name: self._at(FIRST_OF_RAY + index) for index, name in enumerate(RAY_PORTS)}
        return {**fixed, "min_worker_port": self._at(FIRST_OF_WORKERS), "max_worker_port": self._at(NUM_PORTS - 1)}

    def options(self) -> list[str]:
        """Return the same ports as options of ``ray start``."""
        names = {**RAY_PORTS, "min_worker_port": "--min-worker-port", "max_worker_port": "--max-worker-port"}
        return [f"{names[name]}={port}" for name, port in self.of_node().items()]

    def of_manager(self) -> list[int]:
        """Return the fixed ports that must be free on the manager's machine, except those of Ray's workers."""
        node = {name: port for name, port in self.of_node().items() if name in RAY_PORTS}
        return [self.head, self.notices, self.store, self.workers, *node.values()] if self.first else []

    def _at(self, index: int) -> int:
        return self.first + index if self.first else 0


def free_agent_ports() -> dict[str, int]:
    """Return free ports of this machine for the agents of a node of Ray, by parameter.

    A raylet that chooses its agents' ports ends if they take more than 15 s to start, which no setting of Ray changes;
    with given ports it waits for ``RAY_agent_register_timeout_ms``. The kernel gives none of these ports to others.
    """
    end = int(EPHEMERAL.read_text(encoding="ascii").split()[0]) if EPHEMERAL.exists() else 32_768
    candidates = list(range(LOWEST, end if end > LOWEST + 1000 else 65_536))
    random.SystemRandom().shuffle(candidates)
    free = itertools.islice(filter(_is_free, candidates), len(AGENT_PORTS))
    return dict(zip(AGENT_PORTS, free, strict=True))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
