"""Saying that a VM which will be taken may go: once nothing of value is left on it, and not before."""

from __future__ import annotations

from manager.controller.actions import AcknowledgeNotice
from manager.controller.changes import changed, debtors, followed, said
from manager.controller.nodes import NodeState
from manager.controller.reasons import ReasonCode
from manager.controller.state import ControllerState, Decision, Phase
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


def acknowledged(decision: Decision) -> Decision:
    """Acknowledge, after a decision, the notices of those VMs that have nothing left which anybody needs."""
    state = decision.state
    if not state.leaving or state.phase is Phase.ENDED:
        return decision
    free = tuple(worker for worker in sorted(state.leaving) if _is_free_with_its_vm(state, worker))
    if not free:
        return decision
    notices = dict.fromkeys((vm_of(worker), state.workers[worker].notice or "") for worker in free)
    first = {vm_of(worker): worker for worker in reversed(free)}
    actions = [AcknowledgeNotice(worker=first[vm], notice=notice) for vm, notice in notices]
    sentence = f"nothing of value is left on {', '.join(free)}: it may go"
    told = said(changed(state, leaving=state.leaving - set(free)), ReasonCode.NOTICE_ACKNOWLEDGED, sentence, *actions)
    return followed(decision, told, None if decision.reason.code in ROUTINE else decision.reason.code)


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
    if worker in state.member_units or worker in state.awaited or state.workers[worker].holds:
        return False
    if state.ahead is not None and worker in state.ahead.parties:
        return False
    return state.pending is None or worker not in debtors(state.pending)
