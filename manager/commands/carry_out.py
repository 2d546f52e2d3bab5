"""Carries out ``morph run`` and ``morph resume``, and prints the lines with which they end."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import typer

from manager.commands.forever import MOST_SAID, is_kept_up, leave_word
from manager.commands.run_view import run_view
from manager.controller.state.actions import Finish
from manager.dashboard.server import serving
from manager.engine.loop.driver import Observed, Observer
from manager.host.signals import STOPPED_BY_COMMAND
from manager.report.live import LiveRun
from manager.report.summary import summarise
from manager.report.timelines import read_timelines
from manager.report.values import RunReport
from manager.run.prepared import Inputs, prepared, read_inputs
from manager.run.request import IfChanged, RunRequest
from manager.run.train import train
from manager.run_dir import COMMAND, as_its_folder, resuming
from morph.cli.reading.errors import EXIT_GOES_ON, EXIT_INTERRUPTED, places
from morph.cli.reading.progress import doing, doing_if_long
from morph.contract.cluster import LocalVms
from morph.contract.errors import TrainingStopped
from morph.runtime.step.timeline import write_trace


@dataclass(frozen=True)
class Shown:
    """How a run is shown: the fields are options of ``morph run``."""

    plain: bool
    verbose: bool = False
    as_json: bool = False
    page: bool = False

    @contextmanager
    def view(self, live: LiveRun, run_dir: Path) -> Iterator[Observer]:
        """Show the run while the block runs; yields the driver's observer."""
        doing("taking over the run's workers" if live.takes_over else "starting workers")
        leave_word(began=True)
        page = serving(live, run_dir) if self.page else nullcontext()
        with page, run_view(live, plain=self.plain, as_json=self.as_json, verbose=self.verbose) as observer:
            yield _noting_steps(observer)


def _noting_steps(observer: Observer) -> Observer:
    """Return an observer that also reports, once, that a step was decided."""
    first: int | None = None
    moved = False

    def observe(observed: Observed) -> None:
        nonlocal first, moved
        version = observed.decision.state.version
        first = version if first is None else first
        if version > first and not moved:
            moved = True
            leave_word(moved=True)
        observer(observed)

    return observe


def carry_out(
    request: RunRequest, run_dir: Path | None, shown: Shown, if_changed: IfChanged, *, take_over: bool
) -> None:
    """Run the job, in ``run_dir`` if given, and raise ``typer.Exit`` with the command's exit code."""
    with doing_if_long("reading the job's files"):
        inputs = read_inputs(request, run_dir)
        check_device(inputs)
    directory = inputs.run_dir
    leave_word(run_dir=directory.resolve())
    try:
        with places(inputs.places), prepared(inputs, if_changed, doing=doing, take_over=take_over) as run:
            finish, report = train(run, partial(shown.view, run_dir=directory), forever=is_kept_up())
    except KeyboardInterrupt:
        if (directory / COMMAND).exists():
            print(
                f"the same command continues from the newest checkpoint, and so does {resuming(directory)}",
                file=sys.stderr,
            )
        raise
    leave_word(outcome=finish.outcome, sentence=finish.sentence[:MOST_SAID], at_limit=finish.at_limit)
    with redirect_stdout(sys.stderr if shown.as_json else sys.stdout):
        _conclude(finish, report, directory)
        if request.timeline_step is not None:
            _write_timeline(directory, request.timeline_step)
    if finish.outcome == "failed":
        print(finish.traceback, end="", file=sys.stderr)
        raise TrainingStopped(finish.sentence)
    raise typer.Exit(_exit_code(finish))


def check_device(inputs: Inputs) -> None:
    """Refuse a device of local VMs that this machine lacks; ConfigError names the cluster file."""
    if isinstance(inputs.cluster.vms, LocalVms) and inputs.cluster.vms.device == "cuda":
        from morph.runtime.device.devices import usable_device  # loads torch

        usable_device("cuda", source=str(inputs.request.cluster))


def _exit_code(finish: Finish) -> int:
    if finish.outcome != "stopped":
        return 0
    return EXIT_GOES_ON if finish.sentence.startswith(STOPPED_BY_COMMAND) else EXIT_INTERRUPTED


def _conclude(finish: Finish, report: RunReport, run_dir: Path) -> None:
    print(summarise(report))
    if report.steps:
        drawing = shlex.join(["morph", "status", str(run_dir), "--png", str(run_dir / "run.png")])
        print(f"to draw this run: {drawing}")
    if finish.outcome == "stopped":
        version = report.checkpoint_version or 0
        print(f"stopped; the same command continues from step {version}, and so does {resuming(run_dir)}")


def _write_timeline(run_dir: Path, step: int) -> None:
    timelines = read_timelines(run_dir).get(step)
    if timelines is None:
        print(f"step {step} was not run, so it has no timeline")
        return
    path = run_dir / f"timeline-{step}.json"
    with as_its_folder(path):
        write_trace(timelines, path)
    print(f"timeline: {path}")
