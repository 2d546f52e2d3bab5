"""How sections and places in source code are written."""

from __future__ import annotations

import os


def kind_name(kind: int) -> str:
    """Return A, B, ..., Z, A1, B1, ..."""
    return chr(ord("A") + kind % 26) + (str(kind // 26) if kind >= 26 else "")


def short_source(source: str | None) -> str:
    """Return the path as seen from here, or from the installed packages."""
    if source is None:
        return ""
    _, marker, inside = source.rpartition("site-packages/")
    return inside if marker else os.path.relpath(source)
