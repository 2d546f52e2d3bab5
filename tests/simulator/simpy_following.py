"""What ``playing.following`` plays once more, as a short SimPy model: the oracle of its tests, not for speed.

Who decides is an argument, so that the executor's own ``ScheduleFollower`` can.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from fractions import Fraction
from math import ceil
from typing import Any, Protocol

import simpy
from simpy.events import Event

from simulator.engine.following import ShapeTimes
from tests.simulator.simpy_model import Task, Turn


class Follower(Protocol):
    """One stage's decisions, as ``ScheduleFollower`` of ``morph.runtime.step``; tasks are the letters F, R and B."""

    @property
    def finished(self) -> bool:
        """Whether every task is done."""

    def done(self, task: Any) -> None:
        """Record that a task was run."""

    def next_task(self, activations: int, gradients: int) -> Any:
        """The task to run now, or None, given how many inputs have arrived."""


class _Channel:
    """Messages of one direction between two workers: one after the other on the wire, in order behind it."""

    def __init__(self, model: _Model, wire_ns: int, latency_ns: Sequence[int], out: int, into: int) -> None:
        self.model, self.wire_ns, self.latency_ns, self.out, self.into = model, wire_ns, latency_ns, out, into
        self.waiting = simpy.Store(model.env)
        self.changed = model.env.event()
        self.last_arrival = 0
        model.env.process(self.run())

    @property
    def shares(self) -> bool:
        return self.model.times.share_links and self.out != self.into

    def run(self) -> Generator[Event, Any, None]:
        env, number = self.model.env, 0
        while True:
            deliver = yield self.waiting.get()
            if self.shares:
                yield from self.transmit()
            else:
                yield env.timeout(self.wire_ns)
            latency_ns = int(self.latency_ns[min(number, len(self.latency_ns) - 1)])
            self.last_arrival = max(self.last_arrival, int(env.now) + latency_ns)
            env.process(self.arrive(deliver, self.last_arrival))
            number += 1

    def transmit(self) -> Generator[Event, Any, None]:
        env, flows, left = self.model.env, self.model.flows, Fraction(max(1, self.wire_ns))
        flows.append(self)
        self.model.tell_channels(self)
        while left > 0:
            self.changed = env.event()
            began, share = env.now, self.model.share_of(self)
            yield env.timeout(ceil(left * share)) | self.changed
            left -= Fraction(int(env.now - began), share)
        flows.remove(self)
        self.model.tell_channels(self)

    def arrive(self, deliver: Callable[[], None], instant: int) -> Generator[Event, Any, None]:
        yield self.model.env.timeout(instant - self.model.env.now)
        deliver()


class _Worker:
    def __init__(self, model: _Model, stage: int, replica: int, follower: Follower, count: int) -> None:
        self.model, self.stage, self.replica, self.follower = model, stage, replica, follower
        self.activations = count if stage == 0 else 0
        self.gradients = self.forwards = 0
        self.tasks: list[Task] = []
        self.copies = 0
        self.redundant: dict[str, list[int]] = {"f": [], "b": []}
        self.spent = dict.fromkeys("fb", 0)
        self.news = model.env.event()

    def tell(self) -> None:
        if not self.news.triggered:
            self.news.succeed()

    def take_activation(self) -> None:
        self.activations += 1
        self.tell()

    def take_gradient(self) -> None:
        self.gradients += 1
        self.tell()

    def take_copy(self) -> None:
        self.copies += 1
        self.tell()

    def redundant_ns(self, letter: str, number: int) -> int | None:
        """What a redundant task takes; None where it is not to be run, or its input is not there."""
        times = self.model.times
        of_kind = times.redundant_forward_ns if letter == "f" else times.redundant_backward_ns
        there = self.forwards if letter == "f" else len(self.redundant["f"])
        if letter == "b" and self.stage != times.num_stages - 2:
            there = min(there, self.copies)
        if of_kind is None or number >= there:
            return None
        durations = of_kind[self.stage, self.replica]
        return int(durations[min(number, len(durations) - 1)])

    def wait(self) -> Generator[Event, Any, None]:
        """Run what is redundant until there are news, forwards first."""
        env = self.model.env
        while not self.news.triggered:
            lengths = {letter: self.redundant_ns(letter, len(self.redundant[letter])) for letter in "fb"}
            letter = next((letter for letter, length in lengths.items() if length is not None), None)
            if letter is None:
                yield self.news
                return
            began, length = int(env.now), lengths[letter]
            assert length is not None
            yield self.news | env.timeout(length - self.spent[letter])
            self.spent[letter] += int(env.now) - began
            if self.spent[letter] == length:
                self.redundant[letter].append(int(env.now))
                self.spent[letter] = 0

    def catch_up(self, letter: str, done: int) -> Generator[Event, Any, None]:
        """Run what is overdue before a task, as of now."""
        kind = {"F": "f", "B": "b"}.get(letter)
        late = [] if kind is None else range(len(self.redundant[kind]), done - 1)
        lengths = [length for number in late if (length := self.redundant_ns(str(kind), number)) is not None]
        for length in lengths:
            yield self.model.env.timeout(length - self.spent[str(kind)])
            self.spent[str(kind)] = 0
            self.redundant[str(kind)].append(int(self.model.env.now))

    def run(self) -> Generator[Event, Any, None]:
        model, env, times = self.model, self.model.env, self.model.times
        is_last = self.stage == times.num_stages - 1
        turn = 2 + (times.num_stages - 1 - self.stage) * times.num_replicas + self.replica
        lengths = {"F": times.forward_ns, "R": times.recompute_ns, "B": times.backward_ns}
        done = dict.fromkeys("FRB", 0)
        while not self.follower.finished:
            yield Turn(env, turn)
            task = self.follower.next_task(self.activations, self.forwards if is_last else self.gradients)
            if task is None:
                self.news = env.event()
                yield from self.wait()
                continue
            letter = str(task)
            yield from self.catch_up(letter, done[letter])
            durations = lengths[letter][self.stage, self.replica]
            with model.slots.request() as slot:
                yield slot
                self.tasks.append((letter, int(env.now)))
                yield env.timeout(int(durations[min(done[letter], len(durations) - 1)]))
            done[letter] += 1
            self.follower.done(task)
            self.forwards = done["F"]
            self.send(letter, is_last)
        while True:
            self.news = env.event()
            yield from self.wait()

    def send(self, letter: str, is_last: bool) -> None:
        if letter == "F" and not is_last:
            receiver = self.model.workers[self.stage + 1, self.replica]
            self.model.channels["F", self.stage, self.replica].waiting.put(receiver.take_activation)
        elif letter == "B" and self.stage > 0:
            receiver = self.model.workers[self.stage - 1, self.replica]
            self.model.channels["B", self.stage, self.replica].waiting.put(receiver.take_gradient)
            if self.model.times.redundant_backward_ns is not None:
                predecessor = self.model.workers[(self.stage - 2) % self.model.times.num_stages, self.replica]
                self.model.channels["copy", self.stage, self.replica].waiting.put(predecessor.take_copy)


class _Model:
    def __init__(
        self,
        times: ShapeTimes,
        counts: Sequence[int],
        make_follower: Callable[[int, int], Follower],
        compute_slots: int | None,
    ) -> None:
        self.env, self.times = simpy.Environment(initial_time=0), times
        self.flows: list[_Channel] = []
        lanes = [(s, d) for s in range(times.num_stages) for d in range(times.num_replicas)]
        self.slots = simpy.Resource(self.env, capacity=compute_slots or len(lanes))
        self.workers = {(s, d): _Worker(self, s, d, make_follower(s, d), counts[d]) for s, d in lanes}
        self.channels: dict[tuple[str, int, int], _Channel] = {}
        for s, d in lanes:
            node = int(times.node[s, d])
            if s + 1 < times.num_stages:
                wire, latency = int(times.activation_wire_ns[s, d]), times.activation_ns[s, d].tolist()
                self.channels["F", s, d] = _Channel(self, wire, latency, node, int(times.node[s + 1, d]))
            if s > 0:
                wire, latency = int(times.gradient_wire_ns[s - 1, d]), times.gradient_ns[s - 1, d].tolist()
                self.channels["B", s, d] = _Channel(self, wire, latency, node, int(times.node[s - 1, d]))
                far = times.num_stages > 2
                into = int(times.node[(s - 2) % times.num_stages, d])
                self.channels["copy", s, d] = _Channel(self, wire * far, [ns * far for ns in latency], node, into)

    def share_of(self, channel: _Channel) -> int:
        out = sum(flow.out == channel.out for flow in self.flows)
        return max(out, sum(flow.into == channel.into for flow in self.flows))

    def tell_channels(self, channel: _Channel) -> None:
        for flow in self.flows:
            near = flow.out == channel.out or flow.into == channel.into
            if flow is not channel and near and not flow.changed.triggered:
                flow.changed.succeed()


def follow_with_simpy(
    times: ShapeTimes,
    counts: Sequence[int],
    make_follower: Callable[[int, int], Follower],
    compute_slots: int | None = None,
) -> tuple[list[list[list[Task]]], dict[tuple[int, int], dict[str, list[int]]]]:
    """Play one mini-batch with a follower for each (stage, replica).

    Returns:
        tasks[replica][stage] = [(letter, start_ns), ...], and by (stage, replica) when the redundant forwards "f" and
        backwards "b" ended, in ns.
    """
    model = _Model(times, counts, make_follower, compute_slots)
    for worker in model.workers.values():
        model.env.process(worker.run())
    model.env.run()
    tasks = [[model.workers[s, d].tasks for s in range(times.num_stages)] for d in range(times.num_replicas)]
    return tasks, {where: worker.redundant for where, worker in model.workers.items()}
