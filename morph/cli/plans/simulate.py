"""``morph simulate``: one shape: mini-batch time, where it goes, and a picture of the timeline."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from morph.cli.plans.plan_options import from_options, given_options, refuse_together, request_of, require
from morph.cli.reading.options import (
    DrawsOption,
    GpusPerNodeOption,
    JsonOption,
    KneeOption,
    NodeTypeOption,
    OwnLinksOption,
    ProfileArgument,
    ReplicasOption,
    ScheduleName,
    ScheduleOption,
    SlopeOption,
    SlotsOption,
    SlowOption,
    StagesOption,
)
from morph.cli.reading.progress import COMPILED_ONCE, doing_if_long
from morph.contract.errors import PlanError
from morph.contract.files import check_output


class ReduceName(StrEnum):
    """When the all-reduce begins."""

    OVERLAPPED = "overlapped"
    LATE = "late"


class EngineName(StrEnum):
    """What plays the mini-batch."""

    COMPILED = "compiled"
    REFERENCE = "reference"


class RedundantName(StrEnum):
    """What workers compute for the next stage."""

    OFF = "off"
    LFLB = "lflb"
    EFLB = "eflb"
    EFEB = "efeb"


def simulate_command(
    context: typer.Context,
    profile: ProfileArgument,
    pipeline_depth: StagesOption,
    num_replicas: ReplicasOption = 1,
    micro_batch_size: KneeOption = None,
    no_recompute: Annotated[
        bool,
        typer.Option("--no-recompute", help="Keep activations instead of running forwards again; takes more memory."),
    ] = False,
    schedule: ScheduleOption = ScheduleName.VARUNA,
    window_slope: SlopeOption = None,
    compute_slots: SlotsOption = None,
    num_gpus_per_node: GpusPerNodeOption = None,
    node_type: NodeTypeOption = None,
    own_links: OwnLinksOption = False,
    slow: SlowOption = None,
    all_reduce: Annotated[
        ReduceName, typer.Option("--all-reduce", help="Each unit as soon as it has its gradient, or all at the end.")
    ] = ReduceName.OVERLAPPED,
    redundant_computation: Annotated[
        RedundantName,
        typer.Option(
            "--redundant", help="Bamboo's redundant computation: after a loss, eager forwards, or all of it eager."
        ),
    ] = RedundantName.OFF,
    jitter_seed: Annotated[
        int | None, typer.Option("--jitter-seed", help="Also draw times at random from the spread that was measured.")
    ] = None,
    num_draws: DrawsOption = None,
    engine: Annotated[
        EngineName,
        typer.Option("--engine", help="Compiled loops, or the slow and readable model with the same answers."),
    ] = EngineName.COMPILED,
    as_json: JsonOption = False,
    png: Annotated[Path | None, typer.Option("--png", help="Draw the timeline into this PNG file.")] = None,
) -> None:
    """Simulate one mini-batch of one shape: how long it takes, and where the time goes.

    \b
    Example:
      morph simulate profile.json -P 3 -D 2
      morph simulate profile.json -P 3 -D 2 --schedule gpipe --png timeline.png
      morph simulate profile.json -P 4 -D 2 --gpus-per-node 4 --slow 2/0:1.3 --jitter-seed 1
    """
    from morph.contract.profile import load_profile
    from simulator import simulate
    from simulator.inputs.node_types import of_node_type
    from simulator.search.planner import advice

    if png is not None:
        check_output(png, PlanError)
    given = given_options(context)
    if schedule is ScheduleName.VARUNA:
        given.pop("--schedule", None)
    refuse_together(given, "--compute-slots", ["--gpus-per-node"], "it puts all workers on one machine's cores")
    refuse_together(given, "--slope", ["--schedule"], f"the windows of {schedule} are fixed")
    require(given, "--draws", "--jitter-seed")
    request = replace(request_of(context), recompute=not no_recompute)
    with from_options(context, profile), doing_if_long(f"simulating ({COMPILED_ONCE})"):
        measured = of_node_type(load_profile(profile), node_type)
        simulation = simulate(
            measured, request, num_stages=pipeline_depth, window_slope=window_slope, engine=engine.value
        )
        simulation = simulation.with_note(advice(measured, request, simulation))
    if png is not None:
        from simulator.render.timeline import draw_timeline

        draw_timeline(simulation, png)
    if as_json:
        answer: dict[str, object] = {
            "plan": simulation.plan.model_dump(mode="json"),
            "explanation": simulation.explanation,
            "breakdown_s": simulation.breakdown_s,
            "jitter": None if simulation.jitter is None else asdict(simulation.jitter),
        }
        if redundant_computation is not RedundantName.OFF:
            answer["mean_pause_s"] = simulation.mean_pause_s
        print(json.dumps(answer))
        return
    from morph.tables import wide_console
    from simulator.render import tables

    console = wide_console(tables.WIDTH)
    for line in tables.shape_lines(measured, simulation):
        console.print(line)
    console.print(tables.stage_table(measured, simulation))
    for line in tables.memory_lines(simulation):
        console.print(line)
    console.print(tables.ladder_table(simulation))
    if redundant_computation is not RedundantName.OFF:
        console.print(tables.redundant_line(simulation))
    if png is not None:
        console.print(f"Drew {png}.")
