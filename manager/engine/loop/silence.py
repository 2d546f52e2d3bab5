"""Tells a silent worker from a paused manager, and from a network failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from morph.contract.vm_names import vm_of

HEARTBEAT_WAIT_S = 1.0
OWN_STALL_S = 2.0
WATCH_S = 0.5


def heartbeat_wait_s(timeout_s: float) -> float:
    """Return the longest time between two heartbeats of a healthy worker, given the time-out of silent workers."""
    return min(HEARTBEAT_WAIT_S, timeout_s / 4)


def watch_every_s(timeout_s: float) -> float:
    """Return how often to look for silent workers."""
    return min(WATCH_S, timeout_s / 8)


@dataclass
class Signs:
    """The signs of life of one started worker. ``beat_sent_s``: the time from which the next one is awaited."""

    ready: bool = False
    gone: bool = False
    beat_sent_s: float = field(default_factory=time.monotonic)


class Silence:
    """Watches heartbeats. A silent worker is given up after ``timeout_s``.

    If all workers are silent together, on several VMs, they are given up after ``outage_timeout_s``: the cause is the
    network or this machine. ``unheard`` is called at the end of each time in which no worker could be heard, with its
    seconds.
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
        """Whether no worker could be heard at, or just before, the last look, so that time-outs cannot be judged."""
        return self._told or self._outage_since_s is not None

    def overdue(self, workers: Mapping[str, Signs]) -> list[tuple[str, float]]:
        """Return workers whose heartbeat is overdue, and their seconds of silence. Call it every ``watch_every_s``.

        If a worker is silent, others of its VM that missed a heartbeat count as silent too, because the VM is silent.

        While this process was paused (with its machine, or by a signal) it could hear no worker, so that time does not
        count. Nor does a time in which all workers were silent, once one is heard again.
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
                    workers[worker].beat_sent_s = now_s  # it gets the whole time again
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
        """Return whether all are silent, but not yet long enough to be given up together."""
        several = len({vm_of(worker) for worker in silent_s}) > 1
        if not several or not overdue or min(silent_s.values()) <= self._missed_s:
            return False
        if self._outage_since_s is None:
            self._outage_since_s = now_s - min(silent_s.values())
        return min(silent_s.values()) <= self._outage_s
