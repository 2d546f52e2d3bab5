"""Notices that come before their VM is known: an agent may reach the manager while the request is under way."""

from __future__ import annotations

from manager.controller.state.draft import Draft
from manager.controller.state.events import NoticeGiven
from manager.controller.state.provisioning import KeptNotice
from manager.controller.state.reasons import ReasonCode
from manager.controller.state.state import ControllerState
from morph.contract.messages import WorkerId
from morph.contract.vm_names import vm_of


def keeps(draft: Draft, event: NoticeGiven) -> bool:
    """Keep the notice of a node that is not known, if a request is open that it could answer."""
    if not is_awaited(draft.state):
        return False
    entry = KeptNotice(notice=event.notice, taken_s=draft.now_s + event.lead_s)
    draft.change_provisioning(kept_notices={**draft.state.provisioning.kept_notices, event.worker: entry})
    draft.say(ReasonCode.NOTICE_KEPT, f"{event.worker} will be taken in {event.lead_s:.3g} s and is not known yet")
    return True


def notice_of(state: ControllerState, node: WorkerId, now_s: float) -> NoticeGiven | None:
    """Return the notice that was kept of a node which is known now; None: there is none, or it is void by now."""
    entry = state.provisioning.kept_notices.get(node)
    if entry is None or now_s >= entry.taken_s + state.config.policy.rules.requests.notice_grace_s:
        return None
    return NoticeGiven(worker=node, lead_s=max(0.0, entry.taken_s - now_s), notice=entry.notice)


def forget_kept(draft: Draft, *nodes: WorkerId) -> None:
    """Forget the notices of these nodes, and of all that nobody waits for.

    That is once no request is open that their VMs could answer: but of a VM with several devices that came, the other
    workers may still come.
    """
    state = draft.state
    provisioning = state.provisioning
    if not provisioning.kept_notices:
        return
    known = {vm_of(node) for request in provisioning.requests.values() for node in request.granted}
    known.update(map(vm_of, state.workers))
    left = {
        node: entry
        for node, entry in provisioning.kept_notices.items()
        if node not in nodes and (is_awaited(state) or vm_of(node) in known)
    }
    draft.change_provisioning(kept_notices=left)


def is_awaited(state: ControllerState) -> bool:
    """Whether a request is open, so that VMs may come that nobody has named."""
    return any(request.count for request in state.provisioning.requests.values())
