"""``morph cloud``: what would be created on a cloud, and ending what was left there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from morph.words import counted

if TYPE_CHECKING:
    from manager.providers.interface.provider import Vm

cloud_app = typer.Typer(
    help="Look at what a cloud file would create, and end what a run left.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

CloudFile = Annotated[Path, typer.Argument(metavar="FILE", help="Cloud file (YAML).", show_default=False)]
RunOption = Annotated[str, typer.Option("--run", help="Name of the run, as its VMs are tagged.")]
JobOption = Annotated[str, typer.Option("--job", help="Name of the job, as its VMs are tagged.")]


@cloud_app.command("dry-run")
def dry_run_command(
    file: CloudFile,
    count: Annotated[
        int, typer.Option(min=1, max=1000, help="Devices to ask for: VMs with one, or fewer with several.")
    ] = 1,
    run: RunOption = "run",
    job: JobOption = "job",
    cluster: Annotated[
        Path | None, typer.Option(help="Cluster or job file: show the cloud-config of its VMs, without the secrets.")
    ] = None,
) -> None:
    """Print, as JSON, what a request for VMs would create. No request is sent, nothing is created.

    \b
    Example:
      morph cloud dry-run configs/clouds/azure.yaml --count 2
    """
    import json

    from manager.providers.azure.spec import AzureSpec, planned
    from morph.yaml_files import load_yaml

    spec = load_yaml(file, AzureSpec)
    shown = [_cloud_config_of(cluster)] if cluster else []
    print(json.dumps(planned(spec, run, job, f"{job}-1", count, *shown), indent=1))


def _cloud_config_of(path: Path) -> Callable[[str, int], Any]:
    """Return what is shown of the cloud-config of VMs that a cluster file describes."""
    import json

    from pydantic import SecretStr

    from manager.providers.boot.cloud_init import cloud_init, node_start
    from manager.providers.boot.first_boot import packed
    from manager.providers.boot.own_wheel import make_wheel
    from morph.contract.cluster import AzureVms
    from morph.contract.errors import ConfigError
    from morph.yaml_files import load_config

    vms = load_config(path).vms
    if not isinstance(vms, AzureVms):
        raise ConfigError("no VM of these has one", source=str(path), field="vms.kind", value=vms.kind, allowed="azure")
    ray = f"{vms.address}:{vms.ray_port}"
    start = node_start(vms, vms.notice_port, "", make_wheel(), "", ray_address=ray, gpus=vms.device == "cuda")
    start = start.model_copy(update={"ray_token": SecretStr("(secret)"), "node_secret": SecretStr("(secret)")})

    def shown(node: str, num_devices: int) -> Any:
        text = cloud_init(start, node, "azure", num_devices).replace(packed(), "(the program of the first boot)")
        return json.loads(text.partition("\n")[2])

    return shown


@cloud_app.command("reconcile")
def reconcile_command(file: CloudFile, run: RunOption, job: JobOption) -> None:
    """End every VM that a run left on a cloud, and its scale set, or on hosts; nothing else, whatever its name.

    RUN_DIR/vms.json holds both names. Where nothing of that run is there, a name may be misspelt: exit status 1.

    \b
    Example:
      morph cloud reconcile configs/clouds/azure.yaml --run my-run --job my-job
    """
    from manager.providers.interface.provider import RETRYABLE, ProviderError
    from morph.contract.errors import ClusterError
    from morph.yaml_files import read_yaml

    data = read_yaml(file)
    try:
        ended = (
            _end_on_hosts(file, run, job)
            if isinstance(data, dict) and "hosts" in data
            else _end_on_azure(file, run, job)
        )
    except ProviderError as error:
        raise ClusterError(
            f"{error}; the same command goes on" if isinstance(error, RETRYABLE) else str(error)
        ) from error
    for vm in ended:
        print(f"ended {vm.name} ({vm.request}, {vm.size}, zone {vm.zone})")
    print(f"{counted(len(ended), 'VM')} of {run} {'was' if len(ended) == 1 else 'were'} there; none is left")


def _end_on_azure(file: Path, run: str, job: str) -> tuple[Vm, ...]:
    from manager.providers.azure.spec import AzureSpec
    from morph.contract.errors import ConfigError
    from morph.yaml_files import load_yaml

    spec = load_yaml(file, AzureSpec)
    try:
        from manager.providers.azure.termination import end_run
    except ImportError as error:
        raise ConfigError(
            "needs more packages: pip install -e '.[azure]' in the clone of Morph", source=str(file)
        ) from error
    return end_run(spec, run, job, told=_told)


def _end_on_hosts(file: Path, run: str, job: str) -> tuple[Vm, ...]:
    from manager.providers.hosts.static import Hosts, StaticProvider, StaticSpec
    from manager.providers.interface.provider import Misconfigured, end_all
    from morph.yaml_files import load_yaml

    spec = StaticSpec(command=("false",), **dict(load_yaml(file, Hosts)))  # nothing is started
    leases = file.resolve().parent / spec.leases
    provider = StaticProvider(spec, run, leases, job=job)
    leased = provider.list()
    if not leased:
        raise Misconfigured(f"{leases}: run {run} of job {job} has no host: it was ended before, or a name is misspelt")
    end_all(provider, told=_told)
    return leased


def _told(sentence: str) -> None:
    print(sentence, flush=True)
