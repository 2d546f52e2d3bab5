"""What a worker's answer changes."""

from __future__ import annotations

from manager.controller.actions import EndWorker
from manager.controller.changes import (
    busy_workers,
    changed,
    ended,
    followed,
    member_units,
    ready_workers,
    said,
    with_worker,
)
from manager.controller.events import WorkerAnswered
from manager.controller.forming import best_plan, form
from manager.controller.losing import dissolve, settle
from manager.controller.reasons import ReasonCode
from manager.controller.state import ControllerState, Decision, OutstandingOrder, Phase
from manager.controller.stepping import begin, decide_step, seal_if_complete
from morph.contract.messages import Aborted, Answer, Committed, Failed, Prepared, Reshaped, WorkerId, WorkerReady


def answered(state: ControllerState, event: WorkerAnswered, now_s: float) -> Decision:
    """Take an answer to the setup or to the outstanding order; anything else is late, doubled or from a stranger."""
    entry = state.workers.get(event.worker)
    if entry is None:
        return said(state, ReasonCode.IGNORED, f"{event.worker} is not known, or was lost")
    if not entry.ready:
        return _set_up(state, event.worker, event.answer, now_s)
    if entry.order is None or not _fits(event.answer, entry.order):
        return said(state, ReasonCode.IGNORED, f"{event.worker} has no order that this {event.answer.kind} answers")
    if isinstance(event.answer, Failed):
        return ended(
            with_worker(state, event.worker, order=None), "failed", f"{event.worker} failed: {event.answer.error}"
        )
    return _order_answered(state, event.worker, event.answer, now_s)


def start_if_due(state: ControllerState, now_s: float) -> Decision:
    """While starting: form the first generation once everybody expected is ready, or patience has run out."""
    if state.version >= state.config.num_steps:
        return ended(state, "finished", f"all {state.config.num_steps} steps are committed and saved already")
    num_ready, num_known = len(ready_workers(state)), len(state.workers)
    if best_plan(state.config, num_ready) is None:
        fewest = min(state.config.plans)
        state = changed(state, first_feasible_s=None)
        return said(state, ReasonCode.START_WAIT, f"{num_ready} workers are ready, {fewest} are needed to start")
    since_s = now_s if state.first_feasible_s is None else state.first_feasible_s
    state = changed(state, first_feasible_s=since_s)
    if num_ready == num_known and state.num_appeared >= state.config.expected_nodes:
        everybody = said(state, ReasonCode.FORMED, f"all {num_ready} workers are ready")
        return followed(everybody, form(state, now_s))
    if now_s >= since_s + state.config.policy.start_patience_s:
        patience = said(state, ReasonCode.FORMED, f"{num_ready} of {num_known} workers are ready, the others are late")
        return followed(patience, form(state, now_s))
    missing = max(num_known, state.config.expected_nodes) - num_ready
    return said(state, ReasonCode.START_WAIT, f"{num_ready} workers could start; {missing} more are awaited a while")


def _set_up(state: ControllerState, worker: WorkerId, answer: Answer, now_s: float) -> Decision:
    """A worker answers its setup. A failed one ends the run only when nothing was formed yet."""
    if isinstance(answer, Failed):
        sentence = f"{worker} could not be set up: {answer.error}"
        if state.phase is Phase.STARTING:
            return ended(state, "failed", sentence)
        workers = {name: entry for name, entry in state.workers.items() if name != worker}
        return said(changed(state, workers=workers), ReasonCode.WORKER_REMOVED, sentence, EndWorker(worker=worker))
    if not isinstance(answer, WorkerReady):
        return said(state, ReasonCode.IGNORED, f"{worker} is not set up and was given no order")
    state = with_worker(state, worker, ready=True)
    ready = said(state, ReasonCode.WORKER_READY, f"{worker} is ready")
    if state.phase is Phase.STARTING:
        return followed(ready, start_if_due(state, now_s))
    if state.phase is Phase.WAITING:
        return followed(ready, form(state, now_s))
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
    entry = state.workers[worker]
    state = with_worker(state, worker, order=None)
    if isinstance(answer, Reshaped):
        state = with_worker(state, worker, holds=entry.holds | member_units(state).get(worker, frozenset()))
        state = changed(state, loss_scale=answer.loss_scale or state.loss_scale)
    elif isinstance(answer, Prepared):
        reported = {"overflowed": answer.overflowed, "non_finite": answer.non_finite}
        state = with_worker(state, worker, unit_norms_sq=answer.unit_norms_sq, **reported)
    told = said(state, ReasonCode.AWAITING_ANSWERS, f"{worker} answered {answer.kind}")
    if state.phase is Phase.ABORTING:
        return followed(told, settle(state, now_s))
    if isinstance(answer, Aborted):
        detail = answer.detail or ("a peer was lost" if answer.peer_lost else "no detail")
        gave_up = said(state, ReasonCode.ABORTING, f"{worker} gave up its order: {detail}")
        return followed(gave_up, dissolve(state, now_s))
    if state.phase is Phase.COMMITTING:
        return followed(told, seal_if_complete(state, now_s))
    busy = busy_workers(state)
    if busy:
        waiting = said(state, ReasonCode.AWAITING_ANSWERS, f"{len(busy)} workers are still at it")
        return followed(told, waiting)
    return begin(state, now_s) if state.phase is Phase.RESHAPING else decide_step(state, now_s)
