"""Carrying out what ``morph run`` or ``morph resume`` asks for, and showing how it ends."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from morph.cli.errors import EXIT_INTERRUPTED, places
from morph.cli.report import no_price, prices_of
from morph.cli.run_code import IfChanged

if TYPE_CHECKING:
    from manager.controller.actions import Finish
    from manager.report.prices import Prices
    from manager.report.values import RunReport
    from morph.cli.job_run import JobRun
    from morph.cli.kept_command import RunCommand


class LogFormat(StrEnum):
    """How a run is told while it goes on."""

    TEXT = "text"
    JSON = "json"


PlainOption = Annotated[bool, typer.Option("--plain", help="Plain lines even in a terminal.")]
LogFormatOption = Annotated[
    LogFormat, typer.Option("--log-format", help="text, or one JSON object a line on standard output.")
]
PageOption = Annotated[
    bool, typer.Option("--page/--no-page", help="Serve the run's page on loopback; `morph page` gives its address.")
]

IfChangedOption = Annotated[
    IfChanged,
    typer.Option(
        help="If the job's code was changed since the run began: refuse; keep the code that it began with; or accept "
        "changed code and data, from the newest checkpoint on."
    ),
]


@dataclass(frozen=True)
class Shown:
    """How a run is shown; see the options."""

    plain: bool
    log_format: LogFormat
    page: bool


def carry_out(command: RunCommand, run_dir: Path | None, shown: Shown, if_changed: IfChanged) -> None:
    """Do what ``morph run`` was asked for; ``run_dir``: instead of the job's own. Ends in the command's exit code."""
    from manager.preparation import from_its_first_event
    from morph.cli.checks import check_device
    from morph.cli.job_run import asked_for
    from morph.cli.kept_command import keep_command
    from morph.cli.managed_run import managed_run
    from morph.cli.provided import check_address
    from morph.contract.errors import ConfigError, TrainingStopped
    from morph.contract.trace import load_trace

    asked = asked_for(command, run_dir)
    steps, known, described = asked.steps, asked.profile, asked.cluster
    trace, timeline_step, log_format = command.trace, command.timeline_step, shown.log_format
    if timeline_step is not None and timeline_step >= steps:
        raise ConfigError("is never run", field="--timeline-step", value=timeline_step, allowed=f"0 to {steps - 1}")
    prices = _prices(asked, command)
    events = from_its_first_event(load_trace(trace)).scaled(1 / command.trace_speed) if trace else None
    check_device(described, str(asked.cluster_path))
    if asked.cloud is not None:
        check_address(asked.cloud.vms, str(asked.cluster_path))
    if events is not None and described.vms.keep is not None:
        raise ConfigError(
            "a trace decides itself which VMs come and go",
            source=str(asked.cluster_path),
            field="vms.keep",
            value=described.vms.keep,
            allowed="vms.keep or --trace, not both",
        )
    directory = asked.run_dir
    try:
        with places(asked.places):
            finish, report = managed_run(
                asked.code,
                known,
                described,
                events,
                steps=steps,
                run_dir=directory,
                plain=shown.plain,
                recompute=asked.recompute,
                schedule=asked.schedule,
                pipeline_depth=asked.pipeline_depth,
                num_replicas=asked.num_replicas,
                timeline_step=timeline_step,
                as_json=log_format is LogFormat.JSON,
                prices=prices,
                page=shown.page,
                checkpoint_url=asked.checkpoint_url,
                cloud=asked.cloud,
                job_files=asked.job_files,
                if_changed=if_changed,
                keep=partial(keep_command, command=command, files=asked.files(trace)),
            )
    except KeyboardInterrupt:
        print(
            f"the same command goes on from the newest checkpoint, and so does morph resume {directory}",
            file=sys.stderr,
        )
        raise
    with redirect_stdout(sys.stderr if log_format is LogFormat.JSON else sys.stdout):
        _conclude(finish, report, directory)
        if timeline_step is not None:
            _write_timeline(directory, timeline_step)
    if finish.outcome == "failed":
        print(finish.traceback, end="", file=sys.stderr)
        raise TrainingStopped(finish.sentence)
    raise typer.Exit(EXIT_INTERRUPTED if finish.outcome == "stopped" else 0)


def _prices(asked: JobRun, command: RunCommand) -> Prices | None:
    """The command line's price counts for all VMs; else the provider's or the cluster file's for those without one.

    Raises:
        InputError: a price to compare with, and none that is paid.
    """
    vms = asked.cluster.vms
    on_demand = vms.on_demand_usd_per_h if command.on_demand_price is None else command.on_demand_price
    if command.price is not None:
        return prices_of(command.price, on_demand)
    price = asked.cloud.price() if asked.cloud is not None else None
    paid = vms.usd_per_h if price is None else price.usd_per_h
    prices = prices_of(paid, on_demand)
    if paid is None and prices is not None and asked.cloud is None:
        raise no_price()
    return None if prices is None else prices.model_copy(update={"for_all": False})


def _conclude(finish: Finish, report: RunReport, run_dir: Path) -> None:
    from manager.report.summary import summarise
    from morph.cli.run_picture import draw_run

    print(summarise(report))
    if report.steps:
        picture = run_dir / "run.png"
        try:
            draw_run(report, picture)
            print(f"picture: {picture}")
        except OSError as error:  # the run is over all the same, and what it has to say follows
            print(f"note: {picture} cannot be written: {error.strerror}", file=sys.stderr)
    if finish.outcome == "stopped":
        version = report.checkpoint_version or 0
        print(f"stopped; the same command goes on from version {version}; or: morph resume {run_dir}")


def _write_timeline(run_dir: Path, step: int) -> None:
    from manager.report.timelines import read_timelines
    from manager.run_dir import as_its_folder
    from morph.runtime.timeline import write_trace

    timelines = read_timelines(run_dir).get(step)
    if timelines is None:
        print(f"step {step} was not run, so that it has no timeline")
        return
    path = run_dir / f"timeline-{step}.json"
    with as_its_folder(path):
        write_trace(timelines, path)
    print(f"timeline: {path}")
