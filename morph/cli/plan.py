"""``morph plan``: the best shape for a number of GPUs, as a table or as JSON."""

from __future__ import annotations

import json
import math
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from morph.cli.checks import check_output
from morph.cli.errors import places

if TYPE_CHECKING:
    from rich.table import Table

    from morph.contract.plan import Plan
    from morph.contract.profile import Profile
    from simulator import PlanChoice, Simulation


class ScheduleName(StrEnum):
    """Schedules that the executor can run."""

    VARUNA = "varuna"
    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"


def plan_command(
    profile: Annotated[
        Path, typer.Argument(help="Profile that `morph calibrate` wrote.", metavar="PROFILE", show_default=False)
    ],
    gpus: Annotated[int, typer.Option("--gpus", "-g", help="How many GPUs there are.", show_default=False)],
    memory_gib: Annotated[
        float | None, typer.Option("--memory-gib", help="Memory of one GPU in GiB. Default: no limit.")
    ] = None,
    m: Annotated[
        int | None,
        typer.Option("--m", help="Micro-batch size. Default: the job's, else the smallest efficient one."),
    ] = None,
    no_recompute: Annotated[
        bool, typer.Option("--no-recompute", help="Keep activations instead of running forwards again: more memory.")
    ] = False,
    schedule: Annotated[ScheduleName, typer.Option("--schedule", help="Order of the tasks.")] = ScheduleName.VARUNA,
    compute_slots: Annotated[
        int | None,
        typer.Option("--compute-slots", help="Tasks that can run at once when workers share one machine's cores."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write the best plan here.")] = None,
) -> None:
    """Find the pipeline depth P and replica count D that train fastest on so many GPUs.

    \b
    Example:
      morph plan profile.json --gpus 6
      morph plan profile.json --gpus 128 --memory-gib 16 --json -o plan.json
    """
    from morph.contract.errors import PlanError
    from morph.contract.plan import Schedule
    from morph.contract.profile import load_profile
    from simulator import plan

    if output is not None:
        check_output(output, PlanError)
    measured = load_profile(profile)
    wanted: Schedule = schedule.value
    with places(options(profile, m)):
        choice = plan(
            measured,
            num_gpus=gpus,
            memory_bytes=_memory_bytes(memory_gib),
            schedule=wanted,
            micro_batch_size=m,
            compute_slots=compute_slots,
            recompute=not no_recompute,
        )
    if output is not None:
        write_text(output, choice.best.model_dump_json(indent=1) + "\n")
    if as_json:
        print(json.dumps(_as_json(choice)))
        return
    from rich.console import Console

    console = Console()
    for line in shape_lines(measured, choice.best_simulation):
        console.print(line)
    console.print(stage_table(measured, choice.best_simulation))
    if choice.runners_up:
        console.print(_ranking(choice))
    if output is not None:
        console.print(f"Wrote {output}.")


def options(profile: Path, m: int | None) -> dict[str, tuple[str, str]]:
    """Where the values that the planner and the simulator are given stand, for errors."""
    names = {
        "num_gpus": "--gpus",
        "memory_bytes": "--memory-gib, in bytes",
        "pipeline_depth": "-P",
        "num_replicas": "-D",
        "compute_slots": "--compute-slots",
        "micro_batch_size": "job.micro_batch_size" if m is None else "--m",
    }
    return {field: (str(profile), name) for field, name in names.items()}


def _memory_bytes(memory_gib: float | None) -> int | None:
    from morph.contract.errors import PlanError

    if memory_gib is None:
        return None
    if not (math.isfinite(memory_gib) and memory_gib > 0):
        raise PlanError("is not a size", field="--memory-gib", value=memory_gib, allowed="a number above 0")
    return int(memory_gib * 2**30)


def shape_lines(profile: Profile, simulation: Simulation) -> list[str]:
    """What a person wants to know of one shape, in a few lines."""
    plan, expected = simulation.plan, simulation.expected
    counts = plan.micro_batches_per_replica
    shares = f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[-1]} or {counts[0]}"
    parts = sorted(expected.parts_s.items(), key=lambda item: -item[1])
    spent = ", ".join(
        f"{part.replace('_', '-')} {seconds / expected.mini_batch_s:.0%}" for part, seconds in parts if seconds
    )
    return [
        f"[bold]{profile.job.name}: {plan.pipeline_depth} x {plan.num_replicas}[/bold] (P x D), "
        f"{plan.num_workers} workers, {plan.schedule} schedule",
        f"batch {profile.job.batch_size} = {plan.num_micro_batches} micro-batches of {plan.micro_batch_size}, "
        f"{shares} per replica",
        f"expected: [bold]{expected.examples_per_s:.4g} examples/s[/bold], {time_text(expected.mini_batch_s)} per "
        f"mini-batch (lower bound for these stages: {time_text(expected.lower_bound_s)})",
        f"where a worker's time goes: {spent}",
        simulation.explanation,
    ]


def stage_table(profile: Profile, simulation: Simulation) -> Table:
    """Stages with their sections, parameters, times, window and memory."""
    from rich.table import Table

    table = Table(title="Stages", title_justify="left")
    for name in ("stage", "sections", "parameters", "F", "R", "B", "window", "memory"):
        table.add_column(name, justify="right")
    times, held = simulation.costs.times, sum(section.parameter_bytes for section in profile.sections)
    unit_bytes = sum(unit.parameter_bytes for unit in profile.units) or held
    per_byte = profile.job.num_parameters / unit_bytes if unit_bytes else 0.0
    for number, stage in enumerate(simulation.plan.stages):
        size = sum(profile.sections[section].parameter_bytes for section in stage.sections) * per_byte
        last = stage.end_section - 1
        table.add_row(
            str(number),
            str(last) if stage.first_section == last else f"{stage.first_section}-{last}",
            count_text(size),
            time_text(int(times.forward_ns[number]) / 1e9),
            time_text(int(times.recompute_ns[number]) / 1e9) if stage.recompute else "-",
            time_text(int(times.backward_ns[number]) / 1e9),
            str(stage.window),
            bytes_text(int(simulation.costs.memory_bytes[number])),
        )
    return table


def _ranking(choice: PlanChoice) -> Table:
    from rich.table import Table

    table = Table(title=f"Best of {choice.num_shapes} shapes for {choice.num_gpus} GPUs", title_justify="left")
    for name in ("P x D", "workers", "examples/s", "of best", "mini-batch", "lower bound", "memory"):
        table.add_column(name, justify="right")
    best = choice.best.expected.examples_per_s
    for plan in (choice.best, *choice.runners_up):
        expected = plan.expected
        table.add_row(
            f"{plan.pipeline_depth} x {plan.num_replicas}",
            str(plan.num_workers),
            f"{expected.examples_per_s:.4g}",
            f"{expected.examples_per_s / best:.1%}",
            time_text(expected.mini_batch_s),
            time_text(expected.lower_bound_s),
            bytes_text(expected.peak_memory_bytes),
        )
    return table


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
        "best": choice.best.model_dump(mode="json"),
        "explanation": choice.best_simulation.explanation,
        "ladder_s": choice.best_simulation.ladder_s,
        "runners_up": [summary(plan) for plan in choice.runners_up],
    }


def time_text(seconds: float) -> str:
    """Three significant digits with a fitting unit."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def count_text(number: float) -> str:
    """Three significant digits with K, M or B."""
    for factor, unit in ((1e9, " B"), (1e6, " M"), (1e3, " K")):
        if number >= factor:
            return f"{number / factor:.3g}{unit}"
    return f"{number:.0f}"


def bytes_text(size_bytes: int) -> str:
    """Three significant digits in GiB, MiB or KiB."""
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB")):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.3g} {unit}"
    return f"{size_bytes / 2**10:.3g} KiB"


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        PlanError: naming the file, if it cannot be written.
    """
    from morph.contract.errors import PlanError

    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise PlanError(f"cannot be written: {error.strerror}", source=str(path)) from error
