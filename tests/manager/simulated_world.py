"""Virtual time, a seeded generator, a log, and the invariants' way to fail."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

from simulated_worker import Faults

from manager.controller.state.events import Event
from manager.controller.state.state import ControllerState, Decision


class BrokenHistoryError(AssertionError):
    """An invariant did not hold; carries the log of the history."""


class World:
    """What happens when, and what went wrong. Events are ordered by (time, sequence number)."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.random = random.Random(seed)
        self.seed, self.faults = seed, faults
        self.now_s = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.sequence = itertools.count()
        self.log: list[str | tuple[float, ControllerState, Event, Decision]] = []

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        """Schedule."""
        self.at_time(self.now_s + delay_s, action)

    def at_time(self, time_s: float, action: Callable[[], None]) -> None:
        """Schedule at an absolute time."""
        heapq.heappush(self.queue, (time_s, next(self.sequence), action))

    def next(self) -> None:
        """Go on to the next thing that happens."""
        self.check(bool(self.queue), "nothing will ever happen again")
        self.now_s, _, action = heapq.heappop(self.queue)
        action()

    @property
    def quiet(self) -> bool:
        """Nothing goes wrong any more, so that every history can end."""
        return self.now_s >= self.faults.quiet_after_s

    def chance(self, probability: float) -> bool:
        """Draw a fault."""
        return probability > 0 and not self.quiet and self.random.random() < probability

    def between(self, least: float, most: float) -> float:
        """Draw a duration, seconds."""
        return least + (most - least) * self.random.random()

    def lag_s(self) -> float:
        """How long a message takes: now and then so long that others overtake it."""
        return self.between(0.0, 3.0) if self.chance(self.faults.late_message) else self.between(0.0, 0.01)

    def note(self, what: str) -> None:
        """Write a line into the history."""
        self.log.append(f"{self.now_s:8.3f} {what}")

    def check(self, holds: bool, what: str) -> None:
        """Fail with the whole history unless ``holds``."""
        if not holds:
            raise self.broken(what)

    def broken(self, what: str) -> BrokenHistoryError:
        """Build the error that shows the history."""
        again = f"python tests/manager/play_history.py {self.seed}"
        return BrokenHistoryError(f"seed {self.seed}: {what}\n{self.told()}\nseed {self.seed}: {what}; again: {again}")

    def told(self) -> str:
        """Return the history as text."""
        return "\n".join(entry if isinstance(entry, str) else _line(*entry) for entry in self.log)


def _line(time_s: float, before: ControllerState, event: Event, decision: Decision) -> str:
    after = decision.state
    return (
        f"{time_s:8.3f} {before.phase:<10} {event.kind} {event.model_dump_json(exclude_defaults=True)[:160]}\n"
        f"         -> {after.phase} v{after.version} g{after.generation} {decision.reason.code}: "
        f"{decision.reason.sentence}"
    )
