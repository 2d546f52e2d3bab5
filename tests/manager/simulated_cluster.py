"""Workers, storage and a network in virtual time that carry out the controller's actions, faults included.

What happens depends on the seed alone. Every history ends in a ``Finish`` or fails with its whole log.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable

from simulated_job import broken_unit, facts_of, file_of, norm_sq, scale_of
from simulated_worker import Faults, Order, SimulatedWorker

from manager.controller.actions import (
    Abort,
    Action,
    EndWorker,
    Finish,
    SendCommit,
    SendReshape,
    SendStep,
    StartWorker,
    WriteManifest,
)
from manager.controller.config import ControllerConfig
from manager.controller.decide import decide
from manager.controller.events import (
    MANIFEST_WRITER,
    CheckpointFailed,
    Event,
    ManifestWritten,
    NodeAppeared,
    StopRequested,
    Tick,
    UnitsWritten,
    WorkerAnswered,
    WorkerLost,
)
from manager.controller.state import ControllerState, Decision, Phase, initial_state
from morph.contract.messages import (
    Aborted,
    Answer,
    Committed,
    ComputeTimes,
    Failed,
    MicroBatchLoss,
    Prepared,
    Reshaped,
    ReshapeOrder,
    UnitWritten,
    WorkerReady,
)

NO_FAULTS = Faults()
TIMES = ComputeTimes(forward_s=0.1, recompute_s=0.1, backward_s=0.2, reduce_s=0.1, wait_s=0.0, step_s=0.5)


class BrokenHistoryError(AssertionError):
    """An invariant did not hold; carries the log of the history."""


Decider = Callable[[ControllerState, Event, float], Decision]
Observer = Callable[["SimulatedCluster", ControllerState, Event, Decision], None]


def _line(time_s: float, before: ControllerState, event: Event, decision: Decision) -> str:
    after = decision.state
    return (
        f"{time_s:8.3f} {before.phase:<10} {event.kind} {event.model_dump_json(exclude_defaults=True)[:160]}\n"
        f"         -> {after.phase} v{after.version} g{after.generation} {decision.reason.code}: "
        f"{decision.reason.sentence}"
    )


class SimulatedCluster:
    """Drives a ``decide`` until it finishes."""

    def __init__(
        self,
        seed: int,
        config: ControllerConfig,
        faults: Faults = NO_FAULTS,
        decider: Decider = decide,
        observers: tuple[Observer, ...] = (),
    ) -> None:
        self.random = random.Random(seed)
        self.seed, self.faults, self.decider, self.observers = seed, faults, decider, observers
        self.now_s = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.sequence = itertools.count()
        self.workers: dict[str, SimulatedWorker] = {}
        self.told_lost: set[str] = set()
        self.entered: Counter[Phase] = Counter()
        self.num_nodes = 0
        self.state = initial_state(config)
        self.checkpoints: set[int] = {config.initial_version} if config.initial_checkpoint else set()
        self.finish: Finish | None = None
        self.log: list[str | tuple[float, ControllerState, Event, Decision]] = []
        self.history: list[tuple[float, Event, Decision]] = []
        self.wake_s: float | None = None

    # --- the run ---------------------------------------------------------------------------------------------

    def run(self, num_nodes: int = 4, limit_events: int = 4000) -> Finish:
        """Bring up nodes, then play events in time order until the controller finishes."""
        for _ in range(num_nodes):
            self.at(self.random.uniform(0, 2), self.add_node)
        for after_s in self.faults.joins_after_s:
            self.at(after_s, self.add_node)
        for after_s, count in self.faults.deaths_after_s:
            self.at(after_s, lambda count=count: self.kill_some(count))
        if self.faults.stop_after_s is not None:
            self.at(self.faults.stop_after_s, lambda: self.emit(StopRequested(reason="asked to")))
        self.at(self.faults.quiet_after_s, self.replenish)
        for _ in range(limit_events):
            if self.finish is not None:
                return self.finish
            self.check(bool(self.queue), "nothing will ever happen again")
            self.now_s, _, action = heapq.heappop(self.queue)
            action()
        raise self.broken(f"no end after {limit_events} events")

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        """Schedule."""
        self.at_time(self.now_s + delay_s, action)

    def at_time(self, time_s: float, action: Callable[[], None]) -> None:
        """Schedule at an absolute time."""
        heapq.heappush(self.queue, (time_s, next(self.sequence), action))

    def emit(self, event: Event) -> None:
        """Give an event to the controller, check the decision, carry it out."""
        if self.finish is not None:
            return
        before = self.state
        decision = self.decider(before, event, self.now_s)
        self.log.append((self.now_s, before, event, decision))
        if decision.state.phase is not before.phase:
            self.enter(decision.state.phase)
        self.history.append((self.now_s, event, decision))
        self.state = decision.state
        for observer in self.observers:
            observer(self, before, event, decision)
        for action in decision.actions:
            self.carry_out(action)
        wake_s = decision.wake_at_s
        if wake_s is not None and wake_s != self.wake_s:
            self.wake_s = wake_s
            self.at_time(max(self.now_s, wake_s), self.wake)

    def enter(self, phase: Phase) -> None:
        """Some workers die a little after the controller enters a phase."""
        self.entered[phase] += 1
        for fatal, nth, count in self.faults.deaths_in:
            if fatal is phase and self.entered[phase] == nth + 1:
                self.at(self.random.uniform(0.0, 0.1), lambda count=count: self.kill_some(count))

    def wake(self) -> None:
        """Send the tick that the last decision asked for."""
        if self.wake_s is not None and self.now_s >= self.wake_s:
            self.wake_s = None
            self.emit(Tick())

    def check(self, holds: bool, what: str) -> None:
        """Fail with the whole history unless ``holds``."""
        if not holds:
            raise self.broken(what)

    def broken(self, what: str) -> BrokenHistoryError:
        """Build the error that shows the history."""
        return BrokenHistoryError(f"seed {self.seed}: {what}\n" + self.told())

    def told(self) -> str:
        """Return the history as text."""
        return "\n".join(entry if isinstance(entry, str) else _line(*entry) for entry in self.log)

    # --- nodes and deaths ------------------------------------------------------------------------------------

    @property
    def quiet(self) -> bool:
        """Nothing goes wrong any more, so that every history can end."""
        return self.now_s >= self.faults.quiet_after_s

    def chance(self, probability: float) -> bool:
        """Draw a fault."""
        return not self.quiet and self.random.random() < probability

    def add_node(self) -> None:
        """A VM comes up."""
        self.num_nodes += 1
        name = f"n{self.num_nodes}"
        self.workers[name] = SimulatedWorker()
        self.emit(NodeAppeared(node=name))

    def replenish(self) -> None:
        """From here on there are enough VMs."""
        for _ in range(4):
            self.add_node()

    def kill_some(self, count: int) -> None:
        """Kill this many living workers at once."""
        living = [name for name, worker in self.workers.items() if worker.alive]
        for name in self.random.sample(living, min(count, len(living))):
            self.kill(name)

    def kill(self, name: str) -> None:
        """SIGKILL: the manager hears of it soon, late, or only by its own timeouts; busy peers see a reset."""
        worker = self.workers[name]
        if not worker.alive:
            return
        worker.alive = False
        worker.token += 1
        self.log.append(f"{self.now_s:8.3f} {name} dies")
        lost = WorkerLost(worker=name, cause="killed")
        if not self.chance(self.faults.silent_death) or worker.order is None:
            delay_s = (
                self.random.uniform(1, 6) if self.chance(self.faults.late_loss) else self.random.uniform(0.01, 0.1)
            )
            self.at(delay_s, lambda: self.emit(lost))
            if self.chance(self.faults.doubled):
                self.at(delay_s + 0.5, lambda: self.emit(lost))
        for peer in self.workers:
            if self.random.random() < 0.4:
                self.at(self.random.uniform(0.01, 0.2), lambda peer=peer: self.reset(peer, name))

    def reset(self, name: str, peer: str) -> None:
        """A busy worker sees its connection to a dead peer fail."""
        worker = self.workers[name]
        order = worker.order
        if not worker.alive or not isinstance(order, SendReshape | SendStep) or peer not in self.peers_of(order):
            return
        self.give_up(name, peer_lost=True)

    def peers_of(self, order: SendReshape | SendStep) -> set[str]:
        """Return the workers that an order makes one talk to."""
        if isinstance(order, SendReshape):
            served = {source.peer for source in order.order.sources if source.peer and source.worker == order.worker}
            return served | {slot.worker for slot in order.order.slots}
        return {slot.worker for slot in self.state.slots}

    # --- carrying out actions --------------------------------------------------------------------------------

    def carry_out(self, action: Action) -> None:
        """Do one action."""
        match action:
            case StartWorker():
                self.at(self.random.uniform(0.1, 2), lambda: self.set_up(action.worker))
            case SendReshape() | SendStep() | SendCommit():
                self.receive(action)
            case Abort():
                delay_s = self.random.uniform(0.01, 0.1)
                self.at(delay_s, lambda: self.abort(action.worker, action.generation))
            case EndWorker():
                self.kill(action.worker)
            case WriteManifest():
                self.at(self.random.uniform(0.1, 1), lambda: self.write_manifest(action.manifest.version))
            case Finish():
                self.finish = action

    def set_up(self, name: str) -> None:
        """A worker finishes its setup."""
        if self.workers[name].alive:
            self.answer(name, WorkerReady(worker=name, pid=1, setup_s=1))

    def answer(self, name: str, answer: Answer) -> None:
        """Send an answer, now and then twice or late."""
        event = WorkerAnswered(worker=name, answer=answer)
        delay_s = self.random.uniform(0.0, 0.01)
        self.at(delay_s, lambda: self.emit(event))
        if self.chance(self.faults.doubled):
            self.at(self.random.uniform(0.0, 3), lambda: self.emit(event))

    def receive(self, action: Order) -> None:
        """A worker gets an order: it works on it for a while, dies in it, or hangs."""
        worker = self.workers[action.worker]
        if not worker.alive:
            return
        self.check(worker.order is None, f"{action.worker} gets an order while it has one")
        worker.order = action
        worker.token += 1
        token = worker.token
        self.begin(action.worker, worker, action)
        if self.chance(self.faults.stuck):
            return
        duration_s = self.random.uniform(0.2, 1.0)
        if self.chance(self.faults.death_per_order):
            self.at(duration_s * self.random.random(), lambda: self.kill(action.worker))
        if self.chance(self.faults.spurious_abort):
            self.at(duration_s * 0.9, lambda: self.give_up(action.worker, peer_lost=True, token=token))
        self.at(duration_s, lambda: self.complete(action, token))

    def begin(self, name: str, worker: SimulatedWorker, action: Order) -> None:
        """Apply the version that the order decides, as the contract says; the state must be there."""
        order = action.order
        version = order.step if isinstance(action, SendStep) else order.version
        if worker.prepared is not None and worker.prepared + 1 == version:
            right = facts_of(version, self.faults.non_finite)
            self.check(
                order.decided == right, f"{name} is to apply version {version} with {order.decided}, not {right}"
            )
            worker.units = {
                unit: version if unit in worker.stage_units else held for unit, held in worker.units.items()
            }
        if isinstance(action, SendStep):
            scale = scale_of(version, self.faults.non_finite)
            self.check(order.loss_scale == scale, f"{name} is to scale by {order.loss_scale}, its units say {scale}")
        if isinstance(action, SendStep) and order.attempt:
            self.check(worker.prepared == order.step, f"{name} is to retry step {order.step}, which it did not run")
        worker.prepared = None
        if isinstance(action, SendReshape):
            worker.units |= {unit: held for unit, held in worker.received.items() if held == version}
            worker.received = {}
            return
        worker.units |= worker.received
        worker.received = {}
        worker.units = {unit: held for unit, held in worker.units.items() if unit in worker.stage_units}
        right = set(worker.units) == worker.stage_units and set(worker.units.values()) <= {version}
        self.check(right, f"{name} is to be at version {version} with {sorted(worker.stage_units)}, has {worker.units}")
        if order.checkpoint_units:
            self.at(self.random.uniform(0.1, 4), lambda: self.write_units(name, version, order.checkpoint_units))

    def complete(self, action: Order, token: int) -> None:
        """The work of an order is done, unless the worker died, gave up or got stuck; or it waits for a dead peer."""
        name = action.worker
        worker = self.workers[name]
        if not worker.alive or worker.token != token:
            return
        if not isinstance(action, SendCommit) and any(
            not self.workers[peer].alive for peer in self.peers_of(action) - {name}
        ):
            if isinstance(action, SendStep) or self.random.random() < 0.5:
                return
            self.give_up(name, peer_lost=True)
            return
        worker.order = None
        order = action.order
        if isinstance(action, SendReshape):
            self.receive_state(name, worker, action.order)
            self.answer(
                name,
                Reshaped(
                    worker=name,
                    generation=order.generation,
                    groups_s=0.1,
                    state_s=0.2,
                    received_bytes=0,
                    loss_scale=scale_of(order.version, self.faults.non_finite) if worker.stage_units else None,
                ),
            )
        elif isinstance(action, SendStep):
            worker.prepared = action.order.step
            worker.overflowed = action.order.attempt < 3 and self.chance(self.faults.overflow)
            worker.non_finite = broken_unit(action.order.step, self.faults.non_finite) in worker.stage_units
            norms_sq = {unit: norm_sq(unit, action.order.step) for unit in worker.stage_units}
            losses = tuple(
                MicroBatchLoss(micro_batch=index, loss=1 / (1 + action.order.step), metrics={"right": index / 2})
                for index in range(2)
            )
            self.answer(
                name,
                Prepared(
                    worker=name,
                    generation=order.generation,
                    step=action.order.step,
                    attempt=action.order.attempt,
                    overflowed=worker.overflowed,
                    unit_norms_sq={} if worker.non_finite else norms_sq,
                    non_finite=worker.non_finite,
                    losses=losses,
                    times=TIMES,
                ),
            )
        else:
            self.answer(name, Committed(worker=name, generation=order.generation, version=action.order.version))

    def receive_state(self, name: str, worker: SimulatedWorker, order: ReshapeOrder) -> None:
        """Take every unit from where the order says; its source must really have it."""
        for source in order.sources:
            if source.worker != name:
                continue
            if source.kind == "keep":
                right = worker.units.get(source.unit) == order.version
            elif source.kind == "peer":
                peer = self.workers[source.peer or ""]
                right = peer.units.get(source.unit) == order.version
            elif source.kind == "checkpoint":
                right = order.version in self.checkpoints
            else:
                right = order.version == 0
            self.check(
                right, f"{name} cannot get {source.unit} at version {order.version}: {source.kind} {source.peer}"
            )
            worker.received[source.unit] = order.version
        worker.stage_units = frozenset(source.unit for source in order.sources if source.worker == name)

    def give_up(self, name: str, *, peer_lost: bool, token: int | None = None) -> None:
        """Answer ``Aborted`` to the present order."""
        worker = self.workers[name]
        if not worker.alive or worker.order is None or token not in (None, worker.token):
            return
        generation = worker.order.order.generation
        worker.order, worker.token = None, worker.token + 1
        self.answer(name, Aborted(worker=name, generation=generation, peer_lost=peer_lost))

    def abort(self, name: str, generation: int) -> None:
        """The control lane delivers an abort."""
        worker = self.workers[name]
        if worker.order is not None and worker.order.order.generation == generation:
            self.give_up(name, peer_lost=False)

    # --- storage ---------------------------------------------------------------------------------------------

    def write_units(self, name: str, version: int, units: tuple[str, ...]) -> None:
        """The background writer is done, unless its worker died meanwhile."""
        if not self.workers[name].alive:
            return
        if self.chance(self.faults.write_failure):
            self.emit(CheckpointFailed(worker=name, error="disk full"))
            return
        written = tuple(
            UnitWritten(worker=name, version=version, unit=unit, file=file_of(unit), size_bytes=1, sha256="0" * 64)
            for unit in units
        )
        self.emit(UnitsWritten(worker=name, written=written))
        if self.chance(self.faults.doubled):
            self.at(1.0, lambda: self.emit(UnitsWritten(worker=name, written=written)))

    def write_manifest(self, version: int) -> None:
        """The manifest is on storage."""
        if self.state.phase != "sealing" and self.chance(self.faults.write_failure):
            self.emit(CheckpointFailed(worker=MANIFEST_WRITER, error="disk full"))
            return
        self.checkpoints.add(version)
        self.emit(ManifestWritten(version=version))

    def fail(self, name: str, error: str) -> None:
        """A worker's present order fails for good."""
        worker = self.workers[name]
        assert worker.order is not None
        generation = worker.order.order.generation
        worker.order, worker.token = None, worker.token + 1
        self.answer(name, Failed(worker=name, generation=generation, error=error))
