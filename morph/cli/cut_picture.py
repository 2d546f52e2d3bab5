"""Draws where a model is cut: bytes that would cross each place against the compute before it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from morph.cli.cut_words import kind_name
from morph.contract.errors import JobError

if TYPE_CHECKING:
    from morph.cutting.report import CutReport

_COLOURS = ("#8ecae6", "#ffd166", "#7fb069", "#c77dff", "#ef8354", "#9fb4c7", "#f4a6c0", "#b8b08d")
_LINE, _CUT = "#33415c", "#d62828"
_MAX_NAMES, _MANY_PLACES = 26, 300


def draw_cuts(report: CutReport, title: str, path: Path) -> None:
    """Write a PNG: above, bytes alive along the graph with the chosen cuts; below, the sections between them.

    Args:
        report: What was found.
        title: Whose it is.
        path: The file.

    Raises:
        JobError: naming the file, if it cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(15, 7.2), sharex=True, height_ratios=(5, 1.6), layout="constrained"
    )
    _draw_curve(above, report)
    _draw_sections(below, report)
    kinds = len({section.kind for section in report.sections})
    figure.suptitle(
        f"{title}: {len(report.sections)} sections of {kinds} kind{'s' * (kinds > 1)}, "
        f"{report.num_parameters:,} parameters",
        x=0.01,
        ha="left",
    )
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise JobError(f"cannot be written: {error}", source=str(path)) from error
    finally:
        pyplot.close(figure)


def _draw_curve(axes: Any, report: CutReport) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if report.curve:
        places = [100 * share for share, _ in report.curve]
        sizes = [max(size, 1) for _, size in report.curve]
        thin = len(sizes) > _MANY_PLACES
        axes.fill_between(places, sizes, 1, step="post", color=_LINE, alpha=0.12, linewidth=0)
        axes.step(
            places,
            sizes,
            where="post",
            color=_LINE,
            linewidth=0.5 if thin else 1.0,
            label="bytes that a cut at this place would send",
        )
        axes.set_ylim(min(sizes) / 1.6, max(sizes) * 1.3)
    axes.vlines(
        [100 * cut.share_before for cut in report.cuts],
        0,
        1,
        transform=axes.get_xaxis_transform(),
        color=_CUT,
        linewidth=0.7,
        alpha=0.5,
    )
    axes.scatter(
        [100 * cut.share_before for cut in report.cuts],
        [max(cut.bytes_per_sample, 1) for cut in report.cuts],
        s=34,
        color=_CUT,
        zorder=3,
        label="chosen cut",
    )
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(value)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} %"))
    axes.tick_params(axis="x", labelbottom=True)
    axes.set_xlabel("compute in front of the place")
    axes.set_ylabel("bytes per sample")
    axes.grid(axis="y", which="major", linewidth=0.4, alpha=0.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False)


def _draw_sections(axes: Any, report: CutReport) -> None:
    begins = [0.0, *(100 * cut.share_before for cut in report.cuts)]
    widths = [100 * section.compute_share for section in report.sections]
    axes.barh(
        [0.0] * len(widths),
        widths,
        left=begins,
        height=1.0,
        color=[_COLOURS[section.kind % len(_COLOURS)] for section in report.sections],
        edgecolor="white",
        linewidth=1.2,
    )
    for section, begin, width in zip(report.sections, begins, widths, strict=True):
        text = f"{section.index}\n{kind_name(section.kind)}"
        if width > 1.2:
            axes.text(begin + width / 2, 0, text, ha="center", va="center", fontsize=8)
    every = -(-len(report.sections) // _MAX_NAMES)
    for section, begin in list(zip(report.sections, begins, strict=True))[::every]:
        axes.text(begin, -0.62, _short(section.begins_in), rotation=30, ha="right", va="top", fontsize=7)
    axes.set_xlim(0, 100)
    axes.set_ylim(-0.55, 0.55)
    axes.set_yticks([])
    axes.tick_params(axis="x", labelbottom=False, length=0)
    axes.set_ylabel("sections", rotation=90)
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)


def _short(module: str) -> str:
    return module if len(module) <= 28 else "..." + module[-25:]


def size_text(num_bytes: float) -> str:
    """Return a size in B, kB, MB or GB."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"
