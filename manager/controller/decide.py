"""``decide``: one table from (phase, event type) to what is done. Pure: the same input gives the same decision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from manager.controller.acknowledging import acknowledged
from manager.controller.actions import StartWorker
from manager.controller.ahead import ahead_reported
from manager.controller.answering import answered
from manager.controller.asking import asked, lost_booting, nodes_granted, request_refused, with_appeared
from manager.controller.changes import changed, ended, followed, said, wake_by
from manager.controller.early import notice_of, without_kept
from manager.controller.events import (
    AheadReported,
    CheckpointFailed,
    ComputeTimesSeen,
    Event,
    ManagerResumed,
    ManifestWritten,
    NobodyHeard,
    NodeAppeared,
    NodesGranted,
    NoticeGiven,
    NoticeWithdrawn,
    RequestRefused,
    StopRequested,
    Tick,
    UnitsWritten,
    WorkerAnswered,
    WorkerLost,
    WorkerProbed,
)
from manager.controller.forming import form
from manager.controller.losing import lose
from manager.controller.noticing import notice_given, notice_withdrawn
from manager.controller.pacing import times_seen
from manager.controller.probing import probed
from manager.controller.reasons import ReasonCode
from manager.controller.resting import stop_while_resting
from manager.controller.resuming import resumed, resumed_after_the_end
from manager.controller.saving import checkpoint_failed, manifest_written, units_written
from manager.controller.starting import start_if_due
from manager.controller.state import ControllerState, Decision, Phase, WorkerState
from manager.controller.waking import nobody_heard, tick, wake_at_s
from morph.contract.errors import MorphError

MAX_RECENT = 12

Handler = Callable[[ControllerState, Any, float], Decision]


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
    handler = TRANSITIONS.get((state.phase, type(event)))
    if handler is None:
        raise ImpossibleEvent(state, event)
    decision = handler(state, event, now_s)
    if not isinstance(event, WorkerAnswered) or len(decision.state.workers) != len(state.workers):
        decision = asked(decision, now_s)
    decision = acknowledged(decision)
    subject = getattr(event, "worker", getattr(event, "node", ""))
    entry = f"{now_s:.3f} {event.kind} {subject} in {state.phase}: {decision.reason.code}"
    after = changed(decision.state, recent=(*decision.state.recent, entry)[-MAX_RECENT:])
    return Decision(state=after, actions=decision.actions, reason=decision.reason, wake_at_s=wake_at_s(after))


def _node_appeared(state: ControllerState, event: NodeAppeared, now_s: float) -> Decision:
    if event.node in state.workers:
        return said(state, ReasonCode.IGNORED, f"{event.node} is known already")
    notice = notice_of(state, event.node, now_s)
    workers = {**state.workers, event.node: WorkerState(appeared_s=now_s, host=event.host or event.node)}
    state = changed(with_appeared(state, event), workers=workers, num_appeared=state.num_appeared + 1)
    state = without_kept(state, event.node)
    if state.phase is Phase.STARTING and state.waiting_since_s is None:
        state = changed(state, waiting_since_s=now_s)
    state = wake_by(state, now_s + state.config.policy.order_timeout_s)
    sentence = f"{event.node} appeared: its worker is started"
    registered = said(state, ReasonCode.NODE_REGISTERED, sentence, StartWorker(worker=event.node))
    return registered if notice is None else followed(registered, notice_given(state, notice, now_s))


def _worker_lost(state: ControllerState, event: WorkerLost, now_s: float) -> Decision:
    lost = {worker: event.cause for worker in event.workers if worker in state.workers}
    return lose(without_kept(state, *event.workers), lost, now_s) if lost else lost_booting(state, event, now_s)


def _worker_lost_at_start(state: ControllerState, event: WorkerLost, now_s: float) -> Decision:
    removed = _worker_lost(state, event, now_s)
    if removed.reason.code is ReasonCode.IGNORED:
        return removed
    return followed(removed, start_if_due(removed.state, now_s))


def _stop_later(state: ControllerState, event: StopRequested, now_s: float) -> Decision:
    del now_s
    if state.stop_reason is not None:
        return said(state, ReasonCode.IGNORED, "the run is stopping already")
    sentence = f"{event.reason}: the run ends at the next step boundary"
    return said(changed(state, stop_reason=event.reason), ReasonCode.STOP_NOTED, sentence)


def _stop_now(state: ControllerState, event: StopRequested, now_s: float) -> Decision:
    del now_s
    saved = 0 if state.checkpoint is None else state.checkpoint.version
    return ended(changed(state, stop_reason=event.reason), "stopped", f"{event.reason}; version {saved} is saved")


def _stop_after_holding(state: ControllerState, event: StopRequested, now_s: float) -> Decision:
    noted = _stop_later(state, event, now_s)
    return followed(noted, form(noted.state, now_s))


def _stop_while_resting(state: ControllerState, event: StopRequested, now_s: float) -> Decision:
    noted = _stop_later(state, event, now_s)
    return followed(noted, stop_while_resting(noted.state, now_s))


def _nobody_trains(state: ControllerState, event: ComputeTimesSeen, now_s: float) -> Decision:
    del event, now_s
    return said(state, ReasonCode.IGNORED, "nobody trains: these compute times are late")


def _nothing_is_sent_ahead(state: ControllerState, event: AheadReported, now_s: float) -> Decision:
    del event, now_s
    return said(state, ReasonCode.IGNORED, "nothing is sent ahead any more")


def _ending(state: ControllerState, event: Event, now_s: float) -> Decision:
    del now_s
    return said(state, ReasonCode.IGNORED, f"the run is ending: {event.kind} changes nothing")


BEFORE = (Phase.STARTING,)
IDLE = (Phase.WAITING,)
HELD = (Phase.HOLDING,)
RESTS = (Phase.RESTING,)
FORMED = (Phase.RESHAPING, Phase.TRAINING, Phase.COMMITTING, Phase.ABORTING)
LAST = (Phase.SEALING,)
OVER = (Phase.ENDED,)
RUNNING = (*IDLE, *HELD, *RESTS, *FORMED)

_ROWS: tuple[tuple[type[Event], tuple[Phase, ...], Handler], ...] = (
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
    (AheadReported, FORMED, ahead_reported),
    (AheadReported, (*BEFORE, *IDLE, *HELD, *RESTS, *LAST), _nothing_is_sent_ahead),
    (AheadReported, OVER, _ending),
    (StopRequested, (*BEFORE, *IDLE), _stop_now),
    (StopRequested, HELD, _stop_after_holding),
    (StopRequested, RESTS, _stop_while_resting),
    (StopRequested, FORMED, _stop_later),
    (StopRequested, (*LAST, *OVER), _ending),
    (Tick, (*BEFORE, *RUNNING, *LAST), tick),
    (Tick, OVER, _ending),
)

TRANSITIONS: Mapping[tuple[Phase, type[Event]], Handler] = MappingProxyType(
    {(phase, event_type): handler for event_type, phases, handler in _ROWS for phase in phases}
)
"""What is done by (phase, event type). Missing: nothing can be written to storage before the first generation."""
