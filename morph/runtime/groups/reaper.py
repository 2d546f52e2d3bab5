"""Closes old groups in the background, because closing one takes 10-100 ms and no morph should wait for that.

Those with an operation that cannot be ended are kept until it is over or its time-out has passed.
"""

from __future__ import annotations

import logging
import queue
import threading
import time

from morph.runtime.groups.channels import GroupSet

log = logging.getLogger(__name__)

MARGIN_S = 5.0
LINGER_S = 5.0
"""Seconds for the last messages over broken groups to arrive before the groups are closed."""
LOOK_EVERY_S = 0.5

_Given = tuple[float, GroupSet]
"""Times and groups to close."""


class Reaper:
    """Holds the groups of past generations until they can be closed."""

    def __init__(self) -> None:
        self._clean: queue.Queue[_Given] = queue.Queue()
        self._broken: queue.Queue[_Given] = queue.Queue()
        for close, given in ((_close_at_once, self._clean), (_close_when_due, self._broken)):
            threading.Thread(target=close, args=(given,), name="morph-reaper", daemon=True).start()

    def reap(self, groups: GroupSet) -> None:
        """Take over groups that are no longer used; returns at once."""
        (self._broken if groups.broken else self._clean).put((time.monotonic(), groups))


def _close_at_once(given: queue.Queue[_Given]) -> None:
    while True:
        _clear(given.get()[1])


def _clear(groups: GroupSet) -> None:
    try:
        groups.clear()
    except Exception:  # no thread waits for these groups, and later ones are still closed
        log.exception("groups of a past generation cannot be closed")


def _close_when_due(given: queue.Queue[_Given]) -> None:
    held: list[_Given] = []
    while True:
        if not held:
            held.append(given.get())
        time.sleep(LOOK_EVERY_S)
        while not given.empty():
            held.append(given.get())
        now_s = time.monotonic()
        held, looked_at = [], held
        for given_s, groups in looked_at:
            kept_s = now_s - given_s
            if kept_s > groups.limit_s + MARGIN_S or (kept_s > LINGER_S and groups.is_idle):
                _clear(groups)
            else:
                held.append((given_s, groups))
