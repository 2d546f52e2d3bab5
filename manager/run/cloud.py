"""What a run needs for VMs that a provider brings, checked before anything starts."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import fsspec

from manager.controller.state.events import NodeFacts
from manager.engine.machines.provider_machines import Providing
from manager.providers.azure.prices import RetailPrices
from manager.providers.azure.spec import PUBLIC_AZURE, AzureSpec
from manager.providers.factory import azure_spec, open_azure, open_static
from manager.providers.hosts.static import Hosts
from manager.providers.interface.provider import Price, RunName
from morph.contract.cluster import AzureVms, ProvidedVms
from morph.contract.errors import ConfigError

LOCK_NAME = "requirements.lock"


@dataclass(frozen=True)
class Cloud:
    """A cluster file's VMs with the file that says what and where they are. ``described``: of Azure, or hosts."""

    vms: ProvidedVms
    path: Path
    described: AzureSpec | Hosts

    @property
    def most_devices(self) -> int:
        """Of one VM."""
        if isinstance(self.described, AzureSpec):
            return max(size.num_devices for size in self.described.sizes)
        return max(host.num_gpus for host in self.described.hosts)

    @property
    def vm_kind(self) -> NodeFacts:
        """What all VMs of a run will be."""
        spec = self.described
        if not isinstance(spec, AzureSpec):
            return NodeFacts(provider="static")
        (size, *more_sizes), zones = spec.sizes, spec.zones
        return NodeFacts(
            provider=spec.provider,
            size="" if more_sizes else size.name,
            region=spec.location,
            zone=zones[0] if len(zones) == 1 else "",
        )

    def price(self) -> Price | None:
        """What one VM costs; may ask the provider's price list."""
        if self.vms.usd_per_h is not None:
            return Price(usd_per_h=self.vms.usd_per_h, source="the cluster file")
        if isinstance(self.described, AzureSpec):
            return self.described.price(RetailPrices(self.described))
        known = self.described.dearest_usd_per_h
        return None if known is None else Price(usd_per_h=known, source=str(self.path))

    def providing(self, name: RunName, run_dir: Path) -> Providing:
        """Say how the provider of a run is opened."""
        described, vms = self.described, self.vms
        if isinstance(described, AzureSpec):
            spec = azure_spec(described, vms.environment.image, vms.usd_per_h)
            elsewhere = "" if spec.resource_manager == PUBLIC_AZURE else spec.resource_manager
            return Providing(
                lambda start: open_azure(spec, self.path, name, run_dir, start), elsewhere, run_dir / LOCK_NAME
            )
        hosts = described if vms.usd_per_h is None else described.at(vms.usd_per_h)
        return Providing(lambda start: open_static(hosts, self.path, name, start), lock_path=run_dir / LOCK_NAME)


def check_address(cloud: Cloud, source: str) -> None:
    """Refuse an address that this machine has not, or that only this machine reaches and a host is elsewhere.

    Raises:
        ConfigError: naming the cluster file.
    """
    vms, described = cloud.vms, cloud.described
    if ipaddress.IPv4Address(vms.address).is_loopback and isinstance(described, Hosts):
        elsewhere = [host for host in described.hosts if not host.is_here]
        if elsewhere:
            raise ConfigError(
                f"is a loopback address, which {elsewhere[0].shown} of {cloud.path} cannot reach",
                source=source,
                field="vms.address",
                value=vms.address,
                allowed="an address of this machine that the hosts reach",
            )
    try:
        socket.create_server((vms.address, 0)).close()
    except OSError as error:
        raise ConfigError(
            f"cannot be listened on: {error.strerror}",
            source=source,
            field="vms.address",
            value=vms.address,
            allowed="an address of this machine that the VMs reach",
        ) from error


def check_storage(vms: ProvidedVms, checkpoint_url: str | None, source: str, field: str) -> None:
    """Refuse a place for checkpoints that VMs do not reach.

    Raises:
        ConfigError: naming the file, and what would do.
    """
    if vms.shared_storage:
        return
    if checkpoint_url is not None and _scheme(checkpoint_url) not in ("", "file", "local"):
        if isinstance(vms, AzureVms) and vms.uid and not vms.metadata and not vms.pass_variables:
            raise ConfigError(
                "the VMs have nothing to show there",
                source=source,
                field=field,
                value=checkpoint_url,
                allowed="with vms.pass_variables, which name its credentials, or vms.metadata: true, for VMs whose "
                "identity may write there",
            )
        return
    raise ConfigError(
        "is on this machine, where the VMs cannot reach it" if checkpoint_url else "is not given",
        source=source,
        field=field,
        value=checkpoint_url,
        allowed="a URL that every VM reaches (az://, s3://, gs://), or vms.shared_storage: true",
    )


def check_url(checkpoint_url: str, source: str, field: str) -> None:
    """Refuse a URL for whose storage nothing is installed.

    Raises:
        ConfigError: naming what is missing.
    """
    scheme = _scheme(checkpoint_url)
    try:
        fsspec.get_filesystem_class(scheme or "file")
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"cannot be used: {error}", source=source, field=field, value=checkpoint_url, allowed="a URL fsspec knows"
        ) from error


def _scheme(url: str) -> str:
    return urlsplit(url).scheme
