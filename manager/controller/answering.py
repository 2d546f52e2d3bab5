"""What a worker's answer changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from manager.controller.failures.lost_workers import dissolve, settle
from manager.controller.failures.worker_errors import failed
from manager.controller.requests.node_requests import pause_asking
from manager.controller.shape.flapping import hold_s
from manager.controller.shape.forming import form_or_hold
from manager.controller.shape.pre_copy import measure_speed
from manager.controller.shape.starting import start_if_due
from manager.controller.state.actions import EndWorker
from manager.controller.state.draft import Draft
from manager.controller.state.events import Single, WorkerAnswered
from manager.controller.state.nodes import NodeEvent
from manager.controller.state.reasons import ReasonCode
from manager.controller.state.state import OutstandingOrder, Phase, StepReport, mean_of
from manager.controller.steps.stepping import begin, decide_step, seal_if_complete
from morph.contract.messages import Aborted, Answer, Committed, Failed, Prepared, Reshaped, WorkerId, WorkerReady

NOTED: Mapping[Phase, tuple[type[Answer], ...]] = defaultdict(
    tuple,
    {
        Phase.RESHAPING: (Reshaped,),
        Phase.TRAINING: (Prepared,),
        Phase.COMMITTING: (Committed,),
        Phase.ABORTING: (Aborted, Reshaped, Prepared, Committed),
    },
)
"""By phase the answers by which nothing is decided before the last one has come."""


def answered(draft: Draft, event: WorkerAnswered) -> None:
    """Take an answer to the setup or to the outstanding order; anything else is late, doubled or from a stranger."""
    state = draft.state
    entry = state.workers.get(event.worker)
    if entry is None:
        return draft.say(ReasonCode.IGNORED, f"{event.worker} is not known, or was lost")
    if not entry.ready:
        return _set_up(draft, event.worker, event.answer)
    if state.order is None or event.worker not in state.awaited or not _fits(event.answer, state.order):
        return draft.say(ReasonCode.IGNORED, f"{event.worker} has no order that this {event.answer.kind} answers")
    if isinstance(event.answer, Failed):
        return failed(draft, event.worker, event.answer)
    return _order_answered(draft, event.worker, event.answer)


def note_alike(draft: Draft, events: Sequence[Single]) -> int:
    """Note what the first of these events say that answer the present order alike, all but the last who answers it.

    Returns how many were taken in: none where the first is none of these, or decides something by itself.
    """
    state, order = draft.state, draft.state.order
    alike: dict[WorkerId, Answer] = {}
    for event in events:
        if order is None or not isinstance(event, WorkerAnswered) or not isinstance(event.answer, NOTED[state.phase]):
            break
        worker, answer = event.worker, event.answer
        if worker in alike or worker not in state.awaited or not _fits(answer, order):
            break
        alike[worker] = answer
    if alike and len(alike) == len(state.awaited):
        alike.popitem()
    if len(alike) < 2:
        return 0
    _note(draft, alike)
    draft.change(awaited=state.awaited.difference(alike))
    draft.say(ReasonCode.AWAITING_ANSWERS, f"{len(alike)} workers answered, {len(draft.state.awaited)} have still to")
    return len(alike)


def _note(draft: Draft, answers: Mapping[WorkerId, Answer]) -> None:
    """Keep what workers report of their orders."""
    state = draft.state
    reshaped = {worker: answer for worker, answer in answers.items() if isinstance(answer, Reshaped)}
    prepared = {worker: answer for worker, answer in answers.items() if isinstance(answer, Prepared)}
    if reshaped:
        workers, loss_scale = dict(state.workers), state.loss_scale
        for worker, answer in reshaped.items():
            holds = workers[worker].holds | state.member_units.get(worker, frozenset())
            workers[worker] = workers[worker].model_copy(update={"holds": holds})
            loss_scale = answer.loss_scale or loss_scale
            measure_speed(draft, answer)
        draft.change(workers=workers, loss_scale=loss_scale)
    if prepared:
        reports = dict(state.reports)
        for worker, report in prepared.items():
            reports[worker] = StepReport(
                overflowed=report.overflowed, unit_norms_sq=report.unit_norms_sq, non_finite=report.non_finite
            )
        draft.change(reports=reports)


def _set_up(draft: Draft, worker: WorkerId, answer: Answer) -> None:
    """A worker answers its setup. A failed one ends the run only when nothing was formed yet, and its device works."""
    state, now_s = draft.state, draft.now_s
    entry = state.workers[worker]
    if isinstance(answer, Failed):
        sentence = f"{worker} could not be set up: {answer.error}"
        if state.phase is Phase.STARTING and answer.cause != "device":
            return draft.end("failed", sentence)
        draft.forget([worker])
        draft.say(ReasonCode.WORKER_REMOVED, sentence, EndWorker(worker=worker))
        return pause_asking(draft, entry.appeared_s)
    if not isinstance(answer, WorkerReady):
        return draft.say(ReasonCode.IGNORED, f"{worker} is not set up and was given no order")
    wait_s = hold_s(draft, entry.host)
    eligible_s = now_s + wait_s if wait_s else None
    draft.change_node(worker, NodeEvent.SET_UP, ready_s=now_s, eligible_s=eligible_s)
    draft.change(num_setups_lost=0, setup_lost_s=None, setup_s=mean_of(state.setup_s, now_s - entry.appeared_s))
    sentence = f"{worker} is ready"
    if eligible_s is not None:
        sentence += f"; its machine came back before, so that it is taken in after {wait_s:g} s"
    draft.say(ReasonCode.WORKER_READY, sentence)
    if state.phase is Phase.STARTING:
        start_if_due(draft)
    elif state.phase in (Phase.WAITING, Phase.HOLDING):
        form_or_hold(draft)
    return None


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


def _order_answered(draft: Draft, worker: WorkerId, answer: Answer) -> None:
    state = draft.state
    _note(draft, {worker: answer})
    draft.answered(worker)
    if isinstance(answer, Aborted) and state.phase not in (Phase.RESTING, Phase.ABORTING):
        detail = answer.detail or ("a peer was lost" if answer.peer_lost else "no detail")
        draft.say(ReasonCode.ABORTING, f"{worker} gave up its order: {detail}")
        return dissolve(draft)
    num_left, trains = len(draft.state.awaited), state.phase in (Phase.RESHAPING, Phase.TRAINING)
    if trains and not num_left:
        return begin(draft) if state.phase is Phase.RESHAPING else decide_step(draft)
    draft.say(ReasonCode.AWAITING_ANSWERS, f"{worker} answered {answer.kind}")
    if trains:
        draft.add(f"{num_left} workers are still at it")
    elif state.phase is Phase.ABORTING:
        settle(draft)
    elif state.phase is Phase.COMMITTING:
        seal_if_complete(draft)
    return None
