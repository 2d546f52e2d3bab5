"""Saying that a VM which will be taken may go: once nothing of value is left on it, and not before."""

from __future__ import annotations

from manager.controller.state.actions import AcknowledgeNotice
from manager.controller.state.draft import Draft
from manager.controller.state.nodes import NodeState
from manager.controller.state.reasons import ReasonCode
from manager.controller.state.state import ControllerState, Phase
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
"""Beside one of these a notice that is acknowledged is what is worth telling."""


def acknowledge(draft: Draft) -> None:
    """Acknowledge, at the end of a decision, the notices of those VMs that have nothing left which anybody needs."""
    state = draft.state
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
    draft.change_provisioning(leaving=provisioning.leaving - set(free))
    if draft.code in ROUTINE:
        draft.code = ReasonCode.NOTICE_ACKNOWLEDGED
    draft.add(sentence, *actions)


def _is_free_with_its_vm(state: ControllerState, worker: WorkerId) -> bool:
    """Whether a worker is free, and so are the others on its VM, which drain too."""
    others = beside(worker, state.workers)
    drain = all(state.workers[other].node is NodeState.DRAINING for other in others)
    return drain and all(_is_free(state, each) for each in (worker, *others))


def _is_free(state: ControllerState, worker: WorkerId) -> bool:
    """Whether a worker is no member, does no order, serves nobody, and holds nothing that is not elsewhere.

    What it held it holds no longer once a step is decided without it: by then whoever needed it has it. A checkpoint's
    unit that it still has to write is of value too.
    """
    if worker in state.member_units or worker in state.step.awaited or state.workers[worker].holds:
        return False
    if state.ahead is not None and worker in state.ahead.parties:
        return False
    return state.saving.pending is None or worker not in state.saving.pending.debtors
