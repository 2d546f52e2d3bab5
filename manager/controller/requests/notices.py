"""Notices: a VM that will be taken is drained at the next boundary, and taken back when it was not taken."""

from __future__ import annotations

from manager.controller.failures.lost_workers import dissolve
from manager.controller.requests.node_requests import forget_kept, gives_back, keeps
from manager.controller.saves.leaving import step_outlasts
from manager.controller.shape.flapping import flapped, hold_s
from manager.controller.shape.forming import form_or_hold
from manager.controller.shape.starting import start_if_due
from manager.controller.state.bounds import setup_bound_s
from manager.controller.state.draft import Draft
from manager.controller.state.events import NoticeGiven, NoticeWithdrawn
from manager.controller.state.nodes import NodeEvent, NodeState
from manager.controller.state.reasons import ReasonCode
from manager.controller.state.state import Pace, Phase
from manager.controller.steps.resting import save_before_waiting
from morph.contract.messages import WorkerId


def notice_given(draft: Draft, event: NoticeGiven) -> None:
    """Drain a worker: it goes on with its order, and is left out of the next shape."""
    state = draft.state
    entry = state.workers.get(event.worker)
    if entry is None:
        if not gives_back(draft, event) and not keeps(draft, event):
            draft.say(ReasonCode.IGNORED, f"{event.worker} is not known, or was lost")
        return None
    if event.notice and event.notice == entry.notice:
        if entry.node is NodeState.DRAINING:  # who tells it again has not heard that it may go
            draft.change_provisioning(leaving=state.provisioning.leaving | {event.worker})
        return draft.say(ReasonCode.IGNORED, f"the notice of {event.worker} is known already")
    until_s = draft.now_s + event.lead_s + state.config.policy.rules.requests.notice_grace_s
    draft.change_node(event.worker, NodeEvent.NOTICED, drain_until_s=until_s, notice=event.notice, probation=None)
    if event.notice:
        draft.change_provisioning(leaving=state.provisioning.leaving | {event.worker})
    draft.wake_by(until_s)
    sentence = f"{event.worker} will be taken in {event.lead_s:.3g} s"
    if step_outlasts(draft):
        draft.say(ReasonCode.NOTICE_TAKEN, f"{sentence}, before the step could end and be followed by a change")
        return dissolve(draft)
    draft.say(ReasonCode.NOTICE_TAKEN, f"{sentence}: it is left out in time")
    if state.phase is Phase.WAITING:
        save_before_waiting(draft)
    return None


def notice_withdrawn(draft: Draft, event: NoticeWithdrawn) -> None:
    """Take a worker back of which the provider says that it stays."""
    forget_kept(draft, event.worker)
    entry = draft.state.workers.get(event.worker)
    if entry is None or entry.node is not NodeState.DRAINING:
        return draft.say(ReasonCode.IGNORED, f"{event.worker} is not draining")
    return spare(draft, event.worker, "its notice was withdrawn")


def spare(draft: Draft, worker: WorkerId, why: str) -> None:
    """Take a draining worker back, after a while if its machine does this often; re-form if training stands."""
    state = draft.state
    entry = state.workers[worker]
    host = entry.host or worker
    draft.change_provisioning(leaving=state.provisioning.leaving - {worker})
    flapped(draft, host)
    wait_s = hold_s(draft, host)
    draft.change_node(
        worker,
        NodeEvent.SPARED if entry.ready else NodeEvent.SPARED_UNREADY,
        drain_until_s=None,
        eligible_s=draft.now_s + wait_s if wait_s else None,
        pace=Pace(),
    )
    if not entry.ready:
        draft.wake_by(entry.appeared_s + setup_bound_s(state))
    draft.say(ReasonCode.NODE_SPARED, f"{worker} is taken back: {why}")
    if state.phase is Phase.STARTING:
        start_if_due(draft)
    elif state.phase in (Phase.WAITING, Phase.HOLDING):
        form_or_hold(draft)
