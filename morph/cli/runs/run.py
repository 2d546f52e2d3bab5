"""``morph run``, the managed job, and ``morph resume``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from manager.run.request import IfChanged, RunRequest, is_job_file, kept_request, run_dir_of
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
from morph.cli.runs.forever import kept_up
from morph.contract import ranges
from morph.contract.errors import ConfigError


class LogFormat(StrEnum):
    """How a run is told while it goes on."""

    TEXT = "text"
    JSON = "json"


VerboseOption = Annotated[
    bool, typer.Option("--verbose", help="Plain lines, with each decision of the manager and its reason.")
]
LogFormatOption = Annotated[
    LogFormat, typer.Option("--log-format", help="Plain text, or one JSON object per line on standard output.")
]
PageOption = Annotated[
    bool, typer.Option("--page/--no-page", help="Serve the run's page on loopback; `morph page` gives its address.")
]
IfChangedOption = Annotated[
    IfChanged,
    typer.Option(
        help="If the job's code was changed since the run began: refuse to continue; keep the code that it began with; "
        "or accept changed code and data, from the newest checkpoint on."
    ),
]
TakeOverOption = Annotated[
    bool,
    typer.Option(
        "--take-over", help="If another manager uses the same --checkpoint-url, stop it and take over its checkpoints."
    ),
]

ForeverOption = Annotated[
    bool,
    typer.Option(
        "--forever",
        help="Restart the run whatever ends it, after growing pauses, unless you stop it or a limit is reached.",
    ),
]

_SHORT = {"pipeline_depth": "-P", "num_replicas": "-D"}
_IN_A_JOB_FILE = (
    "profile",
    "cluster",
    "steps",
    "epochs",
    "run_dir",
    "checkpoint_url",
    "schedule",
    "recompute",
    *_SHORT,
)


def run_command(
    context: typer.Context,
    job: Annotated[
        str, typer.Argument(metavar="JOB", help="path/to/file.py:name, or a job file (YAML) with all settings.")
    ],
    profile: Annotated[
        Path | None, typer.Option(help="The profile that `morph calibrate` wrote for this job.", show_default=False)
    ] = None,
    cluster: Annotated[Path | None, typer.Option(help="Cluster file (YAML).", show_default=False)] = None,
    steps: Annotated[int, typer.Option(min=1, help="Length of the whole run in optimizer steps.")] = 100,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Length of the whole run in epochs, in place of --steps.", show_default=False),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Journal and checkpoints go here; default: runs/NAME of the job.")
    ] = None,
    checkpoint_url: Annotated[
        str | None,
        typer.Option(help="Checkpoints go to this fsspec URL; default: the run directory.", show_default=False),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Spot trace (CSV): local VMs come and go as recorded in it.")
    ] = None,
    trace_speed: Annotated[
        float, typer.Option(min=0.001, help="Replay the trace this many times faster than it was recorded.")
    ] = 1.0,
    schedule: AnyScheduleOption = None,
    timeline_step: Annotated[
        int | None,
        typer.Option("--timeline-step", min=0, help="Record this step into RUN_DIR/timeline-STEP.json (Perfetto)."),
    ] = None,
    recompute: RecomputeOption = None,
    pipeline_depth: Annotated[
        int | None,
        typer.Option(
            "-P", min=1, help="Number of stages in every shape; with fewer workers the run waits.", show_default=False
        ),
    ] = None,
    num_replicas: Annotated[
        int | None,
        typer.Option("-D", min=1, help="Largest number of replicas; workers beyond that stand by.", show_default=False),
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
    """Train a job on VMs that come and go, re-shaping it as they do.

    The first Ctrl-C stops the run at the next step and saves it; the same command then continues it from there. If the
    process of this command is killed, the same command takes the run over, while its VMs are still alive
    (takeover_patience_s in the cluster file).

    \b
    Example:
      morph run configs/jobs/tiny_gpt.py:job --profile profile.json \\
          --cluster configs/clusters/local.yaml --steps 200 --run-dir runs/tiny
      morph run configs/runs/tiny_gpt.yaml --set job.steps=400 --set policy.redundancy=off
    """
    for name in _IN_A_JOB_FILE if is_job_file(job) else ():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = _SHORT.get(name, "--" + name.replace("_", "-"))
            raise ConfigError("is set in the job file", field=option, allowed=f"--set job.{name}=..., or as {job} says")
    source = context.get_parameter_source("steps")
    if epochs is not None and source is not None and source.name == "COMMANDLINE":
        raise ConfigError("is given with --steps", field="--epochs", value=epochs, allowed="one of the two")
    for option, value, allowed in (
        ("--steps", steps, ranges.COUNT),
        ("--trace-speed", trace_speed, ranges.TRACE_SPEED),
        ("--price", price, ranges.USD_PER_HOUR),
        ("--on-demand-price", on_demand_price, ranges.USD_PER_HOUR),
    ):
        if value is not None:
            allowed.check(option, value)
    request = RunRequest.model_validate(
        {name: context.params[name] for name in RunRequest.model_fields} | {"settings": tuple(settings or ())}
    )
    with kept_up(forever) as begun:
        with doing_if_long(f"reading {job} and what it is run with"):
            if (own := run_dir_of(request, run_dir)) is not None:
                check_unused(own)  # before what is imported, which takes longer
            from morph.cli.runs.carry_out import Shown, carry_out
        shown = Shown(plain, verbose, log_format is LogFormat.JSON, page)
        carry_out(request, run_dir, shown, if_changed, take_over=take_over and begun is None)


def resume_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN_DIR_OR_URL", help="The run's directory or, on another machine, the URL of its checkpoints."
        ),
    ],
    job: Annotated[
        str | None,
        typer.Option(
            metavar="JOB", help="With a URL: the job on this machine, path/to/file.py:name.", show_default=False
        ),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="With a URL: a new run directory; default: runs/NAME of the job.")
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
    """Continue a run with the options of its `morph run` command.

    If the process of the run was killed and its VMs are still alive, they are taken over; otherwise the run continues
    from the newest checkpoint. The command refuses to continue if the job's code (but see --if-changed), the profile,
    the cluster file or the trace was changed or is gone.

    If the machine of the run is gone, give the URL of its checkpoints: the run continues in a new run directory, from
    the newest checkpoint that is whole. The job's code must be on this machine, unchanged, because no code is read from
    storage.

    \b
    Example:
      morph resume runs/tiny
      morph resume az://container/tiny --job my_job.py:job --run-dir runs/tiny
    """
    with kept_up(forever) as begun:
        source = source if begun is None else str(begun)
        with doing_if_long(f"reading what was kept in {source}"):
            if "://" not in source:
                check_unused(Path(source))
            from manager.run.recovery import is_stored, recovered
            from morph.cli.runs.carry_out import Shown, carry_out

        shown, by_force = Shown(plain, verbose, log_format is LogFormat.JSON, page), take_over and begun is None
        if is_stored(source):
            with recovered(source, job, run_dir, cluster, if_changed) as (request, made):
                carry_out(request, made, shown, if_changed, take_over=by_force)
        read_facts(Path(source))
        for option, given in (("--job", job), ("--run-dir", run_dir), ("--cluster", cluster)):
            if given is not None and begun is None:
                raise ConfigError("is for a URL alone", field=option, allowed=f"without it, as {source} says")
        carry_out(kept_request(Path(source)), Path(source), shown, if_changed, take_over=by_force)
