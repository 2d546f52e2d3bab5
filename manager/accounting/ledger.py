"""Reads a run's journal line by line, and books every node-second and its cost into an ``Account``."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from manager.accounting.account import Account, TimeUse
from manager.accounting.spent import NOTHING, NS_PER_S, Spent, nano_usd, rate_of
from manager.controller.state.actions import Action, EndWorker, Finish, ReasonCode, ReleaseNodes, SendCommit, SendStep
from manager.controller.state.events import (
    AnsweredAlike,
    Event,
    ManagerResumed,
    ManifestWritten,
    NodeAppeared,
    NodesGranted,
    NodesStarted,
    Paid,
    Single,
    Together,
    WorkerAnswered,
    WorkerLost,
)
from manager.controller.state.state import Phase
from manager.journal.records import DecisionRecord
from morph.contract.messages import Prepared, ReshapeOrder, WorkerId, WorkerReady
from morph.contract.vm_names import vm_of

_OF_MEMBERS = {
    Phase.RESHAPING: TimeUse.MORPH,
    Phase.ABORTING: TimeUse.MORPH,
    Phase.COMMITTING: TimeUse.CHECKPOINT,
    Phase.SEALING: TimeUse.CHECKPOINT,
}
_UNFORMED = (Phase.STARTING, Phase.WAITING, Phase.HOLDING, Phase.RESTING)


@dataclass(slots=True)
class Stretch:
    """Decided steps from ``first`` to before ``end`` that can still be lost; no save begins at a version in between."""

    first: int
    end: int
    compute: Spent
    bubble: Spent


@dataclass
class Ledger:
    """Reads a journal's lines. Call ``advance`` with each line's time before its content is processed.

    If a clock was set back, no time counts until it has caught up. ``since_ns``: for each worker that costs money, the
    time from which its present rate applies; ``rates``: the rate per nanosecond; ``unheard``: workers whose price is
    not known yet; ``idle``: workers that are gone while others of their VM live: a VM is paid in full until its last
    worker is gone; ``waiting``: workers that wait in their market's queue, and their later price; ``outlives_ns``: how
    long workers outlive a killed manager. ``given_up``: the time of abandoned attempts at the present step; ``kept``:
    the part of it whose results the next shape uses: it counts as computing, the rest as lost. ``settled``: the steps
    that a loss of all workers would lose, in order; a run goes back only to a saved version, so steps are summed from
    one save to the next. ``save_at``: the version at which the last save began. ``dearest``: the highest price so far.
    """

    now_ns: int = 0
    phase: Phase = Phase.STARTING
    members: frozenset[WorkerId] = frozenset()
    since_ns: dict[WorkerId, int] = field(default_factory=dict)
    rates: dict[WorkerId, Spent] = field(default_factory=dict)
    unheard: set[WorkerId] = field(default_factory=set)
    warming: set[WorkerId] = field(default_factory=set)
    idle: set[WorkerId] = field(default_factory=set)
    waiting: dict[WorkerId, Paid] = field(default_factory=dict)
    parts: dict[TimeUse, Spent] = field(default_factory=lambda: dict.fromkeys(TimeUse, NOTHING))
    lives: Spent = NOTHING
    open: Spent = NOTHING
    given_up: Spent = NOTHING
    kept: Spent = NOTHING
    version: int = 0
    settled: list[Stretch] = field(default_factory=list)
    save_at: int = 0
    dearest: int | None = None
    outlives_ns: int = 0
    _all: Spent = NOTHING
    _warming: Spent = NOTHING
    _idle: Spent = NOTHING
    _members: Spent = NOTHING

    def account(self) -> Account:
        """Return the account so far; the running step counts as bubble until it is decided."""
        parts = {**self.parts, TimeUse.BUBBLE: self.parts[TimeUse.BUBBLE] + self.open}
        return Account(parts=parts, total=self.total(), dearest=self.dearest)

    def total(self) -> Spent:
        """Return the cost of all workers so far."""
        total = self.lives
        for worker, since_ns in self.since_ns.items():
            total += self.rates[worker] * (self.now_ns - since_ns)
        return total

    def begin_session(self, time_s: float) -> None:
        """Record that a manager begins with new workers; those of a killed one lived for at most ``outlives_ns``."""
        self.outlived(time_s)
        self.end_session()
        self.now_ns = max(self.now_ns, _ns(time_s))
        self.phase, self.members, self._members = Phase.STARTING, frozenset(), NOTHING
        self.settled.clear()

    def end_session(self) -> None:
        """Record that every worker is gone."""
        self.waiting.clear()
        self._give_up_step()
        self._keep_nothing()
        self._gone(list(self.since_ns))

    def outlived(self, time_s: float) -> None:
        """Book the time that workers outlived a killed manager: until now, but at most for their patience."""
        self.unmanaged(min(time_s, (self.now_ns + self.outlives_ns) / NS_PER_S))

    def unmanaged(self, time_s: float) -> None:
        """Book the time since the last line for workers that had no manager."""
        passed_ns = max(0, _ns(time_s) - self.now_ns)
        self.now_ns += passed_ns
        self.parts[TimeUse.UNMANAGED] += self._all * passed_ns

    def advance(self, time_s: float) -> None:
        """Book the time since the last line."""
        passed_ns = max(0, _ns(time_s) - self.now_ns)
        if not passed_ns:
            return
        self.now_ns += passed_ns
        formed = self.phase not in _UNFORMED
        members = self._members if formed else NOTHING
        self.parts[TimeUse.WARMING] += self._warming * passed_ns
        self.parts[TimeUse.SPARE] += self._idle * passed_ns
        ready = self._all - self._warming - self._idle
        self.parts[TimeUse.SPARE if formed else TimeUse.WAITING] += (ready - members) * passed_ns
        if self.phase is Phase.TRAINING:
            self.open += members * passed_ns
        elif members.node_ns:
            self.parts[_OF_MEMBERS[self.phase]] += members * passed_ns

    def take(self, event: Event, record: DecisionRecord, decided: Collection[Prepared] | Prepared = ()) -> None:
        """Process an event and its decision. ``decided``: answers that decided a step, or one that stands for all."""
        for each in event.events if isinstance(event, Together) else (event,):
            self._heard(each, is_open=record.reason.code is ReasonCode.NODES_GRANTED)
        self._gone([action.worker for action in record.actions if isinstance(action, EndWorker)])
        self._gone([worker for action in record.actions if isinstance(action, ReleaseNodes) for worker in action.nodes])
        if decided:
            self.settle(decided)
        if record.reshape is not None:
            self.members = frozenset(slot.worker for slot in record.reshape.slots) & (self.since_ns.keys() - self.idle)
            self._members = sum((self.rates[worker] for worker in self.members), NOTHING)
        if record.reason.code is ReasonCode.OVERFLOW_RETRY or record.phase is not Phase.TRAINING:
            self._give_up_step()
        if record.reason.code is ReasonCode.OVERFLOW_RETRY or record.version < self.version:
            self._keep_nothing()
        self._set_back(record.version)
        self.version = record.version
        self.save_at = next(filter(None, map(_saved_at, record.actions)), self.save_at)
        if record.reshape is not None:
            self._keep(record.reshape)
        self.phase = record.phase
        if any(isinstance(action, Finish) for action in record.actions):
            self._keep_nothing()
            self._gone(list(self.since_ns))

    def _heard(self, event: Single | AnsweredAlike, *, is_open: bool) -> None:
        match event:
            case NodesGranted():
                self._granted(event, is_open=is_open)
            case NodesStarted(nodes=nodes):
                for worker in nodes:
                    if self.waiting.pop(worker, None) is not None and worker not in self.since_ns:
                        self._begin(worker, event.paid.get(worker, Paid()))
            case NodeAppeared(node=worker, paid=paid) if worker not in self.since_ns:
                paid = paid or self.waiting.pop(worker, None)
                self._begin(worker, paid or Paid())
                if paid is None:
                    self.unheard.add(worker)
                else:
                    self._noted(paid)
            case NodeAppeared(node=worker, paid=paid) if worker in self.idle:
                self._back(worker, paid)
            case WorkerAnswered(answer=WorkerReady()) if event.worker in self.warming:
                self.warming.discard(event.worker)
                self._warming -= self.rates[event.worker]
            case WorkerLost():
                self._gone(event.workers)
            case ManagerResumed(living=living):  # the loss of warming ones comes separately
                self._gone([worker for worker in self.since_ns if worker not in self.warming and worker not in living])
            case ManifestWritten(version=version):
                self.saved(version)

    def saved(self, version: int) -> None:
        """Record that steps before a version can no longer be lost."""
        self._part_at(version)
        self.settled = [stretch for stretch in self.settled if stretch.first >= version]

    def _granted(self, event: NodesGranted, *, is_open: bool) -> None:
        for worker in event.nodes:
            paid = event.paid.get(worker, Paid())
            self._noted(paid)
            if worker in event.waiting and is_open and worker not in self.since_ns:
                self.waiting[worker] = paid
            elif worker in self.unheard:
                self._priced(worker, paid)
            elif is_open and worker not in self.since_ns:
                self._begin(worker, paid)

    def _noted(self, paid: Paid) -> None:
        if paid.usd_per_h is not None:
            self.dearest = max(self.dearest or 0, nano_usd(paid.usd_per_h))

    def _begin(self, worker: WorkerId, paid: Paid) -> None:
        before_ns, rate = _ns(paid.before_s), rate_of(paid)
        self.since_ns[worker], self.rates[worker] = self.now_ns - before_ns, rate
        self.warming.add(worker)
        self.parts[TimeUse.WARMING] += rate * before_ns
        self._all += rate
        self._warming += rate

    def _priced(self, worker: WorkerId, paid: Paid) -> None:
        """Record the price of a worker that appeared before its grant, and book the worker's cost until now.

        If the worker is ready already, its time since it appeared stays booked without a price of its own.
        """
        self.unheard.discard(worker)
        appeared_ns, old, new = self.since_ns[worker], self.rates[worker], rate_of(paid)
        earlier_ns = max(0, appeared_ns - (self.now_ns - _ns(paid.before_s)))
        self.parts[TimeUse.WARMING] += new * earlier_ns
        if worker in self.warming:
            self.parts[TimeUse.WARMING] += (new - old) * (self.now_ns - appeared_ns)
            self.since_ns[worker] = appeared_ns - earlier_ns
            self._warming += new - old
        else:
            self.lives += old * (self.now_ns - appeared_ns) + new * earlier_ns
            self.since_ns[worker] = self.now_ns
        if worker in self.members:
            self._members += new - old
        if worker in self.idle:
            self._idle += new - old
        self._all += new - old
        self.rates[worker] = new

    def _back(self, worker: WorkerId, paid: Paid | None) -> None:
        """Record that a worker is back, whose VM was paid for all along; while it is set up, it counts as a spare."""
        if paid is not None and worker in self.unheard:
            self._noted(paid)
            self._priced(worker, paid)
        self.idle.discard(worker)
        self._idle -= self.rates[worker]

    def _gone(self, workers: Collection[WorkerId]) -> None:
        """Record that workers are gone or given up; each costs money until the last worker of its VM is gone."""
        for worker in workers:
            self.waiting.pop(worker, None)
        left = set(workers) & (self.since_ns.keys() - self.idle)
        if not left:
            return
        for worker in left:
            rate = self.rates[worker]
            self._idle += rate
            if worker in self.warming:
                self._warming -= rate
            if worker in self.members:
                self._members -= rate
        self.warming -= left
        self.members -= left
        self.idle |= left
        living = {vm_of(worker) for worker in self.since_ns.keys() - self.idle}
        for worker in [worker for worker in self.idle if vm_of(worker) not in living]:
            rate = self.rates.pop(worker)
            self.lives += rate * (self.now_ns - self.since_ns.pop(worker))
            self._all -= rate
            self._idle -= rate
            self.idle.discard(worker)
            self.unheard.discard(worker)

    def settle(self, decided: Collection[Prepared] | Prepared) -> None:
        """Record that one step, or many equal ones, are decided: what members report is computing, the rest bubble."""
        longest_ns = self.open.node_ns // max(1, len(self.members))
        if isinstance(decided, Prepared):
            step, compute = decided.step, self._members * min(longest_ns, _compute_ns(decided))
        else:
            step, compute = next(iter(decided)).step, NOTHING
            for answer in decided:
                rate = self.rates.get(answer.worker) or rate_of(Paid())
                compute += rate * min(longest_ns, _compute_ns(answer))
        self._settled(step, *self._book(compute))

    def settle_all(self, first: int, end: int, compute_ns: int) -> None:
        """Record that many steps are decided of which only the sum of the slowest members' times is known."""
        self.settled.append(Stretch(first, end, *self._book(self._members * compute_ns)))
        self.version = end

    def _book(self, compute: Spent) -> tuple[Spent, Spent]:
        """Divide the time since the last step into computing and bubble; return both, kept work added to the first."""
        compute = compute.at_most(self.open)
        bubble, compute_and_kept = self.open - compute, compute + self.kept
        self.parts[TimeUse.COMPUTE] += compute
        self.parts[TimeUse.BUBBLE] += bubble
        self.open = self.kept = self.given_up = NOTHING
        return compute_and_kept, bubble

    def rebook(self, account: Account) -> None:
        """Replace the bookings so far by a known account; workers and their rates stay."""
        self.parts = {**account.parts, TimeUse.BUBBLE: account.parts[TimeUse.BUBBLE] - self.open}
        self.lives += account.total - self.total()
        self.dearest = account.dearest

    def _settled(self, step: int, compute: Spent, bubble: Spent) -> None:
        last = self.settled[-1] if self.settled else None
        if last is None or last.end != step or step == self.save_at:
            self.settled.append(Stretch(step, step + 1, compute, bubble))
        else:
            last.end, last.compute, last.bubble = step + 1, last.compute + compute, last.bubble + bubble

    def _part_at(self, version: int) -> None:
        """Split the stretch that spans this version, if there is one, in proportion to its steps."""
        for number, whole in enumerate(self.settled):
            if whole.first < version < whole.end:
                steps, num_steps = version - whole.first, whole.end - whole.first
                compute, bubble = whole.compute.part(steps, num_steps), whole.bubble.part(steps, num_steps)
                behind = Stretch(version, whole.end, whole.compute - compute, whole.bubble - bubble)
                self.settled[number : number + 1] = [Stretch(whole.first, version, compute, bubble), behind]

    def _keep(self, order: ReshapeOrder) -> None:
        """Record that a shape uses some micro-batches of the abandoned step: that time counts as computing."""
        kept = NOTHING
        if order.salvage is not None and self.given_up.node_ns:
            num, done = order.plan.num_micro_batches, order.salvage.num_spared
            made_ns = _ns(order.plan.expected.mini_batch_s) * order.plan.num_workers * done // num
            kept = self.given_up.part(min(made_ns, self.given_up.node_ns), self.given_up.node_ns)
        self.parts[TimeUse.COMPUTE] += kept - self.kept
        self.parts[TimeUse.LOST] += self.kept - kept
        self.kept = kept

    def _keep_nothing(self) -> None:
        self.parts[TimeUse.COMPUTE] -= self.kept
        self.parts[TimeUse.LOST] += self.kept
        self.kept = self.given_up = NOTHING

    def _set_back(self, version: int) -> None:
        self._part_at(version)
        for lost in [stretch for stretch in self.settled if stretch.first >= version]:
            self.parts[TimeUse.COMPUTE] -= lost.compute
            self.parts[TimeUse.BUBBLE] -= lost.bubble
            self.parts[TimeUse.LOST] += lost.compute + lost.bubble
        self.settled = [stretch for stretch in self.settled if stretch.first < version]

    def _give_up_step(self) -> None:
        self.parts[TimeUse.LOST] += self.open
        self.given_up += self.open
        self.open = NOTHING


def _saved_at(action: Action) -> int | None:
    """Return the version that an action has workers save; None: it has them save nothing."""
    if isinstance(action, SendStep):
        return action.order.step if action.order.checkpoint_units else None
    return action.order.version if isinstance(action, SendCommit) and action.order.checkpoint_units else None


def _compute_ns(answer: Prepared) -> int:
    return _ns(answer.times.forward_s + answer.times.recompute_s + answer.times.backward_s)


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)
