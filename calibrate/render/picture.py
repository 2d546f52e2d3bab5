"""Draws a profile: compute by micro-batch size, send times by message size, all-reduces by ring and size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from calibrate.render.tables import kinds_of, places_text
from morph.contract.errors import ProfileError
from morph.contract.profile import LinkProfile, Profile, SectionProfile, Timing
from morph.pictures import INK, LINES, picture, plain_axes
from morph.words import size_text, time_text

_BAND = 0.15
_MAX_KINDS = len(LINES)


def draw_profile(profile: Profile, path: Path) -> None:
    """Write a PNG: medians as lines, the middle 90 % of samples as bands. Raises ProfileError, naming the file."""
    with picture(path, ProfileError, (14, 9.5), nrows=2, ncols=2) as (figure, ((forward, backward), (links, reduces))):
        _draw_compute(forward, profile, "forward, F(m)/m", lambda section: section.forward)
        _draw_compute(backward, profile, "backward, B(m)/m", lambda section: section.backward)
        _draw_links(links, profile)
        _draw_all_reduces(reduces, profile)
        figure.suptitle(f"{profile.job.name}, {profile.num_sections} sections, on {profile.environment.device}")


def _draw_compute(
    axes: Any, profile: Profile, title: str, times_of: Callable[[SectionProfile], dict[int, Timing]]
) -> None:
    sizes = profile.micro_batch_sizes
    kinds = sorted(kinds_of(profile), key=lambda kind: _task_s(kind[0], sizes[-1]), reverse=True)
    named = {f"section{'s' * (len(kind) > 1)} {places_text(kind)}": times_of(kind[0]) for kind in kinds[:_MAX_KINDS]}
    axes.set_title(title + (f" (the {_MAX_KINDS} heaviest kinds)" if len(kinds) > _MAX_KINDS else ""), loc="left")
    if len(sizes) == 1:
        _draw_bars(axes, named, sizes[0])
    else:
        for (name, times), colour in zip(named.items(), LINES[: len(named)], strict=True):
            _draw_line(axes, sizes, [times[m] for m in sizes], {"color": colour, "label": name}, per_sample=True)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(m) for m in sizes])
        axes.minorticks_off()
        axes.set_xlabel("micro-batch size m")
    axes.set_ylim(bottom=0)
    _finish(axes, "time per sample")


def _draw_bars(axes: Any, named: dict[str, dict[int, Timing]], m: int) -> None:
    """Draw, for one m, a bar for each kind; its error bar is the middle 90 % of the samples."""
    times = [by_size[m] for by_size in named.values()]
    medians = [time.median_s / m for time in times]
    low = [(time.median_s - _quantile(time, 0.05)) / m for time in times]
    high = [(_quantile(time, 0.95) - time.median_s) / m for time in times]
    axes.bar(list(named), medians, 0.5, color=LINES[: len(named)], yerr=(low, high), capsize=4, ecolor=INK)
    axes.set_xlabel(f"m = {m}")


def _task_s(section: SectionProfile, m: int) -> float:
    return section.forward[m].median_s + section.backward[m].median_s


def _draw_links(axes: Any, profile: Profile) -> None:
    same = profile.inter_node == profile.intra_node
    links: dict[str, LinkProfile] = {"" if same else ", same node": profile.intra_node}
    if not same:
        links[", between nodes"] = profile.inter_node
    if profile.between_zones is not None:
        links[", between zones"] = profile.between_zones
    colours = iter(LINES)
    for where, link in links.items():
        for name, entries in (("activations", link.activation), ("gradients", link.gradient)):
            ordered = sorted(entries, key=lambda entry: entry.size_bytes)
            sizes = [max(entry.size_bytes, 1) for entry in ordered]
            _draw_line(axes, sizes, [entry.time for entry in ordered], {"color": next(colours), "label": name + where})
    axes.set_title("one message, send to receipt" + (" (any two nodes alike)" if same else ""), loc="left")
    _byte_axis(axes)
    _finish(axes, "time", logarithmic=True)


def _draw_all_reduces(axes: Any, profile: Profile) -> None:
    lines: dict[tuple[int, int], dict[int, Timing]] = {}
    for entry in profile.all_reduce:
        lines.setdefault((entry.ring_size, entry.in_flight), {})[entry.size_bytes] = entry.time
    counts = sorted({count for _, count in lines})
    rings = sorted({ring for ring, _ in lines})
    for (ring, count), times in sorted(lines.items()):
        sizes = sorted(times)
        look = {"label": f"D={ring}, {count} in flight", "color": LINES[rings.index(ring) % len(LINES)]}
        look["linestyle"] = ("-", "--", ":", "-.")[counts.index(count) % 4]
        _draw_line(axes, sizes, [times[size] for size in sizes], look)
    axes.set_title("all-reduce AR(D)" if lines else "all-reduce: not measured", loc="left")
    _byte_axis(axes)
    _finish(axes, "time", logarithmic=True)


def _draw_line(
    axes: Any, places: Sequence[int], times: Sequence[Timing], look: dict[str, Any], *, per_sample: bool = False
) -> None:
    """Draw a line through the medians, with a band if the line is solid; ``per_sample``: divide times by ``places``."""
    shares = [1.0 / place if per_sample else 1.0 for place in places]
    medians = [time.median_s * share for time, share in zip(times, shares, strict=True)]
    axes.plot(places, medians, marker="o", markersize=4, linewidth=1.5, **look)
    if look.get("linestyle", "-") == "-":
        low, high = (
            [_quantile(time, level) * share for time, share in zip(times, shares, strict=True)]
            for level in (0.05, 0.95)
        )
        axes.fill_between(places, low, high, color=look["color"], alpha=_BAND, linewidth=0)


def _quantile(time: Timing, level: float) -> float:
    return float(np.quantile(time.quantiles_s, level)) if time.quantiles_s else time.median_s


def _byte_axis(axes: Any) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(value)))
    axes.set_xlabel("size")


def _finish(axes: Any, label: str, *, logarithmic: bool = False) -> None:
    if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: time_text(value) if value > 0 else "0"))
    axes.set_ylabel(label)
    plain_axes(axes, grid="both")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=9)
