"""``morph trace``: statistics of a trace as a table, and pictures, alone or with traces drawn from a fitted model."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from morph.contract.errors import TraceError
from morph.contract.trace import Trace
from morph.pictures import BLUE, LINES, ORANGE, picture, plain_axes
from morph.tables import table
from simulator.traces.model import TraceModel
from simulator.traces.statistics import (
    ALL,
    Revocation,
    TraceStatistics,
    counts_of,
    revocations_of,
    statistics_of,
    survival,
)

NUM_DRAWN = 20
TRACE, FIT = BLUE, ORANGE


def trace_table(title: str, statistics: Iterable[TraceStatistics]) -> Table:
    """Return a table with a row for each zone."""
    columns = [
        "zone",
        "hours",
        "VMs (peak)",
        "lost/h",
        "of a VM/h",
        "in bulk",
        "most",
        "median life",
        "back in",
        "notice",
    ]
    columns += ["$/h"]
    rows = [
        [
            zone.zone,
            f"{zone.hours:.1f}",
            f"{zone.mean_vms:.1f} ({zone.peak})",
            f"{zone.num_lost / zone.hours:.3g}" if zone.hours else "-",
            f"{zone.losses_per_vm_h:.3f}",
            f"{zone.bulk_share:.0%}",
            max(zone.sizes, default=0),
            "-" if zone.median_life_h is None else f"{zone.median_life_h:.2f} h",
            "-" if zone.replacement_s is None else f"{zone.replacement_s / 60:.1f} min",
            "-" if zone.lead_s is None else f"{zone.num_noticed / max(1, zone.num_lost):.0%}, {zone.lead_s:.0f} s",
            "-" if zone.usd_per_h is None else f"{zone.usd_per_h:.3g}",
        ]
        for zone in statistics
    ]
    return table(title, columns, rows, left=1, light=True)


def draw_trace(trace: Trace, name: str, path: Path, model: TraceModel | None = None) -> None:
    """Draw to a PNG: VMs over time, how many are lost at once, lifetimes and times between losses.

    With a ``model`` fitted to the trace, ``NUM_DRAWN`` traces drawn from it are shown in every panel.
    """
    drawn = [] if model is None else [model.draw(seed, trace.duration_s) for seed in range(NUM_DRAWN)]
    with picture(path, TraceError, (10.0, 8.0), nrows=2, ncols=2) as (figure, axes):
        (vms, sizes), (lives, gaps) = axes
        _draw_vms(vms, trace, drawn)
        _draw_sizes(sizes, trace, drawn)
        _draw_lives(lives, trace, drawn)
        _draw_gaps(gaps, trace, drawn)
        for each in (vms, sizes, lives, gaps):
            plain_axes(each, grid="y")
        beside = f", and {len(drawn)} traces of the model fitted to it" if drawn else ""
        figure.suptitle(f"{name}{beside}", x=0.01, ha="left", fontsize=13)


def _draw_vms(axes: Any, trace: Trace, drawn: Sequence[Trace]) -> None:
    zones = list(dict.fromkeys(event.zone for event in trace.events))
    if drawn or len(zones) == 1:
        for label, color, each in (("one of the fit", FIT, drawn[:1]), ("trace", TRACE, [trace])):
            for shown in each:
                times, counts = counts_of(shown.events)
                axes.step(np.array(times) / 3600, counts, where="post", color=color, linewidth=1.2, label=label)
    else:
        every = np.array(sorted({0.0, *(event.time_s for event in trace.events)}))
        of_zones = []
        for zone in zones:
            times, counts = counts_of(event for event in trace.events if event.zone == zone)
            of_zones.append(np.array(counts)[np.searchsorted(times, every, "right") - 1])
        colors = [LINES[place % len(LINES)] for place in range(len(zones))]
        axes.stackplot(every / 3600, *of_zones, labels=zones, colors=colors, step="post", linewidth=0)
    axes.set(xlabel="hours", ylabel="VMs", ylim=(0, None))
    axes.legend(fontsize=8, loc="upper right")
    axes.set_title("VMs", loc="left", fontsize=11)


def _draw_sizes(axes: Any, trace: Trace, drawn: Sequence[Trace]) -> None:
    drawings = [("trace", TRACE, [trace], -0.2)] + ([("fit", FIT, list(drawn), 0.2)] if drawn else [])
    every = sorted({loss.size for _, _, traces, _ in drawings for each in traces for loss in revocations_of(each)})
    for label, color, traces, off in drawings:
        counts = Counter(loss.size for each in traces for loss in revocations_of(each))
        heights = [size * counts[size] / len(traces) for size in every]
        axes.bar(np.arange(len(every)) + off * bool(drawn), heights, width=0.4, color=color, label=label)
    axes.set(xticks=range(len(every)), xticklabels=every, xlabel="lost at once", ylabel="VMs lost")
    axes.tick_params(axis="x", labelsize=7)
    axes.set_title("how many are lost at once", loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=8)


def _draw_lives(axes: Any, trace: Trace, drawn: Sequence[Trace]) -> None:
    for label, color, traces in (("fit", FIT, drawn), ("trace", TRACE, [trace])):
        lives = [life for each in traces for life in _whole(each).lifetimes]
        curve = [(0.0, 1.0), *survival(lives)]
        if traces:
            axes.step(*zip(*curve, strict=True), where="post", color=color, label=label)
    axes.set(xlabel="hours", ylabel="share that lives on", ylim=(0, 1.02), xlim=(0, None))
    axes.set_title("lifetimes (Kaplan-Meier)", loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=8)


def _draw_gaps(axes: Any, trace: Trace, drawn: Sequence[Trace]) -> None:
    for label, color, traces in (("fit", FIT, drawn), ("trace", TRACE, [trace])):
        between = [gap for each in traces for gap in _gaps_min(revocations_of(each))]
        if between:
            axes.step(np.sort(between), np.arange(1, len(between) + 1) / len(between), color=color, label=label)
    axes.set(xlabel="minutes between revocations", ylabel="share that is shorter", ylim=(0, 1.02), xlim=(0, None))
    axes.set_title("time between revocations", loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=8)


def _whole(trace: Trace) -> TraceStatistics:
    by_zone = statistics_of(trace)
    return by_zone.get(ALL) or next(iter(by_zone.values()))


def _gaps_min(revocations: Sequence[Revocation]) -> list[float]:
    times = sorted(revocation.time_s for revocation in revocations)
    return [(later - time_s) / 60 for time_s, later in itertools.pairwise(times)]
