"""The workers of a history: they carry out orders as the contract says, and check each order against their own state.

A repeated order is answered again or continued, but not carried out twice. An order older than the newest is ignored.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from simulated_job import SUMMED, broken_unit, facts_of, file_of, norm_sq, scale_of

from manager.controller.state.actions import SendCommit, SendPreCopy, SendReshape, SendStep
from manager.controller.state.events import (
    CheckpointFailed,
    Event,
    PreCopyReported,
    UnitsWritten,
    WorkerAnswered,
    WorkerLost,
)
from manager.controller.state.state import ControllerState, Decision, Phase
from manager.simulation.spot.sums import StepStart, WorkerSums
from morph.contract.evaluation import EvaluationSize, FinishedMetrics
from morph.contract.messages import (
    Aborted,
    Answer,
    Committed,
    Evaluation,
    Failed,
    FailureCause,
    MicroBatchLoss,
    PreCopyOrder,
    PreCopyReport,
    Prepared,
    Reshaped,
    ReshapeOrder,
    UnitWritten,
    WorkerReady,
)
from morph.contract.salvage import Follow, PartialSum, Salvage, counted_in, mask_of
from morph.contract.timeline import ComputeTimes

Order = SendReshape | SendStep | SendCommit
OrderKey = tuple[str, int, int, int]


@dataclass(frozen=True)
class Faults:
    """How often each fault happens: probabilities unless stated otherwise, all 0 by default."""

    num_devices: int = 1
    """workers of each VM, which share notices and losses"""
    node_types: tuple[str, ...] = ()
    """types of VMs, which alternate; without any, all VMs are equal"""
    death_per_order: float = 0.0
    deaths_after_s: tuple[tuple[float, int], ...] = ()
    deaths_in: tuple[tuple[Phase, int, int], ...] = ()
    """(phase, number of earlier times in this phase, number of workers that die at once)"""
    joins_after_s: tuple[float, ...] = ()
    comeback: float = 0.0
    """the machine of a dead worker returns soon under another id"""
    notices_after_s: tuple[tuple[float, float | None], ...] = ()
    """(when a worker gets a notice, after how many seconds its VM is taken; None: the VM is not taken)"""
    notice_withdrawn: float = 0.0
    silent_death: float = 0.0
    late_loss: float = 0.0
    doubled: float = 0.0
    lost_message: float = 0.0
    """to or from a worker"""
    late_message: float = 0.0
    """by up to 3 s, so that messages overtake each other"""
    broken_stream: float = 0.0
    """a stream breaks off, or cannot keep up"""
    order_error: float = 0.0
    """an order fails; this happens once per step, except for lost devices"""
    error_causes: tuple[FailureCause, ...] = ("job", "device", "memory")
    overflow: float = 0.0
    non_finite: float = 0.0
    """share of steps with a gradient that is not finite; the step alone determines whether, and in which unit"""
    stuck: float = 0.0
    spurious_abort: float = 0.0
    write_failure: float = 0.0
    load_failure: float = 0.0
    """a checkpoint cannot be loaded: it is damaged if an older one is undamaged; otherwise storage failed for a
    moment"""
    slow: float = 0.0
    """share of workers that are 30 % slower for a while"""
    refused: float = 0.0
    """requests for VMs that are refused or granted in part"""
    unanswered: float = 0.0
    """requests for VMs that are lost, or whose grants are"""
    restarts_after_s: tuple[float, ...] = ()
    """times at which a new manager takes over"""
    dies_before: str = ""
    """the kind of action before which the manager dies once, after recording it"""
    fresh_starts_after_s: tuple[float, ...] = ()
    """times at which manager and workers die, and the run begins again from its newest checkpoint"""
    clock_jumps: tuple[tuple[float, float], ...] = ()
    """(time, seconds by which the manager's clock jumps)"""
    stop_after_s: float | None = None
    quiet_after_s: float = 60.0


def order_key(action: Order) -> OrderKey:
    order = action.order
    if isinstance(action, SendStep):
        return action.kind, order.generation, action.order.step, action.order.attempt
    evaluated = action.order.evaluated if isinstance(action, SendCommit) else None
    return action.kind, order.generation, action.order.version, 0 if evaluated is None else evaluated.version


def sequence_of(key: OrderKey) -> tuple[int, int, int, int]:
    """Return the part of the key that grows from one order of a worker to its next."""
    kind, generation, version, attempt = key
    return generation, ("send_reshape", "send_step", "send_commit").index(kind), version, attempt


@dataclass
class SimulatedWorker:
    """A worker's own view: its present order, the version of each unit that it has, and the step that it prepared."""

    host: str = ""
    started: bool = False
    alive: bool = True
    deaf: bool = False
    slow: bool = False
    lost_device: bool = False
    token: int = 0
    order: Order | None = None
    begun: OrderKey | None = None
    last: tuple[OrderKey, Answer] | None = None
    newest: tuple[int, int, int, int] = (0, 0, 0, 0)
    aborted: int = 0
    pre_copy_number: int = 0
    units: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)
    shape: ReshapeOrder | None = None
    stage_units: frozenset[str] = frozenset()
    prepared: int | None = None
    shared: dict[str, int] = field(default_factory=dict)
    """the step whose gradients the worker holds, by unit that it follows"""
    begun_sums: WorkerSums | None = None
    sums: WorkerSums = field(default_factory=lambda: WorkerSums(SUMMED))
    overflowed: bool = False
    non_finite: bool = False

    def has(self, unit: str, version: int) -> bool:
        """Return whether the worker can give this unit at this version, if necessary after applying its step."""
        if self.prepared is not None and self.prepared + 1 == version:
            return unit in self.stage_units or self.shared.get(unit) == self.prepared
        return version in (self.units.get(unit), self.received.get(unit))

    def apply(self) -> None:
        """Apply the prepared step, once, to the units of the worker's stage."""
        assert self.prepared is not None
        self.units = {unit: held + 1 if unit in self.stage_units else held for unit, held in self.units.items()}
        self.prepared = None
        self.sums = WorkerSums(SUMMED)

    def forget(self) -> None:
        self.units, self.received, self.stage_units, self.prepared = {}, {}, frozenset(), None
        self.shared, self.begun_sums = {}, None
        self.sums = WorkerSums(SUMMED)


class BrokenHistoryError(AssertionError):
    """A broken invariant; carries the log of the history."""


class World:
    """The event queue, in order of (time, sequence number), and counts of faults."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.random = random.Random(seed)
        self.seed, self.faults = seed, faults
        self.now_s = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.sequence = itertools.count()
        self.log: list[str | tuple[float, ControllerState, Event, Decision]] = []

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at_time(self.now_s + delay_s, action)

    def at_time(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (time_s, next(self.sequence), action))

    def next(self) -> None:
        self.check(bool(self.queue), "nothing will ever happen again")
        self.now_s, _, action = heapq.heappop(self.queue)
        action()

    @property
    def quiet(self) -> bool:
        """Whether faults have ended, so that every history can finish."""
        return self.now_s >= self.faults.quiet_after_s

    def chance(self, probability: float) -> bool:
        return probability > 0 and not self.quiet and self.random.random() < probability

    def between(self, least: float, most: float) -> float:
        """Draw a duration in seconds."""
        return least + (most - least) * self.random.random()

    def lag_s(self) -> float:
        """Draw the delay of a message in seconds; it is sometimes so long that other messages overtake this one."""
        return self.between(0.0, 3.0) if self.chance(self.faults.late_message) else self.between(0.0, 0.01)

    def note(self, what: str) -> None:
        self.log.append(f"{self.now_s:8.3f} {what}")

    def check(self, holds: bool, what: str) -> None:
        """Fail with the whole history unless ``holds``."""
        if not holds:
            raise self.broken(what)

    def broken(self, what: str) -> BrokenHistoryError:
        again = f"python tests/manager/random_history.py {self.seed}"
        return BrokenHistoryError(f"seed {self.seed}: {what}\n{self.told()}\nseed {self.seed}: {what}; again: {again}")

    def told(self) -> str:
        return "\n".join(entry if isinstance(entry, str) else _line(*entry) for entry in self.log)


def _line(time_s: float, before: ControllerState, event: Event, decision: Decision) -> str:
    after = decision.state
    return (
        f"{time_s:8.3f} {before.phase:<10} {event.kind} {event.model_dump_json(exclude_defaults=True)[:160]}\n"
        f"         -> {after.phase} v{after.version} g{after.generation} {decision.reason.code}: "
        f"{decision.reason.sentence}"
    )


Key = tuple[int, str, str]


@dataclass
class Stream:
    """A stream from a sender to a receiver; ``versions``: of each unit that the receiver has or will have."""

    units: tuple[str, ...]
    versions: dict[str, int] = field(default_factory=dict)
    follows: bool = False
    broken: bool = False
    left: bool = False
    """everything has arrived at the receiver, so that the sender has finished"""


class SimulatedPreCopy:
    def __init__(self, world: World, tell: Callable[[Event], None], workers: dict[str, SimulatedWorker]) -> None:
        self.world, self.tell, self.workers = world, tell, workers
        self.streams: dict[Key, Stream] = {}
        self.num_taken = self.num_given_up = 0

    def order(self, action: SendPreCopy) -> None:
        """Deliver a pre-copy order to a worker on the control lane, sometimes twice or never."""
        if not self.world.chance(self.world.faults.lost_message):
            self.world.at(self.world.lag_s(), lambda: self.receive(action.worker, action.order))
        if self.world.chance(self.world.faults.doubled):
            self.world.at(self.world.between(0.0, 3), lambda: self.receive(action.worker, action.order))

    def receive(self, name: str, order: PreCopyOrder) -> None:
        """Let a worker begin a pre-copy order, and drop its older one."""
        worker = self.workers[name]
        if not worker.alive or order.number < worker.pre_copy_number:
            return
        if order.number == worker.pre_copy_number:
            self.report(name, order.number)
            return
        self.end(name)
        worker.pre_copy_number = order.number
        for move in order.moves:
            if name == move.sender:
                key = order.number, name, move.receiver
                if key not in self.streams:
                    mine = tuple(entry.unit for entry in order.moves if entry.receiver == move.receiver)
                    self.streams[key] = Stream(mine)

    def begin_step(self, name: str, version: int) -> None:
        """Begin a step: a sender copies further units; once all are copied, they arrive after a while or never."""
        for key, stream in self.of(name, sending=True):
            if stream.broken or len(stream.versions) == len(stream.units):
                continue
            for unit in stream.units:
                if unit in stream.versions:
                    continue
                if self.workers[name].units.get(unit) != version:
                    raise self.world.broken(f"{name} is to send {unit} ahead at {version}, it has another version")
                stream.versions[unit] = version
                if self.world.random.random() < 0.3:
                    break  # the others follow at a later step
            if len(stream.versions) == len(stream.units):
                self.world.at(self.world.between(0.05, 1.5), lambda key=key: self.arrive(key))

    def arrive(self, key: Key) -> None:
        """Let everything of a stream arrive if its receiver expects it, or break the stream."""
        number, sender, receiver = key
        stream = self.streams[key]
        if self.world.chance(self.world.faults.broken_stream):
            self.give_up(key)
        expected = self.workers[receiver].pre_copy_number == number and self.workers[sender].pre_copy_number == number
        if not stream.broken and expected:
            stream.follows = True
            self.report(receiver, number)

    def report(self, name: str, number: int) -> None:
        """Report the receiver's progress; the report sometimes comes twice, late or never."""
        if not self.workers[name].alive:
            return
        streams = [stream for key, stream in self.of(name, sending=False) if key[0] == number]
        whole = [stream for stream in streams if stream.follows and not stream.broken]
        error = "a stream broke off" if any(stream.broken for stream in streams) else None
        report = PreCopyReport(number=number, following=tuple(u for s in whole for u in s.units), error=error)
        event = PreCopyReported(worker=name, report=report)
        if not self.world.chance(self.world.faults.lost_message):
            self.world.at(self.world.lag_s(), lambda: self.tell(event))
        if self.world.chance(self.world.faults.doubled):
            self.world.at(self.world.between(0.0, 3), lambda: self.tell(event))

    def apply(self, name: str, version: int) -> None:
        """Apply step ``version`` at a sender, and so to the units of its streams."""
        for _, stream in self.of(name, sending=True):
            for unit, held in stream.versions.items():
                if not stream.broken:
                    if held != version:
                        raise self.world.broken(f"{unit}, pre-copied by {name}, is at {held}, not {version}")
                    stream.versions[unit] = version + 1

    def keep(self, name: str, order: ReshapeOrder) -> None:
        """Begin a reshape: drop pre-copied units that the order does not use."""
        used = {(order.ahead, entry.peer, entry.worker) for entry in order.sources if entry.kind == "ahead"}
        for key, stream in self.of(name, sending=True) + self.of(name, sending=False):
            if key not in used:
                stream.broken = True

    def is_broken(self, name: str, order: ReshapeOrder) -> bool:
        """Return whether a worker waits in vain for a pre-copied unit, or for its arrival at the receiver."""
        keys = {
            (order.ahead, entry.peer, entry.worker)
            for entry in order.sources
            if entry.kind == "ahead" and name in (entry.worker, entry.peer)
        }
        return any(key not in self.streams or self.streams[key].broken for key in keys)

    def take(self, name: str, peer: str, unit: str, order: ReshapeOrder) -> bool:
        """Take a pre-copied unit; return whether it is what the order says."""
        assert order.ahead is not None, "pre-copied, and no number"
        stream = self.streams[order.ahead, peer, name]
        self.num_taken += 1
        return not stream.broken and stream.follows and stream.versions.get(unit) == order.version

    def change_over(self, name: str, *, went_well: bool) -> None:
        """End a reshape: all that the worker sent has arrived, or its pre-copies are dropped."""
        for _, stream in self.of(name, sending=True):
            stream.left |= went_well
        if not went_well:
            self.end(name)

    def end(self, name: str) -> None:
        """Drop a worker's pre-copies, also when it dies; the workers at the other ends notice."""
        for key, stream in self.of(name, sending=True) + self.of(name, sending=False):
            if not (stream.broken or stream.left):
                self.give_up(key)

    def give_up(self, key: Key) -> None:
        self.num_given_up += 1
        self.streams[key].broken = True
        number, _, receiver = key
        if self.workers[receiver].pre_copy_number == number:
            self.world.at(self.world.between(0.01, 1), lambda: self.report(receiver, number))

    def of(self, name: str, *, sending: bool) -> list[tuple[Key, Stream]]:
        """Return the unfinished streams that a worker sends or receives."""
        end = 1 if sending else 2
        return [(key, stream) for key, stream in self.streams.items() if key[end] == name and not stream.left]


class SimulatedFollowing:
    """Every pair of a worker and its follower in the generation of both."""

    def __init__(self, world: World, workers: dict[str, SimulatedWorker]) -> None:
        self.world, self.workers = world, workers
        # a generator of its own: the world's draws are the same with and without followers
        self.random = random.Random(world.seed)
        self.in_step: set[tuple[int, str]] = set()
        self.broken: set[tuple[int, str]] = set()
        self.num_shared = self.num_copied = 0

    def begin(self, name: str, worker: SimulatedWorker, order: ReshapeOrder) -> None:
        """Reshape a worker, which must have all the units that its order expects from earlier streams."""
        for follow in order.follows:
            if follow.follower == name and any(worker.units.get(unit) != order.version for unit in follow.known):
                raise self.world.broken(f"{name} is to have {follow.known} at {order.version}: {worker.units}")
            if follow.follower == name and worker.stage_units & set(follow.units):
                raise self.world.broken(f"{name} is to follow {follow.units}, which it drives")

    def enter(self, worker: SimulatedWorker, version: int) -> None:
        """Apply a decided version to the units whose gradients have arrived."""
        for unit, step in worker.shared.items():
            if step + 1 == version and worker.units.get(unit) == step:
                worker.units[unit] = version
        worker.shared = {}

    def share(self, name: str, step: int) -> bool:
        """Send a prepared step's gradients to the follower, if it has caught up; return whether it has them."""
        shape = self.workers[name].shape
        follow = next((follow for follow in shape.follows if follow.worker == name), None)
        if follow is None or not follow.units:
            return False
        pair = shape.generation, name
        follower = self.workers[follow.follower]
        if self.random.random() < self.world.faults.broken_stream or not follower.alive:
            self.broken.add(pair)
        if pair in self.broken or (pair not in self.in_step and self.random.random() < 0.3):
            return False
        self.in_step.add(pair)
        self.num_shared += 1
        for unit in follow.units:
            follower.units[unit] = follower.shared[unit] = step
        return True

    def copies(self, name: str, step: int) -> list[PartialSum]:
        """Return copies of others' sums when a worker gives up a step: whole groups of micro-batches, or none."""
        shape, found = self.workers[name].shape, list[PartialSum]()
        every = shape.copy_sums_every
        for follow in shape.follows if every else ():
            found += self._copy_of(follow, step, every) if follow.follower == name else ()
        return found

    def _copy_of(self, follow: Follow, step: int, every: int) -> list[PartialSum]:
        primary = self.workers[follow.worker]
        if primary.begun_sums is None or primary.begun_sums.step != step:
            return []
        sums = dataclasses.replace(primary.begun_sums, counted=dict(primary.begun_sums.counted or {}))
        sums.run(every * self.random.randrange(len(sums.share) // every + 1))
        sums.keep(step)
        self.num_copied += len(sums.parts)
        return sums.parts


TIMES = ComputeTimes(forward_s=0.1, recompute_s=0.1, backward_s=0.2, reduce_s=0.1, wait_s=0.0, step_s=0.5)
EVALUATED_EVERY = 4


def evaluation_of(version: int, *, sums: bool = False) -> Evaluation:
    """Return what every last stage reports of the evaluation of a version."""
    metrics = {"right": 0.5, **({"hits/sum": float(5 * version % 7)} if sums else {})}
    losses = tuple(MicroBatchLoss(micro_batch=index, loss=2 / version, metrics=metrics) for index in range(2))
    return Evaluation(version=version, num_micro_batches=2, losses=losses)


def score_of(version: int) -> float:
    """Return the metric that the job computes from an evaluation; it goes up and down."""
    return float(2 * (5 * version % 7) + 1)


def runs_what_is_missing(salvage: Salvage, units: Mapping[str, Sequence[int]], num_micro_batches: int) -> bool:
    """Return whether exactly those micro-batches run again of which some contribution is in no sum."""
    counted: dict[tuple[str, int], int] = {}
    for entry in salvage.sums:
        for section, mask in counted_in(entry.sum).items():
            counted[entry.sum.unit, section] = counted.get((entry.sum.unit, section), 0) | mask
    complete = whole = (1 << num_micro_batches) - 1
    for unit, sections in units.items():
        for section in sections:
            complete &= counted.get((unit, section), 0)
    return mask_of(salvage.remaining) == whole & ~complete


class SimulatedWorkers:
    """Every worker of a history. ``tell`` gives an event to the manager; ``checkpoints`` is the content of storage."""

    def __init__(self, world: World, tell: Callable[[Event], None], checkpoints: set[int]) -> None:
        self.world, self.tell, self.checkpoints = world, tell, checkpoints
        self.all: dict[str, SimulatedWorker] = {}
        self.killer: Callable[[str], None] = self.die
        self.members: dict[int, frozenset[str]] = {}
        self.failed: set[int] = set()
        self.damaged: set[int] = set()
        self.evaluation: EvaluationSize | None = None
        self.pre_copy = SimulatedPreCopy(world, tell, self.all)
        self.synced = SimulatedFollowing(world, self.all)

    # --- life ------------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Start a worker; a worker that is set up already only reports that again."""
        worker = self.all[name]
        if not worker.alive:
            return
        worker.started = True
        self.world.at(self.world.between(0.1, 2), lambda: self.set_up(name))

    def set_up(self, name: str) -> None:
        if self.all[name].alive:
            self.send(name, WorkerReady(worker=name, pid=1, setup_s=1, evaluation=self.evaluation))

    def die_together(self, names: Sequence[str]) -> None:
        """End the VM of some workers: the manager learns of all losses at once, or of each by itself."""
        living = [name for name in names if self.all[name].alive]
        told_at_once = len(living) > 1 and self.world.random.random() < 0.7
        for name in living:
            self.die(name, told=not told_at_once)
        if told_at_once:
            lost = WorkerLost(worker=living[0], cause="its VM is gone", beside=tuple(living[1:]))
            self.world.at(self.world.between(0.01, 0.1), lambda: self.tell(lost))

    def die(self, name: str, *, told: bool = True) -> None:
        """Kill a worker: the manager learns of it soon, late, or by time-outs; busy peers' connections are reset."""
        world, worker = self.world, self.all[name]
        if not worker.alive:
            return
        worker.alive = False
        worker.token += 1
        self.pre_copy.end(name)
        world.note(f"{name} dies")
        lost = WorkerLost(worker=name, cause="killed")
        if told and (not world.chance(world.faults.silent_death) or worker.order is None):
            delay_s = world.between(1, 6) if world.chance(world.faults.late_loss) else world.between(0.01, 0.1)
            world.at(delay_s, lambda: self.tell(lost))
            if world.chance(world.faults.doubled):
                world.at(delay_s + 0.5, lambda: self.tell(lost))
        for peer, entry in self.all.items():
            if entry.order is not None and world.random.random() < 0.4:
                world.at(world.between(0.01, 0.2), lambda peer=peer: self.reset(peer, name))

    def reset(self, name: str, peer: str) -> None:
        """Let a busy worker see its connection to a dead peer fail."""
        order = self.all[name].order
        if self.all[name].alive and isinstance(order, SendReshape | SendStep) and peer in self.peers_of(order):
            self.give_up(name, peer_lost=True)

    def peers_of(self, order: SendReshape | SendStep) -> frozenset[str]:
        members = self.members[order.order.generation]
        if isinstance(order, SendReshape):
            sources = order.order.sources
            salvage = order.order.salvage
            holders = {entry.holder for entry in salvage.sums if entry.receiver == order.worker} if salvage else set()
            peers = {source.peer for source in sources if source.peer and source.worker == order.worker}
            return members | peers | holders
        return members

    # --- messages --------------------------------------------------------------------------------------------

    def send(self, name: str, answer: Answer) -> None:
        """Send an answer, which sometimes comes twice, late or never."""
        world, event = self.world, WorkerAnswered(worker=name, answer=answer)
        if not world.chance(world.faults.lost_message):
            world.at(world.lag_s(), lambda: self.tell(event))
        if world.chance(world.faults.doubled):
            world.at(world.between(0.0, 3), lambda: self.tell(event))

    def answer(self, name: str, order: Order, answer: Answer) -> None:
        worker = self.all[name]
        worker.order, worker.token = None, worker.token + 1
        worker.last = (order_key(order), answer)
        if isinstance(order, SendReshape):
            self.pre_copy.change_over(name, went_well=isinstance(answer, Reshaped))
        self.send(name, answer)

    # --- orders ----------------------------------------------------------------------------------------------

    def order(self, action: Order) -> None:
        if isinstance(action, SendReshape):
            self.members[action.order.generation] = frozenset(slot.worker for slot in action.order.slots)
        if not self.world.chance(self.world.faults.lost_message):
            self.world.at(self.world.lag_s(), lambda: self.receive(action))

    def receive(self, action: Order) -> None:
        """Give a worker an order: it works on it for a while, dies in it, or hangs."""
        world, worker, key = self.world, self.all[action.worker], order_key(action)
        if not worker.alive or (worker.order is not None and order_key(worker.order) == key):
            return
        if worker.last is not None and worker.last[0] == key:
            self.send(action.worker, worker.last[1])
            self.write_later(action)
            return
        if sequence_of(key) < worker.newest:
            return  # a repeated order that a newer one has overtaken
        worker.newest = sequence_of(key)
        world.check(not worker.lost_device, f"{action.worker} gets an order, and its device is lost")
        world.check(worker.order is None, f"{action.worker} gets an order while it has one")
        if action.order.generation <= worker.aborted:
            self.answer(action.worker, action, self.aborted(action.worker, action.order.generation, peer_lost=False))
            return
        worker.order, worker.begun = action, key
        worker.token += 1
        token = worker.token
        self.begin(action.worker, worker, action)
        if world.chance(world.faults.stuck):
            worker.deaf = world.random.random() < 0.5
            return
        duration_s = world.between(0.2, 1.0)
        if world.chance(world.faults.death_per_order):
            world.at(duration_s * world.random.random(), lambda: self.killer(action.worker))
        if world.chance(world.faults.spurious_abort):
            world.at(duration_s * 0.9, lambda: self.give_up(action.worker, peer_lost=True, token=token))
        if world.chance(world.faults.order_error):
            world.at(duration_s * 0.9, lambda: self.fail(action, token))
        world.at(duration_s, lambda: self.complete(action, token))

    def fail(self, action: Order, token: int) -> None:
        """Fail a worker's order; a lost device does nothing any more."""
        name, worker, step = action.worker, self.all[action.worker], order_key(action)[2]
        if not worker.alive or worker.token != token:
            return
        causes = [cause for cause in self.world.faults.error_causes if cause == "device" or step not in self.failed]
        if causes:
            cause = self.world.random.choice(causes)
            self.failed.add(step)
            worker.lost_device = cause == "device"
            worker.sums = WorkerSums(SUMMED)
            self.world.note(f"{name} fails at {step}: {cause}")
            generation = action.order.generation
            self.answer(name, action, Failed(worker=name, generation=generation, error=cause, cause=cause))

    def begin(self, name: str, worker: SimulatedWorker, action: Order) -> None:
        """Begin an order: apply the version that it decides, as the contract says; the state must be there."""
        world, order = self.world, action.order
        version = order.step if isinstance(action, SendStep) else order.version
        if isinstance(action, SendReshape):
            self.pre_copy.keep(name, action.order)
        if worker.prepared is not None and worker.prepared + 1 == version:
            right = facts_of(version, world.faults.non_finite)
            if order.decided != right:
                raise world.broken(f"{name} is to apply version {version} with {order.decided}")
            self.pre_copy.apply(name, worker.prepared)
            worker.apply()
            self.synced.enter(worker, version)
        if isinstance(action, SendStep):
            scale = scale_of(version, world.faults.non_finite)
            if order.loss_scale != scale:
                raise world.broken(f"{name} is to scale by {order.loss_scale}, its units say {scale}")
            if order.attempt and worker.prepared != order.step:
                raise world.broken(f"{name} is to retry step {version}, which it did not run")
        if isinstance(action, SendCommit) and action.order.held:
            if any(not worker.has(unit, version) for unit in order.checkpoint_units):
                raise world.broken(f"{name} is to write {order.checkpoint_units} at version {version}: {worker.units}")
            self.write_later(action)
            return
        if isinstance(action, SendReshape):
            worker.sums.keep(version, prepared=() if worker.prepared is None else worker.stage_units)
        worker.prepared = None
        worker.shared = {}
        if isinstance(action, SendReshape):
            worker.shape = action.order
            worker.units |= {unit: held for unit, held in worker.received.items() if held == version}
            worker.received = {}
            return
        worker.units |= worker.received
        worker.received = {}
        followed = {unit for unit, held in worker.units.items() if held == version and unit in self.followed_by(name)}
        worker.units = {unit: held for unit, held in worker.units.items() if unit in worker.stage_units | followed}
        right = set(worker.units) == worker.stage_units | followed and set(worker.units.values()) <= {version}
        if not right:
            raise world.broken(f"{name} is to be at version {version} with {worker.stage_units}: {worker.units}")
        self.write_later(action)
        if isinstance(action, SendStep):
            self.pre_copy.begin_step(name, version)
            shape = worker.shape
            slot = next(slot for slot in shape.slots if slot.worker == name)
            first = version == shape.version and order.attempt == 0
            if not worker.sums.begin(StepStart(SUMMED, shape, first=first), slot, version):
                raise world.broken(f"{name} is to go on with sums that it does not have")
            worker.begun_sums = dataclasses.replace(worker.sums, counted=dict(worker.sums.counted or {}))
            if order.attempt:
                worker.begun_sums = None

    def followed_by(self, name: str) -> set[str]:
        shape = self.all[name].shape
        return {unit for f in shape.follows if f.follower == name for unit in f.units} if shape is not None else set()

    def complete(self, action: Order, token: int) -> None:
        """Complete an order, unless the worker died, gave up or hangs; or wait for a peer."""
        name, worker, key = action.worker, self.all[action.worker], order_key(action)
        if not worker.alive or worker.token != token:
            return
        if not isinstance(action, SendCommit):
            peers = [self.all[peer] for peer in self.peers_of(action) - {name}]
            if any(not peer.alive for peer in peers):
                if isinstance(action, SendReshape) and self.world.random.random() < 0.5:
                    self.give_up(name, peer_lost=True)
                return
            if isinstance(action, SendReshape) and self.pre_copy.is_broken(name, action.order):
                self.give_up(name, peer_lost=True)
                return
            if any(peer.begun != key for peer in peers):
                self.world.at(0.3, lambda: self.complete(action, token))
                return
        if isinstance(action, SendReshape) and self.cannot_load(name, action.order):
            error = f"version {action.order.version} differs from its manifest"
            generation = action.order.generation
            self.answer(name, action, Failed(worker=name, generation=generation, error=error, cause="checkpoint"))
            return
        done: dict[type, Callable[[str, SimulatedWorker, Any], Answer]]
        done = {SendReshape: self.reshaped, SendStep: self.stepped, SendCommit: self.committed}
        self.answer(name, action, done[type(action)](name, worker, action.order))

    def reshaped(self, name: str, worker: SimulatedWorker, order: ReshapeOrder) -> Answer:
        """Take every unit from the source that the order names, which must really have it."""
        for source in order.sources:
            if source.worker == name:
                self.take(name, worker, source, order)
        self.take_sums(name, worker, order)
        worker.stage_units = frozenset(source.unit for source in order.sources if source.worker == name)
        self.synced.begin(name, worker, order)
        scale = scale_of(order.version, self.world.faults.non_finite) if worker.stage_units else None
        durations = {"groups_s": 0.1, "state_s": 0.2, "received_bytes": 0}
        return Reshaped(worker=name, generation=order.generation, loss_scale=scale, **durations)

    def take_sums(self, name: str, worker: SimulatedWorker, order: ReshapeOrder) -> None:
        """Take the partial sums that this worker continues; the named holders must really have them."""
        if order.salvage is None:
            return
        right = runs_what_is_missing(order.salvage, SUMMED, order.plan.num_micro_batches)
        self.world.check(right, f"generation {order.generation} runs {order.salvage.remaining} again")
        for entry in order.salvage.sums:
            if name == entry.receiver and entry.holder != name:
                holder = self.all[entry.holder]
                if entry.sum not in holder.sums.parts:
                    raise self.world.broken(f"{name} is to get a sum of {entry.sum.unit} that {entry.holder} lacks")
                worker.sums.parts.append(entry.sum)

    def cannot_load(self, name: str, order: ReshapeOrder) -> bool:
        if not any((source.peer or source.worker) == name and source.kind == "checkpoint" for source in order.sources):
            return False
        fails = self.world.chance(self.world.faults.load_failure)
        if fails and self.world.random.random() < 0.7 and min(self.checkpoints - self.damaged) < order.version:
            self.damaged.add(order.version)
        return fails or order.version in self.damaged

    def take(self, name: str, worker: SimulatedWorker, source: Any, order: ReshapeOrder) -> None:
        version = order.version
        if source.kind == "ahead":
            right = self.pre_copy.take(name, source.peer, source.unit, order)
        elif source.kind == "keep":
            right = worker.units.get(source.unit) == version
        elif source.kind == "peer":
            right = self.all[source.peer].units.get(source.unit) == version
        else:
            right = version in self.checkpoints if source.kind == "checkpoint" else version == 0
        if not right:
            raise self.world.broken(f"{name} cannot get {source.unit} at {version}: {source.kind} {source.peer}")
        worker.received[source.unit] = version

    def stepped(self, name: str, worker: SimulatedWorker, order: Any) -> Answer:
        """Run a step up to its reduced gradients."""
        faults = self.world.faults
        worker.sums.run()
        worker.prepared = order.step
        worker.overflowed = order.attempt < 3 and self.world.chance(faults.overflow)
        worker.non_finite = broken_unit(order.step, faults.non_finite) in worker.stage_units
        norms_sq = {unit: norm_sq(unit, order.step) for unit in worker.stage_units}
        return Prepared(
            worker=name,
            generation=order.generation,
            step=order.step,
            attempt=order.attempt,
            overflowed=worker.overflowed,
            unit_norms_sq={} if worker.non_finite else norms_sq,
            non_finite=worker.non_finite,
            followed=self.synced.share(name, order.step),
            losses=tuple(
                MicroBatchLoss(micro_batch=index, loss=1 / (1 + order.step), metrics={"right": index / 2})
                for index in range(2)
            ),
            learning_rates=(0.001 / (1 + order.step), 0.001),
            evaluation=self.evaluated(worker, order.step),
            finished=self.finished(order),
            times=TIMES,
        )

    def committed(self, name: str, worker: SimulatedWorker, order: Any) -> Answer:
        again = order.evaluated is not None and order.evaluated.version == order.version
        evaluation = None if again or order.held or self.evaluation is None else self.evaluated(worker, order.version)
        finished = self.finished(order)
        return Committed(
            worker=name,
            generation=order.generation,
            version=order.version,
            evaluation=evaluation,
            finished=finished,
        )

    def evaluated(self, worker: SimulatedWorker, version: int) -> Evaluation | None:
        """Evaluate a version that is due; the last stages report it where the job acts on it."""
        size = self.evaluation
        if size is None:
            return None if version % EVALUATED_EVERY or not version else evaluation_of(version)
        shape = worker.shape
        mine = next((slot for slot in shape.slots if self.all[slot.worker] is worker), None)
        is_last = mine is not None and shape.plan.is_last(mine.stage)
        return evaluation_of(version, sums=True) if is_last and size.is_due(version) else None

    def finished(self, order: Any) -> FinishedMetrics | None:
        """Compute the job's metric from the evaluation that the order names."""
        if order.evaluated is None:
            return None
        version = order.evaluated.version
        right = order.evaluated.values == {"loss": 2 / version, "right": 0.5, "hits": float(2 * (5 * version % 7))}
        self.world.check(right, f"the evaluation of version {version} is told as {order.evaluated.values}")
        return FinishedMetrics(version=version, values={"score": score_of(version)})

    # --- giving up -------------------------------------------------------------------------------------------

    def aborted(self, name: str, generation: int, *, peer_lost: bool) -> Answer:
        kept = self.all[name].sums.told()
        return Aborted(worker=name, generation=generation, peer_lost=peer_lost, kept=kept)

    def give_up(self, name: str, *, peer_lost: bool, token: int | None = None) -> None:
        """Answer ``Aborted`` to the present order."""
        worker = self.all[name]
        if worker.alive and worker.order is not None and not worker.deaf and token in (None, worker.token):
            order = worker.order
            if isinstance(order, SendStep):
                worker.sums.run(self.world.random.randrange(len(worker.sums.share) + 1))
                if order.order.attempt:
                    worker.sums.counted = {}
                worker.sums.keep(order.order.step)
                if not order.order.attempt:
                    worker.sums.parts += self.synced.copies(name, order.order.step)
            self.answer(name, order, self.aborted(name, order.order.generation, peer_lost=peer_lost))

    def abort(self, name: str, generation: int) -> None:
        """Deliver an abort on the control lane, perhaps before the order that it is about."""
        if self.world.chance(self.world.faults.lost_message):
            return
        self.world.at(0.01 + self.world.lag_s(), lambda: self.take_abort(name, generation))

    def take_abort(self, name: str, generation: int) -> None:
        """Give up the order of this generation, now or when it comes."""
        worker = self.all[name]
        worker.aborted = max(worker.aborted, generation)
        if worker.order is not None and worker.order.order.generation <= generation:
            self.give_up(name, peer_lost=False)

    # --- storage ---------------------------------------------------------------------------------------------

    def write_later(self, action: Order) -> None:
        """Hand an order's units to the background writer."""
        if not isinstance(action, SendReshape) and action.order.checkpoint_units:
            version = action.order.step if isinstance(action, SendStep) else action.order.version
            units, name = action.order.checkpoint_units, action.worker
            self.world.at(self.world.between(0.1, 4), lambda: self.write_units(name, version, units))

    def write_units(self, name: str, version: int, units: tuple[str, ...]) -> None:
        """Finish the background writer's work, unless its worker died meanwhile."""
        if not self.all[name].alive:
            return
        if self.world.chance(self.world.faults.write_failure):
            self.tell(CheckpointFailed(worker=name, error="disk full"))
            return
        written = tuple(
            UnitWritten(worker=name, version=version, unit=unit, file=file_of(unit), size_bytes=1, sha256="0" * 64)
            for unit in units
        )
        self.tell(UnitsWritten(worker=name, written=written))
        if self.world.chance(self.world.faults.doubled):
            self.world.at(1.0, lambda: self.tell(UnitsWritten(worker=name, written=written)))
