"""Draws a model's cuts: the bytes that would cross each place, over the compute before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from morph.contract.errors import JobError
from morph.cutting.cuts.report import CutReport
from morph.pictures import INK, RED, SOFT, picture, plain_axes
from morph.words import kind_name, size_text

_MAX_NAMES, _MANY_PLACES = 26, 300


def draw_cuts(report: CutReport, title: str, path: Path) -> None:
    """Write a PNG: live bytes along the graph with the chosen cuts above, the sections between the cuts below.

    JobError: the file cannot be written; the error names it.
    """
    kinds = len({section.kind for section in report.sections})
    with picture(path, JobError, (15, 7.2), nrows=2, sharex=True, height_ratios=(5, 1.6)) as (figure, (above, below)):
        _draw_curve(above, report)
        _draw_sections(below, report)
        figure.suptitle(
            f"{title}: {len(report.sections)} sections of {kinds} kind{'s' * (kinds > 1)}, "
            f"{report.num_parameters:,} parameters",
            x=0.01,
            ha="left",
        )


def _draw_curve(axes: Any, report: CutReport) -> None:
    if report.curve:
        places = [100 * share for share, _ in report.curve]
        sizes = [max(size, 1) for _, size in report.curve]
        width, name = 0.5 if len(sizes) > _MANY_PLACES else 1.0, "bytes that a cut at this place would send"
        axes.fill_between(places, sizes, 1, step="post", color=INK, alpha=0.12, linewidth=0)
        axes.step(places, sizes, where="post", color=INK, linewidth=width, label=name)
        axes.set_ylim(min(sizes) / 1.6, max(sizes) * 1.3)
    begins = [100 * cut.share_before for cut in report.cuts]
    crossing = [max(cut.bytes_per_sample, 1) for cut in report.cuts]
    axes.vlines(begins, 0, 1, transform=axes.get_xaxis_transform(), color=RED, linewidth=0.7, alpha=0.5)
    axes.scatter(begins, crossing, s=34, color=RED, zorder=3, label="chosen cut")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(value)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} %"))
    axes.tick_params(axis="x", labelbottom=True)
    axes.set(xlabel="compute before the place", ylabel="bytes per sample")
    plain_axes(axes, grid="y")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False)


def _draw_sections(axes: Any, report: CutReport) -> None:
    begins = [0.0, *(100 * cut.share_before for cut in report.cuts)]
    widths = [100 * section.compute_share for section in report.sections]
    colours = [SOFT[section.kind % len(SOFT)] for section in report.sections]
    axes.barh([0.0] * len(widths), widths, left=begins, height=1.0, color=colours, edgecolor="white", linewidth=1.2)
    every = -(-len(report.sections) // _MAX_NAMES)
    for number, (section, begin, width) in enumerate(zip(report.sections, begins, widths, strict=True)):
        if width > 1.2:
            text = f"{section.index}\n{kind_name(section.kind)}"
            axes.text(begin + width / 2, 0, text, ha="center", va="center", fontsize=8)
        if number % every == 0:
            axes.text(begin, -0.62, _short(section.begins_in), rotation=30, ha="right", va="top", fontsize=7)
    axes.set(xlim=(0, 100), ylim=(-0.55, 0.55), ylabel="sections")
    axes.set_yticks([])
    axes.tick_params(axis="x", labelbottom=False, length=0)
    plain_axes(axes, without=("top", "right", "bottom", "left"))


def _short(module: str) -> str:
    return module if len(module) <= 28 else "..." + module[-25:]
