"""The tables that the demo prints."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from morph.tables import table, wide_console

if TYPE_CHECKING:
    from manager.report.steps import StepRecord
    from manager.report.values import MorphRecord, RunReport
    from morph.contract.plan import Plan

WIDTH = 132
UNSTEADY_STEPS = 1
"""Of each generation: its caches are cold, and what it sends and reduces was never sent before."""


def _show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    wide_console(WIDTH).print(table(title, columns, rows))


def print_plans(plans: Mapping[int, Plan]) -> None:
    """Best shape for every number of VMs, had each a device of its own."""
    rows = []
    for count, plan in plans.items():
        stages = " ".join(f"{stage.first_section}-{stage.end_section - 1}" for stage in plan.stages)
        speed = f"{plan.expected.examples_per_s:.1f}"
        ms = f"{plan.expected.mini_batch_s * 1e3:.0f}"
        rows.append((count, plan.shape, plan.micro_batch_size, stages, ms, speed))
    columns = ("VMs", "P x D", "m", "stages (sections)", "expected ms", "examples/s")
    _show("best shape by number of VMs (each with a device of its own)", columns, rows)


def print_shapes(report: RunReport) -> None:
    """Shapes and when."""
    rows = []
    for span in report.shapes:
        if span.num_steps and span.examples_per_s:
            end_s = span.end_s if span.end_s is not None else report.end_s
            times = f"{span.start_s - report.start_s:.1f}", f"{end_s - report.start_s:.1f}"
            rows.append((*times, span.shape, span.num_steps, f"{span.examples_per_s:.1f}"))
    _show("shapes", ("from s", "to s", "P x D", "steps", "examples/s"), rows)


def print_morphs(report: RunReport) -> None:
    """What each morph cost."""
    rows = [
        (
            f"{morph.detected_at_s - report.start_s:.1f}",
            f"{morph.from_shape} -> {morph.to_shape or '-'}",
            "newcomers" if morph.planned else "loss",
            ", ".join(morph.lost_workers) or "-",
            _ms(morph.pause_ms),
            _ms(morph.reshape_ms),
            morph.steps_redone,
            _sources(morph),
        )
        for morph in report.morphs
    ]
    columns = ("at s", "morph", "why", "VMs lost", "pause ms", "re-formed after ms", "steps redone", "state from")
    _show("morphs (pause: from the kill, or from the decision, to the next committed step)", columns, rows)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _sources(morph: MorphRecord) -> str:
    return ", ".join(f"{total.count} {kind}" for kind, total in morph.sources.items()) or "-"


def _steady_steps(report: RunReport, shape: str) -> list[StepRecord]:
    """Steps of a shape but the first ones of each of its generations."""
    begun = {span.generation: 0 for span in report.shapes if span.shape == shape}
    steady = []
    for step in report.steps:
        if step.generation in begun:
            begun[step.generation] += 1
            if begun[step.generation] > UNSTEADY_STEPS:
                steady.append(step)
    return steady


def print_expectations(
    report: RunReport, share_of_others: Callable[[Sequence[tuple[float, float]]], float], num_cores: int
) -> None:
    """Expected and measured mini-batch time of the steady part of each shape; all workers share these cores.

    ``share_of_others``: the share of the cores that other processes took during some spans of time (begin and end).
    """
    rows = []
    for shape in dict.fromkeys(span.shape for span in report.shapes):
        steps = _steady_steps(report, shape)
        if not steps:
            continue
        span = next(span for span in report.shapes if span.shape == shape)
        spans_s = [(step.decided_at_s - step.duration_s, step.decided_at_s) for step in steps]
        rows.append(
            (
                shape,
                len(steps),
                f"{span.expected_mini_batch_s * 1e3:.0f}",
                f"{span.expected_here_s * 1e3:.0f}",
                f"{statistics.median(step.duration_s for step in steps) * 1e3:.0f}",
                f"{share_of_others(spans_s):.0%}",
            )
        )
    columns = ("P x D", "steps", "own devices", f"on {num_cores} cores", "measured (median)", "others took")
    _show(f"mini-batch time, ms, after a shape's first step; all VMs share {num_cores} cores", columns, rows)
    print(
        f"The time on {num_cores} cores is what to expect if nothing else uses them. Others took this share of them "
        "during the measured steps:\ncompare the two times only where that is next to nothing."
    )
