"""Waits for other processes and threads."""

from __future__ import annotations

import time
from collections.abc import Callable

ANSWER_S = 150.0


def poll_until(condition: Callable[[], bool], what: str, timeout_s: float = ANSWER_S) -> None:
    """Poll until ``condition`` holds; fail after ``timeout_s``."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.01)
