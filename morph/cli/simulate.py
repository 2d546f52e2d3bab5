"""``morph simulate``: one shape: mini-batch time, where it goes, and a picture of the timeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from morph.cli.checks import check_output
from morph.cli.errors import places
from morph.cli.plan import ScheduleName, options, shape_lines, stage_table, time_text

if TYPE_CHECKING:
    from rich.table import Table

    from simulator import Simulation


def simulate_command(
    profile: Annotated[
        Path, typer.Argument(help="Profile that `morph calibrate` wrote.", metavar="PROFILE", show_default=False)
    ],
    pipeline_depth: Annotated[int, typer.Option("-P", help="Stages of a pipeline.", show_default=False)],
    num_replicas: Annotated[int, typer.Option("-D", help="Replicas of the pipeline.")] = 1,
    m: Annotated[
        int | None,
        typer.Option("--m", help="Micro-batch size. Default: the job's, else the smallest efficient one."),
    ] = None,
    no_recompute: Annotated[
        bool, typer.Option("--no-recompute", help="Keep activations instead of running forwards again: more memory.")
    ] = False,
    schedule: Annotated[ScheduleName, typer.Option("--schedule", help="Order of the tasks.")] = ScheduleName.VARUNA,
    window_slope: Annotated[
        int | None,
        typer.Option(
            "--slope", min=1, help="Micro-batches in flight: slope * (P - 1 - s) + 1. Default: the smallest that pays."
        ),
    ] = None,
    compute_slots: Annotated[
        int | None,
        typer.Option("--compute-slots", help="Tasks that can run at once when workers share one machine's cores."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    png: Annotated[Path | None, typer.Option("--png", help="Draw the timeline into this PNG file.")] = None,
) -> None:
    """Simulate one mini-batch of one shape: how long it takes, and where the time goes.

    \b
    Example:
      morph simulate profile.json -P 3 -D 2
      morph simulate profile.json -P 3 -D 2 --schedule gpipe --png timeline.png
    """
    from morph.contract.errors import PlanError
    from morph.contract.plan import Schedule
    from morph.contract.profile import load_profile
    from simulator import simulate

    if png is not None:
        check_output(png, PlanError)
    measured = load_profile(profile)
    wanted: Schedule = schedule.value
    with places(options(profile, m)):
        simulation = simulate(
            measured,
            num_stages=pipeline_depth,
            num_replicas=num_replicas,
            micro_batch_size=m,
            schedule=wanted,
            window_slope=window_slope,
            compute_slots=compute_slots,
            recompute=not no_recompute,
        )
    if png is not None:
        from morph.cli.timeline_picture import draw_timeline

        draw_timeline(simulation, png)
    if as_json:
        answer = {
            "plan": simulation.plan.model_dump(mode="json"),
            "explanation": simulation.explanation,
            "ladder_s": simulation.ladder_s,
        }
        print(json.dumps(answer))
        return
    from rich.console import Console

    console = Console()
    for line in shape_lines(measured, simulation):
        console.print(line)
    console.print(stage_table(measured, simulation))
    console.print(_ladder_table(simulation))
    if png is not None:
        console.print(f"Drew {png}.")


_STEPS = {
    "work": "all work, evenly spread over the workers",
    "imbalance": "the slowest stage, the replica with most micro-batches",
    "fill_and_drain": "filling and draining the pipeline",
    "latency": "network latency and in-flight windows",
    "shared_cores": "cores shared by the workers",
    "schedule": "waiting that the schedule adds",
    "all_reduce": "gradient all-reduce, as far as exposed",
    "commit_and_optimizer": "commit barrier and optimizer step",
}


def _ladder_table(simulation: Simulation) -> Table:
    from rich.table import Table

    table = Table(title="From pure work to the expected mini-batch", title_justify="left")
    table.add_column("what adds to it")
    for name in ("adds", "reaches"):
        table.add_column(name, justify="right")
    reached = 0.0
    for step, seconds in simulation.ladder_s.items():
        reached += seconds
        if seconds:
            table.add_row(_STEPS[step], time_text(seconds), time_text(reached))
    return table
