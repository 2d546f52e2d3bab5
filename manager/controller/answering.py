"""What a worker's answer changes."""

from __future__ import annotations

from manager.controller.actions import EndWorker
from manager.controller.ahead import with_measured_speed
from manager.controller.asking import with_pause
from manager.controller.changes import (
    answered_by,
    changed,
    ended,
    followed,
    mean_of,
    said,
    with_node,
    with_worker,
    without_workers,
)
from manager.controller.events import WorkerAnswered
from manager.controller.failing import failed
from manager.controller.flapping import hold_s
from manager.controller.forming import form_or_hold
from manager.controller.losing import dissolve, settle
from manager.controller.nodes import NodeEvent
from manager.controller.reasons import ReasonCode
from manager.controller.starting import start_if_due
from manager.controller.state import ControllerState, Decision, OutstandingOrder, Phase, StepReport
from manager.controller.stepping import begin, decide_step, seal_if_complete
from morph.contract.messages import Aborted, Answer, Committed, Failed, Prepared, Reshaped, WorkerId, WorkerReady


def answered(state: ControllerState, event: WorkerAnswered, now_s: float) -> Decision:
    """Take an answer to the setup or to the outstanding order; anything else is late, doubled or from a stranger."""
    entry = state.workers.get(event.worker)
    if entry is None:
        return said(state, ReasonCode.IGNORED, f"{event.worker} is not known, or was lost")
    if not entry.ready:
        return _set_up(state, event.worker, event.answer, now_s)
    if state.order is None or event.worker not in state.awaited or not _fits(event.answer, state.order):
        return said(state, ReasonCode.IGNORED, f"{event.worker} has no order that this {event.answer.kind} answers")
    if isinstance(event.answer, Failed):
        return failed(state, event.worker, event.answer, now_s)
    return _order_answered(state, event.worker, event.answer, now_s)


def _set_up(state: ControllerState, worker: WorkerId, answer: Answer, now_s: float) -> Decision:
    """A worker answers its setup. A failed one ends the run only when nothing was formed yet, and its device works."""
    if isinstance(answer, Failed):
        sentence = f"{worker} could not be set up: {answer.error}"
        if state.phase is Phase.STARTING and answer.cause != "device":
            return ended(state, "failed", sentence)
        appeared_s = state.workers[worker].appeared_s
        state = without_workers(state, [worker])
        removed = said(state, ReasonCode.WORKER_REMOVED, sentence, EndWorker(worker=worker))
        return with_pause(removed, appeared_s, now_s)
    if not isinstance(answer, WorkerReady):
        return said(state, ReasonCode.IGNORED, f"{worker} is not set up and was given no order")
    entry = state.workers[worker]
    wait_s = hold_s(state, entry.host, now_s)
    eligible_s = now_s + wait_s if wait_s else None
    state = with_node(state, worker, NodeEvent.SET_UP, ready_s=now_s, eligible_s=eligible_s)
    state = changed(state, num_setups_lost=0, setup_lost_s=None)
    state = changed(state, setup_s=mean_of(state.setup_s, now_s - entry.appeared_s))
    sentence = f"{worker} is ready"
    if eligible_s is not None:
        sentence += f"; its machine came back before, so that it is taken in after {wait_s:g} s"
    ready = said(state, ReasonCode.WORKER_READY, sentence)
    if state.phase is Phase.STARTING:
        return followed(ready, start_if_due(state, now_s))
    if state.phase in (Phase.WAITING, Phase.HOLDING):
        return followed(ready, form_or_hold(state, now_s))
    return ready


def _fits(answer: Answer, order: OutstandingOrder) -> bool:
    """Whether the answer answers this order, and not an older generation, step or attempt."""
    if isinstance(answer, WorkerReady) or answer.generation != order.generation:
        return False
    match answer:
        case Reshaped():
            return order.kind == "reshape"
        case Prepared():
            return order.kind == "step" and (answer.step, answer.attempt) == (order.version, order.attempt)
        case Committed():
            return order.kind == "commit" and answer.version == order.version
        case _:
            return True


def _order_answered(state: ControllerState, worker: WorkerId, answer: Answer, now_s: float) -> Decision:
    if isinstance(answer, Reshaped):
        holds = state.workers[worker].holds | state.member_units.get(worker, frozenset())
        state = with_worker(state, worker, holds=holds)
        state = with_measured_speed(state, answer)
        state = answered_by(state, worker, loss_scale=answer.loss_scale or state.loss_scale)
    elif isinstance(answer, Prepared):
        report = StepReport(
            overflowed=answer.overflowed, unit_norms_sq=answer.unit_norms_sq, non_finite=answer.non_finite
        )
        state = answered_by(state, worker, reports={**state.reports, worker: report})
    else:
        state = answered_by(state, worker)
    told = said(state, ReasonCode.AWAITING_ANSWERS, f"{worker} answered {answer.kind}")
    if state.phase is Phase.RESTING:
        return told
    if state.phase is Phase.ABORTING:
        return followed(told, settle(state, now_s))
    if isinstance(answer, Aborted):
        detail = answer.detail or ("a peer was lost" if answer.peer_lost else "no detail")
        gave_up = said(state, ReasonCode.ABORTING, f"{worker} gave up its order: {detail}")
        return followed(gave_up, dissolve(state, now_s))
    if state.phase is Phase.COMMITTING:
        return followed(told, seal_if_complete(state, now_s))
    if state.awaited:
        waiting = said(state, ReasonCode.AWAITING_ANSWERS, f"{len(state.awaited)} workers are still at it")
        return followed(told, waiting)
    return begin(state, now_s) if state.phase is Phase.RESHAPING else decide_step(state, now_s)
