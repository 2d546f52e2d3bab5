"""Opens the provider that a cloud file describes."""

from __future__ import annotations

import shlex
import threading
from functools import partial
from pathlib import Path
from typing import Any

from manager.providers.aws.spec import AwsSpec
from manager.providers.azure.prices import disk_price, retail_prices
from manager.providers.azure.spec import AzureSpec
from manager.providers.boot.cloud_init import NodeStart, cloud_init, custom_data, user_data
from manager.providers.hosts.static import Hosts, StaticProvider, StaticSpec
from manager.providers.hosts.static_node import secret_of, static_node
from manager.providers.interface.cloud import Identity
from manager.providers.interface.operations import Operations
from manager.providers.interface.provider import Provider, RunName
from manager.providers.slurm.provider import SlurmProvider
from manager.providers.slurm.spec import SlurmSpec, job_script
from morph.contract.errors import ConfigError

OPERATIONS_NAME = "operations.json"


def azure_spec(spec: AzureSpec, image: str | None, usd_per_h: float | None) -> AzureSpec:
    """Return the spec with the image and the price in the cluster file, if given."""
    sizes = spec.sizes
    if usd_per_h is not None:
        sizes = tuple(size.model_copy(update={"usd_per_h": usd_per_h}) for size in sizes)
    return spec.model_copy(update={"sizes": sizes, "image": image or spec.image})


def aws_spec(spec: AwsSpec, image: str | None, usd_per_h: float | None) -> AwsSpec:
    """Return the spec with the image and price of the cluster file. ConfigError: it is not an AWS image."""
    if image is not None and not image.startswith("ami-"):
        raise ConfigError("is not an AWS image", field="vms.environment.image", value=image, allowed="ami-...")
    types = spec.types
    if usd_per_h is not None:
        types = tuple(known.model_copy(update={"usd_per_h": usd_per_h}) for known in types)
    return spec.model_copy(update={"types": types, "image": image or spec.image})


def ending_command(path: Path, name: RunName) -> str:
    """Return the command that ends the rest of a run; ``path``: the cloud file, or the file of hosts."""
    return shlex.join(["morph", "cloud", "reconcile", str(path), "--run", name.run, "--job", name.job])


def open_azure(spec: AzureSpec, path: Path, name: RunName, run_dir: Path, start: NodeStart) -> Provider:
    """Open the provider of a run's VMs on Azure, without a call. ProviderError: a damaged file in the run directory."""
    from manager.providers.azure.client import azure_client, until_stopped
    from manager.providers.azure.provider import AzureProvider

    stopped = threading.Event()
    login: dict[str, Any] = {"base_url": spec.resource_manager, "authority": spec.authority}
    provider = AzureProvider(
        azure_client(spec.subscription_id, pause=until_stopped(stopped), **login),
        spec,
        Identity(run=name.run, job=name.job),
        Operations(run_dir / OPERATIONS_NAME),
        lambda node, num_devices: custom_data(cloud_init(start, node, "azure", num_devices)),
        find_price=retail_prices(spec),
        find_disk_price=partial(disk_price, spec.location),
        ending=ending_command(path, name),
    )
    provider.group.stopped = stopped  # the client's pauses end with the provider
    return provider


def open_aws(spec: AwsSpec, path: Path, name: RunName, run_dir: Path, start: NodeStart) -> Provider:
    """Open the provider of a run's VMs on AWS, without a call. ProviderError: a damaged file in the run directory."""
    from manager.providers.aws.provider import open_aws

    return open_aws(
        spec,
        Identity(run=name.run, job=name.job),
        Operations(run_dir / OPERATIONS_NAME),
        lambda node, num_devices: user_data(cloud_init(start, node, "aws", num_devices)),
        ending=ending_command(path, name),
    )


def open_static(hosts: Hosts, path: Path, name: RunName, start: NodeStart) -> Provider:
    """Open the provider of hosts; ``path``: the file of hosts; paths in it are relative to its folder."""
    spec = StaticSpec(command=static_node(start), **dict(hosts))
    leases, secret = path.parent / hosts.leases, secret_of(start)
    return StaticProvider(spec, name.run, leases, secret, ending=ending_command(path, name), job=name.job)


def slurm_logs(spec: SlurmSpec, path: Path) -> Path:
    """Return the folder for the jobs' output; ``path``: the cloud file; paths in it are relative to its folder."""
    return path.resolve().parent / spec.logs


def open_slurm(spec: SlurmSpec, path: Path, name: RunName, start: NodeStart) -> Provider:
    """Open the provider of Slurm jobs; makes no call yet. ``path``: the cloud file."""
    return SlurmProvider(
        spec,
        name,
        partial(job_script, start, spec),
        slurm_logs(spec, path),
        ending=ending_command(path, name),
    )
