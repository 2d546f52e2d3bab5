"""Machines whose workers Ray places and starts, on local nodes or on a provider's VMs (``provided``)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from manager.controller.state.events import WorkerLost
from manager.engine.joining.link_server import Entrance, listen
from manager.engine.loop.worker_pool import WorkerPool
from manager.engine.machines.attachment import Attachment
from manager.engine.machines.machines import Machines, Opening, OpenMachines, open_pool
from manager.engine.machines.store_watch import Store
from manager.engine.on_ray.launcher import RayLauncher
from manager.engine.on_ray.ray_cluster import RayCluster
from manager.host.ports import LOOPBACK
from morph.contract.errors import ClusterError
from morph.link.proof import new_secret


@dataclass(frozen=True)
class OnRay:
    """Ray's head node on this machine, the servers beside it, and the workers.

    ``directory``: the result of ``ray_environment.prepare`` or ``adopt``. ``host``: the address on which the store and
    the manager listen; their ports: 0: any free one. ``gpus``: whether each worker has its own GPU.
    """

    directory: Path
    host: str = LOOPBACK
    store_port: int = 0
    workers_port: int = 0
    gpus: bool = False

    def begin(
        self, opening: Opening, cluster: RayCluster, living: Callable[[], Collection[str]]
    ) -> tuple[Store, Entrance, WorkerPool]:
        """Start everything, or continue with what is running. ``living``: the workers that may exist.

        ClusterError: Ray or the store does not start, or listening on an address or port failed.
        """
        orphan, ending = opening.orphan, opening.ending
        ending.callback(cluster.close)
        if orphan is None:
            try:
                entrance = Entrance(listen(self.host, self.workers_port), new_secret())
            except OSError as error:
                raise ClusterError(f"cannot listen on {self.host}: {error.strerror}") from error
            ending.callback(entrance.listening.close)
            cluster.start(entrance.listening)
            store = Store(cluster.start_store, self.host, self.store_port)
            store.start()
        else:
            left = orphan.attachment
            cluster.take_over(orphan.line, orphan.greeting)
            entrance = Entrance(orphan.line.workers, left.own_secret)
            ending.callback(entrance.listening.close)
            store = Store(cluster.start_store, self.host, left.store_port, orphan.greeting["store"])
        launcher = RayLauncher(
            cluster.driver, entrance.home, living, lambda worker, cause: pool.failed(worker, cause), gpus=self.gpus
        )
        pool = open_pool(opening, entrance, launcher, store, cluster.check_head)
        return store, entrance, pool


def open_ray(directory: Path) -> OpenMachines:
    """Return machines that are local Ray nodes; they raise ClusterError if Ray does not start."""

    def open_machines(opening: Opening) -> Machines:
        up = opening.orphan.vms if opening.orphan else ()
        cluster = RayCluster(directory, opening.patience_s, gone=lambda vm: opening.event_queue.put(_ended(vm)))
        store, entrance, pool = OnRay(directory).begin(opening, cluster, lambda: up)
        attachment = Attachment(
            kind="ray",
            control_socket=cluster.control_socket,
            store_host=store.host,
            store_port=store.port,
            own_secret=entrance.secret,
        )
        attachment = opening.orphan.attachment if opening.orphan else attachment
        return Machines(cluster, pool, lambda _worker: LOOPBACK, attachment, lambda: up)

    return open_machines


def _ended(vm: str) -> WorkerLost:
    return WorkerLost(worker=vm, cause="its VM ended")
