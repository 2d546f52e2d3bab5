"""Waits for other processes and threads: how long they may take, and polling; and a clock that tests move."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest

PATIENCE = float(os.environ.get("MORPH_TEST_PATIENCE", "1"))
"""Every bound of tests is multiplied by this, on machines that are slow or busy."""
BOUND_S = 150.0 * PATIENCE
"""How long a test waits for what usually takes seconds at most."""
START_S = 300.0 * PATIENCE
"""``policy.start_patience_s`` of runs that are to begin with all of their VMs, however slowly these boot."""


def poll_until(holds: Callable[[], object], what: str, every_s: float = 0.01) -> object:
    """Poll until ``holds`` returns a true value, and return it; raise an AssertionError after ``BOUND_S``."""
    until_s = time.monotonic() + BOUND_S
    while not (found := holds()):
        assert time.monotonic() < until_s, f"waited {BOUND_S:g} s for {what}"
        time.sleep(every_s)
    return found


def own_time(monkeypatch: pytest.MonkeyPatch, module: ModuleType, **functions: Callable[..., object]) -> None:
    """Replace some functions of ``time`` in one module: threads that an earlier test left may call the others."""
    monkeypatch.setattr(module, "time", SimpleNamespace(**vars(time) | functions))


@dataclass
class Clock:
    """A clock that stands until a test moves it."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s
