"""``morph plan --gpus A..B``: the best shape for every number of GPUs, as a table, CSV and a picture."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from morph.contract.errors import PlanError
from morph.contract.files import write_output
from morph.contract.profile import Profile
from morph.pictures import BLUE, INK, ORANGE, picture, plain_axes
from morph.tables import table, wide_console
from morph.words import size_text, time_text
from simulator import PlanRequest, plan, plan_frame
from simulator.render.tables import WIDTH

_MOST_LABELS = 14


def show_curve(
    profile: Profile, numbers: range, request: PlanRequest, *, csv: Path | None, png: Path | None, as_json: bool
) -> None:
    """Plan for every number of GPUs, print the plans, and write them to ``csv`` and draw them to ``png``.

    Raises PlanError if not even the largest number of GPUs can hold the job, or a file cannot be written.
    """
    frame = plan_frame(profile, numbers[-1], request, min_gpus=numbers[0])
    if frame.empty:
        plan(profile, request, num_gpus=numbers[-1])  # raises an error that says what would suffice
    if csv is not None:
        write_output(csv, frame.to_csv(index=False, lineterminator="\n"))
    if png is not None:
        _draw(profile.job.name, frame, png)
    if as_json:
        print(json.dumps(json.loads(frame.to_json(orient="records"))))
        return
    console = wide_console(WIDTH)
    console.print(_table(profile.job.name, frame))
    console.print(
        f"all with micro-batches of {frame['micro_batch_size'].iloc[0]}, the same for a whole run, and a device for "
        "each worker; for one number of GPUs alone (--gpus N) another size may be faster"
    )
    if sums := [shape for shape in _shapes(frame) if "+" in shape]:
        console.print(f"{sums[0]}: pipelines of unequal depth, which share each mini-batch by their speed")
    absent = sorted(set(numbers) - set(frame["num_gpus"].tolist()))
    if absent:
        console.print(f"{absent[0]} to {absent[-1]} GPUs are too few: the job does not fit in their memory.")
    for path, done in ((csv, "written"), (png, "drawn")):
        if path is not None:
            print(f"{done}: {path}")


def _table(name: str, frame: pd.DataFrame) -> Table:
    columns = {
        "GPUs": frame["num_gpus"],
        "P x D": _shapes(frame),
        "idle": frame["num_idle"],
        "examples/s": frame["examples_per_s"].map("{:.4g}".format),
        "per GPU": frame["examples_per_s_per_gpu"].map("{:.3g}".format),
        "mini-batch": frame["mini_batch_s"].map(time_text),
        "memory": frame["peak_memory_bytes"].map(partial(size_text, binary=True)),
    }
    if "usd_per_1000_examples" in frame:
        columns["$/h"] = frame["usd_per_h"].map("{:.4g}".format)
        columns["$/1000"] = frame["usd_per_1000_examples"].map("{:.3g}".format)
    return table(f"{name}: best shape by number of GPUs", list(columns), zip(*columns.values(), strict=True))


def _draw(name: str, frame: pd.DataFrame, path: Path) -> None:
    """Draw examples per second over GPUs with the shapes; below, examples per GPU, or dollars if there is a price."""
    priced = "usd_per_1000_examples" in frame
    column = "usd_per_1000_examples" if priced else "examples_per_s_per_gpu"
    with picture(path, PlanError, (10.0, 7.0), nrows=2, sharex=True, height_ratios=[2, 1]) as (_, (above, below)):
        above.plot(frame["num_gpus"], frame["examples_per_s"], drawstyle="steps-post", color=BLUE, linewidth=1.8)
        above.set(ylabel="examples per second")
        above.set_title(f"{name}: best shape (P x D) by number of GPUs", loc="left", fontsize=12)
        _label_shapes(above, frame)
        above.set_ylim(top=1.1 * frame["examples_per_s"].max())  # room for the highest label below the title
        below.plot(frame["num_gpus"], frame[column], color=ORANGE, linewidth=1.6)
        below.set(ylabel="$ per 1000 examples" if priced else "examples per second and GPU", xlabel="GPUs")
        for axes in (above, below):
            axes.set_ylim(bottom=0)
            plain_axes(axes, grid="y")


def _shapes(frame: pd.DataFrame) -> list[str]:
    return [shape.replace("x", " x ") for shape in frame["shape"]]


def _label_shapes(axes: Any, frame: pd.DataFrame) -> None:
    """Label the shapes at evenly spaced numbers of GPUs, each at the beginning of its range."""
    shapes = _shapes(frame)
    every = max(1, -(-len(frame) // _MOST_LABELS))
    labelled = -every
    for at, shape in enumerate(shapes):
        if (at and shapes[at] == shapes[at - 1]) or at - labelled < every:
            continue
        labelled = at
        place = frame["num_gpus"].iloc[at], frame["examples_per_s"].iloc[at]
        axes.plot(*place, marker="o", markersize=3.5, color=BLUE)
        axes.annotate(
            shape,
            place,
            textcoords="offset points",
            xytext=(-3, 6),
            ha="right",
            fontsize=8,
            color=INK,
        )
