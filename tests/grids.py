"""Grids of similar cases: `make test-long` runs all cells, each commit only as many as include every value."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

IS_LONG = os.environ.get("MORPH_EXPLORE") == "long"


def cells(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return cells of a grid, which have one value of each axis.

    With ``MORPH_EXPLORE=long`` these are all cells; otherwise as many as the longest axis has values, so that every
    value of every axis is in at least one.
    """
    if IS_LONG:
        return list(itertools.product(*axes))
    return [tuple(axis[index % len(axis)] for axis in axes) for index in range(max(map(len, axes)))]
