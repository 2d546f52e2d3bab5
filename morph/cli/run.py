"""``morph run``: the managed job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from morph.cli.carry_out import IfChangedOption, LogFormat, LogFormatOption, PageOption, PlainOption, Shown, carry_out
from morph.cli.plan import ScheduleName
from morph.cli.report import OnDemandOption, PriceOption
from morph.cli.run_code import IfChanged
from morph.contract import ranges


def run_command(
    context: typer.Context,
    job: Annotated[
        str, typer.Argument(metavar="JOB", help="path/to/file.py:name, or a job file (YAML) that has it all.")
    ],
    profile: Annotated[
        Path | None, typer.Option(help="What `morph calibrate` wrote for this job.", show_default=False)
    ] = None,
    cluster: Annotated[Path | None, typer.Option(help="Cluster file (YAML).", show_default=False)] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of the whole run.")] = 100,
    run_dir: Annotated[
        Path | None, typer.Option(help="Journal, checkpoints and pictures go here; default: runs/NAME of the job.")
    ] = None,
    checkpoint_url: Annotated[
        str | None,
        typer.Option(help="Checkpoints go to this fsspec URL; default: the run directory.", show_default=False),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Spot trace (CSV): local VMs come and go as in it.")] = None,
    trace_speed: Annotated[
        float, typer.Option(min=0.001, help="Play the trace this many times faster than it was recorded.")
    ] = 1.0,
    schedule: Annotated[
        ScheduleName | None,
        typer.Option(
            "--schedule",
            help="Order of the tasks; the weights do not depend on it. Default: whichever is faster.",
            show_default=False,
        ),
    ] = None,
    timeline_step: Annotated[
        int | None,
        typer.Option("--timeline-step", min=0, help="Record this step into RUN_DIR/timeline-STEP.json (Perfetto)."),
    ] = None,
    recompute: Annotated[
        bool | None,
        typer.Option(
            "--recompute/--no-recompute",
            help="Run forwards again, or keep activations: more memory. Default: whichever is faster.",
            show_default=False,
        ),
    ] = None,
    pipeline_depth: Annotated[
        int | None,
        typer.Option("-P", min=1, help="Stages of every shape: with fewer workers the run waits.", show_default=False),
    ] = None,
    num_replicas: Annotated[
        int | None,
        typer.Option(
            "-D", min=1, help="Replicas at most: fewer while workers are missing, others stand by.", show_default=False
        ),
    ] = None,
    plain: PlainOption = False,
    log_format: LogFormatOption = LogFormat.TEXT,
    page: PageOption = True,
    if_changed: IfChangedOption = IfChanged.REFUSE,
    price: PriceOption = None,
    on_demand_price: OnDemandOption = None,
) -> None:
    """Train a job on VMs that come and go, re-shaping it as they do.

    A first Ctrl-C stops at the next step and saves; the same command then goes on from there. It also takes over from a
    run whose process was killed, while its VMs live (takeover_patience_s in the cluster file).

    \b
    Example:
      morph run configs/jobs/tiny_gpt.py:job --profile profile.json \\
          --cluster configs/clusters/local.yaml --steps 200 --run-dir runs/tiny
      morph run configs/runs/tiny_gpt.yaml
    """
    from morph.cli.job_run import check_given
    from morph.cli.kept_command import RunCommand

    check_given(job, _given(context))
    for option, value, allowed in (
        ("--steps", steps, ranges.COUNT),
        ("--trace-speed", trace_speed, ranges.TRACE_SPEED),
        ("--price", price, ranges.USD_PER_HOUR),
        ("--on-demand-price", on_demand_price, ranges.USD_PER_HOUR),
    ):
        if value is not None:
            allowed.check(option, value)
    command = RunCommand(
        job=job,
        profile=profile,
        cluster=cluster,
        steps=steps,
        checkpoint_url=checkpoint_url,
        trace=trace,
        trace_speed=trace_speed,
        schedule=None if schedule is None else schedule.value,
        timeline_step=timeline_step,
        recompute=recompute,
        pipeline_depth=pipeline_depth,
        num_replicas=num_replicas,
        price=price,
        on_demand_price=on_demand_price,
    )
    carry_out(command, run_dir, Shown(plain, log_format, page), if_changed)


def _given(context: typer.Context) -> set[str]:
    """Names of the parameters that stand on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
