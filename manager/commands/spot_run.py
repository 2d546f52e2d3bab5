"""``morph spot-run``: one training script on one spot VM at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from morph.cli.reading.options import FileSettingsOption
from morph.contract.errors import InputError


def spot_run_command(
    job_file: Annotated[
        Path, typer.Argument(help="Job file (YAML): storage, vms, code and other settings.", metavar="JOB")
    ],
    command: Annotated[list[str], typer.Argument(help="Command that the VM runs, after --.", metavar="-- COMMAND...")],
    settings: FileSettingsOption = None,
) -> None:
    """Run any framework's script on one spot VM at a time: it is saved before the VM is lost, and restored on the next.

    With four lines (morph.spot) the script marks its steps and says how it is saved. Saves are as frequent as costs
    least, and follow a notice that leaves time for one; backups go to the storage that the job names. VMs are local, or
    come from the provider of a cluster file: then the script continues on the next VM by itself. With "vms: here" this
    machine is the spot VM: after a save before its loss the command ends with code 75, and the same command on the next
    VM continues.

    \b
    Example:
      morph spot-run job.yaml -- python train.py
    """
    import logging
    import shutil

    from manager.host.folders import make_folder, remove
    from manager.run.cloud import check_storage, check_url
    from manager.run.resolution import load_cloud
    from manager.spot.factory import open_local, open_provided
    from manager.spot.spec import SpotJob, lives_of
    from morph.elastic.launcher import interrupted_once
    from morph.yaml_files import load_cluster, load_yaml

    job, source = load_yaml(job_file, SpotJob, settings or ()), str(job_file)
    if "://" in job.storage:
        check_url(job.storage, source, "storage")
    else:
        job = job.model_copy(update={"storage": str((job_file.parent / job.storage).resolve())})
    code = (job_file.parent / job.code).resolve()
    if not code.is_dir():
        raise InputError("is not a folder", source=source, field="code", value=job.code, allowed="a folder")
    cloud = None
    if job.vms not in ("local", "here"):
        cluster_file = job_file.parent / job.vms
        if not cluster_file.is_file():
            allowed = "local, here, or a cluster file"
            raise InputError("is not a file", source=source, field="vms", value=job.vms, allowed=allowed)
        cloud = load_cloud(load_cluster(cluster_file), cluster_file)
        if cloud is None:
            raise InputError(
                "has no VMs of a provider", source=str(cluster_file), field="vms.kind", allowed="azure, static"
            )
        check_storage(cloud.vms, job.storage, source, "storage")
    if job.num_vms > 1 and job.vms != "local":
        raise InputError("is for local VMs", source=source, field="num_vms", value=job.num_vms, allowed="vms.keep")
    program = command[0] if job.vms == "here" or "/" not in command[0] else str(code / command[0])
    if cloud is None and shutil.which(program) is None:
        allowed = "a program: -- python train.py"
        raise InputError("cannot be started", field="COMMAND", value=command[0], allowed=allowed)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("morph.spot").setLevel(logging.INFO)
    root = make_folder()
    with interrupted_once():
        try:
            lives = None if job.preemptions is None else lives_of(job.preemptions)
            if cloud is None:
                launcher = open_local(job, command, root, None if job.vms == "here" else code, lives)
            else:
                launcher = open_provided(job, command, cloud, root, code, lives)
            outcome = launcher.run()
        finally:
            remove(root)
    raise typer.Exit(outcome.code)
