"""``morph simulate``: the mini-batch time of one shape or plan, its breakdown, and a picture of the timeline."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from enum import StrEnum
from typing import Annotated

import typer

from morph.cli.reading.errors import places
from morph.cli.reading.options import (
    GpusPerNodeOption,
    JitterOption,
    JsonOption,
    MicroBatchOption,
    NodeTypeOption,
    PlanFileOption,
    PngOption,
    ProfileArgument,
    ReplicasOption,
    ScheduleName,
    ScheduleOption,
    SettingsOption,
    SlowOption,
    StagesOption,
)
from morph.cli.reading.progress import COMPILED_ONCE, doing_if_long
from morph.contract.errors import PlanError
from morph.contract.files import check_output
from morph.yaml_files import read_settings
from simulator.commands.plan_options import (
    from_options,
    given_options,
    in_plan_file,
    profile_to_plan,
    refuse_together,
    request_of,
    require,
)
from simulator.commands.settings import SimulateSettings, with_settings

_OF_A_SHAPE = (
    *("-P", "-D", "--m", "--no-recompute", "--schedule", "--gpus-per-node", "--node-type", "--set window_slope"),
)


class EngineName(StrEnum):
    """The engines that simulate a mini-batch."""

    COMPILED = "compiled"
    REFERENCE = "reference"


@with_settings(SimulateSettings)
def simulate_command(
    context: typer.Context,
    profile: ProfileArgument,
    pipeline_depth: StagesOption = None,
    num_replicas: ReplicasOption = 1,
    plan: PlanFileOption = None,
    micro_batch_size: MicroBatchOption = None,
    no_recompute: Annotated[
        bool,
        typer.Option("--no-recompute", help="Keep activations in memory. They are recomputed otherwise."),
    ] = False,
    schedule: ScheduleOption = ScheduleName.VARUNA,
    num_gpus_per_node: GpusPerNodeOption = None,
    node_type: NodeTypeOption = None,
    slow: SlowOption = None,
    jitter_seed: JitterOption = None,
    settings: SettingsOption = None,
    engine: Annotated[
        EngineName,
        typer.Option("--engine", help="The slow reference gives the same answers."),
    ] = EngineName.COMPILED,
    as_json: JsonOption = False,
    png: PngOption = None,
) -> None:
    """Simulate one mini-batch of one shape, or of a plan: how long it takes, and where the time goes.

    \b
    Example:
      morph simulate profile.json -P 3 -D 2
      morph simulate profile.json -P 3 -D 2 --schedule gpipe --png timeline.png
      morph simulate profile.json -P 4 -D 2 --slow 2/0:1.3 --jitter-seed 1
      morph simulate profile.json -P 3 -D 2 --set all_reduce=late
      morph simulate profile.json --plan plan.json --slow 2/0:1.3
    """
    from morph.contract.plan import load_plan
    from simulator import simulate, simulate_plan
    from simulator.inputs.node_types import check_made_for
    from simulator.search.planner import advice

    check_output(png, read=[profile])
    chosen = read_settings(settings or (), SimulateSettings)
    given = given_options(context, chosen)
    if pipeline_depth is None and plan is None:
        raise PlanError("is missing", field="-P", allowed="stages of a pipeline, or --plan FILE")
    refuse_together(given, "--plan", _OF_A_SHAPE, "the plan has its own")
    if schedule is not ScheduleName.GPIPE:
        given.pop("--schedule", None)
    refuse_together(given, "--set compute_slots", ["--gpus-per-node"], "it puts all workers on one machine's cores")
    refuse_together(given, "--set window_slope", ["--schedule"], f"the windows of {schedule} are fixed")
    require(given, "--set num_draws", "--jitter-seed")
    request = replace(request_of(context, chosen), recompute=not no_recompute)
    with from_options(context, profile, chosen), doing_if_long(f"simulating ({COMPILED_ONCE})"):
        measured = profile_to_plan(profile, node_type)
        if plan is not None:
            known = load_plan(plan)
            with places(in_plan_file(plan)):
                check_made_for(measured, known)
                simulation = simulate_plan(measured, known, request, engine=engine.value)
        else:
            simulation = simulate(
                measured,
                request,
                num_stages=pipeline_depth,
                window_slope=chosen.window_slope,
                engine=engine.value,
            )
            simulation = simulation.with_note(advice(measured, request, simulation))
        pause_s = None if chosen.redundant_computation == "off" else simulation.mean_pause_s
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
        if pause_s is not None:
            answer["mean_pause_s"] = pause_s
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
    if pause_s is not None:
        console.print(tables.redundant_line(simulation))
    if png is not None:
        print(f"drawn: {png}")
