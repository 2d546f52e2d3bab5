"""Handles notices: a VM with a notice is drained at the next step boundary, and used again if it was not revoked."""

from __future__ import annotations

from manager.controller.node_requests import forget_kept, gives_back, keeps
from manager.controller.shape.formation import form_or_hold, start_if_due
from manager.controller.shape.selection import hold_s, record_flap
from manager.controller.state.actions import AcknowledgeNotice, ReasonCode
from manager.controller.state.bounds import setup_bound_s
from manager.controller.state.events import NoticeGiven, NoticeWithdrawn
from manager.controller.state.nodes import NodeEvent, NodeState
from manager.controller.state.state import ControllerState, Pace, Phase
from manager.controller.state.transition import Transition
from manager.controller.steps.failures import dissolve
from manager.controller.steps.recovery import save_before_waiting
from manager.controller.steps.save_timing import step_outlasts
from morph.contract.messages import WorkerId
from morph.contract.vm_names import beside, vm_of

ROUTINE = frozenset(
    {
        ReasonCode.AWAITING_ANSWERS,
        ReasonCode.IGNORED,
        ReasonCode.NOTHING_DUE,
        ReasonCode.NOTICE_TAKEN,
        ReasonCode.STEP_DECIDED,
        ReasonCode.STEP_STARTED,
        ReasonCode.TIMES_NOTED,
        ReasonCode.UNITS_NOTED,
    }
)
"""Codes of decisions that are replaced by that of an acknowledged notice."""


def acknowledge(transition: Transition) -> None:
    """At the end of a decision, acknowledge the notices of VMs that hold nothing of value and so may be taken."""
    state = transition.state
    provisioning = state.provisioning
    if not provisioning.leaving or state.phase is Phase.ENDED:
        return
    free = tuple(worker for worker in sorted(provisioning.leaving) if _is_free_with_its_vm(state, worker))
    if not free:
        return
    notices = dict.fromkeys((vm_of(worker), state.workers[worker].notice or "") for worker in free)
    first = {vm_of(worker): worker for worker in reversed(free)}
    actions = [AcknowledgeNotice(worker=first[vm], notice=notice) for vm, notice in notices]
    sentence = f"nothing of value is left on {', '.join(free)}: it may go"
    transition.change_provisioning(leaving=provisioning.leaving - set(free))
    if transition.code in ROUTINE:
        transition.code = ReasonCode.NOTICE_ACKNOWLEDGED
    transition.add(sentence, *actions)


def _is_free_with_its_vm(state: ControllerState, worker: WorkerId) -> bool:
    """Whether a worker and all others on its VM are free and draining."""
    others = beside(worker, state.workers)
    drain = all(state.workers[other].node is NodeState.DRAINING for other in others)
    return drain and all(_is_free(state, each) for each in (worker, *others))


def _is_free(state: ControllerState, worker: WorkerId) -> bool:
    """Whether a worker is not a member, has no order, serves no peer, and has nothing to write or to hand on."""
    if worker in state.member_units or worker in state.step.awaited or state.workers[worker].holds:
        return False
    if state.pre_copy is not None and worker in state.pre_copy.parties:
        return False
    return not any(worker in save.debtors for save in state.saving.under_way)


def on_notice_given(transition: Transition, event: NoticeGiven) -> None:
    """Drain a worker: it completes its order, and is left out of the next shape."""
    state = transition.state
    entry = state.workers.get(event.worker)
    if entry is None:
        if not gives_back(transition, event) and not keeps(transition, event):
            transition.say(ReasonCode.IGNORED, f"{event.worker} is unknown, or was lost")
        return None
    if event.notice and event.notice == entry.notice:
        if entry.node is NodeState.DRAINING:  # a repeated notice means that the acknowledgement did not arrive
            transition.change_provisioning(leaving=state.provisioning.leaving | {event.worker})
        return transition.say(ReasonCode.IGNORED, f"the notice of {event.worker} is known already")
    until_s = transition.now_s + event.lead_s + state.config.policy.rules.requests.notice_grace_s
    transition.change_node(event.worker, NodeEvent.NOTICED, drain_until_s=until_s, notice=event.notice, probation=None)
    if event.notice:
        transition.change_provisioning(leaving=state.provisioning.leaving | {event.worker})
    transition.wake_by(until_s)
    sentence = f"{event.worker} will be taken in {event.lead_s:.3g} s"
    if step_outlasts(transition):
        transition.say(ReasonCode.NOTICE_TAKEN, f"{sentence}, too soon for the step to end first")
        return dissolve(transition)
    transition.say(ReasonCode.NOTICE_TAKEN, f"{sentence}: it is left out in time")
    if state.phase is Phase.WAITING:
        save_before_waiting(transition)
    return None


def on_notice_withdrawn(transition: Transition, event: NoticeWithdrawn) -> None:
    """Take back a worker whose VM stays, because its provider has withdrawn the notice."""
    forget_kept(transition, event.worker)
    entry = transition.state.workers.get(event.worker)
    if entry is None or entry.node is not NodeState.DRAINING:
        return transition.say(ReasonCode.IGNORED, f"{event.worker} is not draining")
    return spare(transition, event.worker, "its notice was withdrawn")


def spare(transition: Transition, worker: WorkerId, why: str) -> None:
    """Take a draining worker back, after a delay if its machine does this often; re-form if nothing trains."""
    state = transition.state
    entry = state.workers[worker]
    host = entry.host or worker
    transition.change_provisioning(leaving=state.provisioning.leaving - {worker})
    record_flap(transition, host)
    wait_s = hold_s(transition, host)
    transition.change_node(
        worker,
        NodeEvent.SPARED if entry.ready else NodeEvent.SPARED_UNREADY,
        drain_until_s=None,
        eligible_s=transition.now_s + wait_s if wait_s else None,
        pace=Pace(),
    )
    if not entry.ready:
        transition.wake_by(entry.appeared_s + setup_bound_s(state))
    transition.say(ReasonCode.NODE_SPARED, f"{worker} stays: {why}")
    if state.phase is Phase.STARTING:
        start_if_due(transition)
    elif state.phase in (Phase.WAITING, Phase.HOLDING):
        form_or_hold(transition)
