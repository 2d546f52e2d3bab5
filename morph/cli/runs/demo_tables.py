"""The tables that the demo prints."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from simulator import simulate_plan

if TYPE_CHECKING:
    from manager.report.values import MorphRecord, RunReport
    from morph.contract.plan import Plan
    from morph.contract.profile import Profile

WIDTH = 132
UNSTEADY_STEPS = 1
"""Of each generation: its caches are cold, and what it sends and reduces was never sent before."""


def _print(table: Table) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(table)


def print_plans(plans: Mapping[int, Plan]) -> None:
    """Best shape for every number of VMs, had each a device of its own."""
    table = Table(title="best shape by number of VMs (each with a device of its own)")
    for column in ("VMs", "P x D", "m", "stages (sections)", "expected ms", "examples/s"):
        table.add_column(column, justify="right")
    for count, plan in plans.items():
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


def shared_expectations(
    report: RunReport, profile_of: Callable[[str], Profile], plans: Mapping[int, Plan], num_cores: int
) -> dict[str, float]:
    """Expected mini-batch seconds of each shape of a run, by its profile, when all VMs share this machine's cores."""
    by_shape = {plan.shape: plan for plan in plans.values()}
    return {
        shape: simulate_plan(profile_of(shape), by_shape[shape], compute_slots=num_cores).expected.mini_batch_s
        for shape in dict.fromkeys(span.shape for span in report.shapes if span.num_steps)
        if shape in by_shape
    }


def corrected(profile: Profile, report: RunReport, shape: str) -> Profile:
    """The profile with the section times that the run measured: in this shape, or else in all of them."""
    correction = report.corrections.get(shape, report.correction)
    if correction is None:
        return profile
    return profile.corrected(correction.factors).model_copy(update={"contention": ()})  # it is in what was measured


def with_expectations(report: RunReport, expected_s: dict[str, float]) -> RunReport:
    """The same report with other expected mini-batch times."""
    spans = [
        span.model_copy(update={"shared_mini_batch_s": expected_s.get(span.shape, span.shared_mini_batch_s)})
        for span in report.shapes
    ]
    return report.model_copy(update={"shapes": tuple(spans)})


def steady_s(report: RunReport, generations: Collection[int]) -> list[float]:
    """Seconds of each step of these generations but the first ones of each."""
    begun = dict.fromkeys(generations, 0)
    durations_s = []
    for step in report.steps:
        if step.generation in begun:
            begun[step.generation] += 1
            if begun[step.generation] > UNSTEADY_STEPS:
                durations_s.append(step.duration_s)
    return durations_s


def print_expectations(
    report: RunReport, shared_s: Mapping[str, float], corrected_s: Mapping[str, float], num_cores: int
) -> None:
    """Expected against measured mini-batch time of the steady part of each shape; all workers share these cores.

    ``corrected_s``: expected with the section times that the run measured in each shape, on what others left of them.
    """
    table = Table(title=f"mini-batch time, ms, after a shape's first step; all VMs share {num_cores} cores")
    for column in ("P x D", "steps", "own devices", f"on {num_cores} cores", "corrected", "measured (median)", "error"):
        table.add_column(column, justify="right")
    for shape, expected_s in shared_s.items():
        spans = {span.generation: span for span in report.shapes if span.shape == shape}
        durations_s = steady_s(report, spans)
        if not durations_s:
            continue
        measured_s = statistics.median(durations_s)
        own_s = next(iter(spans.values())).expected_mini_batch_s
        table.add_row(
            shape,
            str(len(durations_s)),
            f"{own_s * 1e3:.0f}",
            f"{expected_s * 1e3:.0f}",
            f"{corrected_s[shape] * 1e3:.0f}",
            f"{measured_s * 1e3:.0f}",
            f"{(corrected_s[shape] / measured_s - 1) * 100:+.0f} %",
        )
    _print(table)
