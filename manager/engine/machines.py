"""Where a session's workers run: under local Ray nodes, or as plain processes of this machine."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from manager.controller.events import WorkerLost
from manager.engine.attachment import Attachment, Found
from manager.engine.driver import Pool
from manager.engine.inbox import Inbox
from manager.engine.lifelines import Lifelines
from manager.engine.namespaces import HostNetwork, connected
from manager.engine.notice_door import NoticeDoor
from manager.engine.ray_environment import stay_on_loopback
from manager.engine.store_watch import StartedStore, StoreWatch
from manager.engine.vm_fleet import VmHost
from manager.providers.provider import Provider
from morph.contract.messages import Lifeline, WorkerSetup

LOOPBACK = "127.0.0.1"

MakeSetup = Callable[[str], WorkerSetup]


class SessionPool(Pool, Protocol):
    """A pool whose workers can be lost by a closed connection, and that can be told to fall silent."""

    def connection_closed(self, worker: str) -> None:
        """Take note that a worker's process is gone."""

    def close(self) -> None:
        """Report nothing any more, and call nobody."""


class KeptVms(VmHost, Protocol):
    """VMs that outlive a manager that is killed."""

    def settle(self) -> None:
        """From now on another manager would find them."""


@dataclass(frozen=True)
class Provided:
    """Beside the machines, where a provider brings the VMs.

    ``joined``: the workers for which there are VMs in the cluster, with addresses.
    """

    provider: Provider
    notices: NoticeDoor
    joined: Callable[[], Mapping[str, str]]


@dataclass(frozen=True)
class Machines:
    """VMs that can be asked for and revoked, the workers on them, and how these reach each other.

    ``lifeline`` is None where the pool itself sees at once that a worker died. ``attach`` goes on with the workers
    that another manager left, given those that were set up, and returns those that answer. ``attachment`` is what a
    successor needs. ``up``: workers of VMs that another manager left, or that joined since. ``provided``: None where
    VMs are of this machine.
    """

    vms: KeptVms
    pool: SessionPool
    store_host: str
    store_port: int
    lifeline: Lifeline | None
    address_of: Callable[[str], str]
    attachment: Attachment
    attach: Callable[[Collection[str]], tuple[str, ...]]
    up: Callable[[], tuple[str, ...]]
    provided: Provided | None = None


@dataclass(frozen=True)
class Opening:
    """What machines are brought up with.

    Args:
        inbox: Where events go.
        make_setup: What a worker of this name is set up with.
        heartbeat_timeout_s: A silent worker is given up after this.
        outage_timeout_s: Workers that are all silent together are given up after this.
        patience_s: How long everything outlives this process, should it be killed.
        ending: Closes what was opened.
        found: What another manager left; None: nothing.
    """

    inbox: Inbox
    make_setup: MakeSetup
    heartbeat_timeout_s: float
    outage_timeout_s: float
    patience_s: float
    ending: ExitStack
    found: Found | None = None


OpenMachines = Callable[[Opening], Machines]
"""Brings machines up, or goes on with those that were found."""


def open_ray(directory: Path) -> OpenMachines:
    """VMs as local Ray nodes. ``directory`` is what ``ray_environment.prepare`` or ``adopt`` returned.

    The result raises ClusterError when Ray does not start.
    """

    def open_machines(opening: Opening) -> Machines:
        stay_on_loopback()
        from manager.engine.ray_cluster import RayCluster
        from manager.engine.worker_pool import WorkerPool

        found, ending = opening.found, opening.ending
        cluster = RayCluster(directory, opening.patience_s, gone=lambda vm: opening.inbox.put(_ended(vm)))
        ending.callback(cluster.close)
        if found is None:
            cluster.start()
            store = StartedStore(cluster.start_store, LOOPBACK)
            store.start()
        else:
            cluster.take_over(found.line, found.greeting)
            port = found.attachment.store_port
            store = StartedStore(cluster.start_store, LOOPBACK, port, found.greeting["store"])
        attachment = (
            found.attachment
            if found
            else Attachment(kind="ray", door=cluster.door, store_host=store.host, store_port=store.port)
        )
        watch = StoreWatch(store, opening.inbox)
        ending.callback(watch.close)
        pool = WorkerPool(
            opening.inbox,
            opening.make_setup,
            opening.heartbeat_timeout_s,
            checking(cluster.check_head, watch.check),
            outage_timeout_s=opening.outage_timeout_s,
        )
        ending.callback(pool.close)
        lifelines = Lifelines(LOOPBACK, pool.connection_closed)
        ending.callback(lifelines.close)
        lifeline = Lifeline(host=lifelines.host, port=lifelines.port, secret=lifelines.secret)
        return Machines(
            cluster,
            pool,
            attachment.store_host,
            attachment.store_port,
            lifeline,
            lambda _worker: LOOPBACK,
            attachment,
            lambda set_up: pool.attach(found.vms if found else (), set_up, lifeline),
            lambda: found.vms if found else (),
        )

    return open_machines


def checking(*checks: Callable[[], None]) -> Callable[[], None]:
    """Return what makes one check after the other."""

    def check() -> None:
        for each in checks:
            each()

    return check


def _ended(vm: str) -> WorkerLost:
    return WorkerLost(worker=vm, cause="its VM ended")


@dataclass(frozen=True)
class Processes:
    """VMs as processes of this machine, all of them on Linux. With a network of their own they end with the manager.

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

    def __call__(self, opening: Opening) -> Machines:
        """Bring them up; see ``OpenMachines``.

        Raises:
            ClusterError: when that fails.
        """
        from manager.engine.process_pool import ProcessPool
        from manager.engine.process_vms import ProcessVms

        network, found, ending = self.network, opening.found, opening.ending
        if network is not None:
            ending.callback(network.close)
            network.open()
        patience_s = opening.patience_s if network is None else 0.0  # namespaces are named after this process
        lanes: dict[str, Any] = {"connect": self._connect} if self.lanes_in_network else {}
        vms = ProcessVms(self.log_path, self._namespace_of, self.remove_if_killed, patience_s, **lanes)
        ending.callback(vms.close)
        if found is None:
            vms.start()
            store_host, namespace = (LOOPBACK, None) if network is None else (network.hub_address, network.hub)
            store = StartedStore(partial(vms.start_store, namespace=namespace), store_host)
            store.start()
            attachment = Attachment(kind="processes", door=vms.door, store_host=store.host, store_port=store.port)
        else:
            attachment = found.attachment
            vms.take_over(found.line, attachment.door, found.greeting["vms"])
            known = found.greeting["store"]
            store = StartedStore(vms.start_store, attachment.store_host, attachment.store_port, known)
        watch = StoreWatch(store, opening.inbox)
        ending.callback(watch.close)
        pool = ProcessPool(
            opening.inbox,
            opening.make_setup,
            vms.lanes,
            lambda vm: vms.prepare_kill([vm])(),
            opening.heartbeat_timeout_s,
            check_cluster=checking(vms.check, watch.check),
            outage_timeout_s=opening.outage_timeout_s,
            reconnect=vms.rejoin,
        )
        ending.callback(pool.close)

        def attach(set_up: Collection[str]) -> tuple[str, ...]:
            rejoined = vms.rejoin_all()
            pool.attach(rejoined, set_up)
            return tuple(rejoined)

        return Machines(
            vms,
            pool,
            attachment.store_host,
            attachment.store_port,
            None,
            self._address_of,
            attachment,
            attach,
            lambda: found.vms if found else (),
        )

    def _namespace_of(self, vm: str) -> str | None:
        return None if self.network is None else self.network.namespace(self.host_of(vm))

    def _connect(self, vm: str) -> tuple[socket.socket, socket.socket]:
        network = self.network
        assert network is not None, "there is no network"
        return connected(network.hub, network.hub_address, network.namespace(self.host_of(vm)))

    def _address_of(self, vm: str) -> str:
        return LOOPBACK if self.network is None else self.network.address(self.host_of(vm))
