"""Writes numbers with units, kinds of sections and places in source code for a reader."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime


def time_text(seconds: float) -> str:
    """Return three significant digits with a fitting unit."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def moment_text(time_s: float) -> str:
    """Write a moment, in seconds since 1970, as date and time of UTC."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


def duration_text(seconds: float) -> str:
    """Write a duration in its two largest units: ``19 s``, ``3 min 20 s``, ``2 h 5 min``, ``3 d 4 h``."""
    whole = round(seconds)
    for size, unit, part, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


def counted(count: int, one: str, more: str = "") -> str:
    """Return ``1 worker``, ``2 workers``; with ``more`` if the plural needs more than an s: ``1 worker is``."""
    return f"{count} {one if count == 1 else more or one + 's'}"


def listed(entries: Sequence[object], most: int = 24) -> str:
    """Return ``3, 5, 8``; of many entries, the first ones and how many more there are."""
    return ", ".join(map(str, entries[:most])) + (f" and {len(entries) - most} more" if len(entries) > most else "")


def count_text(number: float) -> str:
    """Return three significant digits with K, M or B."""
    for factor, unit in ((1e9, " B"), (1e6, " M"), (1e3, " K")):
        if number >= factor:
            return f"{number / factor:.3g}{unit}"
    return f"{number:.0f}"


def size_text(num_bytes: float, *, binary: bool = False) -> str:
    """Write bytes with a unit: ``512 B``, ``1.5 MB``; with ``binary``, as memory is sold: ``1.43 MiB``."""
    value, unit = float(num_bytes), "B"
    step, larger = (1024, ("KiB", "MiB", "GiB", "TiB")) if binary else (1000, ("kB", "MB", "GB", "TB"))
    for next_unit in larger:
        if value < 999.5:  # else three digits are not enough
            break
        value, unit = value / step, next_unit
    return f"{value:.3g} {unit}"


def kind_name(kind: int) -> str:
    """Return A, B, ..., Z, A1, B1, ..."""
    return chr(ord("A") + kind % 26) + (str(kind // 26) if kind >= 26 else "")


def short_source(source: str | None) -> str:
    """Return the path as seen from here, or from the installed packages."""
    if source is None:
        return ""
    _, marker, inside = source.rpartition("site-packages/")
    return inside if marker else os.path.relpath(source)
