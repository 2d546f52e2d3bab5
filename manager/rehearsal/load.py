"""How busy this machine's cores are while a rehearsal's steps run, and with whose work."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import psutil

from manager.engine.driver import Observed


@dataclass(frozen=True)
class _Counters:
    """Seconds of all cores since the machine started, and of this process and those below it since they did."""

    busy_s: float
    total_s: float
    own_s: float


class Load:
    """An observer of the driver; reads the machine's counters when ``first`` and when ``last`` is decided.

    Attributes:
        busy_share: Of all cores, with whatever work.
        others_share: Of all cores, with work that is not the rehearsal's.
    """

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._before: _Counters | None = None
        self.busy_share = 0.0
        self.others_share = 0.0

    def __call__(self, observed: Observed) -> None:
        """Look at the version that is decided."""
        version = observed.decision.state.version
        if version == self._first and self._before is None:
            self._before = _read()
        elif version == self._last and self._before is not None and self.busy_share == 0.0:
            before, after = self._before, _read()
            total_s = max(1e-9, after.total_s - before.total_s)
            self.busy_share = (after.busy_s - before.busy_s) / total_s
            self.others_share = max(0.0, self.busy_share - (after.own_s - before.own_s) / total_s)


def _read() -> _Counters:
    times = psutil.cpu_times()
    total_s = float(sum(times[:8]))  # guest time is part of user time
    idle_s = times.idle + getattr(times, "iowait", 0.0)
    me = psutil.Process()
    own_s = 0.0
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            used = process.cpu_times()
            own_s += used.user + used.system
    return _Counters(total_s - idle_s, total_s, own_s)
