"""``morph plan --gpus A..B``: the best shape for every number of GPUs, as a table, CSV and a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from morph.cli.plan_tables import bytes_text, time_text, wide_console
from morph.contract.errors import PlanError

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from morph.contract.profile import Profile
    from simulator.objectives import Price

_INK, _BEST, _EACH = "#333333", "#1d6fa5", "#ef8354"
_MOST_LABELS = 14


def show_curve(
    profile: Profile,
    numbers: range,
    settings: dict[str, Any],
    price: Price | None,
    *,
    csv: Path | None,
    png: Path | None,
    as_json: bool,
) -> None:
    """Plan for every number, and print, write and draw the answers.

    Args:
        profile: What calibration measured.
        numbers: Of GPUs.
        settings: Further arguments of :func:`simulator.plan_frame`.
        price: Dollars per GPU-hour.
        csv: Also write the table here.
        png: Also draw the curve here.
        as_json: Print JSON.

    Raises:
        PlanError: not even the largest number of GPUs holds the job, or a file that cannot be written.
    """
    from simulator import plan, plan_frame

    frame = plan_frame(profile, numbers[-1], min_gpus=numbers[0], usd_per_gpu_hour=price, **settings)
    if frame.empty:
        plan(profile, num_gpus=numbers[-1], **settings)  # raises, and says what would do
    if csv is not None:
        _write_csv(frame, csv)
    if png is not None:
        _draw(profile.job.name, frame, png)
    if as_json:
        print(json.dumps(json.loads(frame.to_json(orient="records"))))
        return
    console = wide_console()
    console.print(_table(profile.job.name, frame))
    absent = sorted(set(numbers) - set(frame["num_gpus"].tolist()))
    if absent:
        console.print(f"{absent[0]} to {absent[-1]} GPUs are too few: the job does not fit in their memory.")
    for path, done in ((csv, "Wrote"), (png, "Drew")):
        if path is not None:
            console.print(f"{done} {path}.")


def _table(name: str, frame: pd.DataFrame) -> Table:
    from rich.table import Table

    table = Table(title=f"{name}: best shape by number of GPUs", title_justify="left")
    columns = ["GPUs", "P x D", "idle", "examples/s", "per GPU", "mini-batch", "memory"]
    priced = "usd_per_1000_examples" in frame
    for column in [*columns, *(["$/h", "$/1000"] if priced else [])]:
        table.add_column(column, justify="right")
    for row in frame.to_dict("records"):
        money = [f"{row['usd_per_h']:.4g}", f"{row['usd_per_1000_examples']:.3g}"] if priced else []
        table.add_row(
            str(row["num_gpus"]),
            f"{row['pipeline_depth']} x {row['num_replicas']}",
            str(row["num_idle"]),
            f"{row['examples_per_s']:.4g}",
            f"{row['examples_per_s_per_gpu']:.3g}",
            time_text(row["mini_batch_s"]),
            bytes_text(row["peak_memory_bytes"]),
            *money,
        )
    return table


def _write_csv(frame: pd.DataFrame, path: Path) -> None:
    from morph.cli.whole_file import write_text

    write_text(path, frame.to_csv(index=False, lineterminator="\n"))


def _draw(name: str, frame: pd.DataFrame, path: Path) -> None:
    """Examples per second over GPUs with the shapes; below it those per GPU, or dollars where there is a price."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(10.0, 7.0), sharex=True, layout="constrained", height_ratios=[2, 1]
    )
    gpus = frame["num_gpus"]
    above.plot(gpus, frame["examples_per_s"], drawstyle="steps-post", color=_BEST, linewidth=1.8)
    above.set_ylabel("examples per second")
    above.set_ylim(bottom=0)
    above.set_title(f"{name}: best shape (P x D) by number of GPUs", loc="left", fontsize=12)
    _label_shapes(above, frame)
    column, name_of = ("examples_per_s_per_gpu", "examples per second and GPU")
    if "usd_per_1000_examples" in frame:
        column, name_of = ("usd_per_1000_examples", "$ per 1000 examples")
    below.plot(gpus, frame[column], color=_EACH, linewidth=1.6)
    below.set_ylabel(name_of)
    below.set_ylim(bottom=0)
    below.set_xlabel("GPUs")
    for axes in (above, below):
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=120, format="png")
    except (OSError, ValueError) as error:
        raise PlanError(f"cannot be written: {error}", source=str(path)) from error
    finally:
        pyplot.close(figure)


def _label_shapes(axes: Any, frame: pd.DataFrame) -> None:
    """Name the shapes at evenly spaced numbers of GPUs, each where its stretch begins."""
    shapes = list(zip(frame["pipeline_depth"], frame["num_replicas"], strict=True))
    begins = [at for at, shape in enumerate(shapes) if at == 0 or shape != shapes[at - 1]]
    every = max(1, -(-len(frame) // _MOST_LABELS))
    labelled = -every
    for at in begins:
        if at - labelled < every:
            continue
        labelled = at
        x, y = frame["num_gpus"].iloc[at], frame["examples_per_s"].iloc[at]
        axes.plot([x], [y], marker="o", markersize=3.5, color=_BEST)
        axes.annotate(
            f"{shapes[at][0]} x {shapes[at][1]}",
            (x, y),
            textcoords="offset points",
            xytext=(-3, 6),
            ha="right",
            fontsize=8,
            color=_INK,
        )
