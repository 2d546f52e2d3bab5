"""Old groups are let go in the background: closing one takes 10-100 ms, which no morph should wait for.

Groups of an aborted generation may still have an operation under way that nobody can end; they are
kept, untouched, until its time-out has passed.
"""

from __future__ import annotations

import queue
import threading
import time

from morph.runtime.groups.channels import GroupSet

MARGIN_S = 5.0


class Reaper:
    """Holds the groups of past generations until they can be closed."""

    def __init__(self) -> None:
        self._clean: queue.Queue[tuple[float, GroupSet]] = queue.Queue()
        self._broken: queue.Queue[tuple[float, GroupSet]] = queue.Queue()
        for groups_due in (self._clean, self._broken):
            threading.Thread(target=_close_when_due, args=(groups_due,), name="morph-reaper", daemon=True).start()

    def reap(self, groups: GroupSet) -> None:
        """Take over groups that are no longer used; returns at once."""
        if groups.broken:
            self._broken.put((time.monotonic() + groups.limit_s + MARGIN_S, groups))
        else:
            self._clean.put((0.0, groups))


def _close_when_due(groups_due: queue.Queue[tuple[float, GroupSet]]) -> None:
    while True:
        due_s, groups = groups_due.get()
        time.sleep(max(0.0, due_s - time.monotonic()))
        groups.clear()
