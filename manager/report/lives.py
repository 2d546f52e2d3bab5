"""Derives the lives of a run's VMs from its journal's lines: when each began, its kind, and how it ended. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from pydantic import Field

from manager.controller.state.actions import EndWorker, Finish, ReasonCode, ReleaseNodes, RequestNodes
from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import (
    Event,
    ManagerResumed,
    NodeAppeared,
    NodeFacts,
    NodesGranted,
    NodesStarted,
    NoticeGiven,
    NoticeWithdrawn,
    Paid,
    WorkerAnswered,
    WorkerLost,
)
from manager.journal.records import (
    DIED_WITH_MANAGER,
    OUTLIVES,
    PREEMPTION_FAILED,
    PREEMPTION_INJECTED,
    SESSION_OVER,
    TOOK_OVER,
    VM_KILLED,
    Decided,
    DecisionRecord,
    Fact,
    JournalLine,
)
from morph.contract.base import Value
from morph.contract.messages import WorkerReady
from morph.contract.vm_names import vm_of

TOGETHER_S = 10.0
"""Seconds. Losses within this time are one event: some are noticed by a closed connection, others by silence."""


class Ending(StrEnum):
    """How the life of a VM ended, as far as its journal shows.

    ``REVOKED``: its provider took it, or was about to after a valid notice, or all of its workers were lost at once
    after they had been ready. The crash of a worker on a VM with one device counts as such a loss too: its state is
    equally lost, and a journal does not distinguish the two. ``FAILED``: it was lost without a notice and before any of
    its workers was ready, so that its own start may be the cause. ``INJECTED``: preempted on purpose, by ``morph
    inject``. ``GIVEN_BACK``: the manager ended the VM, or its worker because of an error. ``RUN_OVER``: the VM would
    have lived on. Only ``REVOKED`` counts as a loss.
    """

    REVOKED = "revoked"
    FAILED = "failed"
    INJECTED = "injected"
    GIVEN_BACK = "given_back"
    RUN_OVER = "run_over"


class Life(Value):
    """One VM of one run. Times are seconds of the run's clock, which counts from 1970.

    ``begun_s``: when it was granted or up, whichever was reported first. ``lead_s``: the lead time of the notice before
    its loss; None: there was no notice. ``lost_with``: the number of VMs lost together with it, including itself, 0 if
    it was not lost; ``lost_of``: the number of VMs that the run had.
    """

    vm: str
    facts: NodeFacts = NodeFacts()
    usd_per_h: float | None = None
    begun_s: float
    asked_s: float | None = None
    appeared_s: float | None = None
    ready_s: float | None = None
    noticed_s: float | None = None
    lead_s: float | None = None
    ended_s: float
    ending: Ending
    lost_with: int = Field(default=0, ge=0)
    lost_of: int = Field(default=0, ge=0)

    @property
    def hours(self) -> float:
        """The lifetime."""
        return max(0.0, self.ended_s - self.begun_s) / 3600.0

    @property
    def is_lost(self) -> bool:
        """Whether its end is a loss."""
        return self.ending is Ending.REVOKED

    @property
    def allocation_s(self) -> float | None:
        """The time from the request until the VM was up; None: the VM never was up, or was not requested."""
        return _between(self.asked_s, self.appeared_s)

    @property
    def preparation_s(self) -> float | None:
        """The time from when the VM was up to its first ready worker; None: no worker was ready."""
        return _between(self.appeared_s, self.ready_s)


def together(lives: Sequence[Life]) -> tuple[Life, ...]:
    """Mark how many of a run's VMs were lost together; 1 for a VM that was lost alone."""
    marked = {(life.vm, life.begun_s): life for life in lives}
    lost = sorted((life for life in lives if life.is_lost), key=_taken_s)
    taken_s = [_taken_s(life) for life in lost]
    begun_s = sorted(life.begun_s for life in lives)
    ended_s = sorted(max(life.begun_s, life.ended_s) for life in lives)
    begin = 0
    while begin < len(lost):
        end = bisect_right(taken_s, taken_s[begin] + TOGETHER_S, begin)
        event, begin = lost[begin:end], end
        first_s = min(life.ended_s for life in event)
        num_there = bisect_left(begun_s, first_s) - bisect_left(ended_s, first_s)
        update = {"lost_with": len(event), "lost_of": max(num_there, len(event))}
        marked |= {(life.vm, life.begun_s): life.model_copy(update=update) for life in event}
    return tuple(marked.values())


@dataclass
class _Open:
    """A living VM."""

    begun_s: float
    facts: NodeFacts = field(default_factory=NodeFacts)
    usd_per_h: float | None = None
    asked_s: float | None = None
    appeared_s: float | None = None
    ready_s: float | None = None
    notice: tuple[float, float] | None = None
    workers: set[str] = field(default_factory=set)
    ready: set[str] = field(default_factory=set)


@dataclass
class Lives:
    """``over``: lives that ended since this list was last emptied.

    ``gone_s``: during a take-over, the end of VMs that did not outlive the manager's absence.
    """

    open: dict[str, _Open] = field(default_factory=dict)
    over: list[Life] = field(default_factory=list)
    asked_s: dict[str, float] = field(default_factory=dict)
    early: dict[str, tuple[float, float]] = field(default_factory=dict)
    killed: set[str] = field(default_factory=set)
    injected: set[str] = field(default_factory=set)
    grace_s: float = 0.0
    outlives_s: float = 0.0
    last_s: float = 0.0
    gone_s: float | None = None

    def step(self, line: JournalLine) -> None:
        time_s = max(line.time_s, self.last_s)
        match line.says:
            case ControllerConfig() as config:
                self._begin_session(config)
            case Fact() as fact:
                self._fact(fact, time_s)
            case Decided(event=event, record=record):
                self._event(event, time_s, record.reason.code)
                self._decided(record, time_s)
        self.last_s = time_s

    def _begin_session(self, config: ControllerConfig) -> None:
        self.end_all(self.last_s)
        self.grace_s = config.policy.rules.requests.notice_grace_s

    def end_all(self, time_s: float) -> None:
        """Record that the run, or its session, is over, and with it all VMs."""
        for vm in list(self.open):
            self._end(vm, time_s, Ending.RUN_OVER)
        for remembered in (self.asked_s, self.early, self.killed, self.injected):
            remembered.clear()

    def _fact(self, fact: Fact, time_s: float) -> None:
        if fact.name == VM_KILLED and fact.worker is not None:
            self.killed.add(vm_of(fact.worker))
        elif fact.name == PREEMPTION_INJECTED and fact.worker is not None:
            self.injected.add(fact.worker)
        elif fact.name == PREEMPTION_FAILED and fact.worker is not None:
            self.injected.discard(fact.worker)
        elif fact.name == OUTLIVES:
            self.outlives_s = float(fact.detail)
        elif fact.name == TOOK_OVER and time_s - self.last_s >= self.outlives_s:
            self.gone_s = self.last_s
        elif fact.name in (SESSION_OVER, DIED_WITH_MANAGER):
            self.end_all(time_s)

    def _event(self, event: Event | None, time_s: float, code: ReasonCode) -> None:
        match event:
            case NodesGranted(request=request):
                for node in event.nodes:
                    if node in event.waiting:
                        continue  # its life begins when it leaves the queue
                    if code is ReasonCode.NODES_GRANTED or vm_of(node) in self.open:
                        self._there(node, request, event.paid.get(node), event.facts.get(node), time_s)
            case NodesStarted(request=request):
                for node in event.nodes if code is ReasonCode.NODES_STARTED else ():
                    self._there(node, request, event.paid.get(node), event.facts.get(node), time_s)
            case NodeAppeared(node=node):
                vm = self._there(node, event.request, event.paid, event.facts, time_s)
                vm.appeared_s = time_s if vm.appeared_s is None else vm.appeared_s
            case WorkerAnswered(worker=worker, answer=WorkerReady()) if vm_of(worker) in self.open:
                answered = self.open[vm_of(worker)]
                answered.ready_s = time_s if answered.ready_s is None else answered.ready_s
                answered.ready.add(worker)
            case NoticeGiven():
                self._noticed(vm_of(event.worker), (time_s, event.lead_s))
            case NoticeWithdrawn(worker=worker):
                self.early.pop(vm_of(worker), None)
                if (spared := self.open.get(vm_of(worker))) is not None:
                    spared.notice = None
            case WorkerLost():
                self._gone(event.workers, time_s, Ending.REVOKED)
            case ManagerResumed(living=living):
                ready = [worker for vm in self.open.values() for worker in vm.ready & vm.workers]
                self._gone([worker for worker in ready if worker not in living], time_s, Ending.REVOKED)
                self.gone_s = None

    def _decided(self, record: DecisionRecord, time_s: float) -> None:
        for action in record.actions:
            match action:
                case RequestNodes(request=request):
                    self.asked_s.setdefault(request, time_s)
                case EndWorker(worker=worker):
                    self._gone([worker], time_s, Ending.GIVEN_BACK)
                case ReleaseNodes(nodes=nodes):
                    self._gone(nodes, time_s, Ending.GIVEN_BACK)
                case Finish():
                    self.end_all(time_s)

    def _there(
        self, worker: str, request: str | None, paid: Paid | None, facts: NodeFacts | None, time_s: float
    ) -> _Open:
        name = vm_of(worker)
        vm = self.open.setdefault(name, _Open(time_s, notice=self.early.pop(name, None)))
        vm.workers.add(worker)
        vm.facts = facts or vm.facts
        vm.usd_per_h = vm.usd_per_h if paid is None or paid.usd_per_h is None else paid.usd_per_h
        if vm.asked_s is None and request is not None:
            vm.asked_s = self.asked_s.get(request)
        return vm

    def _noticed(self, name: str, notice: tuple[float, float]) -> None:
        vm = self.open.get(name)
        if vm is None:
            self.early[name] = notice
        elif vm.notice is None or not self._holds(vm.notice, notice[0]):  # the notice is repeated
            vm.notice = notice

    def _holds(self, notice: tuple[float, float], time_s: float) -> bool:
        """Return whether this notice explains a VM's end now: a VM that outlived it by the grace time was spared."""
        return time_s <= sum(notice) + self.grace_s

    def _gone(self, workers: Iterable[str], time_s: float, ending: Ending) -> None:
        """Record that a worker is gone; its VM is gone with the last of its workers."""
        for worker in workers:
            vm = self.open.get(vm_of(worker))
            if vm is not None:
                vm.workers.discard(worker)
                if not vm.workers and self.gone_s is not None:
                    self._end(vm_of(worker), self.gone_s, Ending.RUN_OVER)
                elif not vm.workers:
                    self._end(vm_of(worker), time_s, ending)

    def _end(self, name: str, time_s: float, ending: Ending) -> None:
        vm = self.open.pop(name)
        notice = vm.notice if vm.notice is not None and self._holds(vm.notice, time_s) else None
        if notice is not None:
            ending = Ending.REVOKED
        elif ending is Ending.REVOKED and vm.ready_s is None and name not in self.killed:
            ending = Ending.FAILED
        if ending is Ending.REVOKED and name in self.injected:
            ending = Ending.INJECTED
        noticed_s, lead_s = notice or (None, None)
        self.over.append(
            Life(
                vm=name,
                facts=vm.facts,
                usd_per_h=vm.usd_per_h,
                begun_s=vm.begun_s,
                asked_s=vm.asked_s,
                appeared_s=vm.appeared_s,
                ready_s=vm.ready_s,
                noticed_s=noticed_s,
                lead_s=lead_s,
                ended_s=max(time_s, vm.begun_s),
                ending=ending,
            )
        )


def _taken_s(life: Life) -> float:
    """Return when a VM was or would have been taken: VMs with a notice are left at different boundaries before that."""
    if life.noticed_s is None or life.lead_s is None:
        return life.ended_s
    return max(life.ended_s, life.noticed_s + life.lead_s)


def _between(begin_s: float | None, end_s: float | None) -> float | None:
    return None if begin_s is None or end_s is None else max(0.0, end_s - begin_s)
