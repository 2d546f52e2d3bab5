"""Restarts a run whose cluster was lost, or that rests without VMs, with growing pauses, up to a limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import count

from manager.controller.state.actions import Finish
from manager.controller.steps.recovery import PAUSES
from manager.engine.loop.driver import Observed
from manager.host.signals import stopping_on_signals
from morph.contract.errors import ClusterError, ClusterLost
from morph.contract.waits import Backoff

RESTS = Backoff(first_s=60.0, most_s=3600.0)
"""Rests without VMs, after consecutive sessions whose VMs achieved nothing."""


class Restarts:
    """Counts the attempts since a step was last decided. It observes every session.

    ``give_up_after_s``: the run ends if no step is decided for this time after the cluster was lost. ``clock``:
    monotonic, in seconds. ``rest_at_most_s``: the longest rest without VMs of a run that decides no step. ``has_run``:
    whether a session has decided anything yet.
    """

    def __init__(
        self, give_up_after_s: float, clock: Callable[[], float] = time.monotonic, rest_at_most_s: float = 0.0
    ) -> None:
        self._give_up_after_s, self._rest_at_most_s = give_up_after_s, rest_at_most_s
        self._resting_since_s: float | None = None
        self._num_rests = 0
        self._clock = clock
        self._since_s: float | None = None
        self._num_tries = 0
        self._version: int | None = None
        self._stopping = False
        self._goes_on = self.has_run = False

    def begin_at(self, version: int) -> None:
        """Record that a session begins at this version; above 0 a cluster was up before, so a lost one is replaced."""
        self._goes_on = version > 0

    def __call__(self, observed: Observed) -> None:
        """Record a decision; a new step resets the count of attempts."""
        self.has_run = True
        state = observed.decision.state
        version = state.version
        if state.failing is None or not state.failing.final:  # a final error stops the run as well
            self._stopping = state.stop_reason is not None
        if self._version is not None and version > self._version:
            self._since_s, self._num_tries = None, 0
            self._resting_since_s, self._num_rests, self._goes_on = None, 0, True
        self._version = version

    def rest_s(self) -> float | None:
        """Return how long to rest without VMs; None: the run never decided a step, or has rested long enough."""
        now_s = self._clock()
        since_s = self._resting_since_s = now_s if self._resting_since_s is None else self._resting_since_s
        if not self._goes_on or now_s >= since_s + self._rest_at_most_s:
            return None
        self._num_rests += 1
        self._version = None
        return RESTS.pause_s(self._num_rests - 1)

    def pause_s(self, error: ClusterError) -> float:
        """Return how long to wait before the next attempt; the first follows at once.

        ClusterError: ``error`` itself, if the run never had a cluster or was stopping anyway; or that the limit is
        reached.
        """
        never_up = not (self._num_tries or self._goes_on or isinstance(error, ClusterLost))
        if self._stopping or never_up:
            raise error
        now_s = self._clock()
        self._since_s = now_s if self._since_s is None else self._since_s
        if now_s >= self._since_s + self._give_up_after_s:
            limit = f"{self._give_up_after_s:g} s (policy.give_up_after_s of the cluster file)"
            raise ClusterError(
                f"{error}; no step was decided for {limit}; the same command continues from the newest checkpoint"
            ) from error
        pause_s = PAUSES.pause_s(self._num_tries - 1) if self._num_tries else 0.0
        self._num_tries += 1
        self._version = None  # the next session may begin at an earlier one
        return pause_s


def run_until_it_ends(session: Callable[[int], Finish], restarts: Restarts, tell: Callable[[str], None]) -> Finish:
    """Run one session after another until one ends for good, or a signal asks for a stop between two sessions.

    ``session``: runs the session of this number, from 0. ``tell``: called with a sentence when a cluster is lost or the
    run rests. ClusterError: the cluster never came up, or the limit is reached.
    """
    for number in count():
        try:
            finish = session(number)
            rest_s = restarts.rest_s() if finish.rests else None
            if rest_s is None:
                return finish
            pause_s = rest_s
            tell(f"{finish.sentence}; the run rests without VMs, and tries again in {pause_s:g} s")
        except ClusterError as error:
            pause_s = restarts.pause_s(error)
            when = f"in {pause_s:g} s" if pause_s else "at once"
            tell(f"{error}; the run goes on from its newest checkpoint {when}")
        requested = _wait(pause_s)
        if requested is not None:
            return Finish(outcome="stopped", sentence=f"{requested} before the run had a cluster again")
    raise AssertionError("an endless count ended")


def _wait(pause_s: float) -> str | None:
    requested: list[str] = []
    stop = threading.Event()

    def note(reason: str) -> None:
        requested.append(reason)
        stop.set()

    with stopping_on_signals(note):
        stop.wait(pause_s)
    return requested[0] if requested else None
