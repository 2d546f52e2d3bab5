"""``morph plan``: the best shape for a number of GPUs, or for every number of a range."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from morph.cli.reading.help import offered
from morph.cli.reading.options import (
    AnyScheduleOption,
    JitterOption,
    JsonOption,
    MicroBatchOption,
    NodeTypeOption,
    PngOption,
    ProfileArgument,
    RecomputeOption,
    SettingsOption,
)
from morph.cli.reading.progress import COMPILED_ONCE, doing_if_long
from morph.contract.errors import PlanError
from morph.contract.files import check_output, write_output
from morph.contract.pool import Pool
from morph.yaml_files import read_settings
from simulator.commands.plan_options import (
    from_options,
    given_options,
    gpu_range,
    profile_to_plan,
    refuse_together,
    request_of,
    require,
)
from simulator.commands.settings import PlanSettings, with_settings

if TYPE_CHECKING:
    from morph.contract.profile import Profile
    from simulator import PlanChoice, PlanRequest
    from simulator.inputs.request import ObjectiveName

_NO_ZONE_LINKS = (
    "links between zones were not measured: those between nodes are used instead (--set zone_gbit_per_s, "
    "or `morph calibrate --between-zones`)"
)
_FOR_PROGRESS = ("revocations_per_hour", "pause_s", "replacement_s", "revoked_together")
_OBJECTIVES: dict[str, ObjectiveName] = {
    "examples": "examples_per_s",
    "dollars": "usd_per_example",
    "progress": "progress",
}


class AimName(StrEnum):
    """Objectives of the planner."""

    EXAMPLES = "examples"
    DOLLARS = "dollars"
    PROGRESS = "progress"


@with_settings(PlanSettings)
def plan_command(
    context: typer.Context,
    profile: ProfileArgument,
    gpus: Annotated[
        str | None, typer.Option("--gpus", "-g", metavar="G or A..B", help="Number of GPUs, or a range.")
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            "--nodes",
            help="In place of --gpus: NODESxGPUS, such as 16x1,4x4. This means 16 nodes with 1 GPU and 4 with 4.",
        ),
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option(
            "--pool",
            metavar="TYPE=N,...",
            help="In place of --gpus: GPUs by type, or type@zone.",
        ),
    ] = None,
    num_gpus_per_node: Annotated[
        str | None,
        typer.Option(
            "--gpus-per-node",
            metavar="N",
            help="GPUs of each node, or by type: v100=4,t4=1. Default: 1.",
        ),
    ] = None,
    node_type: NodeTypeOption = None,
    memory_gib: Annotated[
        float | None, typer.Option("--memory-gib", help="Memory of one GPU in GiB. Default: the profile's.")
    ] = None,
    micro_batch_size: MicroBatchOption = None,
    recompute: RecomputeOption = None,
    schedule: AnyScheduleOption = None,
    aim: Annotated[
        AimName,
        typer.Option(
            "--objective",
            metavar="NAME",
            help="examples, dollars or progress: examples per second, dollars per example, or expected progress.",
        ),
    ] = AimName.EXAMPLES,
    usd_per_gpu_hour: Annotated[
        str | None,
        typer.Option(
            "--price",
            help="Dollars per GPU-hour, such as 0.9. Or by GPUs per node, 1:0.9,4:0.75, or by type, v100=0.9,t4=0.16.",
        ),
    ] = None,
    budget_usd_per_h: Annotated[
        float | None,
        typer.Option("--budget", metavar="USD", help="Dollars an hour for all that is used (with --price)."),
    ] = None,
    tolerance_percent: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            min=0,
            max=50,
            metavar="PERCENT",
            help="Gain that is worth more kinds of pipelines. Default: the error of the times.",
        ),
    ] = None,
    jitter_seed: JitterOption = None,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the best plan to this file, too.")
    ] = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="With a range: write the table to this file.")] = None,
    png: PngOption = None,
) -> None:
    """Find the fastest shape for a number of GPUs: the pipeline depth P and the number of replicas D.

    \b
    Example:
      morph plan profile.json --gpus 6
      morph plan profile.json --gpus 128 --memory-gib 16 --json -o plan.json
      morph plan gpt2-2.5b-t4.json --pool v100=12,t4=12 --price v100=0.9,t4=0.16
      morph plan profile.json --gpus 16..128 --csv plans.csv --png plans.png
    """
    from simulator import plan
    from simulator.search.preference import Errors, preferred

    check_output(output, csv, png, read=[profile])
    chosen = read_settings(settings or (), PlanSettings)
    numbers = _numbers(given_options(context, chosen), gpus, aim)
    on_types = None if pool is None else Pool.parse(pool, "--pool")
    with from_options(context, profile, chosen):
        measured = profile_to_plan(profile, node_type, on_types)
        request = replace(request_of(context, chosen), unequal=True)
    with from_options(context, profile, chosen), doing_if_long(f"simulating shapes ({COMPILED_ONCE})"):
        if numbers is not None and len(numbers) > 1:
            from simulator.render.curve import show_curve

            show_curve(measured, numbers, request, csv=csv, png=png, as_json=as_json)
            return
        request = replace(request, objective=_OBJECTIVES[aim])
        choice = plan(measured, request, num_gpus=None if numbers is None else numbers[0], pool=on_types)
    errors = Errors.of(measured)
    if tolerance_percent is not None:
        errors = replace(errors, time=tolerance_percent / 100)
    choice = preferred(choice, request, errors)
    for sentence in _warnings(measured, request, choice.best.pool if on_types is None else on_types):
        print(f"warning: {sentence}", file=sys.stderr)
    if output is not None:
        write_output(output, choice.best.model_dump_json(indent=1) + "\n")
    if as_json:
        print(json.dumps(_as_json(choice)))
        return
    from morph.tables import wide_console
    from simulator.render import tables

    console = wide_console(tables.WIDTH)
    chosen_for = tables.preference_line(choice, errors, request.memory_bytes)
    proved = tables.gap_line(choice)
    lines = [*tables.shape_lines(measured, choice.best_simulation), tables.leftover_line(choice)]
    for line in [*lines, *tables.price_lines(choice), *filter(None, (chosen_for, proved))]:
        console.print(line)
    console.print(tables.stage_table(measured, choice.best_simulation))
    room = tables.room_line(choice, request.memory_bytes, errors.memory)
    for line in [*tables.memory_lines(choice.best_simulation), *([room] if room else [])]:
        console.print(line)
    followers = offered(context, "followers")
    if followers is not None and on_types is None and len(choice.best.pipeline_kinds) == 1:
        memory_bytes = request.memory_bytes or measured.environment.device_memory_bytes
        host_bytes = request.host_memory_bytes or measured.environment.host_memory_bytes
        console.print(followers(measured, choice.best, request.redundancy, memory_bytes, host_bytes))
    if choice.runners_up:
        console.print(tables.ranking(choice, request.memory_bytes))
    if output is not None:
        print(f"written: {output}")


def _warnings(profile: Profile, request: PlanRequest, pool: Pool) -> list[str]:
    """Return warnings about costs that a plan for a pool assumes but that were not measured."""
    from morph.contract.profile import other_links

    warnings = list(other_links(profile, request.links, request.rings))
    if len(pool.zones) > 1 and request.applied_to(profile).between_zones is None:
        warnings.append(_NO_ZONE_LINKS)
    return warnings


def _numbers(given: dict[str, Any], gpus: str | None, aim: AimName) -> range | None:
    """Return the numbers of GPUs to plan for, or None if ``--nodes`` or ``--pool`` gives the number.

    PlanError if options are missing or contradict each other.
    """
    if not {"--gpus", "--nodes", "--pool"} & given.keys():
        allowed = "a number, a range as 16..128, or --nodes or --pool instead"
        raise PlanError("is missing", field="--gpus", allowed=allowed)
    other_ways = ["--gpus", "--nodes", "--node-type", "--jitter-seed", "--set compute_slots"]
    refuse_together(given, "--pool", [*other_ways, "--objective progress"], "it lists all GPUs by type")
    refuse_together(given, "--nodes", ["--gpus", "--gpus-per-node"], "it lists all nodes and their GPUs")
    refuse_together(
        given, "--set compute_slots", ["--nodes", "--gpus-per-node"], "it puts all workers on one machine's cores"
    )
    numbers = None if gpus is None else gpu_range(gpus)
    given[f"--objective {aim}"] = aim
    refuse_together(given, "--budget", ["--objective progress"], "it is for examples per second or dollar")
    if numbers is not None and len(numbers) > 1:
        given["--gpus A..B"] = gpus
    single = ["-o", "--budget", "--jitter-seed", "--objective dollars", "--objective progress"]
    refuse_together(given, "--gpus A..B", single, "it answers for one number of GPUs")
    for needed, options in {
        "--gpus A..B": ("--csv", "--png"),
        "--jitter-seed": ("--set num_draws",),
        "--price": ("--budget",),
        "--objective progress": tuple(f"--set {name}" for name in _FOR_PROGRESS),
    }.items():
        for option in options:
            require(given, option, needed)
    return numbers


def _as_json(choice: PlanChoice) -> dict[str, object]:
    def summary(place: int) -> dict[str, object]:
        """Return a plan without its task orders, for programs."""
        plan = choice.simulations[place].plan
        facts = plan.model_dump(mode="json", exclude={"orders"})
        return {"shape": plan.shape, "num_workers": plan.num_workers, **facts, "value": choice.values[place]}

    return {
        "num_gpus": choice.num_gpus,
        "num_idle": choice.num_idle,
        "usd_per_h": choice.usd_per_h,
        "zone_bytes": choice.zone_bytes,
        "zone_usd_per_h": choice.zone_usd_per_h,
        "objective": choice.objective,
        "value": choice.values[0],
        "gap": choice.gap,
        "best": choice.best.model_dump(mode="json"),
        "explanation": choice.best_simulation.explanation,
        "breakdown_s": choice.best_simulation.breakdown_s,
        "runners_up": [summary(place) for place in range(1, len(choice.simulations))],
    }
