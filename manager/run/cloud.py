"""The settings of a run whose VMs come from a provider, checked before anything starts."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import fsspec

from manager.controller.state.config import Offer
from manager.controller.state.events import NodeFacts
from manager.engine.machines.provider_machines import Providing
from manager.providers.interface.provider import Price, RunName
from manager.run.markets import Market, market_of
from morph.contract.base import Value
from morph.contract.cluster import CloudVms, ProvidedVms
from morph.contract.errors import ConfigError


@dataclass(frozen=True)
class Cloud:
    """The VMs of a cluster file, with the cloud file that describes them, as their market reads it."""

    vms: ProvidedVms
    path: Path
    described: Value

    @property
    def market(self) -> Market:
        """The market from which the VMs come."""
        return market_of(self.vms.market)

    @property
    def most_devices(self) -> int:
        """The largest number of devices of one VM."""
        return self.market.most_devices(self.described)

    @property
    def vm_kind(self) -> NodeFacts:
        """The description that all VMs of a run share."""
        return self.market.vm_kind(self.described)

    def offers(self) -> tuple[Offer, ...]:
        """Return the possible GPUs, if the file names their types; empty if all are alike. May query a price list."""
        return self.market.offers(self.described, self.vms)

    def price(self) -> Price | None:
        """Return the price of one VM; may query the provider's price list."""
        if self.vms.usd_per_h is not None:
            return Price(usd_per_h=self.vms.usd_per_h, source="the cluster file")
        return self.market.price(self.described, self.path)

    def providing(self, name: RunName, run_dir: Path) -> Providing:
        """Return how to open the provider of a run."""
        return self.market.providing(self.described, self.vms, self.path, name, run_dir)


def check_loopback(cloud: Cloud, source: str) -> None:
    """Refuse a loopback address if a host is another machine, by a ConfigError that names the cluster file."""
    vms = cloud.vms
    if ipaddress.IPv4Address(vms.address).is_loopback and (elsewhere := cloud.market.elsewhere(cloud.described)):
        raise ConfigError(
            f"is a loopback address, which {elsewhere} of {cloud.path} cannot reach",
            source=source,
            field="vms.address",
            value=vms.address,
            allowed="an address of this machine that the hosts reach",
        )


def check_listening(cloud: Cloud, source: str) -> None:
    """Refuse an address that this machine does not have, by a ConfigError that names the cluster file."""
    vms = cloud.vms
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
    """Refuse a place for checkpoints that VMs cannot reach; ConfigError names the file and what is allowed."""
    if vms.shared_storage:
        return
    if checkpoint_url is not None and _scheme(checkpoint_url) not in ("", "file", "local"):
        if isinstance(vms, CloudVms) and vms.uid and not vms.metadata and not vms.pass_variables:
            raise ConfigError(
                "the VMs have no credentials for it",
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
    """Refuse a URL whose storage package is not installed, by a ConfigError that names the package."""
    scheme = _scheme(checkpoint_url)
    try:
        fsspec.get_filesystem_class(scheme or "file")
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"cannot be used: {error}", source=source, field=field, value=checkpoint_url, allowed="a URL fsspec knows"
        ) from error


def _scheme(url: str) -> str:
    return urlsplit(url).scheme
