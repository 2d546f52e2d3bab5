"""The sources of VMs: one ``Market`` for each kind that a cluster file can name, and the ``Cloud`` of one such file.

Another package adds its own as an entry point of the group ``morph.markets``, whose name is the kind::

    [project.entry-points."morph.markets"]
    moon = "morph_moon.market:MoonMarket"

For such a kind, ``vms`` of a cluster file has the fields of all providers; the market's own fields are in the file that
``vms.cloud`` names, and ``described`` is its type.
"""

from __future__ import annotations

import ipaddress
import shutil
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from manager.controller.state.config import Offer
from manager.controller.state.events import NodeFacts
from manager.engine.machines.provider_machines import Providing
from manager.providers.aws import spec as aws
from manager.providers.aws.spec import AwsSpec, AwsType
from manager.providers.azure import spec as azure
from manager.providers.azure.prices import retail_prices
from manager.providers.azure.spec import PUBLIC_AZURE, AzureSpec
from manager.providers.factory import aws_spec, azure_spec, open_aws, open_azure, open_slurm, open_static, slurm_logs
from manager.providers.hosts.ssh import SshHost
from manager.providers.hosts.static import Hosts, StaticProvider, StaticSpec
from manager.providers.interface.cloud import TAG_CHARACTERS, Finding, SizeT
from manager.providers.interface.provider import Misconfigured, Price, RunName, Vm, end_all
from manager.providers.slurm import spec as slurm
from manager.providers.slurm.provider import PROGRAMS, SlurmProvider
from manager.providers.slurm.spec import SlurmSpec
from morph.contract.base import Value
from morph.contract.cluster import ClusterConfig, LocalVms, ProvidedVms, market_entry_points
from morph.contract.errors import ConfigError
from morph.yaml_files import load_yaml

LOCK_NAME = "requirements.lock"


class Market(ABC):
    """One kind of VMs. In every call, ``described`` has the market's own type and was checked."""

    described: type[Value]
    """The content of the file that ``vms.cloud`` names."""

    needs: tuple[str, ...] = ()
    extra: str = ""
    """The modules that the market imports, and the extra that installs them."""

    def check(self, source: str) -> None:
        """Check that the packages that the market needs are installed; ConfigError names the file and the package."""
        try:
            missing = any(find_spec(module) is None for module in self.needs)
        except ModuleNotFoundError:  # a module of the market's package
            missing = True
        if missing:
            raise ConfigError(
                f"needs more packages: pip install -e '.[{self.extra}]' in the clone of Morph",
                source=source,
                field="vms.kind",
                value=self.extra,
            )

    mark: str = ""
    """A field that only files of this market have, by which they are recognised."""

    kind: str = ""
    """The market's name in the registry."""

    job_name_characters: int | None = None
    """The number of characters that a job's name may have, because it is in tags or comments of VMs; None: any."""

    def check_job_name(self, job: str, source: str, field: str) -> None:
        """Refuse the name of a job that the market would refuse in a request; ConfigError: the name is too long."""
        most, size = self.job_name_characters, len(job)
        if most is not None and size > most:
            raise ConfigError(
                f"has {size} characters, which {self.kind} refuses in the tags or comments that mark a run's VMs",
                source=source,
                field=field,
                value=job,
                allowed=f"at most {most} characters",
            )

    @abstractmethod
    def most_devices(self, described: Any) -> int:
        """Return the largest number of devices of a VM."""

    @abstractmethod
    def vm_kind(self, described: Any) -> NodeFacts:
        """Return the description that all VMs of a run share."""

    def offers(self, _described: Any, _vms: ProvidedVms) -> tuple[Offer, ...]:
        """Return the possible GPUs, if the file names types; empty if all are alike. May query a price list."""
        return ()

    @abstractmethod
    def price(self, described: Any, path: Path) -> Price | None:
        """Return the price of one VM, if the cluster file does not set it; may query a price list."""

    def elsewhere(self, _described: Any) -> str:
        """Name a machine of the market that cannot reach this machine's loopback address; empty: there is none."""
        return "every VM"

    @abstractmethod
    def providing(self, described: Any, vms: ProvidedVms, path: Path, name: RunName, run_dir: Path) -> Providing:
        """Return how to open the provider of a run. ``path``: the file from which ``described`` was read."""

    def findings(self, _described: Any, _count: int) -> Iterator[Finding]:
        """Check whether ``count`` devices would get VMs; queries, but changes nothing. ConfigError: no checks exist."""
        allowed = "azure or aws"
        raise ConfigError("cloud files of this kind have no checks", field="--kind", value=self.kind, allowed=allowed)

    def policy(self, _described: Any) -> dict[str, Any]:
        """Return the minimal permissions of the manager's user; ConfigError if this kind needs none."""
        raise ConfigError("cloud files of this kind have no policy", field="--kind", value=self.kind, allowed="aws")

    def planned(self, _described: Any, _path: Path, *_names: Any) -> list[dict[str, Any]]:
        """Return what a request would create, for ``run``, ``job``, ``request``, ``count`` and the shown part of boots.

        ConfigError: VMs of this kind are not created.
        """
        allowed = "azure, aws or slurm"
        raise ConfigError("nothing is created for this kind", field="--kind", value=self.kind, allowed=allowed)

    @abstractmethod
    def end_run(self, described: Any, path: Path, run: str, job: str, say: Callable[[str], None]) -> tuple[Vm, ...]:
        """End what a run left behind, found only by the names of the run and its job; return the VMs that existed.

        ProviderError names what could not be ended; or nothing of the run exists.
        """


class AzureMarket(Market):
    """Spot VMs on Azure."""

    described = AzureSpec
    needs, extra = ("azure.core", "azure.identity", "azure.mgmt.compute"), "azure"
    mark = "resource_group"
    job_name_characters = TAG_CHARACTERS

    def most_devices(self, described: AzureSpec) -> int:
        return max(size.num_devices for size in described.sizes)

    def vm_kind(self, described: AzureSpec) -> NodeFacts:
        (size, *more_sizes), zones = described.sizes, described.zones
        return NodeFacts(
            provider=described.provider,
            size="" if more_sizes else size.name,
            region=described.location,
            zone=zones[0] if len(zones) == 1 else "",
        )

    def offers(self, described: AzureSpec, vms: ProvidedVms) -> tuple[Offer, ...]:
        spec = azure_spec(described, None, vms.usd_per_h)
        return _offers(spec.sizes, retail_prices(spec))

    def price(self, described: AzureSpec, _path: Path) -> Price | None:
        return described.price(retail_prices(described))

    def providing(self, described: AzureSpec, vms: ProvidedVms, path: Path, name: RunName, run_dir: Path) -> Providing:
        spec = azure_spec(described, vms.environment.image, vms.usd_per_h)
        elsewhere = "" if spec.resource_manager == PUBLIC_AZURE else spec.resource_manager
        return Providing(partial(open_azure, spec, path, name, run_dir), elsewhere, run_dir / LOCK_NAME)

    def end_run(
        self, described: AzureSpec, path: Path, run: str, job: str, say: Callable[[str], None]
    ) -> tuple[Vm, ...]:
        self.check(str(path))
        from manager.providers.azure.provider import end_run

        return end_run(described, run, job, say=say)

    def findings(self, described: AzureSpec, count: int) -> Iterator[Finding]:
        self.check("the cloud file")
        from manager.providers.azure.checks import Checks
        from manager.providers.azure.client import azure_client

        where: dict[str, Any] = {"base_url": described.resource_manager, "authority": described.authority}
        client = azure_client(described.subscription_id, **where)
        return Checks(described, client, count, retail_prices(described)).run()

    def planned(self, described: AzureSpec, _path: Path, *names: Any) -> list[dict[str, Any]]:
        return azure.planned(described, *names)


class AwsMarket(Market):
    """Spot instances on AWS."""

    described = AwsSpec
    needs, extra = ("boto3", "botocore"), "aws"
    mark = "subnets"
    job_name_characters = TAG_CHARACTERS

    def most_devices(self, described: AwsSpec) -> int:
        return max(known.num_devices for known in described.types)

    def vm_kind(self, described: AwsSpec) -> NodeFacts:
        (known, *more_types), zones = described.types, described.zones
        return NodeFacts(
            provider=described.provider,
            size="" if more_types else known.name,
            region=described.region,
            zone=zones[0] if len(zones) == 1 else "",
        )

    def offers(self, described: AwsSpec, vms: ProvidedVms) -> tuple[Offer, ...]:
        spec = aws_spec(described, None, vms.usd_per_h)
        return _offers(spec.types, self._price_of(spec))

    def price(self, described: AwsSpec, _path: Path) -> Price | None:
        return described.price(self._price_of(described))

    def _price_of(self, described: AwsSpec) -> Callable[[AwsType], float | None]:
        """Return a function for the price of a type if the user gives none."""
        if all(known.usd_per_h is not None for known in described.types):
            return lambda known: known.usd_per_h
        self.check("the cloud file")
        from manager.providers.aws.client import aws_client
        from manager.providers.aws.prices import prices_of

        return prices_of(described, partial(aws_client, described)).dearest

    def providing(self, described: AwsSpec, vms: ProvidedVms, path: Path, name: RunName, run_dir: Path) -> Providing:
        spec = aws_spec(described, vms.environment.image, vms.usd_per_h)
        return Providing(partial(open_aws, spec, path, name, run_dir), lock_path=run_dir / LOCK_NAME)

    def end_run(self, described: AwsSpec, path: Path, run: str, job: str, say: Callable[[str], None]) -> tuple[Vm, ...]:
        self.check(str(path))
        from manager.providers.aws.provider import end_run

        return end_run(described, run, job, say)

    def findings(self, described: AwsSpec, count: int) -> Iterator[Finding]:
        self.check("the cloud file")
        from manager.providers.aws.checks import Checks
        from manager.providers.aws.client import aws_client

        return Checks(described, partial(aws_client, described), count).run()

    def policy(self, described: AwsSpec) -> dict[str, Any]:
        return aws.policy(described)

    def planned(self, described: AwsSpec, _path: Path, *names: Any) -> list[dict[str, Any]]:
        return aws.planned(described, *names)


class StaticMarket(Market):
    """Hosts that the user owns."""

    described = Hosts
    mark = "hosts"

    def most_devices(self, described: Hosts) -> int:
        return max(host.num_devices for host in described.hosts)

    def vm_kind(self, _described: Hosts) -> NodeFacts:
        return NodeFacts(provider="static")

    def offers(self, described: Hosts, vms: ProvidedVms) -> tuple[Offer, ...]:
        hosts = described if vms.usd_per_h is None else described.at(vms.usd_per_h)
        by_type: dict[str, list[SshHost]] = {}
        for host in hosts.hosts:
            if host.node_type is not None:
                by_type.setdefault(host.node_type, []).append(host)
        return tuple(
            Offer(
                node_type=name,
                usd_per_h=_dearest([hosts.usd_per_gpu_h(host) for host in of_type]),
                most=sum(host.num_devices for host in of_type),
            )
            for name, of_type in by_type.items()
        )

    def price(self, described: Hosts, path: Path) -> Price | None:
        known = described.dearest_usd_per_h
        return None if known is None else Price(usd_per_h=known, source=str(path))

    def elsewhere(self, described: Hosts) -> str:
        return next((host.shown for host in described.hosts if not host.is_here), "")

    def providing(self, described: Hosts, vms: ProvidedVms, path: Path, name: RunName, run_dir: Path) -> Providing:
        hosts = described if vms.usd_per_h is None else described.at(vms.usd_per_h)
        return Providing(partial(open_static, hosts, path, name), lock_path=run_dir / LOCK_NAME)

    def end_run(self, described: Hosts, path: Path, run: str, job: str, say: Callable[[str], None]) -> tuple[Vm, ...]:
        spec = StaticSpec(command=("false",), **dict(described))  # nothing is started
        leases = path.resolve().parent / spec.leases
        provider = StaticProvider(spec, run, leases, job=job)
        leased = provider.list()
        if not leased:
            missing = f"run {run} of job {job} has no host: it has ended already, or a name is misspelt"
            raise Misconfigured(f"{leases}: {missing}")
        end_all(provider, say=say)
        return leased


def _offers(sizes: Iterable[SizeT], find: Callable[[SizeT], float | None]) -> tuple[Offer, ...]:
    """Return the GPU types among sizes, with the price of one GPU; ``find``: finds prices that the user omitted."""
    by_type: dict[str, list[float | None]] = {}
    for size in sizes:
        if size.node_type is not None:
            usd_per_h = find(size) if size.usd_per_h is None else size.usd_per_h
            each = None if usd_per_h is None else usd_per_h / size.num_devices
            by_type.setdefault(size.node_type, []).append(each)
    return tuple(Offer(node_type=name, usd_per_h=_dearest(each)) for name, each in by_type.items())


def _dearest(prices: Sequence[float | None]) -> float | None:
    """Return the highest price, because any of these may come; None if a price is unknown."""
    known = [price for price in prices if price is not None]
    return max(known) if len(known) == len(prices) else None


class SlurmMarket(Market):
    """Jobs of a Slurm cluster, in a partition whose jobs may be preempted."""

    described = SlurmSpec
    mark = "partition"
    job_name_characters = slurm.JOB_NAME_CHARACTERS

    def check(self, source: str) -> None:
        """See ``Market``: this one needs Slurm's own programs."""
        if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
            raise ConfigError(
                f"needs Slurm's programs, and {missing[0]} is not on the PATH of this machine",
                source=source,
                field="vms.kind",
                value="slurm",
                allowed="on a login node of the cluster, or in a job of it",
            )

    def most_devices(self, described: SlurmSpec) -> int:
        return described.num_devices

    def vm_kind(self, described: SlurmSpec) -> NodeFacts:
        return NodeFacts(provider="slurm", size=described.size)

    def price(self, described: SlurmSpec, path: Path) -> Price | None:
        known = described.usd_per_h
        return None if known is None else Price(usd_per_h=known, source=str(path))

    def elsewhere(self, described: SlurmSpec) -> str:
        return f"a node of partition {described.partition}"

    def providing(self, described: SlurmSpec, vms: ProvidedVms, path: Path, name: RunName, run_dir: Path) -> Providing:
        priced = described if vms.usd_per_h is None else described.model_copy(update={"usd_per_h": vms.usd_per_h})
        return Providing(partial(open_slurm, priced, path, name), lock_path=run_dir / LOCK_NAME)

    def planned(self, described: SlurmSpec, path: Path, *names: Any) -> list[dict[str, Any]]:
        return slurm.planned(described, slurm_logs(described, path), *names)

    def end_run(
        self, described: SlurmSpec, path: Path, run: str, job: str, say: Callable[[str], None]
    ) -> tuple[Vm, ...]:
        self.check(str(path))
        provider = SlurmProvider(described, RunName(run=run, job=job), lambda _node, _grace_s: "", path.parent)
        left = provider.list()
        if not left:
            others = ", ".join(f"{other} of job {its_job}" for other, its_job in provider.runs().items()) or "none"
            missing = f"run {run} of job {job} has no job in Slurm's queue: it has ended already, or a name is misspelt"
            raise Misconfigured(f"{missing}; runs that have jobs there: {others}")
        end_all(provider, say=say)
        return left


_BUILT_IN: dict[str, type[Market]] = {
    "azure": AzureMarket,
    "aws": AwsMarket,
    "slurm": SlurmMarket,
    "static": StaticMarket,
}


def market_of(kind: str) -> Market:
    """Return the market of a kind.

    ConfigError: there is no such kind, or the market that another package registered cannot be loaded.
    """
    if kind in _BUILT_IN:
        market = _BUILT_IN[kind]()
        market.kind = kind
        return market
    if kind not in market_entry_points():
        allowed = " or ".join([*_BUILT_IN, *market_entry_points()])
        raise ConfigError("no such kind", field="--kind", value=kind, allowed=allowed)
    try:
        registered = market_entry_points()[kind].load()()
    except Exception as error:  # another package's code
        raise ConfigError(f"cannot be loaded: {error}", field="vms.kind", value=kind) from error
    if not isinstance(registered, Market):
        raise ConfigError(
            "cannot be used: the object registered under this name is not a Market", field="vms.kind", value=kind
        )
    registered.kind = kind
    return registered


def market_of_file(data: Any, kind: str | None) -> Market:
    """Return the market of a cloud file. ``kind``: the user's choice; None: recognised by fields, else Azure's."""
    fields = data if isinstance(data, dict) else {}
    return market_of(kind or next((known for known, market in _BUILT_IN.items() if market.mark in fields), "azure"))


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


def load_cloud(cluster: ClusterConfig, source: Path) -> Cloud | None:
    """Read the cloud file that a cluster file names; None: its VMs are local."""
    vms = cluster.vms
    if isinstance(vms, LocalVms):
        return None
    path = source.resolve().parent / vms.cloud
    market = market_of(vms.market)
    market.check(str(source))  # before anything starts
    return Cloud(vms, path, load_yaml(path, market.described))
