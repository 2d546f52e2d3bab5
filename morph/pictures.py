"""Pictures as PNG files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from morph.contract.errors import InputError


@contextmanager
def picture(path: Path, error: type[InputError], size: tuple[float, float], **panels: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes, to be drawn in the block; then write the file.

    Args:
        path: The file.
        error: Raised if it cannot be written, naming it.
        size: Width and height in inches, 110 dots each.
        panels: Arguments of ``Figure.subplots``.
    """
    figure = Figure(figsize=size, layout="constrained")
    yield figure, figure.subplots(**panels)
    try:
        figure.savefig(path, dpi=110, format="png")
    except (OSError, ValueError) as problem:
        raise error(f"cannot be written: {problem}", source=str(path)) from problem


def plain_axes(axes: Any, *, grid: str | None = None, without: tuple[str, ...] = ("top", "right")) -> None:
    """Take lines away from axes, and put a light grid behind what is drawn."""
    axes.spines[list(without)].set_visible(False)
    if grid is not None:
        axes.grid(axis=grid, which="major", linewidth=0.5, alpha=0.5)
    axes.set_axisbelow(True)
