"""``morph simulate``: one shape: mini-batch time, where it goes, and a picture of the timeline."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from morph.cli.checks import check_output
from morph.cli.errors import places
from morph.cli.plan_options import ReduceName, ScheduleName, options, refuse_together, require, slow_of
from morph.cli.plan_tables import shape_lines, stage_table, time_text, wide_console

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
    gpus_per_node: Annotated[
        int | None, typer.Option("--gpus-per-node", help="GPUs of each node. Default: every worker has its own node.")
    ] = None,
    node_type: Annotated[
        str | None, typer.Option("--node-type", help="Which of the node types in the profile. Default: the first.")
    ] = None,
    own_links: Annotated[
        bool, typer.Option("--own-links", help="Let no two messages share the bandwidth of a node's link.")
    ] = False,
    slow: Annotated[
        list[str] | None,
        typer.Option("--slow", metavar="STAGE[/REPLICA]:FACTOR", help="A slow worker, or stage. Repeatable."),
    ] = None,
    all_reduce: Annotated[
        ReduceName, typer.Option("--all-reduce", help="Each stage as soon as it is done, or all at the end.")
    ] = ReduceName.OVERLAPPED,
    jitter_seed: Annotated[
        int | None, typer.Option("--jitter-seed", help="Also draw times at random from the spread that was measured.")
    ] = None,
    draws: Annotated[int | None, typer.Option("--draws", help="Mini-batches drawn. Default: 20.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    png: Annotated[Path | None, typer.Option("--png", help="Draw the timeline into this PNG file.")] = None,
) -> None:
    """Simulate one mini-batch of one shape: how long it takes, and where the time goes.

    \b
    Example:
      morph simulate profile.json -P 3 -D 2
      morph simulate profile.json -P 3 -D 2 --schedule gpipe --png timeline.png
      morph simulate profile.json -P 4 -D 2 --gpus-per-node 4 --slow 2/0:1.3 --jitter-seed 1
    """
    from morph.contract.errors import PlanError
    from morph.contract.plan import Schedule
    from morph.contract.profile import load_profile
    from simulator import simulate
    from simulator.conditions import NUM_DRAWS
    from simulator.node_types import of_node_type

    if png is not None:
        check_output(png, PlanError)
    given = {
        "--compute-slots": compute_slots,
        "--gpus-per-node": gpus_per_node,
        "--slope": window_slope,
        "--schedule": schedule is not ScheduleName.VARUNA,
        "--draws": draws,
        "--jitter-seed": jitter_seed,
    }
    refuse_together(given, "--compute-slots", ["--gpus-per-node"], "it puts all workers on one machine's cores")
    refuse_together(given, "--slope", ["--schedule"], f"the windows of {schedule.value} are fixed")
    require(given, "--draws", "--jitter-seed")
    slowed = slow_of(slow or ())
    wanted: Schedule = schedule.value
    with places(options(profile, m)):
        measured = of_node_type(load_profile(profile), node_type)
        simulation = simulate(
            measured,
            num_stages=pipeline_depth,
            num_replicas=num_replicas,
            micro_batch_size=m,
            schedule=wanted,
            window_slope=window_slope,
            compute_slots=compute_slots,
            recompute=not no_recompute,
            num_gpus_per_node=gpus_per_node,
            share_links=not own_links,
            slow=slowed,
            all_reduce=all_reduce.value,
            jitter_seed=jitter_seed,
            num_draws=NUM_DRAWS if draws is None else draws,
        )
    if png is not None:
        from morph.cli.timeline_picture import draw_timeline

        draw_timeline(simulation, png)
    if as_json:
        answer = {
            "plan": simulation.plan.model_dump(mode="json"),
            "explanation": simulation.explanation,
            "ladder_s": simulation.ladder_s,
            "jitter": None if simulation.jitter is None else asdict(simulation.jitter),
        }
        print(json.dumps(answer))
        return
    console = wide_console()
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
    "bandwidth": "messages that wait for their wire",
    "schedule": "waiting that the schedule adds",
    "shared_cores": "cores shared by the workers",
    "shared_links": "node links shared by messages",
    "slow_workers": "slow workers",
    "all_reduce": "gradient all-reduce, as far as exposed",
    "commit_and_optimizer": "commit barrier and optimizer step",
    "jitter": "times that vary",
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
