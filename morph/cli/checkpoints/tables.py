"""Stored checkpoints as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from morph.checkpoint.looking import Look
from morph.tables import table

if TYPE_CHECKING:
    from rich.table import Table

_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


def checkpoint_table(url: str, looks: Sequence[Look], now_s: float) -> Table:
    """One row for each version, the newest last; ages are as of ``now_s`` (epoch)."""
    columns = ("where", "state", "version", "kind", "shape", "MiB", "age")
    rows = [
        (
            look.where.rsplit("/", 1)[-1],
            f"{look.state}, kept" if look.kept else look.state,
            look.version,
            look.kind or "-",
            look.shape or "-",
            f"{look.size_bytes / 2**20:.1f}",
            age_text(look.saved_s, now_s),
        )
        for look in looks
    ]
    return table(f"checkpoints in {url}", columns, rows, left=2)


def age_text(saved_s: float | None, now_s: float) -> str:
    """How long ago, in its largest unit; a clock that was set back makes nothing younger than now."""
    if saved_s is None:
        return "unknown"
    age_s = max(0.0, now_s - saved_s)
    length_s, name = next((unit for unit in _UNITS if age_s >= unit[0]), _UNITS[-1])
    return f"{age_s / length_s:.{1 if length_s > 1 else 0}f} {name}"
