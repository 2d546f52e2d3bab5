"""How busy this machine's cores are while a rehearsal's steps run."""

from __future__ import annotations

import psutil

from manager.engine.driver import Observed


class Load:
    """An observer that tells how busy this machine's cores were from a version on until the last decision."""

    def __init__(self, from_version: int) -> None:
        self._from_version = from_version
        self._before: tuple[float, float] | None = None
        self.share = 0.0

    def __call__(self, observed: Observed) -> None:
        """Look at the counters when a step is decided."""
        version = observed.decision.state.version
        if version < self._from_version:
            return
        self._from_version = version + 1
        busy_s, all_s = _cpu_times_s()
        if self._before is None:
            self._before = (busy_s, all_s)
        elif all_s > self._before[1]:
            self.share = (busy_s - self._before[0]) / (all_s - self._before[1])


def _cpu_times_s() -> tuple[float, float]:
    times = psutil.cpu_times()
    total_s = float(sum(times[:8]))  # guest time is part of user time
    return total_s - times.idle - getattr(times, "iowait", 0.0), total_s
