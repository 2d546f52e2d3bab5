"""The reference engine: the pipelines of a mini-batch as SimPy processes, in the words of the rules.

It plays what the compiled loops play (:mod:`simulator.engine.pipeline` and :mod:`simulator.engine.execution`), to the
nanosecond, and is written to be read: tests hold the loops against it, and docs/how-it-works/simulator.md quotes it.
Each stage of each replica is a process (``StageWorker``), and so is each direction between two of them (``Channel``).

The first rule that applies decides what a worker runs next. Tasks are the letters F (forward), R (recompute) and B
(backward). At one instant everything ends and arrives first; then workers decide, the last stage first and in it the
lowest replica.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Mapping, Sequence
from fractions import Fraction
from math import ceil, inf
from typing import Any

import numpy as np
import simpy

from morph.contract.errors import PlanError
from morph.contract.plan import Schedule
from simulator.engine.execution import ShapeTimes, lane_times
from simulator.engine.schedules import fixed_order
from simulator.engine.times import Ints, Played, StageTimes

MOST_TASKS = 2**18
"""The most tasks of one mini-batch, which take up to a minute of processor time."""
WAIT = ""
Acting = Generator[simpy.Event, Any, None]
Decide = Callable[["StageWorker"], str]
"""The letter of the task to run now, or ``WAIT``."""


# --- rules ---------------------------------------------------------------------------------------------------
Rules = tuple[Callable[["StageWorker"], str | None], ...]


def backward_after_recompute(worker: StageWorker) -> str | None:
    """After a recompute nothing but its backward runs: its activations fill the memory (Varuna, 3.2, constraint 2)."""
    if worker.done["R"] > worker.done["B"]:
        return "B" if worker.gradient_is_there else WAIT
    return None


def backward_first(worker: StageWorker) -> str | None:
    """A backward that is ready goes before a forward (Varuna, 3.2, constraint 3), and its recompute before it."""
    if worker.gradient_is_there:
        return "R" if worker.recomputes else "B"
    return None


def forward_within_window(worker: StageWorker) -> str | None:
    """A forward that is ready runs while fewer than ``window`` micro-batches are in flight: each takes memory."""
    if worker.activation_is_there and worker.done["F"] - worker.done["B"] < worker.window:
        return "F"
    return None


def recompute_in_time(worker: StageWorker) -> str | None:
    """A recompute begins so early that it ends when the gradient arrives (Varuna, 3.2, constraint 1).

    When the gradient will arrive is known once the next stage has begun its backward.
    """
    begin_ns = worker.recompute_ns
    return "R" if begin_ns is not None and begin_ns <= worker.now_ns else None


def forward_that_is_due(worker: StageWorker) -> str | None:
    """Where the order has a forward next, the worker runs it or waits for its activation."""
    if worker.due == "F":
        return "F" if worker.activation_is_there else WAIT
    return None


def backward_that_is_due(worker: StageWorker) -> str | None:
    """Where the order has a backward next, it runs once its gradient is there."""
    return "B" if worker.due == "B" and worker.gradient_is_there else None


def recompute_that_is_due(worker: StageWorker) -> str | None:
    """Where the order has a recompute next, it runs, whether or not it is known when the gradient will arrive."""
    return "R" if worker.due == "R" else None


VARUNA: Rules = (backward_after_recompute, backward_first, forward_within_window, recompute_in_time)
"""The rules that make the order of a plan: Varuna's static schedule."""
FOLLOWING: Rules = (
    backward_after_recompute,
    backward_first,
    forward_that_is_due,
    forward_within_window,  # while the gradient for the due backward is missing
    recompute_that_is_due,
)
"""An executor follows the order and deviates from it where a gradient is late (Varuna, 3.2: opportunistically)."""
STRICT: Rules = (backward_after_recompute, forward_that_is_due, backward_that_is_due, recompute_that_is_due)
"""GPipe and 1F1B keep to their orders."""


def by_rules(rules: Rules) -> Decide:
    """Return the decision by the first rule that applies; if none does, the worker waits."""
    return lambda worker: next((said for rule in rules if (said := rule(worker)) is not None), WAIT)


# --- processes -----------------------------------------------------------------------------------------------


class StageWorker:
    """One stage of one replica.

    ``done`` counts tasks by letter, ``activations`` and ``gradients`` are inputs that have arrived; the first stage has
    all activations, and the last one the gradient of each forward that it has run. ``gradients_due_ns``: arrivals of
    gradients, as far as they are known.
    """

    def __init__(self, play: _Play, stage: int, replica: int, window: int, order: str, decide: Decide) -> None:
        self.play, self.stage, self.replica, self.window, self.order = play, stage, replica, window, order
        self.decide = decide
        self.is_first, self.is_last = stage == 0, stage == play.times.num_stages - 1
        self.recomputes = bool(play.times.recompute[stage])
        self.count = play.counts[replica]
        self.done = dict.fromkeys("FRB", 0)
        self.activations, self.gradients = self.count if self.is_first else 0, 0
        self.gradients_due_ns: list[int] = []
        self.tasks: list[tuple[str, int]] = []
        self.last_backward_ns = 0
        self.news = play.env.event()
        self.redundant = RedundantTasks(self)
        self._position, self._seen = 0, dict.fromkeys("FRB", 0)

    @property
    def now_ns(self) -> int:
        """Virtual time."""
        return int(self.play.env.now)

    @property
    def activation_is_there(self) -> bool:
        """Whether the next forward can run."""
        return self.done["F"] < min(self.activations, self.count)

    @property
    def gradient_is_there(self) -> bool:
        """Whether nothing but a recompute is missing for the next backward."""
        return self.done["B"] < (self.done["F"] if self.is_last else self.gradients)

    @property
    def recompute_ns(self) -> int | None:
        """When the next recompute must begin to end as the gradient arrives; None: not known."""
        if not self.recomputes or len(self.gradients_due_ns) <= self.done["B"]:
            return None
        return self.gradients_due_ns[self.done["B"]] - self.duration_ns("R")

    @property
    def due(self) -> str:
        """The first letter of the order that was not run."""
        while self._seen[self.order[self._position]] < self.done[self.order[self._position]]:
            self._seen[self.order[self._position]] += 1
            self._position += 1
        return self.order[self._position]

    def duration_ns(self, letter: str) -> int:
        """Return the duration of the next task of this kind."""
        durations = self.play.durations_ns[letter][self.stage, self.replica]
        return int(durations[min(self.done[letter], len(durations) - 1)])

    def tell(self) -> None:
        """Wake the worker if it waits, so that it decides again after a change."""
        if not self.news.triggered:
            self.news.succeed()

    def take_activation(self) -> None:
        """An activation has arrived."""
        self.activations += 1
        self.tell()

    def take_gradient(self) -> None:
        """A gradient has arrived."""
        self.gradients += 1
        self.tell()

    def run(self) -> Acting:
        """The process: one task after the other, and waits."""
        env, play = self.play.env, self.play
        while self.done["B"] < self.count:
            yield play.turn(self)
            letter = self.decide(self)
            if letter == WAIT:
                yield from self.wait()
                continue
            yield from self.redundant.catch_up(letter)
            with play.slots.request() as slot:
                yield slot
                duration_ns = self.duration_ns(letter)
                self.tasks.append((letter, self.now_ns))
                if letter == "B" and not self.is_first and play.plans:
                    self._announce_gradient(self.now_ns + duration_ns)
                yield env.timeout(duration_ns)
            self.done[letter] += 1
            self._send(letter)
        self.last_backward_ns = self.now_ns
        while self.redundant:
            yield from self.wait()

    def wait(self) -> Acting:
        """Wait for a change, or until a recompute must begin; run redundant tasks meanwhile."""
        self.news, instant = self.play.env.event(), self.recompute_ns
        if self.redundant:
            yield from self.redundant.run(self.news)
        elif instant is not None and instant > self.now_ns:
            yield self.news | self.play.env.timeout(instant - self.now_ns)
        else:
            yield self.news

    def _announce_gradient(self, end_ns: int) -> None:
        """Tell the previous stage when the gradient of this backward will arrive."""
        before = self.play.workers[self.stage - 1, self.replica]
        before.gradients_due_ns.append(self.play.channels["B", self.stage, self.replica].arrival_ns(end_ns))
        before.tell()

    def _send(self, letter: str) -> None:
        stage, replica, workers = self.stage, self.replica, self.play.workers
        if letter == "F" and not self.is_last:
            self.play.channels["F", stage, replica].send(workers[stage + 1, replica].take_activation)
        elif letter == "B" and not self.is_first:
            self.play.channels["B", stage, replica].send(workers[stage - 1, replica].take_gradient)
            if self.play.times.redundant_backward_ns is not None:
                predecessor = workers[(stage - 2) % self.play.times.num_stages, replica]
                self.play.channels["copy", stage, replica].send(predecessor.redundant.take_copy)


class RedundantTasks:
    """Tasks of the next stage that a worker computes while it has no task of its own (Bamboo, 5.2).

    Forwards (FRC) are "f" and backwards (BRC) "b"; ``spans`` has the first begin and the end of each. The worker's own
    tasks take precedence: they interrupt a redundant task, which continues later.
    """

    def __init__(self, worker: StageWorker) -> None:
        times, where = worker.play.times, (worker.stage, worker.replica)
        given = {"f": times.redundant_forward_ns, "b": times.redundant_backward_ns}
        self._worker, self._env = worker, worker.play.env
        self._durations = {kind: of_all[where] for kind, of_all in given.items() if of_all is not None}
        self._copies = 0
        self.spans: dict[str, list[tuple[int, int]]] = {kind: [] for kind in self._durations}
        self._begun_ns, self._spent_ns = dict.fromkeys("fb", 0), dict.fromkeys("fb", 0)

    def __bool__(self) -> bool:
        return bool(self._durations)

    def take_copy(self) -> None:
        """A copy of the gradient that the next stage's backward needs has arrived."""
        self._copies += 1
        self._worker.tell()

    def _num_inputs(self, kind: str) -> int:
        """Return the number of tasks whose inputs exist: own forwards' results, FRCs' results, and gradients."""
        if kind not in self._durations:
            return 0
        if kind == "f":
            return self._worker.done["F"]
        next_is_last = self._worker.stage == self._worker.play.times.num_stages - 2  # which has the loss
        return len(self.spans["f"]) if next_is_last else min(len(self.spans["f"]), self._copies)

    def _left_ns(self, kind: str) -> int:
        durations = self._durations[kind]
        return int(durations[min(len(self.spans[kind]), len(durations) - 1)]) - self._spent_ns[kind]

    def run(self, news: simpy.Event) -> Acting:
        """Run available tasks, forwards first, until a change."""
        while not news.triggered:
            kind = next((kind for kind in self._durations if len(self.spans[kind]) < self._num_inputs(kind)), None)
            if kind is None:
                yield news
            else:
                yield from self._work(kind, news)

    def catch_up(self, letter: str) -> Acting:
        """Before a task of its own, run overdue redundant ones with inputs: all but the newest of their kind."""
        kind = {"F": "f", "B": "b"}.get(letter, "")
        overdue = min(self._worker.done[letter] - 1, self._num_inputs(kind))
        while kind and len(self.spans.get(kind, ())) < overdue:
            yield from self._work(kind)

    def _work(self, kind: str, news: simpy.Event | None = None) -> Acting:
        """Run the next task to its end, or until a change."""
        began_ns, left_ns = int(self._env.now), self._left_ns(kind)
        if not self._spent_ns[kind]:
            self._begun_ns[kind] = began_ns
        end = self._env.timeout(left_ns)
        yield end if news is None else news | end
        now_ns = int(self._env.now)
        self._spent_ns[kind] += now_ns - began_ns
        if now_ns - began_ns == left_ns:
            self.spans[kind].append((self._begun_ns[kind], now_ns))
            self._spent_ns[kind] = 0


class Channel:
    """Messages of one direction between two workers: one after the other on the wire, in order behind it.

    ``out`` and ``into`` are nodes. Of n messages that leave one node, or enter one, each gets 1/n of the bandwidth, at
    the fuller of its two ends.
    """

    def __init__(self, play: _Play, wire_ns: int, latency_ns: Sequence[int], out: int, into: int) -> None:
        self.play, self.latency_ns, self.out, self.into = play, latency_ns, out, into
        self.shares = play.times.share_links and out != into
        self.wire_ns = max(1, wire_ns) if self.shares else wire_ns
        self.waiting = simpy.Store(play.env)
        self.changed = play.env.event()
        self.free_ns = self.last_ns = 0
        play.env.process(self.run())

    def arrival_ns(self, handed_over_ns: int) -> int:
        """Return the arrival of a message that is handed over then, on a link that is not shared."""
        return max(self.free_ns, handed_over_ns) + self.wire_ns + self.latency_ns[0]

    def send(self, deliver: Callable[[], None]) -> None:
        """Hand over a message; ``deliver`` is called when it arrives."""
        self.free_ns = max(self.free_ns, int(self.play.env.now)) + self.wire_ns
        self.waiting.put(deliver)

    def run(self) -> Acting:
        """The process: one message after the other."""
        env, number = self.play.env, 0
        while True:
            deliver = yield self.waiting.get()
            if self.shares:
                yield from self.transmit()
            else:
                yield env.timeout(self.wire_ns)
            self.last_ns = max(self.last_ns, int(env.now) + self.latency_ns[min(number, len(self.latency_ns) - 1)])
            env.process(self.arrive(deliver, self.last_ns - int(env.now)))
            number += 1

    def arrive(self, deliver: Callable[[], None], latency_ns: int) -> Acting:
        """Deliver a message after its latency."""
        yield self.play.env.timeout(latency_ns)
        deliver()

    def transmit(self) -> Acting:
        """Use a share of the nodes' links, which changes as others begin and end."""
        env, sending, left_ns = self.play.env, self.play.sending, Fraction(self.wire_ns)
        sending.append(self)
        self.tell_others()
        while left_ns > 0:
            self.changed, began_ns = env.event(), int(env.now)
            share = max(sum(c.out == self.out for c in sending), sum(c.into == self.into for c in sending))
            yield env.timeout(ceil(left_ns * share)) | self.changed
            left_ns -= Fraction(int(env.now) - began_ns, share)
        sending.remove(self)
        self.tell_others()

    def tell_others(self) -> None:
        """The shares of those on the same links have changed."""
        for other in self.play.sending:
            near = other.out == self.out or other.into == self.into
            if other is not self and near and not other.changed.triggered:
                other.changed.succeed()


class _Play:
    """One mini-batch: its workers, the channels between them, and whose turn it is to decide.

    ``plans``: an order is being planned for links that are not shared, so that arrivals of gradients are known ahead.
    """

    def __init__(
        self,
        times: ShapeTimes,
        orders: Sequence[Sequence[str]],
        counts: Sequence[int],
        windows: Sequence[int] | Ints,
        decide: Callable[[int, int], Decide],
        *,
        compute_slots: int | None = None,
        plans: bool = False,
    ) -> None:
        num_tasks = 3 * times.num_stages * sum(counts)
        if num_tasks > MOST_TASKS:
            raise PlanError(
                f"would play {num_tasks} tasks one by one",
                field="engine",
                value="reference",
                allowed=f"the compiled engine, or a shape of at most {MOST_TASKS} tasks",
            )
        self.env, self.times, self.counts, self.plans = simpy.Environment(), times, counts, plans
        self.durations_ns: Mapping[str, Ints] = {
            "F": times.forward_ns,
            "R": times.recompute_ns,
            "B": times.backward_ns,
        }
        lanes = [(s, d) for s in range(times.num_stages) for d in range(times.num_replicas)]
        self.slots = simpy.Resource(self.env, compute_slots or len(lanes))
        self.sending: list[Channel] = []
        self.workers = {(s, d): StageWorker(self, s, d, int(windows[s]), orders[d][s], decide(s, d)) for s, d in lanes}
        self.channels: dict[tuple[str, int, int], Channel] = {}
        for s, d in lanes:
            if s + 1 < times.num_stages:
                self._connect("F", (s, d), s + 1, times.activation_wire_ns[s, d], times.activation_ns[s, d])
            if s > 0:
                wire_ns, latency_ns = times.gradient_wire_ns[s - 1, d], times.gradient_ns[s - 1, d]
                self._connect("B", (s, d), s - 1, wire_ns, latency_ns)
            if s > 0 and times.redundant_backward_ns is not None:
                far = times.num_stages > 2  # of two stages the last one is itself the predecessor of the first
                self._connect("copy", (s, d), (s - 2) % times.num_stages, wire_ns * far, latency_ns * far)
        self._turns: list[tuple[int, int, simpy.Event]] = []

    def _connect(self, kind: str, sender: tuple[int, int], receiver: int, wire_ns: Any, latency_ns: Ints) -> None:
        out, into = (int(self.times.node[stage, sender[1]]) for stage in (sender[0], receiver))
        self.channels[kind, *sender] = Channel(self, int(wire_ns), latency_ns.tolist(), out, into)

    def turn(self, worker: StageWorker) -> simpy.Event:
        """Return the event at which a worker may decide."""
        turn = self.env.event()
        heapq.heappush(self._turns, (-worker.stage, worker.replica, turn))
        return turn

    def run(self) -> None:
        """Play to the end: at each instant everything ends and arrives, then one worker after the other decides."""
        for worker in self.workers.values():
            self.env.process(worker.run())
        while True:
            while self.env.peek() <= self.env.now:
                self.env.step()
            if self._turns:
                heapq.heappop(self._turns)[2].succeed()
            elif self.env.peek() < inf:
                self.env.step()
            else:
                break
        if any(worker.done["B"] < worker.count for worker in self.workers.values()):
            raise PlanError("the task orders wait for each other forever", field="orders")

    def played(self) -> Played:
        """What happened, and when."""
        stages, replicas = range(self.times.num_stages), range(self.times.num_replicas)
        by_replica = [[self.workers[s, d] for s in stages] for d in replicas]
        last_ns = np.array([[self.workers[s, d].last_backward_ns for d in replicas] for s in stages])
        spans = {
            where: np.array(list(worker.redundant.spans.values())) for where, worker in self.workers.items()
        }  # [kinds, n, 2]
        redundant = self.times.redundant_forward_ns is not None
        redone_ns = [[spans[s, d][:, :, 1].max() for d in replicas] for s in stages] if redundant else None
        return Played(
            last_ns,
            tuple(tuple("".join(letter for letter, _ in each.tasks) for each in row) for row in by_replica),
            tuple(tuple(np.array([start for _, start in each.tasks]) for each in row) for row in by_replica),
            None if redone_ns is None else np.maximum(last_ns, redone_ns),
            tuple(tuple(spans[s, d] for s in stages) for d in replicas) if redundant else (),
        )


# --- the engine ----------------------------------------------------------------------------------------------


def run_pipeline(times: StageTimes, counts: tuple[int, ...], *, schedule: Schedule = "varuna", **_kept: bool) -> Played:
    """See :func:`simulator.engine.pipeline.run_pipeline`; orders and times are always kept.

    Raises PlanError for more tasks than ``MOST_TASKS``, or a fixed order that waits for itself.
    """
    num_stages, rules = times.num_stages, VARUNA if schedule == "varuna" else STRICT

    def order(stage: int, count: int) -> str:
        again, window = bool(times.recompute[stage]), int(times.window[0 if schedule == "gpipe" else stage])
        return "" if schedule == "varuna" else fixed_order(schedule, stage, num_stages, count, again, window)

    orders = [[order(stage, count) for stage in range(num_stages)] for count in counts]
    lanes, decide = lane_times(times, len(counts)), by_rules(rules)
    play = _Play(lanes, orders, counts, times.window, lambda _s, _d: decide, plans=schedule == "varuna")
    play.run()
    return play.played()


def execute_orders(
    times: ShapeTimes,
    orders: Sequence[Sequence[str]],
    windows: Sequence[int] | Ints,
    *,
    strict: bool = False,
    compute_slots: int | None = None,
    decide: Callable[[int, int], Decide] | None = None,
    **_kept: bool,
) -> Played:
    """See :func:`simulator.engine.execution.execute_orders`; orders and times are always kept.

    ``decide`` returns the function that decides for a stage of a replica, in place of the rules. Raises PlanError for
    more tasks than ``MOST_TASKS``, or orders that wait for each other.
    """
    counts = [replica[0].count("F") for replica in orders]
    rules = by_rules(STRICT if strict else FOLLOWING)
    play = _Play(times, orders, counts, windows, decide or (lambda _s, _d: rules), compute_slots=compute_slots)
    play.run()
    return play.played()
