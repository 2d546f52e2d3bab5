"""A spot cluster in virtual time, driven by the controller that drives real runs.

Steps between which nothing else happens are skipped: the controller would decide the same each time.
``tests/manager/test_jumping.py`` runs with and without skipping; every later event and decision must be equal.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

import simpy

from manager.accounting.account import Account
from manager.accounting.ledger import Ledger
from manager.controller.deadlines import wake_at_s
from manager.controller.decide import decide
from manager.controller.state.actions import (
    Abort,
    Action,
    EndWorker,
    Finish,
    ReleaseNodes,
    SendCommit,
    SendPreCopy,
    SendReshape,
    SendStep,
    StartWorker,
    WriteManifest,
)
from manager.controller.state.bounds import save_bound_s
from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import (
    AnsweredAlike,
    Event,
    ManifestWritten,
    NodeAppeared,
    NodeFacts,
    NoticeGiven,
    Paid,
    Tick,
    Together,
    WorkerLost,
)
from manager.controller.state.nodes import NodeState
from manager.controller.state.state import ControllerState, Decision, OutstandingOrder, Phase, initial_state, mean_of
from manager.controller.steps.save_timing import is_due
from manager.journal.records import DecisionRecord
from manager.simulation.spot.job import FINGERPRINT, SpotJob
from manager.simulation.spot.run_end import Moment
from manager.simulation.spot.vms import Acting, Told, Workers
from morph.contract.decided import Decided
from morph.contract.messages import Prepared
from morph.contract.vm_names import workers_of

Kind = TypeVar("Kind", bound=Action)
ByKind = Mapping[type, list[Action]]
Watcher = Callable[[float, Event, Decision], None]


def steps_alike(state: ControllerState, now_s: float, step_s: float, until_s: float) -> int:
    """Return how many steps, beginning with the one ordered at ``now_s``, are each followed by another plain step.
    ``step_s``: how long each takes until it is decided. ``until_s``: when the next event of another kind happens.
    """
    saving = state.saving
    if not _is_steady(state, now_s):
        return 0
    quiet_s = min(until_s, wake_at_s(_with_order(state, None)) or math.inf)
    under_way = saving.pending is not None and not saving.pending.stale
    if saving.pending is not None and under_way:
        quiet_s = min(quiet_s, saving.pending.started_s + save_bound_s(state))
    most = state.config.num_steps - 1 - state.version
    if quiet_s < math.inf:
        most = min(most, math.ceil((quiet_s - now_s) / step_s) - 1)
    if under_way or saving.sealing:  # no other save begins
        return max(0, most)
    every = state.config.policy.checkpoint_every_steps
    if every is not None:
        most = min(most, saving.checkpoint_base + every - state.version - 1)
    if saving.save_times.insurance is not None:
        most = min(most, math.ceil((saving.save_times.insurance.due_s - now_s) / step_s))
    while most > 0 and is_due(*_passed(state, now_s, step_s, most)) is not None:
        most -= 1
    return max(0, most)


def passed(state: ControllerState, now_s: float, step_s: float, num_steps: int) -> ControllerState:
    """Return the state after this number of steps are decided and the next one is ordered."""
    later, _ = _passed(state, now_s, step_s, num_steps)
    return later


def _passed(state: ControllerState, now_s: float, step_s: float, num_steps: int) -> tuple[ControllerState, float]:
    assert state.step.order is not None, "a step is ordered"
    version, saves = state.version + num_steps, state.saving.save_times
    mean_s = saves.step_s
    for _ in range(min(num_steps, 128)):  # the mean no longer changes by then
        mean_s = mean_of(mean_s, step_s)
    now_s += num_steps * step_s
    later = _with_order(state, state.step.order.model_copy(update={"version": version, "sent_s": now_s}))
    times = saves.model_copy(update={"step_s": mean_s, "ordered_s": now_s})
    changes = {
        "version": version,
        "decided": Decided(version=version),
        "saving": state.saving.model_copy(update={"save_times": times}),
        "waits": state.waits.model_copy(update={"num_fruitless": 0, "resting_since_s": None}),
    }
    return later.model_copy(update=changes), now_s


def _with_order(state: ControllerState, order: OutstandingOrder | None) -> ControllerState:
    return state.model_copy(update={"step": state.step.model_copy(update={"order": order})})


def _is_steady(state: ControllerState, now_s: float) -> bool:
    """Return whether more steps like the running one follow: no change of shape, save or noticed loss is near."""
    step = state.step
    if state.phase is not Phase.TRAINING or step.order is None or step.order.version != state.version:
        return False
    if step.attempt or state.stop_reason is not None or state.failing is not None or state.pre_copy is not None:
        return False
    if state.waits.join_since_s is not None or step.loss_scale is not None or state.saving.save_times.weighs:
        return False
    for entry in state.workers.values():
        waits = entry.eligible_s is not None and entry.eligible_s > now_s
        if waits or entry.node is NodeState.DRAINING or entry.node is NodeState.SUSPECT:
            return False
    return state.saving.save_times.retry_s is None


class SpotCluster:
    """Simulates a job on VMs that come and go, as SimPy processes in the virtual time of ``env``.

    One process is the manager (``_manage``), others are the actions of workers (:mod:`manager.simulation.spot.vms`).
    The caller simulates the VMs: its processes call ``vm_came``, ``vm_noticed`` and ``vm_taken``. The run ends once
    ``num_steps`` are done and saved. ``seed``: of the random durations, if the job's durations have a spread.
    ``num_expected``: VMs to wait for at the start. ``jumps``: skip steps between which nothing else happens.
    ``watcher`` is called with every event and its decision.
    """

    def __init__(
        self,
        job: SpotJob,
        *,
        num_steps: int,
        seed: int = 0,
        num_expected: int = 1,
        jumps: bool = True,
        watcher: Watcher | None = None,
    ) -> None:
        self.job, self._jumps, self._watcher = job, jumps, watcher
        self.env = simpy.Environment(initial_time=0.0)
        self.workers = Workers(job, seed, self.env, self.tell)
        self.state = initial_state(config_of(job, num_steps, num_expected))
        self.ledger = Ledger()
        self.finish: Finish | None = None
        self.moments: list[Moment] = []
        self.num_fatal = self.num_lost = self.num_decisions = self.lost_steps = 0
        self._names = itertools.count()
        self._told: list[Told] = []
        self._news = self.env.event()
        self._wake_s = self._until_s = math.inf
        self.env.process(self._manage()).callbacks.append(_raise_as_it_is)

    # --- VMs -------------------------------------------------------------------------------------------------

    def vm_came(self, facts: NodeFacts | None = None, usd_per_h: float | None = None) -> str:
        """Report that a VM is up, with all its workers; return its new name."""
        name, num = f"n{next(self._names)}", self.job.gpus_per_vm
        workers = workers_of(name, num)
        self.workers.alive.update(workers)
        paid = None if usd_per_h is None else Paid(usd_per_h=usd_per_h, num_nodes=num)
        self.after(0.0, partial(self.tell, [NodeAppeared(node=worker, facts=facts, paid=paid) for worker in workers]))
        return name

    def vm_noticed(self, name: str, lead_s: float) -> None:
        """Give a VM a notice that it will be taken after ``lead_s``."""
        workers = self._alive_of(name)
        if workers:
            given = [NoticeGiven(worker=worker, lead_s=lead_s, notice=name) for worker in workers]
            self.after(0.0, partial(self.tell, given))

    def vm_taken(self, name: str) -> None:
        """Take a VM; the manager detects this a little later."""
        workers = self._alive_of(name)
        if workers:
            self.workers.alive.difference_update(workers)
            self.num_lost += len(workers)
            lost = [WorkerLost(worker=worker, cause="its VM was taken") for worker in workers]
            self.after(self.job.durations.noticed_s, partial(self.tell, lost))

    def _alive_of(self, name: str) -> list[str]:
        return [worker for worker in workers_of(name, self.job.gpus_per_vm) if worker in self.workers.alive]

    # --- time ------------------------------------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        """The virtual time."""
        return float(self.env.now)

    def after(self, delay_s: float, what: Callable[[], object]) -> None:
        """Call a function after this time."""

        def wait() -> Acting:
            yield self.env.timeout(delay_s)
            what()

        self.env.process(wait())

    def play(self, until_s: float = math.inf) -> None:
        """Simulate until this time, or until the run has ended."""
        self._until_s = until_s
        with without_cycles():
            while self.finish is None and math.inf > min(self.env.peek(), self._wake_s) <= until_s:
                if self._wake_s < self.env.peek():
                    self._timeout_at(self._wake_s).callbacks.append(lambda _: self.tell(()))
                self.env.step()
        if self.now_s < until_s < math.inf and self.finish is None:
            self._timeout_at(until_s)
            self.env.step()
        self.ledger.advance(self.now_s)

    def _timeout_at(self, time_s: float) -> simpy.Timeout:
        """Return a timeout at exactly this time, which a rounded difference may miss."""
        now_s, delay_s = self.now_s, time_s - self.now_s
        while now_s + delay_s < time_s:
            delay_s = math.nextafter(delay_s, math.inf)
        while now_s + delay_s > time_s:
            delay_s = math.nextafter(delay_s, 0.0)
        return self.env.timeout(delay_s)

    @property
    def account(self) -> Account:
        """The uses of the nodes' time so far, and their cost."""
        return self.ledger.account()

    # --- the manager -----------------------------------------------------------------------------------------

    def tell(self, events: Sequence[Told]) -> None:
        """Tell the manager of events, together with all others at the same virtual time."""
        self._told += events
        if not self._news.triggered:
            self._news.succeed()

    def _manage(self) -> Acting:
        """Simulate the manager: it gets all events of one time together, decides, and has the decisions carried out.

        It also wakes up at the controller's next deadline. Each decision moves this deadline, and SimPy cannot cancel a
        timeout, so ``play`` makes one only once no event comes before the deadline.
        """
        while self.finish is None:
            yield self._news
            yield from self._end_of_instant()
            events, self._told, self._news = self._told, [], self.env.event()
            if self._wake_s <= self.now_s:
                events.append(Tick())
            if not events:
                continue
            self._wake_s, was_training = math.inf, self.state.phase is Phase.TRAINING
            steps, wake_s = self._decide(events[0] if len(events) == 1 else _together(events))
            decided = self.state
            if steps:
                yield from self._give(steps, jumps=self._jumps and was_training)
            wake_s = wake_s if self.state is decided else wake_at_s(self.state)
            self._wake_s = math.inf if wake_s is None else max(self.now_s, wake_s)

    def _end_of_instant(self) -> Acting:
        while self.env.peek() <= self.env.now:
            yield self.env.timeout(0)

    def _decide(self, event: Event) -> tuple[list[SendStep], float | None]:
        """Let the controller decide; return the orders of a step, which must still be given, and its next deadline."""
        before = self.state
        decision = decide(before, event, self.now_s)
        self.num_decisions += 1
        if self._watcher is not None:
            self._watcher(self.now_s, event, decision)
        self.state = decision.state
        by_kind: dict[type, list[Action]] = {}
        for kind, actions in itertools.groupby(decision.actions, type):
            by_kind.setdefault(kind, []).extend(actions)
        self._book(event, decision, by_kind, step_decided=decision.state.version > before.version)
        if decision.state.version < before.version:
            self.num_fatal += 1
            self.lost_steps += before.version - decision.state.version
        self._note_moment()
        return self._carry_out(by_kind), decision.wake_at_s

    def _book(self, event: Event, decision: Decision, by_kind: ByKind, *, step_decided: bool) -> None:
        events = event.events if isinstance(event, Together) else (event,)
        prepared = (each.answer for each in events if isinstance(each, AnsweredAlike))
        decided = next((answer for answer in prepared if isinstance(answer, Prepared)), None)
        self.ledger.advance(self.now_s)
        self.ledger.take(event, _record_of(decision, by_kind), decided if decided is not None and step_decided else ())

    def _carry_out(self, by_kind: ByKind) -> list[SendStep]:
        """Carry out a decision; return the orders of a step, which must still be given."""
        for started in _of(by_kind, StartWorker):
            self.workers.start(started.worker)
        for ended in _of(by_kind, EndWorker):
            self.workers.alive.discard(ended.worker)
        if SendReshape in by_kind:
            self.workers.reshape(_of(by_kind, SendReshape))
        if SendCommit in by_kind:
            self.workers.commit(_of(by_kind, SendCommit))
        if SendPreCopy in by_kind:
            self.workers.send_pre_copies(_of(by_kind, SendPreCopy))
        if Abort in by_kind:
            self.workers.abort(_of(by_kind, Abort))
        for written in _of(by_kind, WriteManifest):
            durable = ManifestWritten(version=written.manifest.version)
            self.after(self.job.durations.manifest_s, partial(self.tell, [durable]))
        for finish in _of(by_kind, Finish):
            self.finish = finish
        return _of(by_kind, SendStep)

    def _give(self, steps: list[SendStep], *, jumps: bool) -> Acting:
        """Send a step's orders; with ``jumps``, first skip the steps that are decided before anything else happens."""
        order = steps[0].order
        if jumps:
            yield from self._end_of_instant()
            num = self._num_alike(steps)
            if num:
                formed = self.workers.formed
                assert formed is not None
                self.state = passed(self.state, self.now_s, formed.step_s, num)
                yield self.env.timeout(num * formed.step_s)
                self.ledger.advance(self.now_s)
                self.ledger.settle(self.workers.prepared(order, num, begun_s=self.now_s))
                order = order.model_copy(update={"step": self.state.version, "decided": self.state.decided})
        self.workers.step(steps, order)

    def _num_alike(self, steps: list[SendStep]) -> int:
        """Return how many steps, including this one, are decided before anything else happens."""
        formed = self.workers.formed
        assert formed is not None
        next_s = min(self.env.peek(), self._until_s)
        if formed.order.follows and not formed.followed:  # the steps are alike until then, and differ after it
            next_s = min(next_s, formed.following_at_s)
        if self._told or any(action.order.checkpoint_units for action in steps):
            return 0
        num = steps_alike(self.state, self.now_s, formed.step_s, next_s) if next_s > self.now_s else 0
        while num and self.now_s + num * formed.step_s >= self.env.peek():  # because of rounding
            num -= 1
        return num

    def _note_moment(self) -> None:
        plan = self.state.plan if self.state.phase is Phase.TRAINING else None
        shape, speed = ("", 0.0) if plan is None else (plan.shape, plan.expected.examples_per_s)
        num_vms = -(-len(self.workers.alive) // self.job.gpus_per_vm)
        last = self.moments[-1] if self.moments else None
        if last is None or (last.num_vms, last.shape) != (num_vms, shape):
            self.moments.append(Moment(self.now_s, num_vms, shape, speed))


def _raise_as_it_is(process: simpy.Event) -> None:
    """Raise a failed process's own error: SimPy would copy it, but errors with several arguments cannot be copied."""
    if isinstance(process.value, BaseException):
        raise process.value


@contextlib.contextmanager
def without_cycles() -> Iterator[None]:
    """Turn off Python's garbage collector: decisions form no reference cycles, and it takes longer than deciding."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def config_of(job: SpotJob, num_steps: int, num_expected: int) -> ControllerConfig:
    """Return the controller's configuration, as in a real run."""
    return ControllerConfig(
        job=job.name,
        fingerprint=next(iter(job.plans.values())).fingerprint or FINGERPRINT,
        plans=job.plans,
        type_compute_s=job.type_compute_s,
        units=job.units,
        unit_bytes=job.unit_bytes,
        state_copies=job.state_copies,
        num_steps=num_steps,
        policy=job.policy,
        expected_nodes=max(1, num_expected),
        section_compute_s=job.section_compute_s,
        link_bytes_per_s=job.durations.link_bytes_per_s,
        expected_losses=job.expected_losses,
    )


def _of(by_kind: ByKind, kind: type[Kind]) -> list[Kind]:
    return by_kind.get(kind, [])  # type: ignore[return-value]


def _record_of(decision: Decision, by_kind: ByKind) -> DecisionRecord:
    """Return a record with only what the ledger reads: of step and commit orders, only the first that saves."""
    reshapes, state = _of(by_kind, SendReshape), decision.state
    steps = [action for action in _of(by_kind, SendStep) if action.order.checkpoint_units][:1]
    commits = [action for action in _of(by_kind, SendCommit) if action.order.checkpoint_units][:1]
    return DecisionRecord.model_construct(
        reason=decision.reason,
        phase=state.phase,
        generation=state.generation,
        version=state.version,
        wake_at_s=None,
        actions=(*_of(by_kind, EndWorker), *_of(by_kind, ReleaseNodes), *_of(by_kind, Finish), *steps, *commits),
        reshape=reshapes[0].order if reshapes else None,
        reshape_receivers=(),
    )


def _together(events: list[Told]) -> Together:
    return Together.model_construct(kind="together", events=tuple(events))
