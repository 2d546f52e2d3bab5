"""Tables for a terminal, or for wherever else the output goes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


def wide_console(width: int) -> Console:
    """A console whose tables fit: as wide as the terminal, and wide enough where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=width)


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 0, light: bool = False
) -> Table:
    """A table with one row for each of ``rows``.

    Args:
        title: Above it.
        columns: Their names; numbers stand at the right.
        rows: Their cells.
        left: So many of the first columns are text, at the left, and folded where they are long.
        light: With no lines but one below the names.
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
