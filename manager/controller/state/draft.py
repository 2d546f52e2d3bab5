"""A decision while it is made: one draft goes from handler to handler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

from manager.controller.state import nodes
from manager.controller.state.actions import Abort, Action, Finish, ReleaseNodes
from manager.controller.state.nodes import NodeEvent
from manager.controller.state.reasons import Reason, ReasonCode
from manager.controller.state.state import ControllerState, Decision, Phase, changed
from manager.controller.state.steps import OutstandingOrder
from morph.contract.messages import WorkerId

Answer = TypeVar("Answer")


class Draft:
    """What is decided so far at ``now_s``: the state, the actions in order, and what is told.

    Every part of the controller changes it in place. The states themselves stay frozen: whoever reads ``state`` has it
    as it was then.
    """

    def __init__(self, state: ControllerState, now_s: float) -> None:
        self.state, self.now_s = state, now_s
        self.actions: list[Action] = []
        self.code: ReasonCode | None = None
        self._sentences: list[str] = []
        self._known: dict[Callable[..., Any], tuple[tuple[object, ...], Any]] = {}

    def say(self, code: ReasonCode, sentence: str, *actions: Action) -> None:
        """Tell what was done last, and why. That work is lost is told whatever follows, but for the run's end."""
        if self.code is not ReasonCode.SET_BACK or self.state.phase is Phase.ENDED:
            self.code = code
        self.add(sentence, *actions)

    def add(self, sentence: str, *actions: Action) -> None:
        """Tell something beside what was told before."""
        self._sentences.append(sentence)
        self.actions += actions

    def end(self, outcome: Literal["finished", "stopped", "failed"], sentence: str) -> None:
        """End the run: abort what is outstanding, then finish. With an error that cannot be mended it has failed."""
        trace, cause, failing = "", None, self.state.failing
        if failing is not None and failing.final:
            outcome, trace, cause = "failed", failing.traceback, failing.cause
        aborts = [Abort(worker=worker, generation=self.state.generation) for worker in self.state.busy_workers]
        finish = Finish(outcome=outcome, sentence=sentence, traceback=trace, cause=cause)
        self.change(phase=Phase.ENDED, order=None, awaited=frozenset(), finish=finish)
        self.say(ReasonCode(outcome), sentence, *aborts, finish)

    def decision(self, wake_at_s: float | None) -> Decision:
        """Return what was decided."""
        assert self.code is not None, "a decision without a reason"
        reason = Reason(code=self.code, sentence="; ".join(self._sentences))
        return Decision.model_construct(
            state=self.state, actions=tuple(self.actions), reason=reason, wake_at_s=wake_at_s
        )

    def change(self, **fields: Any) -> None:
        """Replace some fields of the state, each in the slice where it stands."""
        self.state = changed(self.state, **fields)

    def change_worker(self, worker: WorkerId, **fields: Any) -> None:
        """Replace some fields of one worker."""
        workers = self.state.workers.copy()
        workers[worker] = workers[worker].model_copy(update=fields)
        self.change(workers=workers)

    def change_node(self, worker: WorkerId, event: NodeEvent, **fields: Any) -> None:
        """Put a node in the state that follows an event, and replace some of its fields."""
        self.change_worker(worker, node=nodes.after(self.state.workers[worker].node, event), **fields)

    def order(self, order: OutstandingOrder, receivers: Iterable[WorkerId], **fields: Any) -> None:
        """Make this order outstanding, and replace other fields; nobody had one before."""
        self.change(order=order, awaited=frozenset(receivers), reports={}, **fields)

    def answered(self, worker: WorkerId, **fields: Any) -> None:
        """Take a worker's order from it, and replace other fields."""
        awaited = self.state.step.awaited - {worker}
        self.change(awaited=awaited, order=self.state.step.order if awaited else None, **fields)

    def forget(self, lost: Iterable[WorkerId]) -> None:
        """Forget workers, and give back what VMs they had of a provider.

        A pending checkpoint that one of them still had to write to becomes stale.
        """
        state, gone = self.state, set(lost)
        workers = {worker: entry for worker, entry in state.workers.items() if worker not in gone}
        pending, awaited = state.saving.pending, state.step.awaited - gone
        if pending is not None and gone & pending.debtors:
            pending = pending.model_copy(update={"stale": True})
        order = state.step.order if awaited else None
        self.change(
            workers=workers, pending=pending, awaited=awaited, order=order, leaving=state.provisioning.leaving - gone
        )
        if state.config.target_nodes and gone:
            self.actions.append(ReleaseNodes(nodes=tuple(sorted(gone))))

    def wake_by(self, time_s: float) -> None:
        """Look at nodes and requests again at this time, at the latest."""
        if self.state.provisioning.nodes_wake_s is None or time_s < self.state.provisioning.nodes_wake_s:
            self.change(nodes_wake_s=time_s)

    def once(self, question: Callable[[ControllerState, float], Answer], *depends_on: object) -> Answer:
        """Answer a question about the state, once unless a part of it that the answer depends on was replaced."""
        known = self._known.get(question)
        if known is None or any(then is not now for then, now in zip(known[0], depends_on, strict=True)):
            known = self._known[question] = (depends_on, question(self.state, self.now_s))
        answer: Answer = known[1]
        return answer
