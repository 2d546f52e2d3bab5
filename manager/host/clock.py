"""The clock of a run: seconds as the wall clock said when the run began, counted on by the monotonic clock."""

from __future__ import annotations

import time
from collections.abc import Callable


class RunClock:
    """Nobody moves it: neither who sets this machine's clock, nor a manager's death. Wall time is for people alone.

    Args:
        epoch_s: ``epoch_s`` of the manager that began the session, where its VMs live: this machine was not started
            anew since, so that both read one monotonic clock. None: a session begins.
        not_before_s: It begins no earlier, whatever the wall clock says: the journal's last line.
        wall: Seconds since 1970.
        monotonic: Seconds that only grow.
    """

    def __init__(
        self,
        epoch_s: float | None = None,
        not_before_s: float = 0.0,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic = monotonic
        self.epoch_s = max(wall(), not_before_s) - monotonic() if epoch_s is None else epoch_s

    def now_s(self) -> float:
        """Seconds since 1970, as far as the wall clock was right when the session began."""
        return self.epoch_s + self._monotonic()
