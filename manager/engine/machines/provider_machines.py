"""Machines whose VMs a provider brings: head node, store and servers are on this machine, workers on the VMs."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import SecretStr

from manager.engine.joining.certificates import load_authority
from manager.engine.joining.notice_server import NoticeServer
from manager.engine.loop.event_queue import EventQueue
from manager.engine.machines.attachment import Attachment
from manager.engine.machines.machines import Machines, Opening, OpenMachines, Provided
from manager.engine.machines.ray_machines import OnRay
from manager.engine.on_ray.ray_cluster import RayCluster
from manager.host.ports import Ports
from manager.journal.records import Fact
from manager.providers.boot.cloud_init import NodeStart, node_start, wanted_on
from manager.providers.boot.own_wheel import Lock, kept_wheel
from manager.providers.interface.provider import Provider
from morph.contract.cluster import ProvidedVms
from morph.contract.errors import ClusterError
from morph.link.proof import new_secret

if TYPE_CHECKING:
    from manager.engine.joining.enrolment_desk import EnrolmentDesk

log = logging.getLogger(__name__)

MakeProvider = Callable[[NodeStart], Provider]
"""Opens the provider, given how its VMs start."""


@dataclass(frozen=True)
class Providing:
    """The settings that a run on a provider's VMs needs in addition to its cluster file.

    ``management_url``: where a forgotten VM requests its own end; empty: the provider's usual address. ``lock_path``:
    the lock file of the packages that VMs install.
    """

    make_provider: MakeProvider
    management_url: str = ""
    lock_path: Path = Path("requirements.lock")


def open_provided(directory: Path, vms: ProvidedVms, providing: Providing) -> OpenMachines:
    """Return a function that opens such machines. ``directory`` is the result of ``ray_environment.prepare`` or
    ``adopt``.

    The function raises ClusterError if Ray does not start, or if listening on an address or port fails.
    """

    def open_machines(opening: Opening) -> Machines:
        orphan, ending = opening.orphan, opening.ending
        ports = Ports(vms.first_port or 0)
        head_port = vms.ray_port or ports.head
        cluster = RayCluster(directory, opening.patience_s, vms.address, head_port, ports.first)
        addresses = _Addresses(cluster.joined)
        on_ray = OnRay(directory, vms.address, ports.store, ports.workers, gpus=vms.device == "cuda")
        secret = _node_secret(directory.parent / "node-secret", make=orphan is None)
        wheel = kept_wheel(directory.parent / "wheel", make=orphan is None)
        if orphan is None:
            check_free(vms.address, ports.of_manager())
        store, entrance, pool = on_ray.begin(opening, cluster, addresses.look)
        notice_port = orphan.attachment.notice_port if orphan else vms.notice_port or ports.notices
        desk, authority = _desk(directory.parent, opening.event_queue) if vms.tls else (None, "")
        try:
            notices = NoticeServer(
                opening.event_queue, secret, vms.address, notice_port, desk, wheel, _lock(providing, vms, opening)
            )
            ending.callback(notices.close)
        except OSError as error:
            raise ClusterError(f"cannot listen on {vms.address}: {error.strerror}") from error
        start = node_start(
            vms,
            notices.port,
            secret,
            wheel,
            providing.management_url,
            ray_address=cluster.address,
            ray_token=SecretStr((directory.parent / "token").read_text(encoding="utf-8").strip()),
            gpus=vms.device == "cuda",
            first_port=ports.first,
            authority=authority,
        )
        return Machines(
            vms=cluster,
            pool=pool,
            address_of=addresses.of,
            attachment=Attachment(
                kind="provided",
                control_socket=cluster.control_socket,
                store_host=store.host,
                store_port=store.port,
                notice_port=notices.port,
                secret=orphan.attachment.secret if orphan else new_secret(),
                own_secret=entrance.secret,
            ),
            up=lambda: tuple(addresses.look()),
            provided=Provided(providing.make_provider(start), notices, addresses.look),
        )

    return open_machines


def check_free(address: str, ports: Collection[int]) -> None:
    """Check that no process listens on the ports that the run will use; ClusterError names the first taken one."""
    for port in ports:
        try:
            socket.create_server((address, port)).close()
        except OSError as error:
            why = os.strerror(error.errno or 0)
            raise ClusterError(f"vms.first_port: cannot listen on {address}:{port}: {why}") from error


class _Addresses:
    """Keeps the workers' addresses, because an address may still be looked up after its VM has left."""

    def __init__(self, joined: Callable[[], dict[str, str]]) -> None:
        self._joined = joined
        self._known: dict[str, str] = {}
        self._lock = threading.Lock()

    def look(self) -> dict[str, str]:
        joined = self._joined()
        with self._lock:
            self._known |= joined
        return joined

    def of(self, worker: str) -> str:
        with self._lock:
            return self._known[worker]


def _desk(directory: Path, event_queue: EventQueue) -> tuple[EnrolmentDesk, str]:
    """Return the authority that signs for the VMs, and its certificate; ClusterError if its key is gone."""
    from manager.engine.joining.enrolment_desk import EnrolmentDesk

    authority = load_authority(directory)
    return EnrolmentDesk(event_queue, authority), authority.pem.decode()


def _lock(providing: Providing, vms: ProvidedVms, opening: Opening) -> Lock:
    def say(sentence: str) -> None:
        opening.event_queue.put(Fact(name="packages_unhashed", detail=sentence))
        log.warning("%s", sentence)

    return Lock(providing.lock_path, wanted_on(vms), say)


def _node_secret(path: Path, *, make: bool) -> str:
    """Return the secret of the VMs' credentials, which outlives a killed manager; ClusterError if it is gone."""
    if make:
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(32), encoding="utf-8")
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ClusterError("the VMs' secret is gone") from error
