"""Draws the timeline of a mini-batch: one row per worker, one box per task."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pandas as pd

from morph.contract.errors import InputError, PlanError
from morph.pictures import GREY, ORANGE, SOFT, picture, plain_axes
from morph.words import time_text
from simulator.costs.answer import TASKS, Simulation

COLOURS = {
    "forward": SOFT[0],
    "recompute": SOFT[2],
    "backward": SOFT[1],
    "redundant_forward": SOFT[6],
    "redundant_backward": SOFT[5],
    "all_reduce": SOFT[3],
    "commit": GREY,
    "optimizer": ORANGE,
}
_UNITS = ((1.0, "s"), (1e3, "ms"), (1e6, "us"))
_WIDTH_INCHES, _POINTS_PER_DIGIT = 15.0, 5.0


def draw_timeline(simulation: Simulation, path: Path, max_replicas: int = 4) -> None:
    """Write a PNG of a simulated mini-batch: of the first ``max_replicas`` replicas, which the title says."""
    plan, frame = simulation.plan, simulation.timeline
    replicas = min(max_replicas, plan.num_replicas)
    shown = "" if replicas == plan.num_replicas else f" (replicas 0-{replicas - 1} of {plan.num_replicas} shown)"
    title = (
        f"{plan.shape.replace('x', ' x ')}, {plan.schedule}: {time_text(plan.expected.mini_batch_s)} "
        f"per mini-batch, {plan.expected.examples_per_s:.4g} examples/s{shown}"
    )
    types = {stage: each.node_type for stage, each in enumerate(plan.stages) if each.node_type}
    draw_boxes(frame[frame["replica"] < replicas], plan.num_replicas > 1, title, path, PlanError, types)


def draw_boxes(
    frame: pd.DataFrame,
    name_replicas: bool,
    title: str,
    path: Path,
    error: type[InputError],
    types: Mapping[int, str] = MappingProxyType({}),
) -> None:
    """Write a PNG: a row for each replica and stage, with coloured tasks and their numbers where these fit.

    ``frame`` is a table like ``Simulation.timeline``. ``error`` is raised, naming the file, if it cannot be written.
    ``types``: types of GPU by stage, for the labels of rows.
    """
    end_s = float(frame["end_s"].max())
    factor, unit = next(((f, u) for f, u in _UNITS if end_s * f >= 1), _UNITS[-1])
    places = sorted(set(zip(frame["replica"], frame["stage"], strict=True)))
    groups = sorted({replica for replica, _ in places})
    row_of = {place: number + 0.4 * groups.index(place[0]) for number, place in enumerate(places)}
    names = [
        f"{f'replica {d}  ' if name_replicas else ''}stage {s}{f'  {types[s]}' if s in types else ''}"
        for d, s in places
    ]
    points_per_s = _WIDTH_INCHES * 72 * 0.9 / end_s
    height = 1.6 + min(14.0, 0.42 * len(places) + 0.15 * len(groups))
    with picture(path, error, (_WIDTH_INCHES, height)) as (_, axes):
        for task, boxes in frame.groupby("task"):
            axes.barh(
                [row_of[place] for place in zip(boxes["replica"], boxes["stage"], strict=True)],
                (boxes["end_s"] - boxes["start_s"]) * factor,
                left=boxes["start_s"] * factor,
                height=0.86,
                color=COLOURS[str(task)],
                edgecolor="white",
                linewidth=0.6 if len(frame) < 1500 else 0.0,
            )
        columns = [frame[name].tolist() for name in ("replica", "stage", "micro_batch", "start_s", "end_s")]
        for replica, stage, number, start_s, over_s in zip(*columns, strict=True):
            room = (over_s - start_s) * points_per_s
            if number >= 0 and room >= _POINTS_PER_DIGIT * len(str(number)) + 2:
                middle, row = (start_s + over_s) / 2 * factor, row_of[replica, stage]
                axes.text(middle, row, str(number), ha="center", va="center", fontsize=7)
        axes.set_yticks(list(row_of.values()), names, fontsize=8)
        axes.set(xlim=(0, end_s * factor), ylim=(max(row_of.values()) + 0.6, -0.6))
        axes.set_xlabel(f"time since the start of the mini-batch ({unit})")
        axes.tick_params(axis="y", length=0)
        axes.set_title(title, loc="left", fontsize=11)
        plain_axes(axes, without=("top", "right", "left"))
        present = [task for task in COLOURS if task in set(frame["task"])]
        from matplotlib.patches import Patch  # slow to import, and not needed by a run that only shows its page

        handles = [Patch(color=COLOURS[task], label=TASKS.get(task, task.replace("_", " "))) for task in present]
        below = -0.02 - 0.9 / (1 + len(places))
        axes.legend(handles=handles, loc="upper right", bbox_to_anchor=(1.0, below), ncols=6, frameon=False)
