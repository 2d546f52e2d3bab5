"""Telling a silent worker from a manager that stood still itself."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

HEARTBEAT_WAIT_S = 1.0
"""The longest time between two heartbeats of a healthy worker."""

OWN_STALL_S = 2.0


@dataclass
class Signs:
    """Of one started worker. ``beat_sent_s``: since when its next sign of life is awaited."""

    ready: bool = False
    gone: bool = False
    beat_sent_s: float = field(default_factory=time.monotonic)


class Silence:
    """Watches heartbeats."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._watched_s = time.monotonic()

    def overdue(self, workers: Mapping[str, Signs]) -> list[tuple[str, float]]:
        """Workers whose heartbeat is overdue, and for how many seconds they are silent. Ask at least once a second.

        While this process stood still itself (a paused machine, a stop signal) it could hear nobody: that time
        does not count.
        """
        now_s = time.monotonic()
        deaf_s = now_s - self._watched_s
        self._watched_s = now_s
        if deaf_s > OWN_STALL_S:
            for signs in workers.values():
                signs.beat_sent_s += deaf_s
        return [
            (worker, now_s - signs.beat_sent_s)
            for worker, signs in workers.items()
            if signs.ready and not signs.gone and now_s - signs.beat_sent_s > HEARTBEAT_WAIT_S + self._timeout_s
        ]
