"""The tables that the demo prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from simulator import plan_table, simulate

if TYPE_CHECKING:
    from manager.report.values import MorphRecord, RunReport
    from morph.contract.plan import Plan
    from morph.contract.profile import Profile

WIDTH = 132


def _print(table: Table) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(table)


def print_plans(profile: Profile, max_gpus: int, memory_bytes: int | None) -> None:
    """Best shape for every number of VMs, had each a device of its own."""
    table = Table(title="best shape by number of VMs (each with a device of its own)")
    for column in ("VMs", "P x D", "m", "stages (sections)", "expected ms", "examples/s"):
        table.add_column(column, justify="right")
    for count, plan in plan_table(profile, max_gpus, memory_bytes=memory_bytes).items():
        stages = " ".join(f"{stage.first_section}-{stage.end_section - 1}" for stage in plan.stages)
        speed = f"{plan.expected.examples_per_s:.1f}"
        ms = f"{plan.expected.mini_batch_s * 1e3:.0f}"
        table.add_row(str(count), plan.shape, str(plan.micro_batch_size), stages, ms, speed)
    _print(table)


def print_shapes(report: RunReport) -> None:
    """Shapes and when."""
    table = Table(title="shapes")
    for column in ("from s", "to s", "P x D", "steps", "examples/s"):
        table.add_column(column, justify="right")
    for span in report.shapes:
        if span.num_steps and span.examples_per_s:
            end_s = span.end_s if span.end_s is not None else report.end_s
            times = f"{span.start_s - report.start_s:.1f}", f"{end_s - report.start_s:.1f}"
            table.add_row(*times, span.shape, str(span.num_steps), f"{span.examples_per_s:.1f}")
    _print(table)


def print_morphs(report: RunReport) -> None:
    """What each morph cost."""
    table = Table(title="morphs (pause: from the kill, or from the decision, to the next committed step)")
    for column in ("at s", "morph", "why", "VMs lost", "pause ms", "re-formed after ms", "steps redone", "state from"):
        table.add_column(column, justify="right" if column not in ("why", "state from") else "left")
    for morph in report.morphs:
        table.add_row(
            f"{morph.detected_at_s - report.start_s:.1f}",
            f"{morph.from_shape} -> {morph.to_shape or '-'}",
            "newcomers" if morph.planned else "loss",
            ", ".join(morph.lost_workers) or "-",
            _ms(morph.pause_ms),
            _ms(morph.reshape_ms),
            str(morph.steps_redone),
            _sources(morph),
        )
    _print(table)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _sources(morph: MorphRecord) -> str:
    return ", ".join(f"{total.count} {kind}" for kind, total in morph.sources.items()) or "-"


def print_expectations(report: RunReport, profile: Profile, memory_bytes: int | None, num_cores: int) -> None:
    """Expected against measured mini-batch time; what shares this machine's cores is expected to."""
    by_shape = {plan.shape: plan for plan in plan_table(profile, 64, memory_bytes=memory_bytes).values()}
    table = Table(title=f"mini-batch time, ms; this machine's {num_cores} cores are shared by all VMs")
    for column in ("P x D", "expected, own devices", f"expected, {num_cores} cores", "measured (median)", "error"):
        table.add_column(column, justify="right")
    told = set()
    for span in report.shapes:
        plan: Plan | None = by_shape.get(span.shape)
        if plan is None or span.measured_mini_batch_s is None or span.shape in told or span.num_steps < 2:
            continue
        told.add(span.shape)
        steps = [step.duration_s for step in report.steps if step.generation in _generations(report, span.shape)]
        measured_s = sorted(steps)[len(steps) // 2]
        shared = simulate(
            profile,
            boundaries=[stage.first_section for stage in plan.stages],
            num_replicas=plan.num_replicas,
            micro_batch_size=plan.micro_batch_size,
            compute_slots=num_cores,
        ).plan.expected.mini_batch_s
        table.add_row(
            span.shape,
            f"{plan.expected.mini_batch_s * 1e3:.0f}",
            f"{shared * 1e3:.0f}",
            f"{measured_s * 1e3:.0f}",
            f"{(shared / measured_s - 1) * 100:+.0f} %",
        )
    _print(table)


def _generations(report: RunReport, shape: str) -> set[int]:
    return {span.generation for span in report.shapes if span.shape == shape}
