"""Draws the timeline of a simulated mini-batch: one row per worker, one box per task."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from morph.cli.plan import time_text
from morph.contract.errors import PlanError

if TYPE_CHECKING:
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


def draw_timeline(simulation: Simulation, path: Path, max_replicas: int = 4) -> None:
    """Write a PNG: stages as rows, grouped by replica, coloured tasks with micro-batch numbers where they fit.

    Args:
        simulation: What to draw.
        path: The file.
        max_replicas: Of more replicas only the first so many are drawn; the title says so.

    Raises:
        PlanError: naming the file, if it cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    plan, frame = simulation.plan, simulation.timeline
    replicas = min(max_replicas, plan.num_replicas)
    frame = frame[frame["replica"] < replicas]
    end_s = float(frame["end_s"].max())
    factor, unit = next(((f, u) for f, u in _UNITS if end_s * f >= 1), _UNITS[-1])
    depth = plan.pipeline_depth
    num_rows = replicas * depth
    figure, axes = pyplot.subplots(
        figsize=(_WIDTH_INCHES, 1.6 + min(14.0, 0.42 * num_rows + 0.15 * replicas)), layout="constrained"
    )
    row_of = {(d, s): d * (depth + 0.4) + s for d in range(replicas) for s in range(depth)}
    for task, colour in COLOURS.items():
        of_task = frame[frame["task"] == task]
        bars = [(row_of[d, s], begin, end) for d, s, begin, end in _columns(of_task)]
        axes.barh(
            [row for row, _, _ in bars],
            [(end - begin) * factor for _, begin, end in bars],
            left=[begin * factor for _, begin, _ in bars],
            height=0.86,
            color=colour,
            edgecolor="white",
            linewidth=0.6 if len(frame) < 1500 else 0.0,
        )
    _number_boxes(axes, frame, row_of, end_s, factor)
    axes.set_yticks(list(row_of.values()), [_row_name(d, s, plan.num_replicas) for d, s in row_of], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, end_s * factor)
    axes.set_ylim(max(row_of.values()) + 0.6, -0.6)
    axes.set_xlabel(f"time since the start of the mini-batch ({unit})")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    shown = "" if replicas == plan.num_replicas else f" (replicas 0-{replicas - 1} of {plan.num_replicas} shown)"
    axes.set_title(
        f"{depth} x {plan.num_replicas}, {plan.schedule}: {time_text(plan.expected.mini_batch_s)} per mini-batch, "
        f"{plan.expected.examples_per_s:.4g} examples/s{shown}",
        loc="left",
        fontsize=11,
    )
    present = set(frame["task"])
    handles = [Patch(color=colour, label=task.replace("_", "-")) for task, colour in COLOURS.items() if task in present]
    axes.legend(
        handles=handles, loc="upper right", bbox_to_anchor=(1.0, -0.02 - 0.9 / (1 + num_rows)), ncols=6, frameon=False
    )
    try:
        figure.savefig(path, dpi=110, format="png")
    except (OSError, ValueError) as error:
        raise PlanError(f"cannot be written: {error}", source=str(path)) from error
    finally:
        pyplot.close(figure)


def _columns(frame: Any) -> list[tuple[int, int, float, float]]:
    return list(zip(frame["replica"], frame["stage"], frame["start_s"], frame["end_s"], strict=True))


def _number_boxes(axes: Any, frame: Any, row_of: dict[tuple[int, int], float], end_s: float, factor: float) -> None:
    points_per_s = _WIDTH_INCHES * 72 * 0.9 / end_s
    columns = ("replica", "stage", "micro_batch", "start_s", "end_s")
    for d, s, number, begin, end in zip(*(frame[column] for column in columns), strict=True):
        if number >= 0 and (end - begin) * points_per_s >= _POINTS_PER_DIGIT * len(str(number)) + 2:
            axes.text((begin + end) / 2 * factor, row_of[d, s], str(number), ha="center", va="center", fontsize=7)


def _row_name(replica: int, stage: int, num_replicas: int) -> str:
    return f"stage {stage}" if num_replicas == 1 else f"replica {replica}  stage {stage}"
