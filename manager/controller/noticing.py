"""Notices: a VM that will be taken is drained at the next boundary, and taken back when nobody came for it."""

from __future__ import annotations

from manager.controller.asking import noticed_booting
from manager.controller.changes import changed, followed, said, wake_by, with_node
from manager.controller.early import kept, without_kept
from manager.controller.events import NoticeGiven, NoticeWithdrawn
from manager.controller.flapping import flapped, hold_s
from manager.controller.forming import form_or_hold
from manager.controller.nodes import NodeEvent, NodeState
from manager.controller.reasons import ReasonCode
from manager.controller.starting import start_if_due
from manager.controller.state import ControllerState, Decision, Pace, Phase
from morph.contract.messages import WorkerId


def notice_given(state: ControllerState, event: NoticeGiven, now_s: float) -> Decision:
    """Drain a worker: it goes on with its order, and is left out of the next shape."""
    entry = state.workers.get(event.worker)
    if entry is None:
        ignored = said(state, ReasonCode.IGNORED, f"{event.worker} is not known, or was lost")
        return noticed_booting(state, event) or kept(state, event, now_s) or ignored
    if event.notice and event.notice == entry.notice:
        if entry.node is NodeState.DRAINING:  # who tells it again has not heard that it may go
            state = changed(state, leaving=state.leaving | {event.worker})
        return said(state, ReasonCode.IGNORED, f"the notice of {event.worker} is known already")
    until_s = now_s + event.lead_s + state.config.policy.rules.requests.notice_grace_s
    state = with_node(
        state, event.worker, NodeEvent.NOTICED, drain_until_s=until_s, notice=event.notice, probation=None
    )
    if event.notice:
        state = changed(state, leaving=state.leaving | {event.worker})
    sentence = f"{event.worker} will be taken in {event.lead_s:g} s: it is left out at the next boundary"
    return said(wake_by(state, until_s), ReasonCode.NOTICE_TAKEN, sentence)


def notice_withdrawn(state: ControllerState, event: NoticeWithdrawn, now_s: float) -> Decision:
    """Take a worker back of which the provider says that it stays."""
    state = without_kept(state, event.worker)
    entry = state.workers.get(event.worker)
    if entry is None or entry.node is not NodeState.DRAINING:
        return said(state, ReasonCode.IGNORED, f"{event.worker} is not draining")
    return spare(state, event.worker, "its notice was withdrawn", now_s)


def spare(state: ControllerState, worker: WorkerId, why: str, now_s: float) -> Decision:
    """Take a draining worker back, after a while if its machine does this often; re-form if training stands."""
    entry = state.workers[worker]
    host = entry.host or worker
    state = flapped(changed(state, leaving=state.leaving - {worker}), host, now_s)
    wait_s = hold_s(state, host, now_s)
    state = with_node(
        state,
        worker,
        NodeEvent.SPARED if entry.ready else NodeEvent.SPARED_UNREADY,
        drain_until_s=None,
        eligible_s=now_s + wait_s if wait_s else None,
        pace=Pace(),
    )
    if not entry.ready:
        state = wake_by(state, entry.appeared_s + state.config.policy.order_timeout_s)
    told = said(state, ReasonCode.NODE_SPARED, f"{worker} is taken back: {why}")
    if state.phase is Phase.STARTING:
        return followed(told, start_if_due(state, now_s))
    if state.phase in (Phase.WAITING, Phase.HOLDING):
        return followed(told, form_or_hold(state, now_s))
    return told
