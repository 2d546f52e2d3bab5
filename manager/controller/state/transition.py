"""Collects a decision: one transition is passed from handler to handler, and each changes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any, Generic, Literal, ParamSpec, TypedDict, TypeVar, Unpack

from manager.controller.state import nodes
from manager.controller.state.actions import Abort, Action, Finish, Reason, ReasonCode, ReleaseNodes
from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import NodeFacts
from manager.controller.state.nodes import NodeEvent
from manager.controller.state.saves import PendingCheckpoint, SaveTimes, Saving
from manager.controller.state.state import (
    ControllerState,
    Decision,
    Failing,
    Leap,
    Measured,
    OutstandingOrder,
    Pace,
    Phase,
    PreCopy,
    Probation,
    Provisioning,
    StepProgress,
    Waits,
    WorkerState,
)
from morph.contract.decided import Decided, LossTrend
from morph.contract.evaluation import EvaluationSize, EvaluationTotals, Judged
from morph.contract.job_facts import Epochs
from morph.contract.messages import ReshapeOrder, UnitId, Version, WorkerId

Answer = TypeVar("Answer")
Fields = ParamSpec("Fields")


class StateFields(TypedDict, total=False):
    """Fields of ``ControllerState`` that are not in a slice."""

    config: ControllerConfig
    phase: Phase
    version: Version
    generation: int
    decided: Decided | None
    reshape: ReshapeOrder | None
    member_units: dict[WorkerId, frozenset[UnitId]]
    workers: dict[WorkerId, WorkerState]
    num_appeared: int
    pre_copy: PreCopy | None
    num_pre_copies: int
    evaluation: EvaluationSize | None
    epochs: Epochs | None
    unfinished: EvaluationTotals | None
    judged: Judged
    failing: Failing | None
    losses: LossTrend
    leaps: dict[Version, Leap]
    unnamed: tuple[int, ...]
    stop_reason: str | None
    finish: Finish | None
    recent: tuple[str, ...]


class WorkerFields(TypedDict, total=False):
    """Fields of ``WorkerState`` except ``node``, which ``Transition.change_node`` sets."""

    facts: NodeFacts
    ready_s: float | None
    eligible_s: float | None
    notice: str | None
    drain_until_s: float | None
    pace: Pace
    probation: Probation | None
    holds: frozenset[UnitId]


class SliceChange(Generic[Fields]):
    """A method of ``Transition`` that replaces fields of the slice of the state at ``path``; ``kind``: its type."""

    def __init__(self, path: str, kind: Callable[Fields, object]) -> None:  # noqa: ARG002 (for its type)
        self._path = path.split(".")

    def __get__(self, transition: Transition, owner: type[Transition]) -> Callable[Fields, None]:
        """Return a bound function, not stored: a reference cycle would keep each decision's state in memory."""

        def change(*args: Fields.args, **fields: Fields.kwargs) -> None:
            assert not args, "fields are given by name"
            owners = list(accumulate(self._path, getattr, initial=transition.state))
            replaced = owners.pop().model_copy(update=fields)
            for name, owner in zip(reversed(self._path), reversed(owners), strict=True):
                replaced = owner.model_copy(update={name: replaced})
            transition.state = replaced

        return change


class Transition:
    """The decision so far, at ``now_s``: the state, the actions in order, and the reason; handlers change it."""

    change_step = SliceChange("step", StepProgress)
    change_saving = SliceChange("saving", Saving)
    change_save_times = SliceChange("saving.save_times", SaveTimes)
    change_waits = SliceChange("waits", Waits)
    change_provisioning = SliceChange("provisioning", Provisioning)
    change_measured = SliceChange("measured", Measured)

    def __init__(self, state: ControllerState, now_s: float) -> None:
        self.state, self.now_s = state, now_s
        self.actions: list[Action] = []
        self.code: ReasonCode | None = None
        self._sentences: list[str] = []
        self._known: dict[Callable[..., Any], tuple[tuple[object, ...], Any]] = {}

    def say(self, code: ReasonCode, sentence: str, *actions: Action) -> None:
        """Set the reason of the decision. A reason that reports lost work is kept, unless the run ends."""
        if self.code is not ReasonCode.SET_BACK or self.state.phase is Phase.ENDED:
            self.code = code
        self.add(sentence, *actions)

    def add(self, sentence: str, *actions: Action) -> None:
        """Add a sentence to the reason."""
        self._sentences.append(sentence)
        self.actions += actions

    def end(self, outcome: Literal["finished", "stopped", "failed"], sentence: str) -> None:
        """End the run: abort outstanding orders, then finish. After a final error, the outcome is "failed"."""
        trace, cause, failing = "", None, self.state.failing
        if failing is not None and failing.final:
            outcome, trace, cause = "failed", failing.traceback, failing.cause
        provisioning, rests = self.state.provisioning, False
        if provisioning.gives_up and outcome == "stopped":
            rests = self.state.config.policy.when_stuck == "rest"
            if rests:
                sentence += "; its VMs are given back (policy.when_stuck: rest)"
            elif provisioning.failed_setups is not None:
                outcome = "failed"
                trace, cause = provisioning.failed_setups.traceback, provisioning.failed_setups.cause
        aborts = [Abort(worker=worker, generation=self.state.generation) for worker in self.state.busy_workers]
        at_limit = provisioning.gives_up == "limit" and outcome == "stopped"
        finish = Finish(
            outcome=outcome, sentence=sentence, traceback=trace, cause=cause, rests=rests, at_limit=at_limit
        )
        self.change(phase=Phase.ENDED, finish=finish)
        self.change_step(order=None, awaited=frozenset())
        self.say(ReasonCode(outcome), sentence, *aborts, finish)

    def decision(self, wake_at_s: float | None) -> Decision:
        """Return the finished decision."""
        assert self.code is not None, "a decision without a reason"
        reason = Reason(code=self.code, sentence="; ".join(self._sentences))
        return Decision.model_construct(
            state=self.state, actions=tuple(self.actions), reason=reason, wake_at_s=wake_at_s
        )

    def change(self, **fields: Unpack[StateFields]) -> None:
        """Replace some fields of the state that are not in a slice."""
        self.state = self.state.model_copy(update=fields)

    def change_worker(self, worker: WorkerId, **fields: Unpack[WorkerFields]) -> None:
        """Replace some fields of one worker."""
        workers = self.state.workers.copy()
        workers[worker] = workers[worker].model_copy(update=fields)
        self.change(workers=workers)

    def change_node(self, worker: WorkerId, event: NodeEvent, **fields: Unpack[WorkerFields]) -> None:
        """Change a worker's state by an event, and replace some of its fields."""
        entry = self.state.workers[worker]
        node = nodes.after(entry.node, event)
        self.change(workers={**self.state.workers, worker: entry.model_copy(update={**fields, "node": node})})

    def change_under_way(self, change: Callable[[PendingCheckpoint], PendingCheckpoint]) -> None:
        """Change each checkpoint that is being written."""
        pending, earlier = self.state.saving.pending, self.state.saving.earlier
        self.change_saving(pending=None if pending is None else change(pending), earlier=tuple(map(change, earlier)))

    def order(self, order: OutstandingOrder, receivers: Iterable[WorkerId]) -> None:
        """Make this order outstanding; no other order may be outstanding."""
        self.change_step(order=order, awaited=frozenset(receivers), reports={}, shares=(), finished=None)

    def answered(self, worker: WorkerId) -> None:
        """Record that a worker has answered its order."""
        awaited = self.state.step.awaited - {worker}
        self.change_step(awaited=awaited, order=self.state.step.order if awaited else None)

    def forget(self, lost: Iterable[WorkerId]) -> None:
        """Forget workers, and release their VMs; a pending checkpoint that needs files of theirs becomes stale."""
        state, gone = self.state, set(lost)
        workers = {worker: entry for worker, entry in state.workers.items() if worker not in gone}
        pending, awaited = state.saving.pending, state.step.awaited - gone
        if pending is not None and gone & pending.debtors:
            pending = pending.model_copy(update={"stale": True})
        self.change(workers=workers)
        self.change_saving(pending=pending)
        self.change_step(awaited=awaited, order=state.step.order if awaited else None)
        self.change_provisioning(leaving=state.provisioning.leaving - gone)
        if state.config.target_nodes and gone:
            self.actions.append(ReleaseNodes(nodes=tuple(sorted(gone))))

    def wake_by(self, time_s: float) -> None:
        """Look at workers and requests again at this time, at the latest."""
        if self.state.provisioning.nodes_wake_s is None or time_s < self.state.provisioning.nodes_wake_s:
            self.change_provisioning(nodes_wake_s=time_s)

    def once(self, question: Callable[[ControllerState, float], Answer], *depends_on: object) -> Answer:
        """Answer a question about the state; it is cached until an object of ``depends_on`` is replaced."""
        known = self._known.get(question)
        if known is None or any(then is not now for then, now in zip(known[0], depends_on, strict=True)):
            known = self._known[question] = (depends_on, question(self.state, self.now_s))
        answer: Answer = known[1]
        return answer
