"""The picture of a run: VMs, shape, throughput and loss on one time axis, with every morph marked."""

from __future__ import annotations

import io
import itertools
import math
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from manager.accounting.account import TimeUse
from morph.contract.files import write_whole
from morph.pictures import BLUE, BROWN, GREY, INK, ORANGE, QUIET, RED, SKY, SOFT, VIOLET
from morph.words import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from manager.accounting.spent import Prices
    from manager.report.steps import StepRecord
    from manager.report.values import RunReport


WIDTH_PX, HEIGHT_PX, DOTS_PER_INCH = 1600, 1000, 100
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
UNPLANNED, PLANNED = RED, GREY
MEASURED, EXPECTED, LOSS, VMS = BLUE, ORANGE, VIOLET, SKY
PARTS = {
    TimeUse.COMPUTE: (BLUE, "forward, recompute and backward of steps that count"),
    TimeUse.BUBBLE: (SKY, "the rest of those steps: waiting for others, messages, sums of gradients"),
    TimeUse.LOST: (RED, "steps that were given up before their end, or undone by a return to an earlier version"),
    TimeUse.MORPH: (ORANGE, "forming another shape"),
    TimeUse.CHECKPOINT: (VIOLET, "the save at the end of the run; earlier saves run beside training"),
    TimeUse.WAITING: (SOFT[7], "ready while no shape trains"),
    TimeUse.WARMING: (SOFT[1], "booting, until the worker is ready"),
    TimeUse.SPARE: (GREY, "ready, but not part of the shape"),
    TimeUse.UNMANAGED: (BROWN, "after the manager was killed, until another took over or the VMs were gone"),
}
"""The colour and meaning of each use of VMs' time."""
MOST_STEPS = 4000
"""The number of steps, evenly chosen, that are drawn of a longer run."""
LABEL_ROWS = 3
MOST_METRICS = 12
LOST = "VMs were lost"
RUNS = (BLUE, ORANGE, VIOLET, RED, BROWN, GREY)
"""The colours of several runs, in order."""
Curves = dict[str, list[float | None]]
Point = tuple[float, float, float, float | None, float | None]
LABEL_WIDTH_PX = 66


def draw_run(report: RunReport, path: Path) -> None:
    """Write a PNG of 1600 x 1000 pixels; an existing file is replaced atomically. OSError if it cannot be written."""
    from manager.run_dir import as_its_folder

    drawn = png_of(run_figure(report))
    with as_its_folder(path):
        write_whole(path, drawn)


def png_of(figure: Figure) -> bytes:
    """Return a figure as a PNG file's content."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    return drawn.getvalue()


def run_figure(report: RunReport) -> Figure:
    """Return the figure: four panels from top to bottom, in seconds since the run's start."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_PX / DOTS_PER_INCH, HEIGHT_PX / DOTS_PER_INCH), dpi=DOTS_PER_INCH)
        panels = figure.subplots(4, 1, sharex=True, gridspec_kw={"height_ratios": [2.4, 0.9, 3, 3], "hspace": 0.2})
        figure.subplots_adjust(left=0.065, right=0.985, top=0.855, bottom=0.06)
        _make_plain(panels)
        duration_s = max(report.end_s - report.start_s, 1e-3)
        panels[0].set_xlim(0, duration_s)
        panels[3].set_xlabel("seconds since the start")
        _draw_vms(panels[0], report)
        _draw_shapes(panels[1], report)
        _draw_throughput(panels[2], report)
        _draw_loss(panels[3], report)
        _mark_morphs(panels, report)
        figure.text(0.065, 0.965, _title(report), fontsize=15, color=INK, fontweight="bold")
        figure.text(0.065, 0.938, _subtitle(report), fontsize=11.5, color="#55626e")
        figure.align_ylabels(panels)
    return figure


def training_figure(report: RunReport) -> Figure | None:
    """Return loss, learning rate and metrics, a row each: by seconds, and by steps; None if there are none."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps = [record for record in report.steps.thinned(MOST_STEPS) if not record.redone_later]
    curves = _curves(report, steps)
    if not curves:
        return None
    height = 0.6 + 1.9 * len(curves)
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_PX / DOTS_PER_INCH, height), dpi=DOTS_PER_INCH)
        rows = figure.subplots(
            len(curves), 2, sharex="col", sharey="row", squeeze=False, gridspec_kw={"hspace": 0.3, "wspace": 0.04}
        )
        figure.subplots_adjust(left=0.065, right=0.985, top=1 - 0.4 / height, bottom=0.55 / height)
        rows[0][0].set_xlim(0, max(report.end_s - report.start_s, 1e-3))
        rows[-1][0].set_xlabel("seconds since the start")
        rows[-1][1].set_xlabel("steps")
        rows[-1][1].xaxis.set_major_locator(MaxNLocator(integer=True))
        _make_plain(rows.flat)
        for row, (name, (of_steps, of_versions)) in zip(rows, curves.items(), strict=True):
            for panel, by_step in zip(row, (False, True), strict=True):
                panel.margins(y=0.08)
                for number, (label, values) in enumerate(of_steps.items()):
                    points = [
                        (record.step if by_step else record.decided_at_s - report.start_s, value)
                        for record, value in zip(steps, values, strict=True)
                        if value is not None
                    ]
                    if points:
                        colour = MEASURED if number == len(of_steps) - 1 else QUIET
                        panel.plot(*zip(*points, strict=True), color=colour, linewidth=1.6, label=label)
                _draw_evaluations(panel, report, of_versions, by_step=by_step)
                for morph in (morph for morph in report.morphs if not morph.planned):
                    ends_s = (morph.began_s, morph.resumed_at_s or morph.began_s)
                    span = (morph.version,) * 2 if by_step else [end_s - report.start_s for end_s in ends_s]
                    panel.axvspan(*span, color=UNPLANNED, alpha=0.35, linewidth=1, label=LOST)
            row[0].set_title(name, loc="left", fontsize=11.5, color=INK)
            if len(row[0].get_legend_handles_labels()[0]) > 1:
                _legend_or_note(row[1], "", handles_of=row[0])
    return figure


def comparison_figure(reports: Mapping[str, RunReport], prices: Prices | None = None) -> Figure:
    """Return loss (top) and throughput of runs: by step, by seconds, and by dollars if all their prices are known."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    curves = {name: _of_steps(report, prices) for name, report in reports.items()}
    priced = all(known == known for points in curves.values() for *_, known, _, _ in points)
    axes = ("steps", "seconds since the start", "dollars")[: 3 if priced else 2]
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_PX / DOTS_PER_INCH, 7.2), dpi=DOTS_PER_INCH)
        rows = figure.subplots(2, len(axes), sharex="col", sharey="row", gridspec_kw={"hspace": 0.12, "wspace": 0.06})
        figure.subplots_adjust(left=0.065, right=0.985, top=0.93, bottom=0.08)
        _make_plain(rows.flat)
        for panels, what, label in zip(rows, (3, 4), ("loss", "examples / s"), strict=True):
            panels[0].set_ylabel(label)
            for by, panel in enumerate(panels):
                for (name, points), colour in zip(curves.items(), itertools.cycle(RUNS), strict=False):
                    drawn, lost = (
                        [(point[by], point[what]) for point in some if point[what] is not None]
                        for some in (points, _after_losses(reports[name], points))
                    )
                    if drawn:
                        panel.plot(*zip(*drawn, strict=True), color=colour, linewidth=1.6, label=name)
                    if lost:
                        panel.scatter(*zip(*lost, strict=True), marker="x", color=colour, label=LOST, zorder=3)
        for panel, name in zip(rows[1], axes, strict=True):
            panel.set_xlabel(name)
        rows[1][0].set_ylim(bottom=0)
        _legend_or_note(rows[0][-1], "no step was decided", handles_of=rows[1][0])
    return figure


def _make_plain(panels: Iterable[Axes]) -> None:
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#e4e8ec", linewidth=0.8)
        panel.set_axisbelow(True)


def _of_steps(report: RunReport, prices: Prices | None) -> Sequence[Point]:
    """Return of steps that count: their number, seconds, dollars (NaN: unknown) so far, loss, and examples/s."""
    kept = np.flatnonzero(~report.steps.redone)
    rows = kept[np.unique(np.linspace(0, len(kept) - 1, min(len(kept), MOST_STEPS)).round().astype(int))]
    sizes = [span.batch_size for span in report.shapes if span.num_steps] or [0]
    points = []
    for row, record in zip(rows.tolist(), report.steps.rows(rows), strict=True):
        dollars = report.steps.cost(row).dollars(prices)
        speed = sizes[0] / record.duration_s if record.duration_s > 0 else None
        seconds = record.decided_at_s - report.start_s
        points.append((record.step + 1, seconds, math.nan if dollars is None else dollars, record.loss, speed))
    return points


def _after_losses(report: RunReport, points: Sequence[Point]) -> list[Point]:
    """Return the first point after each loss of VMs."""
    rows = {
        bisect_right(points, float(morph.version), key=lambda point: point[0])
        for morph in report.morphs
        if not morph.planned
    }
    return [points[row] for row in sorted(rows) if row < len(points)]


def _curves(report: RunReport, steps: Sequence[StepRecord]) -> dict[str, tuple[Curves, dict[int, float | None]]]:
    """Return what is drawn of a training: by name, the values of each step by label, and of each evaluated version."""
    curves: dict[str, tuple[Curves, dict[int, float | None]]] = {}
    evaluated = report.evaluations
    if evaluated or any(record.loss is not None for record in steps):
        of_versions = {evaluation.version: evaluation.loss for evaluation in evaluated}
        curves["loss"] = {"of each step": [record.loss for record in steps]}, of_versions
    rates = [record.learning_rates or (None, None) for record in steps]
    if any(low is not None for low, _ in rates):
        several = any(low != high for low, high in rates)
        lowest = {"lowest": [low for low, _ in rates]} if several else {}
        curves["learning rate"] = lowest | {"highest": [high for _, high in rates]}, {}
    metrics = [*(record.metrics for record in steps), *(record.metrics for record in evaluated)]
    for name in list(dict.fromkeys(name for known in metrics for name in known))[:MOST_METRICS]:
        of_versions = {evaluation.version: evaluation.metrics.get(name) for evaluation in evaluated}
        curves[name] = {"of each step": [record.metrics.get(name) for record in steps]}, of_versions
    return curves


def _draw_evaluations(
    panel: Axes, report: RunReport, values: Mapping[int, float | None], *, by_step: bool = False
) -> None:
    """Mark the result of each evaluation, by version, at that version or at the time when it was decided."""
    decided_s = report.steps.decided_at_s([version for version, value in values.items() if value is not None])
    points = {
        version: (version if by_step else decided_s.get(version, report.start_s) - report.start_s, value)
        for version, value in values.items()
        if value is not None
    }
    for label, marker, size, chosen in (
        ("evaluation", "D", 5, list(points.values())),
        ("best version", "*", 14, [points[report.best_version]] if report.best_version in points else []),
    ):
        if chosen:
            panel.plot(
                *zip(*chosen, strict=True), marker, color=EXPECTED, ms=size, mec="white", label=label, clip_on=False
            )


def _title(report: RunReport) -> str:
    shapes = [span.shape for span in report.shapes if span.num_steps]
    again = f", formed {len(shapes)} times" if len(shapes) > len(set(shapes)) else ""
    return f"{report.job}: {counted(report.version, 'step')} in {counted(len(set(shapes)), 'shape')}{again}"


def _subtitle(report: RunReport) -> str:
    forced = sum(not morph.planned for morph in report.morphs)
    planned = len(report.morphs) - forced
    text = f"{counted(forced, 'change')} of shape after a loss (red) and {planned} planned (grey), each with its pause"
    pauses_ms = [morph.pause_ms for morph in report.morphs if morph.pause_ms is not None and not morph.planned]
    if pauses_ms:
        text += f"; after a loss: median {statistics.median(pauses_ms):.0f} ms, worst {max(pauses_ms):.0f} ms"
    return f"{text}; {counted(report.steps_redone, 'step')} run again"


def _draw_vms(panel: Axes, report: RunReport) -> None:
    from matplotlib.ticker import MaxNLocator

    times_s = [change.time_s - report.start_s for change in report.vms]
    counts = [change.num_vms for change in report.vms]
    if times_s:
        times_s, counts = [*times_s, report.end_s - report.start_s], [*counts, counts[-1]]
        panel.fill_between(times_s, counts, step="post", color=VMS, alpha=0.45, linewidth=0, label="VMs available")
        panel.step(times_s, counts, where="post", color="#5b93c7", linewidth=1.2)
    edges_s, workers = [0.0], [0]
    for span in report.shapes:
        end_s = report.end_s if span.end_s is None else span.end_s
        edges_s += [span.start_s - report.start_s, end_s - report.start_s]
        workers += [span.num_workers, 0]
    if report.shapes:
        panel.step(edges_s, workers, where="post", color=INK, linewidth=1.8, label="workers in use")
    panel.set_ylim(0, max([*counts, *workers, 1]) * 1.12)
    panel.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    panel.set_ylabel("VMs")
    if panel.get_legend_handles_labels()[0]:
        place = {"bbox_to_anchor": (0.985, 0.955), "bbox_transform": panel.figure.transFigure}  # beside the title
        panel.legend(loc="lower right", ncols=2, fontsize=10, frameon=False, borderpad=0, **place)


def _draw_shapes(panel: Axes, report: RunReport) -> None:
    colours: dict[str, str] = {}
    width_s = max(report.end_s - report.start_s, 1e-3)
    for start_s, end_s, shape in _bands(report):
        colour = colours.setdefault(shape, SOFT[len(colours) % len(SOFT)])
        panel.axvspan(start_s, end_s, facecolor=colour, edgecolor="white", linewidth=1.0)
        share = (end_s - start_s) / width_s
        if share > 0.008:
            panel.text(
                (start_s + end_s) / 2, 0.5, shape, transform=panel.get_xaxis_transform(),
                ha="center", va="center", color=INK, fontsize=13 if share > 0.03 else 10, fontweight="bold",
                rotation=0 if share > 0.025 else 90,
            )  # fmt: skip
    panel.set_yticks([])
    panel.grid(visible=False)
    panel.spines["left"].set_visible(False)
    panel.set_ylabel("shape PxD")


def _bands(report: RunReport) -> list[tuple[float, float, str]]:
    """Return (start, end, shape) in seconds since the start; adjacent bands of one shape are merged."""
    bands: list[tuple[float, float, str]] = []
    for span in report.shapes:
        end_s = report.end_s if span.end_s is None else span.end_s
        if bands and bands[-1][2] == span.shape and bands[-1][1] == span.start_s - report.start_s:
            bands[-1] = (bands[-1][0], end_s - report.start_s, span.shape)
        else:
            bands.append((span.start_s - report.start_s, end_s - report.start_s, span.shape))
    return bands


def _draw_throughput(panel: Axes, report: RunReport) -> None:
    top, at = 0.0, 0
    durations_s, decided_s = report.steps.column("duration_s"), report.steps.column("decided_at_s")
    every = -(-max(1, len(durations_s)) // MOST_STEPS)
    for span in (span for span in report.shapes if span.num_steps):
        rows, at = slice(at, at + span.num_steps, every), at + span.num_steps
        took = [pair for pair in zip(durations_s[rows].tolist(), decided_s[rows].tolist(), strict=True) if pair[0] > 0]
        speeds = [span.batch_size / duration_s for duration_s, _ in took]
        times_s = [at_s - report.start_s for _, at_s in took]
        panel.plot(times_s, speeds, ".", color=MEASURED, markersize=4, alpha=0.35)
        smooth = [statistics.median(speeds[max(0, i - 4) : i + 5]) for i in range(len(speeds))]
        panel.plot(times_s, smooth, color=MEASURED, linewidth=1.8, label="measured (dots: each step)")
        end_s = (report.end_s if span.end_s is None else span.end_s) - report.start_s
        if span.expected_here_s:
            expected = span.batch_size / span.expected_here_s
            panel.plot(
                [span.start_s - report.start_s, end_s], [expected, expected], "--", color=EXPECTED, linewidth=1.8,
                label="expected by the planner",
            )  # fmt: skip
            top = max(top, expected)
        top = max([top, *smooth])
    panel.set_ylim(0, top * 1.25 or 1)
    panel.set_ylabel("examples / s")
    _legend_or_note(panel, "no step was decided")


def _draw_loss(panel: Axes, report: RunReport) -> None:
    points = [
        (record.decided_at_s - report.start_s, record.loss, record.redone_later)
        for record in report.steps.thinned(MOST_STEPS)
        if record.loss is not None
    ]
    kept = [(time_s, loss) for time_s, loss, redone in points if not redone]
    lost = [(time_s, loss) for time_s, loss, redone in points if redone]
    if kept:
        panel.plot(*zip(*kept, strict=True), color=LOSS, linewidth=1.6, label="loss of each step")
    _draw_evaluations(panel, report, {evaluation.version: evaluation.loss for evaluation in report.evaluations})
    if lost:
        panel.plot(
            *zip(*lost, strict=True), "o", mfc="none", color=UNPLANNED, ms=6, label="lost, and run again", clip_on=False
        )
    panel.margins(y=0.08)
    panel.set_ylabel("loss")
    _legend_or_note(panel, "no loss was reported")


def _legend_or_note(panel: Axes, note: str, handles_of: Axes | None = None) -> None:
    """Put a legend above the panel, where it hides nothing, or a note into it; ``handles_of``: the panel it is of."""
    handles = dict(zip(*(handles_of or panel).get_legend_handles_labels()[::-1], strict=True))
    if handles:
        panel.legend(
            list(handles.values()), list(handles), ncols=4, fontsize=10, frameon=False, borderpad=0,
            loc="lower right", bbox_to_anchor=(1.0, 0.99),
        )  # fmt: skip
    else:
        panel.text(0.5, 0.5, note, transform=panel.transAxes, ha="center", va="center", color=QUIET)


def _mark_morphs(panels: Sequence[Axes], report: RunReport) -> None:
    begins_s = [morph.began_s - report.start_s for morph in report.morphs]
    width_px = WIDTH_PX * 0.92
    rows = label_rows([begin_s / max(report.end_s - report.start_s, 1e-3) * width_px for begin_s in begins_s])
    for morph, begin_s, row in zip(report.morphs, begins_s, rows, strict=True):
        colour = PLANNED if morph.planned else UNPLANNED
        end_s = begin_s if morph.resumed_at_s is None else morph.resumed_at_s - report.start_s
        for panel in panels:
            panel.axvspan(begin_s, end_s, color=colour, alpha=0.18, linewidth=0)
            panel.axvline(begin_s, color=colour, linewidth=1.1, alpha=0.9)
        panels[0].annotate(
            "no step since" if morph.pause_ms is None else f"{morph.pause_ms:.0f} ms",
            xy=(begin_s, 1.0), xycoords=panels[0].get_xaxis_transform(), xytext=(0, 4 + 15 * row),
            textcoords="offset points", ha="center", va="bottom", color=colour, fontsize=10.5, fontweight="bold",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 0},
        )  # fmt: skip


def label_rows(centres_px: Sequence[float]) -> list[int]:
    """Give labels, in order of their centres, the lowest row without overlap, else that with the least overlap."""
    ends_px = [float("-inf")] * LABEL_ROWS
    rows = []
    for centre_px in centres_px:
        free = [row for row in range(LABEL_ROWS) if ends_px[row] <= centre_px - LABEL_WIDTH_PX / 2]
        row = free[0] if free else min(range(LABEL_ROWS), key=lambda row: ends_px[row])
        ends_px[row] = centre_px + LABEL_WIDTH_PX / 2
        rows.append(row)
    return rows
