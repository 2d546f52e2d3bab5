"""A simulated or planned shape as lines, tables and numbers with units."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from morph.contract.plan import Plan
    from morph.contract.profile import Profile
    from simulator import PlanChoice, Simulation
    from simulator.jitter import Spread

_MOST_PARTS = 6
_WIDTH = 110


def wide_console() -> Console:
    """A console whose tables fit: as wide as the terminal, and wide enough where there is none."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


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
        *([jitter_line(simulation.jitter)] if simulation.jitter else []),
        *([node_line(plan)] if plan.placement else []),
        f"where a worker's time goes: {spent}",
        simulation.explanation,
    ]


def jitter_line(spread: Spread) -> str:
    """Mean and percentiles of the drawn mini-batches."""
    return (
        f"with jitter, {spread.num_draws} mini-batches drawn: mean {time_text(spread.mean_s)}, "
        f"5 % below {time_text(spread.p5_s)}, 5 % above {time_text(spread.p95_s)}"
    )


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


def leftover_line(choice: PlanChoice) -> str:
    """Which GPUs have nothing to do."""
    plan = choice.best
    if not choice.num_idle:
        return f"all {choice.num_gpus} GPUs at work"
    idle = f"{choice.num_idle} {'GPU' if choice.num_idle == 1 else 'GPUs'} idle"
    if not plan.placement:
        return idle
    busy = Counter(node for row in plan.placement for node in row)
    free = {node: size - busy[node] for node, size in enumerate(plan.node_sizes) if size > busy[node]}
    whole = Counter(plan.node_sizes[node] for node in free if not busy[node])
    parts = [f"{number} whole {'node' if number == 1 else 'nodes'} of {size}" for size, number in sorted(whole.items())]
    parts += [f"{left} on node {node}" for node, left in free.items() if busy[node]]
    shown = parts if len(parts) <= _MOST_PARTS else [*parts[:_MOST_PARTS], "..."]
    return f"{idle}: {', '.join(shown)}"


def node_line(plan: Plan) -> str:
    """How the stages lie on the nodes, where several share one."""
    crossings = [sum(a != b for a, b in pairwise(row)) for row in plan.placement]
    used = len({node for row in plan.placement for node in row})
    fewest, most = min(crossings), max(crossings)
    times = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    return (
        f"on {used} of {len(plan.node_sizes)} nodes; a replica's messages cross between nodes at {times} of its "
        f"{plan.pipeline_depth - 1} cuts"
    )


def ranking(choice: PlanChoice) -> Table:
    """The best shape and the runners-up."""
    from rich.table import Table

    value = {"examples_per_s": None, "usd_per_example": "$/1000", "progress": "progress/s"}
    column = value[choice.objective]
    title = f"Best of {choice.num_shapes} shapes for {choice.num_gpus} GPUs"
    table = Table(title=title, title_justify="left")
    names = ("P x D", "workers", "examples/s", "of best", "mini-batch", "lower bound", "memory")
    for name in (*names, *([column] if column else [])):
        table.add_column(name, justify="right")
    best = choice.best.expected.examples_per_s
    for plan, worth in zip((choice.best, *choice.runners_up), choice.values, strict=True):
        expected = plan.expected
        table.add_row(
            f"{plan.pipeline_depth} x {plan.num_replicas}",
            str(plan.num_workers),
            f"{expected.examples_per_s:.4g}",
            f"{expected.examples_per_s / best:.1%}",
            time_text(expected.mini_batch_s),
            time_text(expected.lower_bound_s),
            bytes_text(expected.peak_memory_bytes),
            *([f"{worth * (1000 if choice.objective == 'usd_per_example' else 1):.4g}"] if column else []),
        )
    return table


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
    """Three significant digits in GiB, MiB or KiB, of which it is below 1000."""
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB")):
        if size_bytes >= 999.5 / 1024 * factor:
            return f"{size_bytes / factor:.3g} {unit}"
    return f"{size_bytes / 2**10:.3g} KiB"
