"""Where a session's workers run: under local Ray nodes, or as plain processes of this machine."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from manager.engine.driver import Pool
from manager.engine.inbox import Inbox
from manager.engine.lifelines import Lifelines
from manager.engine.namespaces import HostNetwork, connected
from manager.engine.vm_fleet import VmHost
from morph.contract.messages import Lifeline, WorkerSetup

LOOPBACK = "127.0.0.1"

MakeSetup = Callable[[str], WorkerSetup]


class SessionPool(Pool, Protocol):
    """A pool whose workers can be lost by a closed connection, and that can be told to fall silent."""

    def connection_closed(self, worker: str) -> None:
        """Take note that a worker's process is gone."""

    def close(self) -> None:
        """Report nothing any more, and call nobody."""


@dataclass(frozen=True)
class Machines:
    """VMs that can be asked for and revoked, the workers on them, and how these reach each other.

    ``lifeline`` is None where the pool itself sees at once that a worker died.
    """

    vms: VmHost
    pool: SessionPool
    store_host: str
    store_port: int
    lifeline: Lifeline | None
    address_of: Callable[[str], str]


OpenMachines = Callable[[Inbox, MakeSetup, float, ExitStack], Machines]
"""(inbox, what a worker is set up with, heartbeat time-out in s, closes what was opened): brings machines up."""


def open_ray(directory: Path) -> OpenMachines:
    """VMs as local Ray nodes. ``directory`` is what ``ray_environment.prepare`` returned.

    The result raises ClusterError when Ray does not start.
    """

    def open_machines(inbox: Inbox, make_setup: MakeSetup, heartbeat_timeout_s: float, ending: ExitStack) -> Machines:
        from manager.engine.ray_cluster import RayCluster
        from manager.engine.worker_pool import Store, WorkerPool

        cluster = RayCluster(directory)
        ending.callback(cluster.close)
        cluster.start()
        store = Store(LOOPBACK)
        pool = WorkerPool(inbox, make_setup, heartbeat_timeout_s)
        ending.callback(pool.close)
        lifelines = Lifelines(LOOPBACK, pool.connection_closed)
        ending.callback(lifelines.close)
        lifeline = Lifeline(host=lifelines.host, port=lifelines.port, secret=lifelines.secret)
        ending.callback(lambda: store)  # Ray ends an actor whose last handle is gone, and the store with it
        return Machines(cluster, pool, store.host, store.port, lifeline, lambda _worker: LOOPBACK)

    return open_machines


@dataclass(frozen=True)
class Processes:
    """VMs as processes of this machine, all of them on Linux.

    Args:
        log_path: What workers write to standard error goes there.
        remove_if_killed: A directory to remove should this process be killed.
        network: Hosts with a network of their own; None: all share the loopback.
        lanes_in_network: Orders and heartbeats go through that network too, and so are lost with a host's link.
        host_of: The host (numbered from 0) of a VM; asked only where there is a network.
    """

    log_path: Path
    remove_if_killed: Path | None = None
    network: HostNetwork | None = None
    lanes_in_network: bool = False
    host_of: Callable[[str], int] = lambda _vm: 0

    def __call__(self, inbox: Inbox, make_setup: MakeSetup, heartbeat_timeout_s: float, ending: ExitStack) -> Machines:
        """Bring them up; see ``OpenMachines``.

        Raises:
            ClusterError: when that fails.
        """
        from manager.engine.process_pool import ProcessPool
        from manager.engine.process_vms import ProcessVms

        network = self.network
        if network is not None:
            ending.callback(network.close)
            network.open()
        lanes: dict[str, Any] = {"connect": self._connect} if self.lanes_in_network else {}
        vms = ProcessVms(self.log_path, self._namespace_of, self.remove_if_killed, **lanes)
        ending.callback(vms.close)
        vms.start()
        store_host = LOOPBACK if network is None else network.hub_address
        store_port = vms.start_store(store_host, None if network is None else network.hub)
        pool = ProcessPool(inbox, make_setup, vms.lanes, lambda vm: vms.prepare_kill([vm])(), heartbeat_timeout_s)
        ending.callback(pool.close)
        return Machines(vms, pool, store_host, store_port, None, self._address_of)

    def _namespace_of(self, vm: str) -> str | None:
        return None if self.network is None else self.network.namespace(self.host_of(vm))

    def _connect(self, vm: str) -> tuple[socket.socket, socket.socket]:
        network = self.network
        assert network is not None, "there is no network"
        return connected(network.hub, network.hub_address, network.namespace(self.host_of(vm)))

    def _address_of(self, vm: str) -> str:
        return LOOPBACK if self.network is None else self.network.address(self.host_of(vm))
