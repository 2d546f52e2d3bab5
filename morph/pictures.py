"""Pictures as PNG files, and the colours of every picture and page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from morph.contract.errors import InputError

INK, QUIET = "#22303c", "#8795a1"
BLUE, ORANGE, GREEN, VIOLET, RED, YELLOW = "#2f6db3", "#e08a1e", "#2e8b57", "#6a4c9c", "#c8372d", "#f2c14e"
SKY, GREY, BROWN = "#9cc3e6", "#7a828c", "#4d3b2f"
LINES = (BLUE, ORANGE, GREEN, VIOLET, RED, YELLOW, BROWN, GREY)
"""Colours of lines and bars that must be told apart."""
SOFT = ("#a6cee3", "#b2df8a", "#fdcf8e", "#d4bfe6", "#f7b6b2", "#9fd9cf", "#e6d98f", "#cfd6dd", "#f3bfe0", "#b9c7f0")
"""Colours of areas with dark text."""


@contextmanager
def picture(path: Path, error: type[InputError], size: tuple[float, float], **panels: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes, to be drawn in the block; then write the file.

    ``error``: raised if the file cannot be written; it names the file. ``size``: width and height in inches, 110 dots
    each.
    """
    from matplotlib.figure import Figure  # slow to import, and not needed for the colours

    figure = Figure(figsize=size, layout="constrained")
    yield figure, figure.subplots(**panels)
    try:
        figure.savefig(path, dpi=110, format="png")
    except (OSError, ValueError) as problem:
        raise error(f"cannot be written: {problem}", source=str(path)) from problem


def plain_axes(axes: Any, *, grid: str | None = None, without: tuple[str, ...] = ("top", "right")) -> None:
    """Remove lines from axes, and put a light grid behind the drawing."""
    axes.spines[list(without)].set_visible(False)
    if grid is not None:
        axes.grid(axis=grid, which="major", linewidth=0.5, alpha=0.5)
    axes.set_axisbelow(True)
