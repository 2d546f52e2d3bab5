"""``morph config``: check, explain and describe cluster and job files."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from morph.cli.reading.progress import doing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

    from morph.contract.cluster import JobFile, JobPart
    from morph.contract.job_facts import Epochs

config_app = typer.Typer(
    help="Check, explain and describe cluster and job files.\n\n\b\nExample:\n"
    "  morph config check configs/runs/tiny_gpt.yaml",
    no_args_is_help=True,
)


class FileKind(StrEnum):
    """The kinds of files."""

    JOB = "job"
    CLUSTER = "cluster"


FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A job or cluster file (YAML).")]


@config_app.command("check")
def check_command(file: FileArgument) -> None:
    """Check a file; in a job file, also that job, profile and VMs fit together. Nothing is started or written.

    \b
    Example:
      morph config check configs/runs/tiny_gpt.yaml
    """
    from morph.contract.cluster import JobFile
    from morph.yaml_files import load_config

    config = load_config(file)
    if isinstance(config, JobFile):
        doing("loading PyTorch and the job, and checking that its profile and VMs fit it")
        print(f"{file}: a job file; {_check_job_file(file, config)}")
    else:
        print(f"{file}: a cluster file; every key is known and every value in range")


@config_app.command("explain")
def explain_command(file: FileArgument) -> None:
    """Print every key with its effective value, the source of the value, and its meaning.

    \b
    Example:
      morph config explain configs/clusters/local.yaml
    """
    from rich.console import Console
    from rich.table import Table

    from morph.yaml_files import load_config, read_yaml

    table = Table("key", "value", "from", "meaning", title=str(file))
    given = read_yaml(file)
    for key, value, field in _fields(load_config(file)):
        table.add_row(key, _shown(value), "file" if _is_given(given, key) else "default", field.description or "")
    Console(width=None if Console().is_terminal else 160).print(table)


@config_app.command("schema")
def schema_command(
    kind: Annotated[FileKind, typer.Argument(help="Kind of file.")] = FileKind.JOB,
) -> None:
    """Print the JSON schema of a kind of file, for editors and other programs.

    \b
    Example:
      morph config schema job > job.schema.json
    """
    import json

    from morph.contract.cluster import ClusterConfig, JobFile

    model = JobFile if kind is FileKind.JOB else ClusterConfig
    print(json.dumps(model.model_json_schema(), indent=2))


def _check_job_file(path: Path, file: JobFile) -> str:
    """Check everything that a run checks before it starts; return a sentence about what would run."""
    from manager.commands.carry_out import check_device
    from manager.run.prepared import resolve
    from manager.run.request import RunRequest
    from morph.cli.reading.errors import places
    from morph.contract.plan import by_pool
    from morph.contract.pool import Pool
    from morph.preflight.job_check import check_job

    run = resolve(RunRequest(job=str(path), steps=1), path, file)
    check_device(run)
    with places(run.places):
        with run.job_files.in_use():
            epochs = check_job(run.request.job, run.profile).facts.epochs
        config = run.config()
    pool = Pool.of(config.target_nodes) if config.target_nodes else by_pool(config.plans)[-1][0]
    if config.offers:
        pool = max(config.plans.values(), key=lambda plan: plan.expected.examples_per_s).pool
    plan = config.best_plan(pool)
    assert plan is not None, "the run would not begin"
    return (
        f"{run.profile.job.name} fits its profile; {length_text(file.job, epochs)}, with {pool} workers in shape "
        f"{plan.shape}, at least {config.fewest_workers} needed"
    )


def _fields(section: BaseModel, before: str = "") -> Iterator[tuple[str, Any, FieldInfo]]:
    """Yield each key that is not a section itself: dotted name, value, description."""
    from pydantic import BaseModel

    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _fields(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value, field


def _is_given(given: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(given, dict) or part not in given:
            return False
        given = given[part]
    return True


def _shown(value: Any) -> str:
    if value is None or value == ():
        return "-"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def length_text(job: JobPart, epochs: Epochs | None) -> str:
    """Return the length of a run; of epochs, also how they divide into steps."""
    from morph.words import counted

    if job.epochs is None or epochs is None:
        return counted(job.steps, "step")
    ends = {
        "fill": "; the last samples of an epoch share a step with the first of the next",
        "short": "; the last step of an epoch is shorter",
        "drop": "; the last samples of an epoch are left out",
    }
    why = ends[epochs.end] if epochs.num_left else ""
    steps = counted(epochs.steps_of(job.epochs), "step")
    return (
        f"{counted(job.epochs, 'epoch')} of {counted(epochs.num_samples, 'sample')} at {epochs.batch_size} are "
        f"{steps}{why}"
    )
