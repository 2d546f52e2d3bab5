"""Grids of alike cases: `make test-long` goes through all of them, every commit through as few as show each value."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

IS_LONG = os.environ.get("MORPH_EXPLORE") == "long"


def cells(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cells of a grid, one value of each axis in each.

    All of them with ``MORPH_EXPLORE=long``; else as many as the longest axis has values, every value of every axis in
    at least one.
    """
    if IS_LONG:
        return list(itertools.product(*axes))
    return [tuple(axis[index % len(axis)] for axis in axes) for index in range(max(map(len, axes)))]
