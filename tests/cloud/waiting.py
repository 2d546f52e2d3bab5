"""Waiting for other processes by polling, for a bounded time."""

from __future__ import annotations

import time
from collections.abc import Callable

BOUND_S = 150.0
LOOK_S = 0.05


def until(holds: Callable[[], object], what: str, bound_s: float = BOUND_S) -> object:
    """Poll until ``holds`` returns a true value, and return it; raise an AssertionError after ``bound_s``."""
    until_s = time.monotonic() + bound_s
    while not (found := holds()):
        assert time.monotonic() < until_s, f"waited {bound_s:g} s for {what}"
        time.sleep(LOOK_S)
    return found
