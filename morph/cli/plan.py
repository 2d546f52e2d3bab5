"""``morph plan``: the best shape for a number of GPUs, or for every number of a range."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from morph.cli.checks import check_output
from morph.cli.errors import places
from morph.cli.plan_options import (
    AimName,
    ScheduleName,
    gpu_range,
    memory_bytes_of,
    node_list,
    options,
    price_of,
    refuse_together,
    require,
)
from morph.cli.plan_tables import (
    bytes_text,
    count_text,
    leftover_line,
    ranking,
    shape_lines,
    stage_table,
    time_text,
    wide_console,
)
from morph.cli.whole_file import write_text

if TYPE_CHECKING:
    from morph.contract.plan import Plan
    from morph.contract.profile import Profile
    from simulator import PlanChoice

__all__ = ["ScheduleName", "bytes_text", "count_text", "options", "plan_command", "time_text"]


def plan_command(
    profile: Annotated[
        Path, typer.Argument(help="Profile that `morph calibrate` wrote.", metavar="PROFILE", show_default=False)
    ],
    gpus: Annotated[
        str | None,
        typer.Option("--gpus", "-g", metavar="G or A..B", help="How many GPUs there are, or a range of numbers."),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option("--nodes", help="Instead: NODESxGPUS, as 16x1,4x4 for 16 nodes with 1 GPU and 4 with 4."),
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option("--gpus-per-node", help="GPUs of each node. Default: every GPU has a node of its own.")
    ] = None,
    node_type: Annotated[
        str | None, typer.Option("--node-type", help="Which of the node types in the profile. Default: the first.")
    ] = None,
    memory_gib: Annotated[
        float | None, typer.Option("--memory-gib", help="Memory of one GPU in GiB. Default: as in the profile.")
    ] = None,
    m: Annotated[
        int | None,
        typer.Option("--m", help="Micro-batch size. Default: the job's, else the fastest of those measured."),
    ] = None,
    recompute: Annotated[
        bool | None,
        typer.Option(
            "--recompute/--no-recompute",
            help="Run forwards again, or keep activations: more memory. Default: whichever is faster.",
            show_default=False,
        ),
    ] = None,
    schedule: Annotated[
        ScheduleName | None,
        typer.Option("--schedule", help="Order of the tasks. Default: whichever is faster.", show_default=False),
    ] = None,
    compute_slots: Annotated[
        int | None,
        typer.Option("--compute-slots", help="Tasks that can run at once when workers share one machine's cores."),
    ] = None,
    own_links: Annotated[
        bool, typer.Option("--own-links", help="Let no two messages share the bandwidth of a node's link.")
    ] = False,
    objective: Annotated[
        AimName, typer.Option("--objective", help="Examples per second, dollars per example, or expected progress.")
    ] = AimName.EXAMPLES,
    price: Annotated[
        str | None,
        typer.Option("--price", help="Dollars per GPU-hour, as 0.9, or by GPUs per node, as 1:0.9,4:0.75."),
    ] = None,
    revocations_per_hour: Annotated[
        float | None, typer.Option("--revocations-per-hour", help="How often one node is revoked, for progress.")
    ] = None,
    pause_s: Annotated[
        float | None, typer.Option("--pause-s", help="What a morph stops training for, for progress. Default: 1.")
    ] = None,
    replacement_s: Annotated[
        float | None,
        typer.Option("--replacement-s", help="Until a revoked node is replaced, for progress. Default: 120."),
    ] = None,
    revoked_together: Annotated[
        int | None,
        typer.Option("--revoked-together", help="Nodes that one revocation takes at once, for progress. Default: 1."),
    ] = None,
    jitter_seed: Annotated[
        int | None, typer.Option("--jitter-seed", help="Judge the shapes in the running with times drawn at random.")
    ] = None,
    draws: Annotated[
        int | None, typer.Option("--draws", help="Mini-batches drawn for each of these. Default: 20.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write the best plan here.")] = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="Of a range: write the table here.")] = None,
    png: Annotated[Path | None, typer.Option("--png", help="Of a range: draw the curve here.")] = None,
) -> None:
    """Find the pipeline depth P and replica count D that train fastest on so many GPUs.

    \b
    Example:
      morph plan profile.json --gpus 6
      morph plan profile.json --gpus 128 --memory-gib 16 --json -o plan.json
      morph plan profile.json --nodes 16x1,4x4
      morph plan profile.json --gpus 16..128 --price 0.9 --csv plans.csv --png plans.png
    """
    from morph.contract.errors import PlanError
    from morph.contract.profile import load_profile
    from simulator.node_types import of_node_type

    for path in (output, csv, png):
        if path is not None:
            check_output(path, PlanError)
    numbers = _numbers(
        {
            "--gpus": gpus,
            "--nodes": nodes,
            "--gpus-per-node": gpus_per_node,
            "--compute-slots": compute_slots,
            "--objective dollars": objective is AimName.DOLLARS,
            "--objective progress": objective is AimName.PROGRESS,
            "--revocations-per-hour": revocations_per_hour,
            "--pause-s": pause_s,
            "--replacement-s": replacement_s,
            "--revoked-together": revoked_together,
            "--jitter-seed": jitter_seed,
            "--draws": draws,
            "-o": output,
            "--csv": csv,
            "--png": png,
        }
    )
    with places(options(profile, m)):
        measured = of_node_type(load_profile(profile), node_type)
    shared: dict[str, Any] = {
        "memory_bytes": memory_bytes_of(memory_gib),
        "schedule": None if schedule is None else schedule.value,
        "micro_batch_size": m,
        "compute_slots": compute_slots,
        "recompute": recompute,
        "num_gpus_per_node": gpus_per_node if nodes is None else node_list(nodes),
        "share_links": not own_links,
    }
    priced = None if price is None else price_of(price)
    with places(options(profile, m)):
        if numbers is not None and len(numbers) > 1:
            from morph.cli.plan_curve import show_curve

            show_curve(measured, numbers, shared, priced, csv=csv, png=png, as_json=as_json)
            return
        figures: dict[str, Any] = {
            "revocations_per_hour": revocations_per_hour,
            "pause_s": pause_s,
            "replacement_s": replacement_s,
            "revoked_together": revoked_together,
        }
        figures |= {"usd_per_gpu_hour": priced, "jitter_seed": jitter_seed, "num_draws": draws}
        choice = _choice(measured, numbers, shared | {"objective": objective.objective}, figures)
    if output is not None:
        write_text(output, choice.best.model_dump_json(indent=1) + "\n")
    if as_json:
        print(json.dumps(_as_json(choice)))
        return
    _show(measured, choice, output)


def _choice(profile: Profile, numbers: range | None, settings: dict[str, Any], figures: dict[str, Any]) -> PlanChoice:
    from simulator import plan

    known = {name: value for name, value in figures.items() if value is not None}
    return plan(profile, num_gpus=None if numbers is None else numbers[0], **settings, **known)


def _numbers(given: dict[str, Any]) -> range | None:
    """The numbers of GPUs to plan for; None: as many as ``--nodes`` have.

    Raises:
        PlanError: options that are missing, or that contradict each other.
    """
    from morph.contract.errors import PlanError

    if given["--gpus"] is None and given["--nodes"] is None:
        raise PlanError("is missing", field="--gpus", allowed="a number, a range as 16..128, or --nodes instead")
    refuse_together(given, "--nodes", ["--gpus", "--gpus-per-node"], "it lists all nodes and their GPUs")
    refuse_together(
        given, "--compute-slots", ["--nodes", "--gpus-per-node"], "it puts all workers on one machine's cores"
    )
    numbers = None if given["--gpus"] is None else gpu_range(given["--gpus"])
    given = given | {"--gpus A..B": given["--gpus"] if numbers is not None and len(numbers) > 1 else None}
    single = ["-o", "--jitter-seed", "--objective dollars", "--objective progress"]
    refuse_together(given, "--gpus A..B", single, "it answers for one number of GPUs")
    for option, other in [
        ("--csv", "--gpus A..B"),
        ("--png", "--gpus A..B"),
        ("--draws", "--jitter-seed"),
        ("--revocations-per-hour", "--objective progress"),
        ("--pause-s", "--objective progress"),
        ("--replacement-s", "--objective progress"),
        ("--revoked-together", "--objective progress"),
    ]:
        require(given, option, other)
    return numbers


def _show(profile: Profile, choice: PlanChoice, output: Path | None) -> None:
    console = wide_console()
    for line in shape_lines(profile, choice.best_simulation):
        console.print(line)
    console.print(leftover_line(choice))
    console.print(stage_table(profile, choice.best_simulation))
    if choice.runners_up:
        console.print(ranking(choice))
    if output is not None:
        console.print(f"Wrote {output}.")


def summary(plan: Plan) -> dict[str, object]:
    """A plan without its task orders, for programs."""
    return {
        "shape": plan.shape,
        "num_workers": plan.num_workers,
        **plan.model_dump(mode="json", exclude={"orders"}),
    }


def _as_json(choice: PlanChoice) -> dict[str, object]:
    return {
        "num_gpus": choice.num_gpus,
        "num_idle": choice.num_idle,
        "objective": choice.objective,
        "value": choice.values[0],
        "best": choice.best.model_dump(mode="json"),
        "explanation": choice.best_simulation.explanation,
        "ladder_s": choice.best_simulation.ladder_s,
        "runners_up": [
            {**summary(plan), "value": value} for plan, value in zip(choice.runners_up, choice.values[1:], strict=True)
        ],
    }
