"""Small pure changes and questions that every part of the controller needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from manager.controller import nodes
from manager.controller.actions import Abort, Finish
from manager.controller.nodes import NodeEvent, NodeState
from manager.controller.reasons import Reason, ReasonCode
from manager.controller.state import ControllerState, Decision, OutstandingOrder, PendingCheckpoint, Phase
from morph.contract.messages import WorkerId


def changed(state: ControllerState, **fields: Any) -> ControllerState:
    """Return the state with some fields replaced."""
    return state.model_copy(update=fields)


def with_worker(state: ControllerState, worker: WorkerId, **fields: Any) -> ControllerState:
    """Return the state with some fields of one worker replaced."""
    workers = state.workers.copy()
    workers[worker] = workers[worker].model_copy(update=fields)
    return changed(state, workers=workers)


def with_node(state: ControllerState, worker: WorkerId, event: NodeEvent, **fields: Any) -> ControllerState:
    """Return the state with a node in the state that follows an event, and some of its fields replaced."""
    return with_worker(state, worker, node=nodes.after(state.workers[worker].node, event), **fields)


def with_order(state: ControllerState, order: OutstandingOrder, receivers: Iterable[WorkerId]) -> ControllerState:
    """Return the state with this order outstanding; nobody had one before."""
    return changed(state, order=order, awaited=frozenset(receivers), reports={})


def answered_by(state: ControllerState, worker: WorkerId, **fields: Any) -> ControllerState:
    """Return the state in which a worker has no order any more, and some other fields replaced."""
    awaited = state.awaited - {worker}
    return changed(state, awaited=awaited, order=state.order if awaited else None, **fields)


def without_workers(state: ControllerState, lost: Iterable[WorkerId]) -> ControllerState:
    """Forget workers; a pending checkpoint that one of them still had to write to becomes stale."""
    gone = set(lost)
    workers = {worker: entry for worker, entry in state.workers.items() if worker not in gone}
    pending = state.pending
    if pending is not None and gone & debtors(pending):
        pending = pending.model_copy(update={"stale": True})
    awaited = state.awaited - gone
    if state.leaving:
        state = changed(state, leaving=state.leaving - gone)
    return changed(state, workers=workers, pending=pending, awaited=awaited, order=state.order if awaited else None)


def debtors(pending: PendingCheckpoint) -> set[WorkerId]:
    """Return the workers that still have units of this checkpoint to write."""
    return {worker for unit, worker in pending.writers.items() if unit not in pending.written}


def workers_that_are(state: ControllerState, *states: NodeState) -> tuple[WorkerId, ...]:
    """Return the workers in these states, in order of appearance."""
    return tuple(worker for worker, entry in state.workers.items() if entry.node in states)


def ready_workers(state: ControllerState) -> tuple[WorkerId, ...]:
    """Return the workers that are set up, whether they may be given a slot or not, in order of appearance."""
    return tuple(worker for worker, entry in state.workers.items() if entry.ready)


def busy_workers(state: ControllerState) -> tuple[WorkerId, ...]:
    """Return the workers with an outstanding order, in order of appearance."""
    return tuple(worker for worker in state.workers if worker in state.awaited) if state.awaited else ()


def wake_by(state: ControllerState, time_s: float) -> ControllerState:
    """Return the state that is looked at again at this time, at the latest."""
    if state.nodes_wake_s is not None and state.nodes_wake_s <= time_s:
        return state
    return changed(state, nodes_wake_s=time_s)


def mean_of(before: float | None, sample_s: float) -> float | None:
    """Take a measured duration into a mean that forgets; a clock that stepped back measured nothing."""
    if sample_s < 0:
        return before
    return sample_s if before is None else 0.7 * before + 0.3 * sample_s


def said(state: ControllerState, code: ReasonCode, sentence: str, *actions: Any) -> Decision:
    """Build a decision."""
    return Decision(state=state, actions=actions, reason=Reason(code=code, sentence=sentence))


def followed(first: Decision, second: Decision, code: ReasonCode | None = None) -> Decision:
    """Join two decisions of which the second was made from the first's state.

    The code is the second's, but that work is lost is told whatever follows.
    """
    lost = code is None and first.reason.code is ReasonCode.SET_BACK and second.state.phase is not Phase.ENDED
    if lost:
        code = first.reason.code
    sentence = f"{first.reason.sentence}; {second.reason.sentence}"
    return Decision(
        state=second.state,
        actions=first.actions + second.actions,
        reason=Reason(code=code or second.reason.code, sentence=sentence),
    )


def ended(state: ControllerState, outcome: Literal["finished", "stopped", "failed"], sentence: str) -> Decision:
    """End the run: abort what is outstanding, then finish. With an error that cannot be mended it has failed."""
    trace = ""
    if state.failing is not None and state.failing.final:
        outcome, trace = "failed", state.failing.traceback
    aborts = [Abort(worker=worker, generation=state.generation) for worker in busy_workers(state)]
    finish = Finish(outcome=outcome, sentence=sentence, traceback=trace)
    state = changed(state, phase=Phase.ENDED, order=None, awaited=frozenset(), finish=finish)
    return said(state, ReasonCode(outcome), sentence, *aborts, finish)
