"""Telling a silent worker from a manager that stood still itself, and from a network that is gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
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
    """Watches heartbeats.

    Args:
        timeout_s: A silent worker is given up after this.
        outage_timeout_s: Where all are silent together, on several VMs, they are given up after this: it is the
            network, or this machine.
        unheard: Told of each time, in seconds, in which nobody could be heard, when it is over.
    """

    def __init__(
        self, timeout_s: float, outage_timeout_s: float = 0.0, unheard: Callable[[float], None] = lambda _s: None
    ) -> None:
        self._overdue_s = heartbeat_wait_s(timeout_s) + timeout_s
        self._missed_s = 2 * heartbeat_wait_s(timeout_s)
        self._stall_s = min(OWN_STALL_S, timeout_s / 2)
        self._outage_s = max(outage_timeout_s, self._overdue_s)
        self._unheard = unheard
        self._watched_s = time.monotonic()
        self._outage_since_s: float | None = None
        self._told = False

    @property
    def outage(self) -> bool:
        """Whether, at the last look, nobody could be heard, or only just: no wait for anybody can be judged."""
        return self._told or self._outage_since_s is not None

    def overdue(self, workers: Mapping[str, Signs]) -> list[tuple[str, float]]:
        """Workers whose heartbeat is overdue, and for how many seconds they are silent. Ask every ``watch_every_s``.

        Beside a silent worker, others of its VM that missed a heartbeat are silent too: the VM is.

        While this process stood still itself (a paused machine, a stop signal) it could hear nobody: that time
        does not count. Nor does one in which all were silent, once somebody is heard again.
        """
        now_s = time.monotonic()
        deaf_s = now_s - self._watched_s
        self._watched_s, self._told = now_s, False
        if deaf_s > self._stall_s:
            for signs in workers.values():
                signs.beat_sent_s += deaf_s
            self._tell(deaf_s)
        silent_s = {
            worker: now_s - signs.beat_sent_s for worker, signs in workers.items() if signs.ready and not signs.gone
        }
        overdue = {worker: time_s for worker, time_s in silent_s.items() if time_s > self._overdue_s}
        if self._is_outage(silent_s, overdue, now_s):
            return []
        if self._outage_since_s is not None:
            lasted_s, self._outage_since_s = now_s - self._outage_since_s, None
            if min(silent_s.values(), default=0.0) <= self._missed_s:
                for worker in overdue:
                    workers[worker].beat_sent_s = now_s  # it has its time anew to be heard as well
                self._tell(lasted_s)
                return []
        vms = {vm_of(worker) for worker in overdue}
        return [
            (worker, time_s) for worker, time_s in silent_s.items() if time_s > self._missed_s and vm_of(worker) in vms
        ]

    def _tell(self, lasted_s: float) -> None:
        self._told = True
        self._unheard(lasted_s)

    def _is_outage(self, silent_s: Mapping[str, float], overdue: Mapping[str, float], now_s: float) -> bool:
        """Whether all are silent, and not for so long yet that they are given up together."""
        several = len({vm_of(worker) for worker in silent_s}) > 1
        if not several or not overdue or min(silent_s.values()) <= self._missed_s:
            return False
        if self._outage_since_s is None:
            self._outage_since_s = now_s - min(silent_s.values())
        return min(silent_s.values()) <= self._outage_s
