"""An Azure whose VMs are virtual hosts of this machine: Morph's code and Azure's SDK find it at Azure's addresses.

Inside the hosts ``https://management.azure.com`` and 169.254.169.254 answer, so that Morph needs no special settings.
The manager runs on a host of its own, with an identity, as ``docs/guides/azure.md`` says.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from manager.engine.local_vms.namespaces import enter
from tests.cloud.certificates import server_context
from tests.cloud.hosts import Host, Hosts
from tests.cloud.metadata import Facts, MetadataService
from tests.cloud.region import Region, Role
from tests.waiting import BOUND_S

MANAGEMENT = "management.azure.com"
MANAGEMENT_ADDRESS = "10.201.0.2"
SUBSCRIPTION = "00000000-0000-0000-0000-000000000001"
GROUP = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/train"
USD_PER_H = {"Standard_NC6": 0.3, "Standard_NC24": 1.4}

SIZES = [{"name": name, "num_gpus": 0, "usd_per_h": price} for name, price in USD_PER_H.items()]
CLOUD_FILE: dict[str, Any] = {
    "subscription_id": SUBSCRIPTION,
    "resource_group": "train",
    "location": "westus2",
    "zones": ["1", "2", "3"],
    "sizes": SIZES[:1],
    "image": "microsoft-dsvm:ubuntu-hpc:2204:latest",
    "subnet_id": f"{GROUP}/providers/Microsoft.Network/virtualNetworks/net/subnets/nodes",
    "identity_id": f"{GROUP}/providers/Microsoft.ManagedIdentity/userAssignedIdentities/nodes",
    "ssh_public_key": "ssh-ed25519 AAAAC3Nz me",
}
"""A cloud file of this Azure with one size, so that all VMs have one price; the size has no GPU."""


class VirtualAzure:
    """The region, its VMs and the manager's host; use as a context manager, from the main thread.

    Args:
        shared: Folders that every host sees: the storage of a run.
        bytes_per_s: Of each host's link.
        region: Further fields of ``Region``.
    """

    def __init__(self, *shared: Path, bytes_per_s: float = 125_000_000.0, **region: Any) -> None:
        self._options = region
        self.hosts = Hosts(shared, {MANAGEMENT: MANAGEMENT_ADDRESS}, bytes_per_s=bytes_per_s)
        self.services: dict[str, MetadataService] = {}
        self.logs: dict[str, str] = {}
        self.before_removal: Callable[[Host], None] = lambda _host: None
        self._ending = ExitStack()
        self.region: Region
        self.manager: Host

    def __enter__(self) -> VirtualAzure:
        try:
            self._open()
        except BaseException:
            self._ending.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    @property
    def manager_address(self) -> str:
        return self.hosts.network.hub_address

    def _open(self) -> None:
        self._ending.enter_context(self.hosts)
        hub = self.hosts.network.hub
        context, trusted = server_context(self.hosts.directory, MANAGEMENT)
        self.hosts.trust(trusted)
        self.region = in_namespace(
            hub,
            lambda: Region(
                (MANAGEMENT_ADDRESS, 443),
                USD_PER_H,
                play=self,
                url_of_clients=f"https://{MANAGEMENT}",
                **self._options,
            ),
        )
        self._ending.callback(self.region.close)
        self.region.open(context)
        self.services["manager"] = MetadataService(hub, self._facts("manager", "", "manager"))
        self._ending.callback(self.services["manager"].close)
        self.manager = self.hosts.on_hub("manager", {})

    def boot(self, name: str, resource_id: str, cloud_config: str) -> None:
        """Start a VM: called by the region."""
        namespace = self.hosts.furnish(name)
        self.services[name] = MetadataService(namespace, self._facts(name, resource_id, "node"))
        self.hosts.boot(name, cloud_config)

    def kill(self, name: str) -> None:
        """End a VM; called by the region. Its files are kept in ``logs``."""
        if (host := self.hosts.living.get(name)) is not None:
            host.kill()
            self.logs[name] = "\n".join(
                f"-- {unit}\n{host.log(unit)}" for unit in ("host", "morph-node", "morph-agent")
            )
            self.before_removal(host)
        if (service := self.services.pop(name, None)) is not None:
            service.close()
        self.hosts.remove(name)

    def popen(self, command: Sequence[str], out: IO[str] | None = None, **environment: str) -> subprocess.Popen[str]:
        """Start a command on the manager's host, with which it ends at the latest."""
        return subprocess.Popen(
            self.manager.inside(*command),
            env={**self.manager.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=out or subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def processes(self, host: str = "manager") -> list[str]:
        """Return the command lines of a host's processes except process 1."""
        found = self.hosts.living.get(host)
        if found is None or not found.is_on:
            return []
        listed = subprocess.run(
            found.inside("ps", "-eo", "pid=,args="), capture_output=True, text=True, timeout=BOUND_S, check=True
        )
        lines = [line.strip() for line in listed.stdout.splitlines()]
        return [line for line in lines if not line.startswith("1 ") and " ps -eo" not in line and line]

    def _facts(self, name: str, resource_id: str, role: Role) -> Facts:
        region = self.region

        def tags() -> dict[str, str]:
            with region.lock:
                return dict(region.machines.get(name, {}).get("tags", {}))

        return Facts(name, resource_id, tags, lambda: region.new_token(role), region.events, region.start)


def in_namespace(namespace: str, make: Callable[[], Any]) -> Any:
    """Call a function in a thread that has moved to a network namespace."""
    made: list[Any] = []

    def run() -> None:
        try:
            enter(namespace)
            made.append(make())
        except BaseException as error:
            made.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(BOUND_S)
    if not made or isinstance(made[0], BaseException):
        raise RuntimeError(f"cannot be made in {namespace}") from (made[0] if made else None)
    return made[0]
