"""The machines on which a session's workers run; starts those that are plain processes of this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from manager.engine.joining.link_server import Entrance, LinkServer, listen
from manager.engine.joining.notice_server import NoticeServer
from manager.engine.local_vms.namespaces import HostNetwork, opened_in
from manager.engine.local_vms.vm_fleet import VmHost
from manager.engine.loop.event_queue import EventQueue
from manager.engine.loop.worker_pool import Launcher, WorkerPool
from manager.engine.machines.attachment import Attachment, OrphanedRun
from manager.engine.machines.store_watch import Store, StoreWatch
from manager.host.ports import LOOPBACK
from manager.providers.interface.provider import Provider
from morph.contract.messages import WorkerSetup
from morph.link.proof import new_secret

if TYPE_CHECKING:
    from manager.engine.on_processes.process_vms import ProcessVms

MakeSetup = Callable[[str], WorkerSetup]


@dataclass(frozen=True)
class Provided:
    """The parts added if a provider brings the VMs. ``joined``: the workers in the cluster, with addresses."""

    provider: Provider
    notices: NoticeServer
    joined: Callable[[], Mapping[str, str]]


@dataclass(frozen=True)
class Machines:
    """VMs that can be requested and revoked, the workers on them, and how the workers reach each other.

    ``attachment``: the data that a successor needs. ``up``: returns the workers of VMs that another manager left, or
    that have joined since then. ``provided``: None if the VMs are on this machine.
    """

    vms: VmHost
    pool: WorkerPool
    address_of: Callable[[str], str]
    attachment: Attachment
    up: Callable[[], tuple[str, ...]]
    provided: Provided | None = None


@dataclass(frozen=True)
class Opening:
    """The arguments for bringing machines up.

    Time-outs: see ``Silence``. ``patience_s``: how long everything outlives this process if it is killed. ``ending``:
    closes what was opened. ``orphan``: the run that another manager left; None: there is none.
    """

    event_queue: EventQueue
    make_setup: MakeSetup
    heartbeat_timeout_s: float
    outage_timeout_s: float
    patience_s: float
    ending: ExitStack
    orphan: OrphanedRun | None = None


OpenMachines = Callable[[Opening], Machines]
"""Brings machines up, or continues with those of a run that is taken over."""


def open_pool(
    opening: Opening, entrance: Entrance, launcher: Launcher, store: Store, check_owner: Callable[[], None]
) -> WorkerPool:
    """Watch the store, accept workers, and open their pool. ``check_owner`` raises the error that ends the session."""
    watch = StoreWatch(store, opening.event_queue)
    opening.ending.callback(watch.close)

    def check() -> None:
        check_owner()
        watch.check()

    pool = WorkerPool(
        opening.event_queue,
        opening.make_setup,
        launcher,
        opening.heartbeat_timeout_s,
        check_cluster=check,
        outage_timeout_s=opening.outage_timeout_s,
    )
    opening.ending.callback(pool.close)
    opening.ending.callback(LinkServer(entrance, pool).close)
    return pool


@dataclass(frozen=True)
class Begun:
    """The process from which workers are forked, which imports their modules, and the socket that they will call."""

    entrance: Entrance
    vms: ProcessVms

    def close(self) -> None:
        """End the process, and all processes forked from it. Safe to call twice."""
        self.vms.close()
        self.entrance.listening.close()


@dataclass(frozen=True)
class Processes:
    """VMs that are processes of this machine, on Linux. If they have their own network, they end with the manager.

    ``log_path``: receives the workers' standard error. ``remove_if_killed``: a directory to remove if this process is
    killed. ``network``: None: all VMs share the loopback; ``host_of``: returns the host (numbered from 0) of a VM, with
    a network. ``job_path``: the job whose imports are made once for all workers; empty: each worker imports by itself.
    ``begun``: the process that ``begin`` started, for one session; None: it starts with the others.
    """

    log_path: Path
    remove_if_killed: Path | None = None
    network: HostNetwork | None = None
    host_of: Callable[[str], int] = lambda _vm: 0
    job_path: str = ""
    begun: Begun | None = None

    def begin(self, patience_s: float) -> Begun:
        """Start the first process, which the caller closes; see ``Opening`` for how long it outlives this one."""
        from manager.engine.on_processes.process_vms import ProcessVms

        entrance = self._entrance()
        try:
            vms = ProcessVms.begin(
                entrance.listening, self.log_path, entrance.home, self._namespace_of, self.remove_if_killed, patience_s
            )
        except BaseException:
            entrance.listening.close()
            raise
        return Begun(entrance, vms)

    def __call__(self, opening: Opening) -> Machines:
        """Bring the machines up (see ``OpenMachines``); ClusterError if one does not come up."""
        from manager.engine.on_processes.process_vms import ProcessVms

        network, orphan, ending = self.network, opening.orphan, opening.ending
        if network is not None:
            ending.callback(network.close)
            network.open()
        patience_s = opening.patience_s if network is None else 0.0  # namespaces are named after this process
        if orphan is None:
            begun = self.begun or self.begin(patience_s)
            ending.callback(begun.close)
            entrance, vms = begun.entrance, begun.vms
            vms.start(self.job_path)
            store_host, namespace = (LOOPBACK, None) if network is None else (network.hub_address, network.hub)
            store = Store(partial(vms.start_store, namespace=namespace), store_host)
            store.start()
            attachment = Attachment(
                kind="processes",
                control_socket=vms.control_socket,
                store_host=store.host,
                store_port=store.port,
                own_secret=entrance.secret,
            )
        else:
            attachment = orphan.attachment
            entrance = Entrance(orphan.line.workers, attachment.own_secret)
            ending.callback(entrance.listening.close)
            vms = ProcessVms.take_over(
                orphan.line,
                attachment.control_socket,
                orphan.greeting["vms"],
                self.log_path,
                entrance.home,
                self._namespace_of,
            )
            ending.callback(vms.close)
            known = orphan.greeting["store"]
            store = Store(vms.start_store, attachment.store_host, attachment.store_port, known)
        pool = open_pool(opening, entrance, vms, store, vms.check)
        return Machines(vms, pool, self._address_of, attachment, lambda: orphan.vms if orphan else ())

    def _entrance(self) -> Entrance:
        network = self.network
        if network is None:
            return Entrance(listen(LOOPBACK), new_secret())
        return Entrance(opened_in(network.hub, partial(listen, network.hub_address)), new_secret())

    def _namespace_of(self, vm: str) -> str | None:
        return None if self.network is None else self.network.namespace(self.host_of(vm))

    def _address_of(self, vm: str) -> str:
        return LOOPBACK if self.network is None else self.network.address(self.host_of(vm))
