"""``decide``: one table from (phase, event type) to what is done. Pure: the same input gives the same decision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from manager.controller.acknowledging import acknowledge
from manager.controller.answering import answered, note_answers
from manager.controller.deadlines import nobody_heard, tick, wake_at_s
from manager.controller.failures.lost_workers import lose
from manager.controller.requests.node_requests import (
    ask_missing,
    forget_kept,
    lost_booting,
    nodes_granted,
    note_appeared,
    notice_of,
    request_refused,
)
from manager.controller.requests.notices import notice_given, notice_withdrawn
from manager.controller.resuming import resumed, resumed_after_the_end
from manager.controller.saves.noting import vm_came
from manager.controller.shape.forming import form, note_torn_vms
from manager.controller.shape.pre_copy import ahead_reported
from manager.controller.shape.starting import start_if_due
from manager.controller.state.actions import StartWorker
from manager.controller.state.bounds import setup_bound_s
from manager.controller.state.draft import Draft
from manager.controller.state.events import (
    AnsweredAlike,
    CheckpointFailed,
    CheckpointFound,
    CheckpointNotFound,
    ComputeTimesSeen,
    Event,
    ManagerResumed,
    ManifestWritten,
    NobodyHeard,
    NodeAppeared,
    NodesGranted,
    NoticeGiven,
    NoticeWithdrawn,
    PreCopyReported,
    RequestRefused,
    Single,
    StopRequested,
    Tick,
    Together,
    UnitsWritten,
    WorkerAnswered,
    WorkerLost,
    WorkerProbed,
)
from manager.controller.state.reasons import ReasonCode
from manager.controller.state.state import ControllerState, Decision, Phase, WorkerState
from manager.controller.steps.resting import stop_while_resting
from manager.controller.steps.restoring import checkpoint_found, checkpoint_not_found, find_whole, in_doubt
from manager.controller.steps.saving import checkpoint_failed, manifest_written, units_written
from manager.controller.stragglers.detection import times_seen
from manager.controller.stragglers.probing import probed
from morph.contract.errors import MorphError
from morph.contract.messages import Answer, WorkerId

MAX_RECENT = 12
_ANSWERS = (WorkerAnswered, AnsweredAlike)

Handler = Callable[[Draft, Any], None]


class ImpossibleEvent(MorphError):
    """An event came in a phase in which it cannot happen: a defect of the shell or of the controller."""

    def __init__(self, state: ControllerState, event: Event) -> None:
        self.phase, self.event = state.phase, event
        history = "; ".join(state.recent) or "none"
        super().__init__(
            f"job {state.config.job}: {event.kind} cannot happen in phase {state.phase} "
            f"(event {event.model_dump_json()}; last events: {history})"
        )


def decide(state: ControllerState, event: Event, now_s: float) -> Decision:
    """Take one event.

    Args:
        state: What is known, from ``initial_state`` or the last decision.
        event: What happened.
        now_s: Wall-clock seconds at which the shell saw it. A clock that steps back makes waits longer by as
            much, one that jumps ahead may have workers given up that would have answered; neither loses a step.

    Returns:
        The new state, the actions to carry out in order (after both are journalled), the reason, and the
        time at which a ``Tick`` must come at the latest.

    Raises:
        ImpossibleEvent: the event cannot happen in this phase.
    """
    draft = Draft(state, now_s)
    answers_only = _take_all(draft, event.events if isinstance(event, Together) else (event,))
    if not answers_only or len(draft.state.workers) != len(state.workers):
        ask_missing(draft)
    acknowledge(draft)
    subject = getattr(event, "worker", getattr(event, "node", ""))
    entry = f"{now_s:.3f} {event.kind} {subject} in {state.phase}: {draft.code}"
    draft.change(recent=(*draft.state.recent, entry)[-MAX_RECENT:])
    return draft.decision(wake_at_s(draft.state))


def _take_all(draft: Draft, events: Sequence[Single | AnsweredAlike]) -> bool:
    """Take events one after the other, answers of many workers at once; returns whether all are answers."""
    for run in _runs(events):
        for each in note_answers(draft, run) if isinstance(run, dict) else (run,):
            handler = TRANSITIONS.get((draft.state.phase, type(each)))
            if handler is None:
                raise ImpossibleEvent(draft.state, each)
            handler(draft, each)
    return all(isinstance(event, _ANSWERS) for event in events)


def _runs(events: Sequence[Single | AnsweredAlike]) -> Iterator[Single | dict[WorkerId, Answer]]:
    """Each event, but answers of different workers that follow one another together."""
    answers: dict[WorkerId, Answer] = {}
    for event in events:
        workers = event.workers if isinstance(event, AnsweredAlike) else ()
        if isinstance(event, WorkerAnswered) and len(events) > 1:
            workers = (event.worker,)
        if answers and (not workers or not answers.keys().isdisjoint(workers)):
            yield answers
            answers = {}
        if workers and isinstance(event, _ANSWERS):
            answers |= dict.fromkeys(workers, event.answer)
        elif not isinstance(event, AnsweredAlike):
            yield event
    if answers:
        yield answers


def _node_appeared(draft: Draft, event: NodeAppeared) -> None:
    state, now_s = draft.state, draft.now_s
    if event.node in state.workers:
        return draft.say(ReasonCode.IGNORED, f"{event.node} is known already")
    notice = notice_of(state, event.node, now_s)
    vm_came(draft, event)
    facts = note_appeared(draft, event)
    entry = WorkerState(appeared_s=now_s, host=event.host or event.node, facts=facts)
    draft.change(workers={**state.workers, event.node: entry}, num_appeared=state.num_appeared + 1)
    forget_kept(draft, event.node)
    if state.phase is Phase.STARTING and state.waits.waiting_since_s is None:
        draft.change_waits(waiting_since_s=now_s)
    draft.wake_by(now_s + setup_bound_s(state))
    sentence = f"{event.node} appeared: its worker is started"
    draft.say(ReasonCode.NODE_REGISTERED, sentence, StartWorker(worker=event.node))
    return None if notice is None else notice_given(draft, notice)


def _worker_lost(draft: Draft, event: WorkerLost) -> None:
    lost = {worker: event.cause for worker in event.workers if worker in draft.state.workers}
    if not lost:
        return lost_booting(draft, event)
    forget_kept(draft, *event.workers)
    note_torn_vms(draft, lost)
    return lose(draft, lost)


def _worker_lost_at_start(draft: Draft, event: WorkerLost) -> None:
    _worker_lost(draft, event)
    if draft.code is not ReasonCode.IGNORED:
        start_if_due(draft)


def _stop_later(draft: Draft, event: StopRequested) -> None:
    if draft.state.stop_reason is not None:
        return draft.say(ReasonCode.IGNORED, "the run is stopping already")
    draft.change(stop_reason=event.reason)
    return draft.say(ReasonCode.STOP_NOTED, f"{event.reason}: the run ends at the next step boundary")


def _stop_now(draft: Draft, event: StopRequested) -> None:
    saved = 0 if draft.state.saving.checkpoint is None else draft.state.saving.checkpoint.version
    draft.change(stop_reason=event.reason)
    draft.end("stopped", f"{event.reason}; version {saved} is saved")


def _stop_while_nobody_trains(draft: Draft, event: StopRequested) -> None:
    _stop_later(draft, event)
    if in_doubt(draft.state):
        find_whole(draft)
    else:
        form(draft) if draft.state.phase is Phase.HOLDING else stop_while_resting(draft)


def _ignored(sentence: str) -> Handler:
    return lambda draft, event: draft.say(ReasonCode.IGNORED, sentence.format(event.kind))


_nobody_trains = _ignored("no shape trains: these compute times are late")
_nothing_is_sent_ahead = _ignored("nothing is sent ahead any more")
_ending = _ignored("the run is ending: {} changes nothing")


BEFORE = (Phase.STARTING,)
IDLE = (Phase.WAITING,)
HELD = (Phase.HOLDING,)
RESTS = (Phase.RESTING,)
FORMED = (Phase.RESHAPING, Phase.TRAINING, Phase.COMMITTING, Phase.ABORTING)
LAST = (Phase.SEALING,)
OVER = (Phase.ENDED,)
RUNNING = (*IDLE, *HELD, *RESTS, *FORMED)

_ROWS: tuple[tuple[type[Single], tuple[Phase, ...], Handler], ...] = (
    (NodeAppeared, (*BEFORE, *RUNNING), _node_appeared),
    (NodeAppeared, (*LAST, *OVER), _ending),
    (NodesGranted, (*BEFORE, *RUNNING), nodes_granted),
    (NodesGranted, (*LAST, *OVER), _ending),
    (RequestRefused, (*BEFORE, *RUNNING), request_refused),
    (RequestRefused, (*LAST, *OVER), _ending),
    (NoticeGiven, (*BEFORE, *RUNNING, *LAST), notice_given),
    (NoticeGiven, OVER, _ending),
    (NoticeWithdrawn, (*BEFORE, *RUNNING, *LAST), notice_withdrawn),
    (NoticeWithdrawn, OVER, _ending),
    (WorkerAnswered, (*BEFORE, *RUNNING, *LAST), answered),
    (WorkerAnswered, OVER, _ending),
    (WorkerLost, BEFORE, _worker_lost_at_start),
    (WorkerLost, (*RUNNING, *LAST), _worker_lost),
    (WorkerLost, OVER, _ending),
    (NobodyHeard, (*BEFORE, *RUNNING, *LAST), nobody_heard),
    (NobodyHeard, OVER, _ending),
    (ComputeTimesSeen, FORMED, times_seen),
    (ComputeTimesSeen, (*BEFORE, *IDLE, *HELD, *RESTS, *LAST), _nobody_trains),
    (ComputeTimesSeen, OVER, _ending),
    (WorkerProbed, (*BEFORE, *RUNNING, *LAST), probed),
    (WorkerProbed, OVER, _ending),
    (ManagerResumed, (*BEFORE, *RUNNING, *LAST), resumed),
    (ManagerResumed, OVER, resumed_after_the_end),
    (UnitsWritten, (*RUNNING, *LAST), units_written),
    (UnitsWritten, OVER, _ending),
    (CheckpointFailed, (*RUNNING, *LAST), checkpoint_failed),
    (CheckpointFailed, OVER, _ending),
    (ManifestWritten, (*RUNNING, *LAST), manifest_written),
    (ManifestWritten, OVER, _ending),
    (CheckpointFound, (*RUNNING, *LAST), checkpoint_found),
    (CheckpointFound, OVER, _ending),
    (CheckpointNotFound, (*RUNNING, *LAST), checkpoint_not_found),
    (CheckpointNotFound, OVER, _ending),
    (PreCopyReported, FORMED, ahead_reported),
    (PreCopyReported, (*BEFORE, *IDLE, *HELD, *RESTS, *LAST), _nothing_is_sent_ahead),
    (PreCopyReported, OVER, _ending),
    (StopRequested, (*BEFORE, *IDLE), _stop_now),
    (StopRequested, (*HELD, *RESTS), _stop_while_nobody_trains),
    (StopRequested, FORMED, _stop_later),
    (StopRequested, (*LAST, *OVER), _ending),
    (Tick, (*BEFORE, *RUNNING, *LAST), tick),
    (Tick, OVER, _ending),
)

TRANSITIONS: Mapping[tuple[Phase, type[Single]], Handler] = MappingProxyType(
    {(phase, event_type): handler for event_type, phases, handler in _ROWS for phase in phases}
)
"""What is done by (phase, event type). Missing: nothing can be written to storage before the first generation."""
