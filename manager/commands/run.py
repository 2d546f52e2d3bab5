"""``morph run``, the managed job, and ``morph resume``."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from manager.commands.forever import kept_up
from manager.run.request import (
    SHORT_OPTIONS,
    IfChanged,
    RunRequest,
    absolute_url,
    is_job_file,
    kept_request,
    run_dir_of,
)
from manager.run_dir import check_unused, read_facts
from morph.cli.reading.options import (
    AnyScheduleOption,
    FileSettingsOption,
    OnDemandOption,
    PlainOption,
    PriceOption,
    RecomputeOption,
)
from morph.cli.reading.progress import doing_if_long
from morph.contract import ranges
from morph.contract.errors import ConfigError

_ALSO_IN_A_JOB_FILE = ("profile", "steps", "epochs", "checkpoint_url", *("schedule", "recompute"), *SHORT_OPTIONS)


class LogFormat(StrEnum):
    """The form of a run's messages."""

    TEXT = "text"
    JSON = "json"


VerboseOption = Annotated[bool, typer.Option("--verbose", help="Plain lines, with each decision and its reason.")]
LogFormatOption = Annotated[
    LogFormat, typer.Option("--log-format", help="Lines of text, or of JSON on standard output.")
]
PageOption = Annotated[
    bool,
    typer.Option(
        "--page/--no-page", help="Serve a web page about the run, on loopback. `morph page` prints its address."
    ),
]
IfChangedOption = Annotated[
    IfChanged,
    typer.Option(
        metavar="CHOICE",
        help="If the code changed: refuse, keep or accept. Refuse ends the command, keep continues with the code "
        "that the run began with, accept continues with the changed code and data from the newest checkpoint.",
    ),
]
TakeOverOption = Annotated[
    bool,
    typer.Option(
        "--take-over",
        help="Stop another manager of the same --checkpoint-url. This run then continues from its checkpoints.",
    ),
]

ForeverOption = Annotated[
    bool,
    typer.Option(
        "--forever",
        help="Restart the run whenever its manager ends. Pauses between restarts grow; a run that you stop, or that "
        "reaches a limit, is not restarted.",
    ),
]


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _in_place_of_the_files(context: typer.Context, job: str) -> list[str]:
    """Return the options of a command with a job file as settings, which count in place of what the file says.

    ConfigError: ``--cluster`` is among them; a job file describes its VMs itself.
    """
    if _is_given(context, "cluster"):
        raise ConfigError(
            "is given with a job file, which describes its VMs itself",
            field="--cluster",
            value=str(context.params["cluster"]),
            allowed=f"--set vms.KEY=VALUE, or the keys vms and policy of {job}",
        )
    given = {name: context.params[name] for name in _ALSO_IN_A_JOB_FILE if _is_given(context, name)}
    if "profile" in given:
        given["profile"] = str(given["profile"].resolve())
    if "checkpoint_url" in given:
        given["checkpoint_url"] = absolute_url(given["checkpoint_url"])
    return [f"job.{name}={json.dumps(value)}" for name, value in given.items()]


def run_command(
    context: typer.Context,
    job: Annotated[str, typer.Argument(metavar="JOB", help="path/to/file.py:name, or a YAML file with all settings.")],
    profile: Annotated[
        Path | None, typer.Option(help="Profile that `morph calibrate` wrote for this job.", show_default=False)
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="Cluster file (YAML): VMs, policy and limits.", show_default=False)
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=ranges.COUNT.high, help="Optimizer steps of the whole run.")] = 100,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Epochs of the whole run, in place of --steps.", show_default=False),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the run; default: runs/NAME of the job. It holds the journal and the checkpoints."
        ),
    ] = None,
    checkpoint_url: Annotated[
        str | None,
        typer.Option(help="fsspec URL for checkpoints; default: the run's folder.", show_default=False),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Spot trace (CSV) by which local VMs come and go.")] = None,
    trace_speed: Annotated[
        float, typer.Option(min=0.001, max=ranges.TRACE_SPEED.high, help="Play the trace this many times faster.")
    ] = 1.0,
    schedule: AnyScheduleOption = None,
    timeline_step: Annotated[
        int | None,
        typer.Option(
            "--timeline-step",
            min=0,
            help="Record step N for `morph timeline`. It is written to RUN_DIR/timeline-N.json, for Perfetto too.",
        ),
    ] = None,
    recompute: RecomputeOption = None,
    pipeline_depth: Annotated[
        int | None,
        typer.Option(
            "-P",
            min=1,
            max=ranges.COUNT.high,
            help="Cut the model into N stages. With fewer workers the run waits.",
            show_default=False,
        ),
    ] = None,
    num_replicas: Annotated[
        int | None,
        typer.Option(
            "-D",
            min=1,
            max=ranges.COUNT.high,
            help="Train at most N replicas. Further workers stand by.",
            show_default=False,
        ),
    ] = None,
    plain: PlainOption = False,
    verbose: VerboseOption = False,
    log_format: LogFormatOption = LogFormat.TEXT,
    page: PageOption = True,
    if_changed: IfChangedOption = IfChanged.REFUSE,
    forever: ForeverOption = False,
    take_over: TakeOverOption = False,
    price: PriceOption = None,
    on_demand_price: OnDemandOption = None,
    settings: FileSettingsOption = None,
) -> None:
    """Train a job on VMs that come and go: its pipelines are re-shaped as they do.

    Ctrl-C saves the run at the next step; the same command continues it. If the process of this command is killed
    while the VMs live on, the same command takes the run over (see takeover_patience_s in the cluster file).

    \b
    Example:
      morph run configs/jobs/tiny_gpt.py:job --profile profile.json \\
          --cluster configs/clusters/local.yaml --steps 200 --run-dir runs/tiny
      morph run configs/runs/tiny_gpt.yaml --set job.steps=400
    """
    if epochs is not None and _is_given(context, "steps"):
        raise ConfigError("is given with --steps", field="--epochs", value=epochs, allowed="one of the two")
    request = RunRequest.model_validate(
        {name: context.params[name] for name in RunRequest.model_fields}
        | {"settings": (*(settings or ()), *(_in_place_of_the_files(context, job) if is_job_file(job) else ()))}
    )
    with kept_up(forever) as begun:
        with doing_if_long(f"reading {job} and its settings"):
            if (own := run_dir_of(request, run_dir)) is not None:
                check_unused(own)  # before the imports, which take longer
            from manager.commands.carry_out import Shown, carry_out
        shown = Shown(plain, verbose, log_format is LogFormat.JSON, page)
        carry_out(request, run_dir, shown, if_changed, take_over=take_over and begun is None)


def resume_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN_DIR_OR_URL", help="The run's folder or, on another machine, the URL of its checkpoints."
        ),
    ],
    job: Annotated[
        str | None,
        typer.Option(
            metavar="JOB", help="With a URL: the job on this machine, path/to/file.py:name.", show_default=False
        ),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="With a URL: a new folder; default: runs/NAME of the job.")
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="With a URL: a cluster file instead of the run's own.", show_default=False)
    ] = None,
    plain: PlainOption = False,
    verbose: VerboseOption = False,
    log_format: LogFormatOption = LogFormat.TEXT,
    page: PageOption = True,
    if_changed: IfChangedOption = IfChanged.REFUSE,
    forever: ForeverOption = False,
    take_over: TakeOverOption = False,
) -> None:
    """Continue a run, with the options of its command.

    If the run's process was killed while its VMs live on, the VMs are taken over; otherwise the run continues from the
    newest checkpoint. The command refuses if the job's code (but see --if-changed), the profile, the cluster file or
    the trace was changed or is missing.

    If the run's machine is lost, give the URL of the checkpoints: the run continues in a new folder from the newest
    intact checkpoint. The job's code must be on this machine, unchanged: no code is read from storage.

    \b
    Example:
      morph resume runs/tiny
      morph resume az://container/tiny --job my_job.py:job --run-dir runs/tiny
    """
    with kept_up(forever) as begun:
        source = source if begun is None else str(begun)
        with doing_if_long(f"reading {source}"):
            if "://" not in source:
                check_unused(Path(source))
            from manager.commands.carry_out import Shown, carry_out
            from manager.run.recovery import is_stored, recovered

        shown, by_force = Shown(plain, verbose, log_format is LogFormat.JSON, page), take_over and begun is None
        if is_stored(source):
            with recovered(source, job, run_dir, cluster, if_changed) as (request, made):
                carry_out(request, made, shown, if_changed, take_over=by_force)
        read_facts(Path(source))
        for option, given in (("--job", job), ("--run-dir", run_dir), ("--cluster", cluster)):
            if given is not None and begun is None:
                raise ConfigError("applies only to a URL", field=option, allowed=f"without it, as {source} says")
        carry_out(kept_request(Path(source)), Path(source), shown, if_changed, take_over=by_force)
