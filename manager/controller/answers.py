"""Changes the state by a worker's answer to an order."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from manager.controller.giving_up import gives_up_at_start, note_failed_setup
from manager.controller.node_requests import pause_requests
from manager.controller.shape.change_reasons import worth_giving_up
from manager.controller.shape.formation import form_or_hold, start_if_due
from manager.controller.shape.pre_copy import measure_speed
from manager.controller.shape.selection import hold_s
from manager.controller.state.actions import EndWorker, ReasonCode
from manager.controller.state.events import WorkerAnswered
from manager.controller.state.judging import judges_losses, why_bad
from manager.controller.state.nodes import NodeEvent
from manager.controller.state.state import OutstandingOrder, Phase, StepReport, mean_of
from manager.controller.state.transition import Transition
from manager.controller.steps.bad_steps import gives_up, leap_if_due
from manager.controller.steps.checkpoints import seal_if_complete
from manager.controller.steps.failures import dissolve, settle
from manager.controller.steps.training_loop import begin, decide_step
from manager.controller.steps.worker_errors import failed
from morph.contract.messages import (
    Aborted,
    Answer,
    Committed,
    Failed,
    Prepared,
    Reshaped,
    WorkerId,
    WorkerReady,
    weights_of,
)
from morph.words import counted

AnswerT = TypeVar("AnswerT")

NOTED: Mapping[Phase, tuple[type[Answer], ...]] = defaultdict(
    tuple,
    {
        Phase.RESHAPING: (Reshaped,),
        Phase.TRAINING: (Prepared,),
        Phase.COMMITTING: (Committed,),
        Phase.ABORTING: (Aborted, Reshaped, Prepared, Committed),
    },
)
"""The kinds of answers, by phase, that decide nothing until the last of them has come."""


def on_worker_answered(transition: Transition, event: WorkerAnswered) -> None:
    """Handle an answer to the setup or the outstanding order; ignore late and repeated ones, and unknown senders."""
    state = transition.state
    step = state.step
    entry = state.workers.get(event.worker)
    if entry is None:
        return transition.say(ReasonCode.IGNORED, f"{event.worker} is unknown, or was lost")
    if not entry.ready:
        return _set_up(transition, event.worker, event.answer)
    if step.order is None or event.worker not in step.awaited or not _fits(event.answer, step.order):
        return transition.say(ReasonCode.IGNORED, f"{event.worker} has no order that this {event.answer.kind} answers")
    if isinstance(event.answer, Failed):
        transition.change_step(kept={worker: sums for worker, sums in step.kept.items() if worker != event.worker})
        return failed(transition, event.worker, event.answer)
    return _order_answered(transition, event.worker, event.answer)


def note_answers(transition: Transition, answers: Mapping[WorkerId, Answer]) -> Sequence[WorkerAnswered]:
    """Record answers of many workers that arrived together; return those that must still be handled one by one."""
    state, order, noted = transition.state, transition.state.step.order, NOTED[transition.state.phase]
    step = state.step
    awaited = order is not None and step.awaited.issuperset(answers)
    alike = _alike(answers).values()
    if order is None or not awaited or not all(isinstance(given, noted) and _fits(given, order) for given in alike):
        return [_answer_of(worker, answer) for worker, answer in answers.items()]
    answers = dict(answers)
    last = answers.popitem() if len(answers) == len(step.awaited) else None
    if answers:
        _note(transition, answers)
        transition.change_step(awaited=step.awaited.difference(answers))
        left, kind = len(transition.state.step.awaited), next(iter(answers.values())).kind
        transition.say(
            ReasonCode.AWAITING_ANSWERS,
            f"{counted(len(answers), 'worker')} answered {kind}, {counted(left, 'has', 'have')} still to",
        )
    return () if last is None else [_answer_of(*last)]


def _alike(answers: Mapping[WorkerId, AnswerT]) -> dict[int, AnswerT]:
    """Return the distinct answers by their Python ``id``: many workers may share one object."""
    return dict(zip(map(id, answers.values()), answers.values(), strict=True))


def _answer_of(worker: WorkerId, answer: Answer) -> WorkerAnswered:
    return WorkerAnswered.model_construct(worker=worker, answer=answer.model_copy(update={"worker": worker}))


def _note(transition: Transition, answers: Mapping[WorkerId, Answer]) -> None:
    kinds = dict.fromkeys(map(type, answers.values()))
    for kind in kinds:
        alike = answers if len(kinds) == 1 else {worker: sent for worker, sent in answers.items() if type(sent) is kind}
        if kind in _NOTES:
            _NOTES[kind](transition, alike)


def _note_reshaped(transition: Transition, answers: Mapping[WorkerId, Reshaped]) -> None:
    state = transition.state
    entries = dict(state.workers)
    for worker in answers:
        entry, units = entries[worker], state.member_units.get(worker, frozenset())
        if not units <= entry.holds:
            entries[worker] = entry.model_copy(update={"holds": entry.holds | units})
    scales = [answer.loss_scale for answer in answers.values() if answer.loss_scale is not None]
    transition.change(workers=entries)
    transition.change_step(loss_scale=scales[-1] if scales else state.step.loss_scale)
    measure_speed(transition, answers)


def _note_prepared(transition: Transition, answers: Mapping[WorkerId, Prepared]) -> None:
    state, judged, alike = transition.state, judges_losses(transition.state), _alike(answers)
    reports = {key: _report_of(answer, judged=judged) for key, answer in alike.items()}
    named = {answer.named.step for answer in alike.values() if answer.named is not None}
    if named:
        transition.change(unnamed=tuple(step for step in state.unnamed if step not in named))
    paired = zip(answers, [reports[key] for key in map(id, answers.values())], strict=True)
    transition.change_step(reports=transition.state.step.reports | dict(paired))
    _note_evaluation(transition, alike.values())


def _note_evaluation(transition: Transition, answers: Iterable[Prepared | Committed]) -> None:
    state = transition.state
    if state.evaluation is None or not state.evaluation.acts:
        return
    for answer in answers:
        if answer.evaluation is not None:
            transition.change_step(shares=(*transition.state.step.shares, answer.evaluation))
        if answer.finished is not None:
            transition.change_step(finished=answer.finished)


def _note_aborted(transition: Transition, answers: Mapping[WorkerId, Aborted]) -> None:
    state = transition.state
    kept = {worker: sums for worker, sums in state.step.kept.items() if worker not in answers}
    if state.reshape is not None and state.reshape.keep_sums:
        for worker, answer in answers.items():
            if answer.kept is not None and answer.kept.step == state.version and answer.kept.sums:
                kept[worker] = answer.kept.sums
    transition.change_step(kept=kept)


_NOTES: Mapping[type, Callable[[Transition, Mapping[WorkerId, Any]], None]] = {
    Reshaped: _note_reshaped,
    Prepared: _note_prepared,
    Committed: lambda transition, answers: _note_evaluation(transition, _alike(answers).values()),
    Aborted: _note_aborted,
}


def _report_of(answer: Prepared, *, judged: bool) -> StepReport:
    losses = {each.micro_batch: each.loss if math.isfinite(each.loss) else math.inf for each in answer.losses if judged}
    return StepReport(
        overflowed=answer.overflowed,
        unit_norms_sq=answer.unit_norms_sq,
        non_finite=answer.non_finite,
        followed=answer.followed,
        weights=weights_of(answer.losses),
        losses=losses,
    )


def _set_up(transition: Transition, worker: WorkerId, answer: Answer) -> None:
    """Handle the answer to a setup. A failure ends the run only before the first shape, and if the device works."""
    state, now_s = transition.state, transition.now_s
    entry = state.workers[worker]
    if isinstance(answer, Failed):
        sentence = note_failed_setup(transition, worker, entry.host, answer)
        if state.phase is Phase.STARTING and answer.cause != "device":
            return gives_up_at_start(transition)
        transition.forget([worker])
        transition.say(ReasonCode.SETUP_FAILED, sentence, EndWorker(worker=worker))
        return pause_requests(transition, entry.appeared_s)
    if not isinstance(answer, WorkerReady):
        return transition.say(ReasonCode.IGNORED, f"{worker} is not set up and was given no order")
    wait_s = hold_s(transition, entry.host)
    eligible_s = now_s + wait_s if wait_s else None
    transition.change_node(worker, NodeEvent.SET_UP, ready_s=now_s, eligible_s=eligible_s)
    transition.change_provisioning(num_setups_lost=0, setup_lost_s=None, failed_setups=None)
    transition.change_measured(setup_s=mean_of(state.measured.setup_s, now_s - entry.appeared_s))
    transition.change(evaluation=answer.evaluation, epochs=answer.epochs)
    sentence = f"{worker} is ready"
    if eligible_s is not None:
        sentence += f"; its machine came and went before, so it is used only after {wait_s:g} s"
    transition.say(ReasonCode.WORKER_READY, sentence)
    if state.phase is Phase.STARTING:
        start_if_due(transition)
    elif state.phase in (Phase.WAITING, Phase.HOLDING):
        form_or_hold(transition)
    elif (why := worth_giving_up(transition)) is not None:
        transition.add(why)
        dissolve(transition, planned=True)
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


def _all_answered(transition: Transition) -> None:
    """Continue once every worker has reshaped, or has prepared the step."""
    if transition.state.phase is Phase.RESHAPING:
        return None if leap_if_due(transition) else begin(transition)
    bad = why_bad(transition.state)
    return None if bad and gives_up(transition, bad) else decide_step(transition, bad=bool(bad))


def _order_answered(transition: Transition, worker: WorkerId, answer: Answer) -> None:
    state = transition.state
    _note(transition, {worker: answer})
    transition.answered(worker)
    if isinstance(answer, Aborted) and state.phase not in (Phase.RESTING, Phase.ABORTING):
        detail = answer.detail or ("a peer was lost" if answer.peer_lost else "no detail")
        transition.say(ReasonCode.ABORTING, f"{worker} gave up its order: {detail}")
        return dissolve(transition)
    num_left, trains = len(transition.state.step.awaited), state.phase in (Phase.RESHAPING, Phase.TRAINING)
    if trains and not num_left:
        return _all_answered(transition)
    transition.say(ReasonCode.AWAITING_ANSWERS, f"{worker} answered {answer.kind}")
    if trains:
        transition.add(f"{counted(num_left, 'worker is', 'workers are')} still to answer")
    elif state.phase is Phase.ABORTING:
        settle(transition)
    elif state.phase is Phase.COMMITTING:
        seal_if_complete(transition)
    return None
