"""``morph cloud``: show and check what a run would create on a cloud, and end what it left there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from morph.words import counted

cloud_app = typer.Typer(
    help="Show what a cloud file would create, or clean up.\n\n\b\nExample:\n"
    "  morph cloud dry-run configs/clouds/azure.yaml --count 2",
    no_args_is_help=True,
    rich_markup_mode=None,
)

CloudFile = Annotated[Path, typer.Argument(metavar="FILE", help="Cloud file (YAML).", show_default=False)]
RunOption = Annotated[str, typer.Option("--run", help="Name of the run in the tags of its VMs.")]
JobOption = Annotated[str, typer.Option("--job", help="Name of the job in the tags of its VMs.")]
KindOption = Annotated[
    str | None,
    typer.Option(help="vms.kind of the file. Default: recognised by the file's keys.", show_default=False),
]


@cloud_app.command("dry-run")
def dry_run_command(
    file: CloudFile,
    count: Annotated[
        int, typer.Option(min=1, max=1000, help="Devices to request, in VMs with one device or with several.")
    ] = 1,
    run: RunOption = "run",
    job: JobOption = "job",
    cluster: Annotated[
        Path | None,
        typer.Option(
            help="Cluster or job file: show how its VMs boot, as a cloud-config or a job script, without secrets."
        ),
    ] = None,
    kind: KindOption = None,
) -> None:
    """Print, as JSON, what a request for VMs would create. No request is sent; nothing is created.

    \b
    Example:
      morph cloud dry-run configs/clouds/azure.yaml --count 2
    """
    import json

    from manager.run.markets import market_of_file
    from morph.yaml_files import load_yaml, read_yaml

    market = market_of_file(read_yaml(file), kind)
    spec = load_yaml(file, market.described)
    market.check_job_name(job, str(file), "--job")
    shown = [_boot_of(cluster, market.kind, spec)] if cluster else []
    print(json.dumps(market.planned(spec, file, run, job, f"{job}-1", count, *shown), indent=1))


def _boot_of(path: Path, kind: str, spec: Any) -> Callable[[str, int], Any]:
    """Return what makes the cloud-config, or job script, of a cluster file's VMs, with placeholders for secrets."""
    import json

    from pydantic import SecretStr

    from manager.providers.boot.cloud_init import cloud_init, node_start
    from manager.providers.boot.first_boot import packed, program
    from manager.providers.boot.own_wheel import make_wheel
    from manager.providers.slurm.spec import job_script
    from morph.contract.cluster import CloudVms, SlurmVms
    from morph.contract.errors import ConfigError
    from morph.yaml_files import load_config

    vms = load_config(path).vms
    if not isinstance(vms, CloudVms | SlurmVms) or vms.kind != kind:
        raise ConfigError(
            "is not the cloud file's kind", source=str(path), field="vms.kind", value=vms.kind, allowed=kind
        )
    ray = f"{vms.address}:{vms.ray_port}"
    start = node_start(vms, vms.notice_port, "", make_wheel(), "", ray_address=ray, gpus=vms.device == "cuda")
    start = start.model_copy(update={"ray_token": SecretStr("(secret)"), "node_secret": SecretStr("(secret)")})

    def script(node: str, _num_devices: int) -> Any:
        return job_script(start, spec, node, spec.grace_s or 0.0).replace(packed(), "(the boot program)").splitlines()

    def shown(node: str, num_devices: int) -> Any:
        shown = json.loads(cloud_init(start, node, vms.kind, num_devices).partition("\n")[2])
        for name, text in program().items():
            shown["bootcmd"] = [line.replace(f"\n{text.rstrip()}\n", f"\n({name})\n") for line in shown["bootcmd"]]
        return shown

    return script if isinstance(vms, SlurmVms) else shown


@cloud_app.command("check")
def check_command(
    file: CloudFile,
    count: Annotated[int, typer.Option(min=1, max=1000, help="Devices of the run.")] = 1,
    kind: KindOption = None,
) -> None:
    """Check whether a run would get its VMs: login, names in the file, permissions, quota, price. Nothing is created.

    For files of Azure and AWS. On AWS, the requests of a run are sent as dry runs, which AWS checks but does not carry
    out. Exit status 1: a check failed.

    \b
    Example:
      morph cloud check configs/clouds/aws.yaml --count 8
    """
    from manager.run.markets import market_of_file
    from morph.yaml_files import load_yaml, read_yaml

    market = market_of_file(read_yaml(file), kind)
    all_well = True
    for finding in market.findings(load_yaml(file, market.described), count):
        print(f"{'ok   ' if finding.is_well else 'WRONG'} {finding.sentence}", flush=True)
        all_well &= finding.is_well
    if not all_well:
        raise typer.Exit(1)


@cloud_app.command("policy")
def policy_command(file: CloudFile, kind: KindOption = None) -> None:
    """Print, as JSON, the minimal permissions for running the manager. No request is sent.

    \b
    Example:
      morph cloud policy configs/clouds/aws.yaml
    """
    import json

    from manager.run.markets import market_of_file
    from morph.yaml_files import load_yaml, read_yaml

    market = market_of_file(read_yaml(file), kind)
    print(json.dumps(market.policy(load_yaml(file, market.described)), indent=1))


@cloud_app.command("reconcile")
def reconcile_command(
    file: CloudFile,
    run: RunOption,
    job: JobOption,
    kind: KindOption = None,
) -> None:
    """End every VM that a run left on a cloud or on hosts, and the run's scale set; nothing else is ended.

    RUN_DIR/vms.json holds both names. If nothing of the run is found, a name may be misspelt: exit status 1.

    \b
    Example:
      morph cloud reconcile configs/clouds/azure.yaml --run my-run --job my-job
    """
    from manager.providers.interface.provider import RETRYABLE, ProviderError
    from manager.run.markets import market_of_file
    from morph.contract.errors import ClusterError
    from morph.yaml_files import load_yaml, read_yaml

    market = market_of_file(read_yaml(file), kind)
    try:
        ended = market.end_run(load_yaml(file, market.described), file, run, job, _say)
    except ProviderError as error:
        raise ClusterError(
            f"{error}; repeat the command to continue" if isinstance(error, RETRYABLE) else str(error)
        ) from error
    for vm in ended:
        print(f"ended {vm.name} ({vm.request}, {vm.size}, zone {vm.zone})")
    print(f"{counted(len(ended), 'VM')} of {run} {'was' if len(ended) == 1 else 'were'} there; none is left")


def _say(sentence: str) -> None:
    print(sentence, flush=True)
