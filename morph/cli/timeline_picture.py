"""Draws the timeline of a mini-batch, simulated or measured: one row per worker, one box per task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from morph.cli.plan import time_text
from morph.contract.errors import InputError, PlanError

if TYPE_CHECKING:
    from morph.contract.timeline import StepTimeline
    from simulator import Simulation

COLOURS = {
    "forward": "#8ecae6",
    "recompute": "#ffd166",
    "backward": "#7fb069",
    "all_reduce": "#c77dff",
    "commit": "#6c757d",
    "optimizer": "#ef8354",
}
_UNITS = ((1.0, "s"), (1e3, "ms"), (1e6, "us"))
_WIDTH_INCHES, _POINTS_PER_DIGIT = 15.0, 5.0


@dataclass(frozen=True)
class Box:
    """One task; a ``micro_batch`` below 0 has no number."""

    replica: int
    stage: int
    task: str
    micro_batch: int
    start_s: float
    end_s: float


def draw_timeline(simulation: Simulation, path: Path, max_replicas: int = 4) -> None:
    """Write a PNG of a simulated mini-batch.

    Args:
        simulation: What to draw.
        path: The file.
        max_replicas: Of more replicas only the first so many are drawn; the title says so.

    Raises:
        PlanError: naming the file, if it cannot be written.
    """
    plan, frame = simulation.plan, simulation.timeline
    replicas = min(max_replicas, plan.num_replicas)
    shown = "" if replicas == plan.num_replicas else f" (replicas 0-{replicas - 1} of {plan.num_replicas} shown)"
    title = (
        f"{plan.pipeline_depth} x {plan.num_replicas}, {plan.schedule}: {time_text(plan.expected.mini_batch_s)} "
        f"per mini-batch, {plan.expected.examples_per_s:.4g} examples/s{shown}"
    )
    columns = ("replica", "stage", "task", "micro_batch", "start_s", "end_s")
    rows = zip(*(frame[column] for column in columns), strict=True)
    boxes = [Box(*row) for row in rows if row[0] < replicas]
    names = {
        (d, s): f"stage {s}" if plan.num_replicas == 1 else f"replica {d}  stage {s}"
        for d in range(replicas)
        for s in range(plan.pipeline_depth)
    }
    _draw(boxes, names, title, path, PlanError)


def draw_measured(timelines: Sequence[StepTimeline], replica: int, path: Path) -> None:
    """Write a PNG of one replica in a measured step, as figure 7 of the Varuna paper; numbers count its micro-batches.

    Raises:
        RunDirError: naming the file, if it cannot be written.
    """
    from morph.contract.errors import RunDirError
    from morph.runtime.timeline import lay_out

    laid = [one for one in lay_out(timelines) if one.timeline.replica == replica]
    first = min((one.span.micro_batch for one in laid if one.span.micro_batch is not None), default=0)
    drawn = {"forward", "recompute", "backward", "reduce"}
    boxes = [
        Box(
            replica,
            one.timeline.stage,
            "all_reduce" if one.span.kind == "reduce" else one.span.kind,
            -1 if one.span.micro_batch is None else one.span.micro_batch - first,
            one.start_s,
            one.end_s,
        )
        for one in laid
        if one.span.kind in drawn
    ]
    facts = timelines[0]
    names = {(replica, stage): f"stage {stage}" for stage in sorted({box.stage for box in boxes})}
    which = "" if facts.shape.endswith("x1") else f", replica {replica}"
    title = (
        f"{facts.shape.replace('x', ' x ')}, {facts.schedule}, step {facts.step}{which}: measured, "
        f"{time_text(max(box.end_s for box in boxes))} until every gradient was reduced"
    )
    _draw(boxes, names, title, path, RunDirError)


def _draw(
    boxes: Sequence[Box], names: dict[tuple[int, int], str], title: str, path: Path, error_type: type[InputError]
) -> None:
    """Write a PNG: a row for each (replica, stage) in ``names``, coloured tasks with numbers where they fit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    end_s = max(box.end_s for box in boxes)
    factor, unit = next(((f, u) for f, u in _UNITS if end_s * f >= 1), _UNITS[-1])
    num_rows = len(names)
    groups = sorted({d for d, _ in names})
    figure, axes = pyplot.subplots(
        figsize=(_WIDTH_INCHES, 1.6 + min(14.0, 0.42 * num_rows + 0.15 * len(groups))), layout="constrained"
    )
    row_of = {(d, s): number + 0.4 * groups.index(d) for number, (d, s) in enumerate(names)}
    for task, colour in COLOURS.items():
        bars = [box for box in boxes if box.task == task]
        axes.barh(
            [row_of[box.replica, box.stage] for box in bars],
            [(box.end_s - box.start_s) * factor for box in bars],
            left=[box.start_s * factor for box in bars],
            height=0.86,
            color=colour,
            edgecolor="white",
            linewidth=0.6 if len(boxes) < 1500 else 0.0,
        )
    _number_boxes(axes, boxes, row_of, end_s, factor)
    axes.set_yticks(list(row_of.values()), list(names.values()), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, end_s * factor)
    axes.set_ylim(max(row_of.values()) + 0.6, -0.6)
    axes.set_xlabel(f"time since the start of the mini-batch ({unit})")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_title(title, loc="left", fontsize=11)
    present = {box.task for box in boxes}
    handles = [Patch(color=colour, label=task.replace("_", "-")) for task, colour in COLOURS.items() if task in present]
    axes.legend(
        handles=handles, loc="upper right", bbox_to_anchor=(1.0, -0.02 - 0.9 / (1 + num_rows)), ncols=6, frameon=False
    )
    try:
        figure.savefig(path, dpi=110, format="png")
    except (OSError, ValueError) as error:
        raise error_type(f"cannot be written: {error}", source=str(path)) from error
    finally:
        pyplot.close(figure)


def _number_boxes(
    axes: Any, boxes: Sequence[Box], row_of: dict[tuple[int, int], float], end_s: float, factor: float
) -> None:
    points_per_s = _WIDTH_INCHES * 72 * 0.9 / end_s
    for box in boxes:
        room = (box.end_s - box.start_s) * points_per_s
        if box.micro_batch >= 0 and room >= _POINTS_PER_DIGIT * len(str(box.micro_batch)) + 2:
            middle, row = (box.start_s + box.end_s) / 2 * factor, row_of[box.replica, box.stage]
            axes.text(middle, row, str(box.micro_batch), ha="center", va="center", fontsize=7)
