"""Machines whose VMs a provider brings: the head node, the store and the doors here, the workers there."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import SecretStr

from manager.engine.attachment import Attachment
from manager.engine.certificates import load_authority
from manager.engine.inbox import Inbox
from manager.engine.lifelines import Lifelines
from manager.engine.machines import Machines, Opening, OpenMachines, Provided, checking
from manager.engine.notice_door import NoticeDoor
from manager.engine.own_wheel import kept_wheel, python_version, requirements
from manager.engine.ports import Ports
from manager.engine.ray_environment import leave_loopback
from manager.engine.store_watch import StartedStore, StoreWatch
from manager.providers.cloud_init import NodeStart
from manager.providers.provider import Provider
from morph.contract.cluster import AzureVms, ProvidedVms
from morph.contract.errors import ClusterError
from morph.contract.messages import Lifeline
from morph.contract.proof import new_secret

if TYPE_CHECKING:
    from manager.engine.enrolment_desk import EnrolmentDesk

MakeProvider = Callable[[NodeStart], Provider]
"""Opens the provider, whose VMs start like this."""


@dataclass(frozen=True)
class Providing:
    """What a run on such VMs needs beside its cluster file.

    ``management_url``: what a forgotten VM asks for its end; empty: what it asks anyway.
    """

    make_provider: MakeProvider
    management_url: str = ""


def open_provided(directory: Path, vms: ProvidedVms, providing: Providing) -> OpenMachines:
    """Open machines of this kind. ``directory`` is what ``ray_environment.prepare`` or ``adopt`` returned.

    The result raises ClusterError when Ray does not start, or an address or port cannot be listened on.
    """

    def open_machines(opening: Opening) -> Machines:
        leave_loopback()
        from manager.engine.ray_cluster import RayCluster
        from manager.engine.worker_pool import WorkerPool

        found, ending = opening.found, opening.ending
        ports = Ports(vms.first_port or 0)
        head_port = vms.ray_port or ports.head
        cluster = RayCluster(directory, opening.patience_s, vms.address, head_port, ports.first)
        ending.callback(cluster.close)
        start_store = cluster.start_store
        secret = _node_secret(directory.parent / "node-secret", make=found is None)
        wheel = kept_wheel(directory.parent / "wheel", make=found is None)
        if found is None:
            check_free(vms.address, ports.of_manager())
            cluster.start()
            store, notice_port = StartedStore(start_store, vms.address, ports.store), vms.notice_port or ports.notices
            store.start()
        else:
            cluster.take_over(found.line, found.greeting)
            left, pid = found.attachment, found.greeting["store"]
            store, notice_port = StartedStore(start_store, vms.address, left.store_port, pid), left.notice_port
        watch = StoreWatch(store, opening.inbox)
        ending.callback(watch.close)
        desk, authority = _desk(directory.parent, opening.inbox, secret) if vms.tls else (None, "")
        pool = WorkerPool(
            opening.inbox,
            opening.make_setup,
            opening.heartbeat_timeout_s,
            checking(cluster.check_head, watch.check),
            outage_timeout_s=opening.outage_timeout_s,
            gpus=vms.device == "cuda",
        )
        ending.callback(pool.close)
        try:
            lifelines = Lifelines(vms.address, pool.connection_closed, ports.lifelines)
            ending.callback(lifelines.close)
            door = NoticeDoor(opening.inbox, secret, vms.address, notice_port, desk, wheel)
            ending.callback(door.close)
        except OSError as error:
            raise ClusterError(f"cannot listen on {vms.address}: {error.strerror}") from error
        start = NodeStart(
            ray_address=cluster.address,
            manager_address=f"{vms.address}:{door.port}",
            ray_token=SecretStr((directory.parent / "token").read_text(encoding="utf-8").strip()),
            node_secret=SecretStr(secret),
            setup=vms.environment.setup,
            python=vms.environment.python,
            python_version=python_version(),
            wheel_sha256=hashlib.sha256(wheel).hexdigest(),
            requirements=(*requirements("tls" if vms.tls else ""), *vms.environment.packages),
            uid=vms.uid if isinstance(vms, AzureVms) else 0,
            metadata=not isinstance(vms, AzureVms) or vms.metadata,
            gpus=vms.device == "cuda",
            first_port=ports.first,
            lonely_s=vms.lonely_s,
            management_url=providing.management_url,
            authority=authority,
        )
        lifeline = Lifeline(host=lifelines.host, port=lifelines.port, secret=lifelines.secret)
        addresses = _Addresses(cluster.joined)

        def attach(set_up: Collection[str]) -> tuple[str, ...]:
            return pool.attach(tuple(addresses.look()), set_up, lifeline)

        return Machines(
            vms=cluster,
            pool=pool,
            store_host=store.host,
            store_port=store.port,
            lifeline=lifeline,
            address_of=addresses.of,
            attachment=Attachment(
                kind="provided",
                door=cluster.door,
                store_host=store.host,
                store_port=store.port,
                notice_port=door.port,
                secret=found.attachment.secret if found else new_secret(),
            ),
            attach=attach,
            up=lambda: tuple(addresses.look()),
            provided=Provided(providing.make_provider(start), door, addresses.look),
        )

    return open_machines


def check_free(address: str, ports: Collection[int]) -> None:
    """See that nobody listens on ports that the run is to have.

    Raises:
        ClusterError: naming the first one that is taken.
    """
    for port in ports:
        try:
            socket.create_server((address, port)).close()
        except OSError as error:
            why = os.strerror(error.errno or 0)
            raise ClusterError(f"vms.first_port: cannot listen on {address}:{port}: {why}") from error


class _Addresses:
    """Where workers are reached; remembered, for one whose VM has just left is still asked for now and then."""

    def __init__(self, joined: Callable[[], dict[str, str]]) -> None:
        self._joined = joined
        self._known: dict[str, str] = {}
        self._lock = threading.Lock()

    def look(self) -> dict[str, str]:
        found = self._joined()
        with self._lock:
            self._known |= found
        return found

    def of(self, worker: str) -> str:
        with self._lock:
            return self._known[worker]


def _desk(directory: Path, inbox: Inbox, secret: str) -> tuple[EnrolmentDesk, str]:
    """Return what signs for the VMs, and the certificate by which they know what it signed.

    Raises:
        ClusterError: what it signs with is gone.
    """
    from manager.engine.enrolment_desk import EnrolmentDesk

    authority = load_authority(directory)
    return EnrolmentDesk(inbox, secret, authority), authority.pem.decode()


def _node_secret(path: Path, *, make: bool) -> str:
    """Return what the VMs and the manager share; it outlives a manager that is killed, as Ray's token does.

    Raises:
        ClusterError: it is gone.
    """
    if make:
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(32), encoding="utf-8")
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ClusterError("the VMs' secret is gone") from error
