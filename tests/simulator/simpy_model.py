"""The rules of ``playing.engine`` once more, as a short SimPy model: the oracle of its tests, not for speed.

The other half of the oracle, for given orders on shared links and cores, is :mod:`tests.simulator.simpy_following`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import simpy
from simpy.events import Event, EventPriority

from simulator.engine.times import StageTimes

Task = tuple[str, int]
"""(letter, start_ns)"""


class Turn(Event):
    """Fires at this instant, after every task that ends now has ended, in the order of ``priority``."""

    def __init__(self, env: simpy.Environment, priority: int) -> None:
        super().__init__(env)
        self._ok, self._value = True, None
        env.schedule(self, priority=EventPriority(priority))


class _Stage:
    def __init__(self, model: _Model, replica: int, index: int) -> None:
        self.model, self.replica, self.index = model, replica, index
        self.activations: list[int] = []
        self.gradients: list[int] = []
        self.forwards = self.recomputes = self.backwards = 0
        self.activation_free = self.gradient_free = 0
        self.tasks: list[Task] = []
        self.news = model.env.event()

    def tell(self) -> None:
        if not self.news.triggered:
            self.news.succeed()

    def choose(self) -> tuple[str | None, int | None]:
        """The letter to run now, else the instant at which something may have changed, if known."""
        times, now, s = self.model.times, self.model.env.now, self.index
        is_last, again = s == times.num_stages - 1, bool(times.recompute[s])
        j = self.backwards
        gradient = self.gradients[j] if j < len(self.gradients) else (0 if is_last and j < self.forwards else None)
        if self.recomputes > self.backwards:
            return ("B", None) if gradient is not None and gradient <= now else (None, gradient)
        instants, early = [], False
        if gradient is not None and j < self.forwards:
            if gradient <= now:
                return ("R" if again else "B"), None
            early = again and gradient - int(times.recompute_ns[s]) <= now
            instants.append(gradient - int(times.recompute_ns[s]) if again and not early else gradient)
        if self.forwards < self.model.counts[self.replica] and self.forwards - self.backwards < int(times.window[s]):
            arrival = 0 if s == 0 else None
            if self.forwards < len(self.activations):
                arrival = self.activations[self.forwards]
            if arrival is not None and arrival <= now:
                return "F", None
            if arrival is not None:
                instants.append(arrival)
        return ("R", None) if early else (None, min(instants, default=None))

    def begin(self, letter: str) -> int:
        """Announce what the task will deliver and when; return its duration in ns."""
        times, now, s = self.model.times, int(self.model.env.now), self.index
        self.tasks.append((letter, now))
        stages = self.model.stages[self.replica]
        if letter == "R":
            return int(times.recompute_ns[s])
        if letter == "F":
            duration = int(times.forward_ns[s])
            self.forwards += 1
            if s + 1 < len(stages):
                leaves = max(now + duration, self.activation_free)
                self.activation_free = leaves + int(times.wires_ns[0][s])
                stages[s + 1].activations.append(leaves + int(times.activation_ns[s]))
                stages[s + 1].tell()
            return duration
        duration = int(times.backward_ns[s])
        if s > 0:
            leaves = max(now + duration, self.gradient_free)
            self.gradient_free = leaves + int(times.wires_ns[1][s - 1])
            stages[s - 1].gradients.append(leaves + int(times.gradient_ns[s - 1]))
            stages[s - 1].tell()
        return duration

    def run(self) -> Generator[Event, Any, None]:
        env, counts = self.model.env, self.model.counts
        turn = 2 + (self.model.times.num_stages - 1 - self.index) * len(counts) + self.replica
        while self.backwards < counts[self.replica]:
            yield Turn(env, turn)
            letter, instant = self.choose()
            if letter is None:
                self.news = env.event()
                yield self.news if instant is None else self.news | env.timeout(instant - env.now)
                continue
            yield env.timeout(self.begin(letter))
            self.recomputes += letter == "R"
            if letter == "B":
                self.backwards += 1
                self.recomputes = self.backwards


class _Model:
    def __init__(self, times: StageTimes, counts: tuple[int, ...]) -> None:
        self.env = simpy.Environment(initial_time=0)
        self.times, self.counts = times, counts
        self.stages = [[_Stage(self, d, s) for s in range(times.num_stages)] for d in range(len(counts))]


def play_with_simpy(times: StageTimes, counts: tuple[int, ...]) -> list[list[list[Task]]]:
    """Play one mini-batch under the Varuna rules; returns tasks[replica][stage] = [(letter, start_ns), ...]."""
    model = _Model(times, counts)
    for stages in model.stages:
        for stage in stages:
            model.env.process(stage.run())
    model.env.run()
    return [[stage.tasks for stage in stages] for stages in model.stages]
