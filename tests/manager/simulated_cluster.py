"""Workers, a provider, storage and a network in virtual time, which carry out the controller's actions, with faults.

Everything that happens is drawn from the seed. Every history ends in a ``Finish``, or fails with its whole log.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from simulated_job import FILES, SPEEDS, make_config
from simulated_workers import TIMES, BrokenHistoryError, Faults, SimulatedWorker, SimulatedWorkers, World

from manager.accounting.spent import Prices
from manager.controller.decide import decide
from manager.controller.state.actions import (
    Abort,
    AcknowledgeNotice,
    Action,
    EndWorker,
    FindCheckpoint,
    Finish,
    MarkBest,
    ProbeWorker,
    RequestNodes,
    SendCommit,
    SendPreCopy,
    SendReshape,
    SendStep,
    StartWorker,
    WriteManifest,
)
from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import (
    EVENT,
    MANIFEST_WRITER,
    CheckpointFailed,
    CheckpointFound,
    CheckpointNotFound,
    ComputeTimesSeen,
    Event,
    ManagerResumed,
    ManifestWritten,
    NobodyHeard,
    NodeAppeared,
    NodeFacts,
    NodesGranted,
    NodesStarted,
    NoticeGiven,
    NoticeWithdrawn,
    Paid,
    RequestRefused,
    StopRequested,
    Tick,
    WorkerAnswered,
    WorkerLost,
    WorkerProbed,
    WorkerTimes,
)
from manager.controller.state.state import ControllerState, Decision, Phase, initial_state
from manager.journal.journal import Journal
from manager.journal.records import VM_KILLED, Fact
from manager.report.live import LiveRun
from manager.run_dir import JOURNAL
from morph.contract.checkpoint import Manifest
from morph.contract.evaluation import Judged
from morph.contract.messages import Failed
from morph.contract.vm_names import beside, vm_of, workers_of


def priced(number: int) -> Paid:
    """Return a VM's price, which depends on its number: values without effect on decisions draw no random numbers."""
    usd_per_h = 0.1 * (number % 4) if number % 4 else None
    return Paid(usd_per_h=usd_per_h, num_nodes=1 + number % 3, before_s=0.3 * (number % 7))


def waits(vm: str) -> bool:
    """Return whether a VM waits in a queue before it boots, which depends on its number too."""
    return int(vm[1:]) % 5 == 2


class SimulatedProvider:
    """Brings VMs up; a request that is repeated under its name gets no further VMs, and the same answer."""

    def __init__(self, world: World, tell: Callable[[Event], None], workers: SimulatedWorkers) -> None:
        self.world, self.tell, self.workers = world, tell, workers
        self.num_nodes = 0
        self.num_notices = 0
        self.types: dict[str, str] = {}
        self.answers: dict[str, Event] = {}

    def add_node(self, host: str | None = None, request: str | None = None) -> str:
        """Bring up a VM; ``host``: the earlier machine on which it runs."""
        self.num_nodes += 1
        vm = f"n{self.num_nodes}"
        self.up(vm, host, request)
        return vm

    def facts(self, vm: str) -> NodeFacts | None:
        """Return a VM's facts; None if all VMs are equal."""
        types = self.world.faults.node_types
        return NodeFacts(node_type=self.types.get(vm, types[int(vm[1:]) % len(types)])) if types else None

    def up(self, vm: str, host: str | None, request: str | None) -> None:
        """Bring up a VM with all of its workers."""
        names = workers_of(vm, self.world.faults.num_devices)
        for name in names:
            self.workers.all[name] = SimulatedWorker(host=host or name)
        for name in names:
            self.tell(NodeAppeared(node=name, host=host, request=request, facts=self.facts(vm)))

    def tell_all(self) -> None:
        """Report every VM that is up to a manager that takes over."""
        for name, worker in self.workers.all.items():
            if worker.alive:
                self.tell(NodeAppeared(node=name, host=worker.host, facts=self.facts(vm_of(name))))

    def come_back(self, host: str) -> None:
        """Bring a machine back under another id after a while."""
        if self.world.chance(self.world.faults.comeback):
            self.world.at(self.world.between(0.5, 3), lambda: self.add_node(host))

    def request(self, action: RequestNodes) -> None:
        """Answer a request: grant all or some of it, refuse it, or lose it."""
        world = self.world
        if world.chance(world.faults.unanswered):
            return
        answer = self.answers.get(action.request)
        if answer is None:
            answer = self.answers[action.request] = self.decide(action)
        if not world.chance(world.faults.unanswered):
            world.at(world.between(0.1, 1) + world.lag_s(), lambda: self.tell(answer))

    def decide(self, action: RequestNodes) -> Event:
        """Draw the number of VMs for a request, and boot them."""
        count, world = action.count, self.world
        if world.chance(world.faults.refused):
            count = world.random.randrange(count)
        if not count:
            return RequestRefused(request=action.request, cause=world.random.choice(["quota", "capacity", "error"]))
        each = world.faults.num_devices
        vms: list[str] = []
        for _ in range(-(-count // each)):
            self.num_nodes += 1
            vms.append(f"n{self.num_nodes}")
            self.types[vms[-1]] = action.node_type
        for vm in vms:
            if not world.chance(world.faults.refused / 4):
                world.at(world.between(0.2, 4), lambda vm=vm: self.begin(vm, action.request))
            elif self.num_nodes % 2:  # it never comes up, and the provider may or may not report this
                for name in workers_of(vm, each):
                    lost = WorkerLost(worker=name, cause="taken while it booted")
                    world.at(world.between(0.2, 4), lambda lost=lost: self.tell(lost))
        paid = {}
        for vm in (vm for vm in vms if int(vm[1:]) % 5):  # some have no known price
            price = priced(int(vm[1:]))
            price = price.model_copy(update={"num_nodes": each}) if each > 1 else price
            paid |= dict.fromkeys(workers_of(vm, each), price)
        nodes = tuple(name for vm in vms for name in workers_of(vm, each))
        waiting = tuple(name for vm in vms if waits(vm) for name in workers_of(vm, each))
        return NodesGranted(request=action.request, nodes=nodes, paid=paid, waiting=waiting)

    def begin(self, vm: str, request: str) -> None:
        """Bring up a VM; for some of those that waited in a queue, first report that they left it."""
        if waits(vm) and int(vm[1:]) % 2:
            names = workers_of(vm, self.world.faults.num_devices)
            price = priced(int(vm[1:])).model_copy(update={"num_nodes": len(names)})
            self.tell(NodesStarted(request=request, nodes=names, paid=dict.fromkeys(names, price)))
        self.up(vm, None, request)

    def acknowledged(self, name: str) -> None:
        """Handle the acknowledgement that a VM is no longer needed: it is taken now, was taken already, or stays."""
        if self.world.chance(self.world.faults.doubled):
            self.workers.killer(name)

    def notice(self, taken_after_s: float | None) -> None:
        """Give notice of some worker's VM, sometimes twice; then take the VM or spare it."""
        world = self.world
        living = [name for name, worker in self.workers.all.items() if worker.alive]
        if not living:
            return
        name = world.random.choice(living)
        self.num_notices += 1
        world.note(f"{name} is noticed")
        names = (name, *beside(name, self.workers.all))
        for each in names:
            given = NoticeGiven(worker=each, lead_s=taken_after_s or 2.0, notice=f"notice {self.num_notices}")
            self.tell(given)
            if world.chance(world.faults.doubled):
                world.at(world.between(0, 4), lambda given=given: self.tell(given))
        if taken_after_s is not None and len(names) > 1:
            world.at(taken_after_s, lambda: self.workers.die_together(names))
        elif taken_after_s is not None:
            world.at(taken_after_s, lambda: self.workers.killer(name))
        elif world.chance(world.faults.notice_withdrawn):
            for each in names:
                world.at(world.between(0, 3), lambda each=each: self.tell(NoticeWithdrawn(worker=each)))


__all__ = ["TIMES", "BrokenHistoryError", "Faults", "SimulatedCluster"]

NO_FAULTS = Faults()
SLOW = 1.3

Decider = Callable[[ControllerState, Event, float], Decision]
Observer = Callable[["SimulatedCluster", ControllerState, Event, Decision], None]


class SimulatedCluster(World):
    """Drives a ``decide`` until it finishes."""

    def __init__(
        self,
        seed: int,
        config: ControllerConfig,
        faults: Faults = NO_FAULTS,
        decider: Decider = decide,
        observers: tuple[Observer, ...] = (),
    ) -> None:
        super().__init__(seed, faults)
        self.decider, self.observers = decider, observers
        self.checkpoints: set[int] = {config.initial_version} if config.initial_checkpoint else set()
        self.told_written = set(self.checkpoints)
        self.judged: dict[int, Judged] = {}
        self.marked: int | None = None
        self.crew = SimulatedWorkers(self, self.emit, self.checkpoints)
        self.crew.killer = self.kill
        self.provider = SimulatedProvider(self, self.emit, self.crew)
        self.clock_ahead_s = 0.0
        self.down = self.died_before = False
        self.told_lost: set[str] = set()
        self.forgotten: set[str] = set()
        self.asked: Counter[tuple[object, ...]] = Counter()
        self.refused: Counter[str] = Counter()
        self.refused_until_s = -math.inf
        self.num_managers = 1
        self.entered: Counter[Phase] = Counter()
        self.first = self.state = initial_state(config)
        self.finish: Finish | None = None
        self.history: list[tuple[float, Event, Decision]] = []
        self.wake_s: float | None = None

    @property
    def workers(self) -> dict[str, SimulatedWorker]:
        return self.crew.all

    # --- the run ---------------------------------------------------------------------------------------------

    def run(self, num_nodes: int = 4, limit_events: int = 6000) -> Finish:
        """Bring up nodes, then play events in time order until the controller finishes."""
        self.schedule(num_nodes)
        for _ in range(limit_events):
            if self.finish is not None and not self.down:
                return self.finish
            self.next()
        raise self.broken(f"no end after {limit_events} events")

    def schedule(self, num_nodes: int) -> None:
        faults = self.faults
        for _ in range(num_nodes):
            self.at(self.between(0, 2), self.provider.add_node)
        for after_s in faults.joins_after_s:
            self.at(after_s, self.provider.add_node)
        for after_s, count in faults.deaths_after_s:
            self.at(after_s, lambda count=count: self.kill_some(count))
        for after_s, taken_after_s in faults.notices_after_s:
            self.at(after_s, lambda taken_after_s=taken_after_s: self.provider.notice(taken_after_s))
        for after_s in faults.restarts_after_s:
            self.at(after_s, self.restart)
        for after_s in faults.fresh_starts_after_s:
            self.at(after_s, self.start_afresh)
        for after_s, by_s in faults.clock_jumps:
            self.at(after_s, lambda by_s=by_s: self.jump(by_s))
        if faults.stop_after_s is not None:
            self.at(faults.stop_after_s, lambda: self.emit(StopRequested(reason="asked to")))
        self.at(faults.quiet_after_s, self.replenish)
        if self.state.config.target_nodes:
            self.emit(Tick())

    def clock_s(self) -> float:
        return self.now_s + self.clock_ahead_s

    def jump(self, by_s: float) -> None:
        self.clock_ahead_s += by_s
        self.note(f"the clock jumps by {by_s:.1f} s")
        self.set_alarm(self.state_wake_s)
        if by_s > 0:  # as if the manager had been suspended
            self.emit(NobodyHeard(lasted_s=by_s))

    @property
    def state_wake_s(self) -> float | None:
        """Return when the last decision needs a tick."""
        return self.history[-1][2].wake_at_s if self.history else None

    def emit(self, event: Event) -> None:
        """Give the controller an event unless the manager is down, check the decision, and carry it out."""
        if self.finish is not None or self.down or getattr(event, "worker", None) in self.forgotten:
            return
        before = self.state
        decision = self.decider(before, event, self.clock_s())
        self.log.append((self.now_s, before, event, decision))
        if decision.state.phase is not before.phase:
            self.enter(decision.state.phase)
        self.history.append((self.clock_s(), event, decision))
        self.state = decision.state
        for observer in self.observers:
            observer(self, before, event, decision)
        if not self.died_before and any(action.kind == self.faults.dies_before for action in decision.actions):
            self.died_before = True
            self.go_down()
        if self.down:
            return  # it died before its first action
        for action in decision.actions:
            self.carry_out(action)
        if decision.state.version > before.version:
            self.at(0.05, self.send_times)
        self.set_alarm(decision.wake_at_s)

    def set_alarm(self, wake_s: float | None) -> None:
        """Wake the manager when its clock shows this time."""
        self.wake_s = wake_s
        if wake_s is not None:
            self.at_time(max(self.now_s, wake_s - self.clock_ahead_s) + 1e-6, lambda: self.wake(wake_s))

    def wake(self, wake_s: float) -> None:
        """Send the tick that the last decision requested."""
        if self.wake_s == wake_s and self.clock_s() >= wake_s:
            self.wake_s = None
            self.emit(Tick())

    def enter(self, phase: Phase) -> None:
        """Kill some workers a little after the controller has entered a phase."""
        self.entered[phase] += 1
        for fatal, nth, count in self.faults.deaths_in:
            if fatal is phase and self.entered[phase] == nth + 1:
                self.at(self.between(0.0, 0.1), lambda count=count: self.kill_some(count))

    # --- managers --------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Kill the manager, now or right after its next decision is recorded; later a new one takes over."""
        if self.finish is not None or self.down or not self.history:
            return
        if self.random.random() < 0.5:
            self.go_down()
        else:
            self.observers = (*self.observers, self.die_before_acting)

    def die_before_acting(
        self, cluster: SimulatedCluster, before: ControllerState, event: Event, decision: Decision
    ) -> None:
        self.observers = self.observers[:-1]
        self.go_down()

    def go_down(self) -> None:
        """Go down: from now on no worker is heard, while orders are still delivered."""
        self.down, self.wake_s = True, None
        self.note("the manager dies")
        self.at(self.between(0.1, 3), self.take_over)

    def take_over(self) -> None:
        """Let a new manager rebuild the state from the journal, and find the living workers."""
        state = self.first
        for time_s, event, _ in self.history:
            state = decide(state, EVENT.validate_json(event.model_dump_json()), time_s).state
        self.check(state == self.state, "what the journal gives back is not the state")
        self.down, self.num_managers = False, self.num_managers + 1
        living = tuple(name for name, worker in self.workers.items() if worker.alive and worker.started)
        self.emit(ManagerResumed(living=living))
        self.provider.tell_all()

    def start_afresh(self) -> None:
        """Lose everything but storage: the run begins again at its newest checkpoint, with new VMs."""
        if self.finish is not None or self.down or not self.checkpoints:
            return
        for name in list(self.workers):
            self.crew.die(name)
        version, old = max(self.checkpoints), self.state.config
        saved = self.manifest_of(version)
        config = old.model_copy(update={"initial_version": version, "initial_checkpoint": saved})
        self.first = self.state = initial_state(config)
        self.told_written = set(self.checkpoints)
        self.history.clear()
        self.forgotten.update(self.workers)
        self.asked.clear()
        self.refused_until_s = -math.inf
        self.provider.answers.clear()
        self.wake_s = None
        self.note(f"the run is begun again at version {version}")
        for _ in range(4):
            self.at(self.between(0, 2), self.provider.add_node)

    # --- deaths and slow workers -----------------------------------------------------------------------------

    def replenish(self) -> None:
        """Add VMs, so that from here on there are enough."""
        for _ in range(4):
            self.provider.add_node()

    def kill_some(self, count: int) -> None:
        living = [name for name, worker in self.workers.items() if worker.alive]
        for name in self.random.sample(living, min(count, len(living))):
            self.kill(name)

    def kill(self, name: str) -> None:
        """Kill a worker, or all workers of its VM."""
        worker, others = self.workers[name], beside(name, self.workers)
        if not worker.alive:
            return
        if others and self.random.random() < 0.8:
            self.crew.die_together((name, *others))
        else:
            self.crew.die(name)
        self.provider.come_back(worker.host)

    def send_times(self) -> None:
        """Let heartbeats bring the compute times of a step's micro-batches, from all members at once."""
        if not self.faults.slow:
            return
        times = []
        for slot in self.state.slots:
            worker = self.workers[slot.worker]
            if self.quiet:
                worker.slow = False
            elif self.random.random() < self.faults.slow / 10:
                worker.slow = not worker.slow
            stage = self.state.plan.stages[slot.stage]
            took_s = (SLOW if worker.slow else 1.0) * len(stage.sections) / SPEEDS[stage.node_type]
            samples_s = tuple(took_s * self.between(0.97, 1.03) for _ in range(4))
            times.append(WorkerTimes(worker=slot.worker, generation=self.state.generation, compute_s=samples_s))
        if times:
            self.emit(ComputeTimesSeen(times=tuple(times)))

    def probe(self, action: ProbeWorker) -> None:
        worker = self.workers[action.worker]
        if worker.alive and not self.chance(self.faults.lost_message):
            slowdown: float | None = SLOW if worker.slow and not self.quiet and self.random.random() < 0.8 else 1.0
            if self.chance(self.faults.lost_message):
                slowdown = None  # an order came first
            answer = WorkerProbed(worker=action.worker, probe=action.probe, slowdown=slowdown)
            self.at(self.between(0.1, 1), lambda: self.emit(answer))

    # --- carrying out actions --------------------------------------------------------------------------------

    def carry_out(self, action: Action) -> None:
        match action:
            case StartWorker():
                self.crew.start(action.worker)
            case SendReshape() | SendStep() | SendCommit():
                self.crew.order(action)
            case Abort():
                self.crew.abort(action.worker, action.generation)
            case SendPreCopy():
                self.crew.pre_copy.order(action)
            case ProbeWorker():
                self.probe(action)
            case AcknowledgeNotice():
                self.provider.acknowledged(action.worker)
            case RequestNodes():
                self.provider.request(action)
            case EndWorker():
                self.kill(action.worker)
            case WriteManifest():
                version, first = action.manifest.version, self.first
                self.judged[version] = action.manifest.judged
                self.at(self.between(0.1, 1), lambda: self.write_manifest(version, first))
            case MarkBest(best=best):
                if best.version in self.checkpoints:
                    self.marked = best.version
            case FindCheckpoint():
                first = self.first
                self.at(self.between(0.1, 2), lambda: self.find_checkpoint(first))
            case Finish():
                self.finish = action

    def find_checkpoint(self, first: ControllerState) -> None:
        """Search storage: damaged versions are set aside; the manager may die before it can report the result."""
        if first is not self.first or (self.down and self.random.random() < 0.5):
            return
        if self.chance(self.faults.load_failure):
            self.emit(CheckpointNotFound(error="storage does not answer", damaged=False))
            return
        version = max(self.checkpoints - self.crew.damaged)
        newer = sorted(passed for passed in self.checkpoints if passed > version)
        self.checkpoints.difference_update(newer)
        self.told_written.difference_update(newer)
        told = tuple(f"version {passed} is skipped" for passed in newer)
        manifest = self.manifest_of(version)
        self.emit(CheckpointFound(manifest=manifest, passed_over=told))

    def manifest_of(self, version: int) -> Manifest:
        return Manifest(fingerprint="f", version=version, units=FILES, judged=self.judged.get(version, Judged()))

    def write_manifest(self, version: int, first: ControllerState) -> None:
        """Write the manifest, unless the run that requested it was begun again."""
        if first is not self.first:
            return
        if self.state.phase != "sealing" and self.chance(self.faults.write_failure):
            self.emit(CheckpointFailed(worker=MANIFEST_WRITER, error="disk full"))
            return
        self.checkpoints.add(version)
        self.crew.damaged.discard(version)
        self.emit(ManifestWritten(version=version))

    def fail(self, name: str, error: str) -> None:
        """Let a worker's present order fail for good."""
        worker = self.workers[name]
        generation = worker.order.order.generation
        worker.order, worker.token = None, worker.token + 1
        self.emit(WorkerAnswered(worker=name, answer=Failed(worker=name, generation=generation, error=error)))


class JournalledCluster(SimulatedCluster):
    """A cluster whose kills, events and decisions are in a journal before they take effect."""

    def __init__(self, seed: int, run_dir: Path, faults: Faults, start_s: float = 0.0, **fields: object) -> None:
        config = make_config(**fields)
        super().__init__(seed, config, faults, observers=(self.write_down,))
        self.journal = Journal.open(run_dir / JOURNAL)
        self.now_s = start_s
        self.journal.append_config(start_s, config)
        self.killed_s: dict[str, float] = {}
        self.facts: list[tuple[float, Fact]] = []

    def write_down(self, cluster: SimulatedCluster, before: ControllerState, event: Event, decision: Decision) -> None:
        self.journal.append_decision(self.clock_s(), event, decision)

    def kill(self, name: str) -> None:
        if self.workers[name].alive:
            self.killed_s[name] = self.now_s
            self.facts.append((self.clock_s(), Fact(name=VM_KILLED, worker=name)))
            self.journal.append_fact(*self.facts[-1])
        super().kill(name)

    def start_afresh(self) -> None:
        before = self.first
        super().start_afresh()
        if self.first is not before:
            self.journal.append_config(self.clock_s(), self.first.config)


def played(stop_at: int | None = None) -> LiveRun:
    """Return a cluster that was played to its end, or until ``stop_at`` was decided."""
    run = LiveRun("gpt2-stdlib", 12, 8, Prices(paid_usd_per_h=1.0, on_demand_usd_per_h=3.0), start_s=0.0)

    def observe(cluster: SimulatedCluster, _before: ControllerState, event: Event, decision: Decision) -> None:
        if stop_at is None or run.version < stop_at:
            run.take(cluster.now_s, event, decision)

    faults = Faults(deaths_after_s=((6.0, 1),))
    cluster = SimulatedCluster(0, make_config(expected_nodes=6), faults, observers=(observe,))
    assert cluster.run(6).outcome == "finished"
    return run
