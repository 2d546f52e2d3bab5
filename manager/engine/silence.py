"""Telling a silent worker from a manager that stood still itself."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from morph.contract.vm_names import vm_of

HEARTBEAT_WAIT_S = 1.0
OWN_STALL_S = 2.0
WATCH_S = 0.5


def heartbeat_wait_s(timeout_s: float) -> float:
    """The longest time between two heartbeats of a healthy worker, where a silent one is given up after so long."""
    return min(HEARTBEAT_WAIT_S, timeout_s / 4)


def watch_every_s(timeout_s: float) -> float:
    """How often to look for silent workers."""
    return min(WATCH_S, timeout_s / 8)


@dataclass
class Signs:
    """Of one started worker. ``beat_sent_s``: since when its next sign of life is awaited."""

    ready: bool = False
    gone: bool = False
    beat_sent_s: float = field(default_factory=time.monotonic)


class Silence:
    """Watches heartbeats."""

    def __init__(self, timeout_s: float) -> None:
        self._overdue_s = heartbeat_wait_s(timeout_s) + timeout_s
        self._missed_s = 2 * heartbeat_wait_s(timeout_s)
        self._stall_s = min(OWN_STALL_S, timeout_s / 2)
        self._watched_s = time.monotonic()

    def overdue(self, workers: Mapping[str, Signs]) -> list[tuple[str, float]]:
        """Workers whose heartbeat is overdue, and for how many seconds they are silent. Ask every ``watch_every_s``.

        Beside a silent worker, others of its VM that missed a heartbeat are silent too: the VM is.

        While this process stood still itself (a paused machine, a stop signal) it could hear nobody: that time
        does not count.
        """
        now_s = time.monotonic()
        deaf_s = now_s - self._watched_s
        self._watched_s = now_s
        if deaf_s > self._stall_s:
            for signs in workers.values():
                signs.beat_sent_s += deaf_s
        silent_s = {
            worker: now_s - signs.beat_sent_s for worker, signs in workers.items() if signs.ready and not signs.gone
        }
        vms = {vm_of(worker) for worker, time_s in silent_s.items() if time_s > self._overdue_s}
        return [
            (worker, time_s) for worker, time_s in silent_s.items() if time_s > self._missed_s and vm_of(worker) in vms
        ]
