"""Prints tables for a terminal or another output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table


def wide_console(width: int | None = None, file: TextIO | None = None) -> Console:
    """Return a console that is as wide as the terminal, or has ``width`` columns without one.

    It prints text as it is: names and paths of users may look like rich's markup or its codes for emoji.
    """
    console = Console(file=file, markup=False, emoji=False)
    if width is not None and not console.is_terminal:
        console.width = width
    return console


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 0, light: bool = False
) -> Table:
    """Return a table with one row for each of ``rows``; numbers are aligned to the right.

    The first ``left`` columns are text, aligned to the left and folded if they are long. ``light``: whether to draw no
    lines except one below the names.
    """
    look: dict[str, Any] = {"box": box.SIMPLE, "pad_edge": False, "collapse_padding": True} if light else {}
    made = Table(title=title, title_justify="left", **look)
    for place, name in enumerate(columns):
        if place < left:
            made.add_column(name, overflow="fold")
        else:
            made.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        made.add_row(*map(str, row))
    return made
