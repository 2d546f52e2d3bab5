"""Measures the times of a rehearsal's mini-batches, and how busy this machine's cores were with its and other work."""

from __future__ import annotations

import itertools
import statistics
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from manager.controller.state.events import WorkerAnswered
from manager.engine.loop.driver import Observed
from morph.contract.messages import Prepared

WARM_UP_STEPS = 1
_PARTS = ("forward", "recompute", "backward", "reduce", "wait")


@dataclass
class Measured:
    """An observer of the driver that records steps.

    ``decided_s[t]`` is the time when step t was decided, and ``prepared[t]`` has (time, stage, answer) of its workers.
    """

    decided_s: list[float] = field(default_factory=list)
    prepared: dict[int, list[tuple[float, int, Prepared]]] = field(default_factory=dict)

    def __call__(self, observed: Observed) -> None:
        """Record one decision."""
        state, event = observed.decision.state, observed.event
        if isinstance(event, WorkerAnswered) and isinstance(event.answer, Prepared):
            stages = {slot.worker: slot.stage for slot in state.slots}
            entry = (observed.time_s, stages[event.worker], event.answer)
            self.prepared.setdefault(event.answer.step, []).append(entry)
        while len(self.decided_s) < state.version:
            self.decided_s.append(observed.time_s)

    @property
    def mini_batches_s(self) -> tuple[float, ...]:
        """The times from decision to decision of the steps that count."""
        counted = self.decided_s[WARM_UP_STEPS - 1 :]
        return tuple(after - before for before, after in itertools.pairwise(counted))

    @property
    def counted_steps(self) -> range:
        """The steps that count."""
        return range(WARM_UP_STEPS, len(self.decided_s))

    @property
    def turn_s(self) -> float:
        """The median time from a decision until the last worker of the first stage has begun the next step.

        It includes the manager's round trip, and the optimizer step of that stage.
        """
        turns = []
        for step in self.counted_steps:
            begun = [time_s - answer.times.step_s for time_s, stage, answer in self.prepared[step] if stage == 0]
            turns.append(max(begun) - self.decided_s[step - 1])
        return statistics.median(turns)

    @property
    def late_s(self) -> float:
        """The longest delay of a task's end, which shows how far behind the host was."""
        return max(answer.times.late_s for step in self.counted_steps for _, _, answer in self.prepared[step])

    def parts_s(self) -> dict[str, float]:
        """Return seconds per worker and step by kind of work, averaged over workers and the steps that count."""
        answers = [answer for step in self.counted_steps for _, _, answer in self.prepared[step]]
        return {part: statistics.mean(getattr(answer.times, f"{part}_s") for answer in answers) for part in _PARTS}


@dataclass(frozen=True)
class _Counters:
    """The busy seconds of all cores since the machine started, and those of this process and its descendants."""

    busy_s: float
    total_s: float
    own_s: float


class Load:
    """An observer of the driver; reads the machine's counters when ``first`` and when ``last`` is decided.

    Attributes:
        busy_share: The busy share of all cores, with any work.
        others_share: The share of all cores that other work than the rehearsal took.
    """

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._before: _Counters | None = None
        self.busy_share = 0.0
        self.others_share = 0.0

    def __call__(self, observed: Observed) -> None:
        """Observe the decided version."""
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
