"""``decide``: one table from (phase, event type) to a handler. Pure: the same input gives the same decision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from manager.controller.answers import note_answers, on_worker_answered
from manager.controller.deadlines import on_nobody_heard, on_tick, wake_at_s
from manager.controller.giving_up import count_idle, give_up_if_due, note_idle
from manager.controller.node_requests import (
    forget_kept,
    lost_booting,
    note_appeared,
    notice_of,
    on_nodes_granted,
    on_nodes_started,
    on_request_refused,
    request_missing,
)
from manager.controller.notices import acknowledge, on_notice_given, on_notice_withdrawn
from manager.controller.probing import on_worker_probed
from manager.controller.shape.formation import form, record_partly_lost_vms, start_if_due
from manager.controller.shape.pre_copy import on_pre_copy_reported
from manager.controller.state.actions import ReasonCode, StartWorker
from manager.controller.state.bounds import setup_bound_s
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
    NodesStarted,
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
from manager.controller.state.state import ControllerState, Decision, Phase, WorkerState
from manager.controller.state.transition import Transition
from manager.controller.steps.checkpoints import on_checkpoint_failed, on_manifest_written, on_units_written
from manager.controller.steps.doubt import find_whole, in_doubt, on_checkpoint_found, on_checkpoint_not_found
from manager.controller.steps.failures import lose
from manager.controller.steps.recovery import stop_while_resting
from manager.controller.steps.save_measuring import vm_came
from manager.controller.stragglers import on_compute_times
from manager.controller.takeover import on_manager_resumed, on_manager_resumed_after_end
from morph.contract.errors import MorphError
from morph.contract.messages import Answer, WorkerId

MAX_RECENT = 12
_ANSWERS = (WorkerAnswered, AnsweredAlike)

Handler = Callable[[Transition, Any], None]
BEFORE = (Phase.STARTING,)
IDLE = (Phase.WAITING,)
HELD = (Phase.HOLDING,)
RESTS = (Phase.RESTING,)
FORMED = (Phase.RESHAPING, Phase.TRAINING, Phase.COMMITTING, Phase.ABORTING)
LAST = (Phase.SEALING,)
OVER = (Phase.ENDED,)
RUNNING = (*IDLE, *HELD, *RESTS, *FORMED)


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
    """Decide how to react to one event; ImpossibleEvent if it cannot happen in this phase. ``now_s`` is monotonic.

    The actions are carried out in order, after event and decision are journalled; a ``Tick`` must come at the
    decision's wake-up time at the latest.
    """
    transition = Transition(state, now_s)
    count_idle(transition)
    answers_only = _take_all(transition, event.events if isinstance(event, Together) else (event,))
    give_up_if_due(transition)
    note_idle(transition)
    if not answers_only or len(transition.state.workers) != len(state.workers):
        request_missing(transition)
    acknowledge(transition)
    subject = getattr(event, "worker", getattr(event, "node", ""))
    entry = f"{now_s:.3f} {event.kind} {subject} in {state.phase}: {transition.code}"
    transition.change(recent=(*transition.state.recent, entry)[-MAX_RECENT:])
    return transition.decision(wake_at_s(transition.state))


def _take_all(transition: Transition, events: Sequence[Single | AnsweredAlike]) -> bool:
    """Handle events one after the other, but answers of many workers at once; return whether all events are answers."""
    for run in _runs(events):
        for each in note_answers(transition, run) if isinstance(run, dict) else (run,):
            handler = TRANSITIONS.get((transition.state.phase, type(each)))
            if handler is None:
                raise ImpossibleEvent(transition.state, each)
            handler(transition, each)
    return all(isinstance(event, _ANSWERS) for event in events)


def _runs(events: Sequence[Single | AnsweredAlike]) -> Iterator[Single | dict[WorkerId, Answer]]:
    """Yield the events in order; consecutive answers of different workers are one dict."""
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


def _on_node_appeared(transition: Transition, event: NodeAppeared) -> None:
    state, now_s = transition.state, transition.now_s
    if event.node in state.workers:
        return transition.say(ReasonCode.IGNORED, f"{event.node} is known already")
    notice = notice_of(state, event.node, now_s)
    vm_came(transition, event)
    facts = note_appeared(transition, event)
    entry = WorkerState(appeared_s=now_s, host=event.host or event.node, facts=facts)
    transition.change(workers={**state.workers, event.node: entry}, num_appeared=state.num_appeared + 1)
    forget_kept(transition, event.node)
    if state.phase is Phase.STARTING and state.waits.waiting_since_s is None:
        transition.change_waits(waiting_since_s=now_s)
    transition.wake_by(now_s + setup_bound_s(state))
    sentence = f"{event.node} appeared: its worker is started"
    transition.say(ReasonCode.NODE_REGISTERED, sentence, StartWorker(worker=event.node))
    return None if notice is None else on_notice_given(transition, notice)


def _on_worker_lost(transition: Transition, event: WorkerLost) -> None:
    lost = {worker: event.cause for worker in event.workers if worker in transition.state.workers}
    if not lost:
        return lost_booting(transition, event)
    forget_kept(transition, *event.workers)
    record_partly_lost_vms(transition, lost)
    return lose(transition, lost)


def _on_worker_lost_at_start(transition: Transition, event: WorkerLost) -> None:
    _on_worker_lost(transition, event)
    if transition.code is not ReasonCode.IGNORED:
        start_if_due(transition)


def _stop_later(transition: Transition, event: StopRequested) -> None:
    if transition.state.provisioning.gives_up:  # the user's stop takes precedence: after giving up, the run would rest
        transition.change_provisioning(gives_up=None)
        transition.change(stop_reason=None)
    if transition.state.stop_reason is not None:
        return transition.say(ReasonCode.IGNORED, "the run is stopping already")
    transition.change(stop_reason=event.reason)
    return transition.say(ReasonCode.STOP_NOTED, f"{event.reason}: the run ends at the next step boundary")


def _stop_now(transition: Transition, event: StopRequested) -> None:
    saved = 0 if transition.state.saving.checkpoint is None else transition.state.saving.checkpoint.version
    transition.change(stop_reason=event.reason)
    transition.end("stopped", f"{event.reason}; version {saved} is saved")


def _stop_while_nobody_trains(transition: Transition, event: StopRequested) -> None:
    _stop_later(transition, event)
    if in_doubt(transition.state):
        find_whole(transition)
    else:
        form(transition) if transition.state.phase is Phase.HOLDING else stop_while_resting(transition)


def _ignored(sentence: str) -> Handler:
    return lambda transition, event: transition.say(ReasonCode.IGNORED, sentence.format(event.kind))


_nobody_trains = _ignored("no shape trains: these compute times came too late")
_no_pre_copy = _ignored("nothing is pre-copied any more")
_ending = _ignored("the run is ending: {} changes nothing")


_ROWS: tuple[tuple[type[Single], tuple[Phase, ...], Handler], ...] = (
    (NodeAppeared, (*BEFORE, *RUNNING), _on_node_appeared),
    (NodeAppeared, (*LAST, *OVER), _ending),
    (NodesGranted, (*BEFORE, *RUNNING), on_nodes_granted),
    (NodesGranted, (*LAST, *OVER), _ending),
    (NodesStarted, (*BEFORE, *RUNNING), on_nodes_started),
    (NodesStarted, (*LAST, *OVER), _ending),
    (RequestRefused, (*BEFORE, *RUNNING), on_request_refused),
    (RequestRefused, (*LAST, *OVER), _ending),
    (NoticeGiven, (*BEFORE, *RUNNING, *LAST), on_notice_given),
    (NoticeGiven, OVER, _ending),
    (NoticeWithdrawn, (*BEFORE, *RUNNING, *LAST), on_notice_withdrawn),
    (NoticeWithdrawn, OVER, _ending),
    (WorkerAnswered, (*BEFORE, *RUNNING, *LAST), on_worker_answered),
    (WorkerAnswered, OVER, _ending),
    (WorkerLost, BEFORE, _on_worker_lost_at_start),
    (WorkerLost, (*RUNNING, *LAST), _on_worker_lost),
    (WorkerLost, OVER, _ending),
    (NobodyHeard, (*BEFORE, *RUNNING, *LAST), on_nobody_heard),
    (NobodyHeard, OVER, _ending),
    (ComputeTimesSeen, FORMED, on_compute_times),
    (ComputeTimesSeen, (*BEFORE, *IDLE, *HELD, *RESTS, *LAST), _nobody_trains),
    (ComputeTimesSeen, OVER, _ending),
    (WorkerProbed, (*BEFORE, *RUNNING, *LAST), on_worker_probed),
    (WorkerProbed, OVER, _ending),
    (ManagerResumed, (*BEFORE, *RUNNING, *LAST), on_manager_resumed),
    (ManagerResumed, OVER, on_manager_resumed_after_end),
    (UnitsWritten, (*RUNNING, *LAST), on_units_written),
    (UnitsWritten, OVER, _ending),
    (CheckpointFailed, (*RUNNING, *LAST), on_checkpoint_failed),
    (CheckpointFailed, OVER, _ending),
    (ManifestWritten, (*RUNNING, *LAST), on_manifest_written),
    (ManifestWritten, OVER, _ending),
    (CheckpointFound, (*RUNNING, *LAST), on_checkpoint_found),
    (CheckpointFound, OVER, _ending),
    (CheckpointNotFound, (*RUNNING, *LAST), on_checkpoint_not_found),
    (CheckpointNotFound, OVER, _ending),
    (PreCopyReported, FORMED, on_pre_copy_reported),
    (PreCopyReported, (*BEFORE, *IDLE, *HELD, *RESTS, *LAST), _no_pre_copy),
    (PreCopyReported, OVER, _ending),
    (StopRequested, (*BEFORE, *IDLE), _stop_now),
    (StopRequested, (*HELD, *RESTS), _stop_while_nobody_trains),
    (StopRequested, FORMED, _stop_later),
    (StopRequested, (*LAST, *OVER), _ending),
    (Tick, (*BEFORE, *RUNNING, *LAST), on_tick),
    (Tick, OVER, _ending),
)

TRANSITIONS: Mapping[tuple[Phase, type[Single]], Handler] = MappingProxyType(
    {(phase, event_type): handler for event_type, phases, handler in _ROWS for phase in phases}
)
"""The handler by (phase, event type). A missing pair cannot happen: nothing is written before the first generation."""
