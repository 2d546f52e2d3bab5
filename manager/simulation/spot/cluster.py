"""A spot cluster in virtual time, driven by the controller that drives real runs."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

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
from manager.controller.state.state import Decision, Phase, initial_state
from manager.journal.records import DecisionRecord
from manager.simulation.spot.agenda import Agenda
from manager.simulation.spot.job import FINGERPRINT, SpotJob
from manager.simulation.spot.jumping import passed, steps_alike
from manager.simulation.spot.outcome import Moment
from manager.simulation.spot.vms import Told, Workers
from morph.contract.messages import Prepared

Kind = TypeVar("Kind", bound=Action)
ByKind = Mapping[type, list[Action]]
Watcher = Callable[[float, Event, Decision], None]


class SpotCluster:
    """Plays a job on VMs that come and go.

    VMs are told of by ``vm_came``, ``vm_noticed`` and ``vm_taken``, which may be put down for later with ``at``.

    Args:
        job: What is trained.
        num_steps: The run ends once these are done and saved.
        seed: Of what is drawn, if the job's durations have a spread.
        num_expected: VMs that are waited for at the start.
        jumps: Pass over steps between which nothing else happens.
        watcher: Told every event with what was decided.
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
        self.now_s = 0.0
        self.agenda: Agenda[Sequence[Told]] = Agenda()
        self.workers = Workers(job, seed, self.after)
        self.state = initial_state(config_of(job, num_steps, num_expected))
        self.ledger = Ledger()
        self.finish: Finish | None = None
        self.moments: list[Moment] = []
        self.num_fatal = self.num_lost = self.num_decisions = self.lost_steps = 0
        self._names = itertools.count()
        self._wake_s = math.inf

    # --- VMs -------------------------------------------------------------------------------------------------

    def vm_came(self, facts: NodeFacts | None = None, usd_per_h: float | None = None) -> str:
        """A VM is up; returns its name, which is new."""
        name = f"n{next(self._names)}"
        self.workers.alive.add(name)
        paid = None if usd_per_h is None else Paid(usd_per_h=usd_per_h)
        self.agenda.put(self.now_s, lambda: [NodeAppeared(node=name, facts=facts, paid=paid)])
        return name

    def vm_noticed(self, name: str, lead_s: float) -> None:
        """A VM is said to be taken after so long."""
        if name in self.workers.alive:
            self.agenda.put(self.now_s, lambda: [NoticeGiven(worker=name, lead_s=lead_s, notice=name)])

    def vm_taken(self, name: str) -> None:
        """A VM is gone; the manager hears of it a little later."""
        if name in self.workers.alive:
            self.workers.alive.discard(name)
            self.num_lost += 1
            self.after(self.job.durations.noticed_s, lambda: [WorkerLost(worker=name, cause="its VM was taken")])

    # --- time ------------------------------------------------------------------------------------------------

    def after(self, delay_s: float, what: Callable[[], Sequence[Told]]) -> None:
        """Put down what is to be called after so long; the controller is told what it returns."""
        self.agenda.put(self.now_s + delay_s, what)

    def play(self, until_s: float = math.inf) -> None:
        """Go on until this time, or until the run has ended."""
        with _without_cycles():
            while self.finish is None and math.inf > min(self.agenda.next_s, self._wake_s) <= until_s:
                self._play_next(until_s)
        if until_s < math.inf and self.finish is None:
            self.now_s = max(self.now_s, until_s)
        self.ledger.advance(self.now_s)

    def _play_next(self, until_s: float) -> None:
        """Tell the controller what happens next."""
        next_s = self.now_s = min(self.agenda.next_s, self._wake_s)
        events: list[Told] = []
        while self.agenda.next_s == next_s:
            events += self.agenda.take()()
        if self._wake_s == next_s:
            self._wake_s = math.inf
            events.append(Tick())
        if events:
            self._tell(events[0] if len(events) == 1 else _together(events), until_s)

    @property
    def account(self) -> Account:
        """Where the nodes' time went so far, and what it cost."""
        return self.ledger.account()

    # --- the controller --------------------------------------------------------------------------------------

    def _tell(self, event: Event, until_s: float) -> None:
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
        steps = self._carry_out(by_kind)
        if steps and self._jumps and before.phase is Phase.TRAINING:
            self._jump(steps, until_s)
        elif steps:
            self.workers.step(steps, steps[0].order, self.now_s)
        wake_s = wake_at_s(self.state)
        self._wake_s = math.inf if wake_s is None else max(self.now_s, wake_s)

    def _book(self, event: Event, decision: Decision, by_kind: ByKind, *, step_decided: bool) -> None:
        events = event.events if isinstance(event, Together) else (event,)
        prepared = (each.answer for each in events if isinstance(each, AnsweredAlike))
        decided = next((answer for answer in prepared if isinstance(answer, Prepared)), None)
        self.ledger.advance(self.now_s)
        self.ledger.take(event, _record_of(decision, by_kind), decided if decided is not None and step_decided else ())

    def _carry_out(self, by_kind: ByKind) -> list[SendStep]:
        """Do what was decided; returns the orders of a step, which are still to be given."""
        for started in _of(by_kind, StartWorker):
            self.workers.start(started.worker)
        for ended in _of(by_kind, EndWorker):
            self.workers.alive.discard(ended.worker)
        if SendReshape in by_kind:
            self.workers.reshape(_of(by_kind, SendReshape), self.now_s)
        if SendCommit in by_kind:
            self.workers.commit(_of(by_kind, SendCommit))
        if SendPreCopy in by_kind:
            self.workers.send_ahead(_of(by_kind, SendPreCopy))
        if Abort in by_kind:
            self.workers.abort(_of(by_kind, Abort), self.now_s)
        for written in _of(by_kind, WriteManifest):
            version = written.manifest.version
            self.after(self.job.durations.manifest_s, lambda version=version: [ManifestWritten(version=version)])  # type: ignore[misc]
        for finish in _of(by_kind, Finish):
            self.finish = finish
        return _of(by_kind, SendStep)

    def _jump(self, steps: list[SendStep], until_s: float) -> None:
        """Give the orders of a step, and if nothing happens until many like it are decided, those of a later one."""
        formed = self.workers.formed
        assert formed is not None
        num, order = 0, steps[0].order
        if formed.order.follows and not formed.followed:  # until then the steps are alike, and then one is another
            until_s = min(until_s, formed.following_at_s)
        if until_s > self.now_s and not any(action.order.checkpoint_units for action in steps):
            num = steps_alike(self.state, self.now_s, formed.step_s, min(self.agenda.next_s, until_s))
        if num:
            self.state = passed(self.state, self.now_s, formed.step_s, num)
            self.now_s += num * formed.step_s
            self.ledger.advance(self.now_s)
            self.ledger.settle(self.workers.prepared(order, num, begun_s=self.now_s))
            order = order.model_copy(update={"step": self.state.version, "decided": self.state.decided})
        self.workers.step(steps, order, self.now_s)

    def _note_moment(self) -> None:
        plan = self.state.plan if self.state.phase is Phase.TRAINING else None
        shape, speed = ("", 0.0) if plan is None else (plan.shape, plan.expected.examples_per_s)
        num_vms = len(self.workers.alive)
        last = self.moments[-1] if self.moments else None
        if last is None or (last.num_vms, last.shape) != (num_vms, shape):
            self.moments.append(Moment(self.now_s, num_vms, shape, speed))


@contextlib.contextmanager
def _without_cycles() -> Iterator[None]:
    """Do not look for cycles of objects meanwhile: values hardly form any, and looking takes longer than deciding."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def config_of(job: SpotJob, num_steps: int, num_expected: int) -> ControllerConfig:
    """Return what the controller is told: as in a real run."""
    return ControllerConfig(
        job=job.name,
        fingerprint=next(iter(job.plans.values())).fingerprint or FINGERPRINT,
        plans=job.plans,
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
    """What the ledger looks at, which is not the orders."""
    reshapes, state = _of(by_kind, SendReshape), decision.state
    return DecisionRecord.model_construct(
        reason=decision.reason,
        phase=state.phase,
        generation=state.generation,
        version=state.version,
        wake_at_s=None,
        actions=(*_of(by_kind, EndWorker), *_of(by_kind, ReleaseNodes), *_of(by_kind, Finish)),
        reshape=reshapes[0].order if reshapes else None,
        reshape_receivers=(),
    )


def _together(events: list[Told]) -> Together:
    return Together.model_construct(kind="together", events=tuple(events))
