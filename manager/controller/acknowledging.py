"""Saying that a VM which will be taken may go: once nothing of value is left on it, and not before."""

from __future__ import annotations

from manager.controller.actions import AcknowledgeNotice
from manager.controller.changes import changed, debtors, followed, said
from manager.controller.reasons import ReasonCode
from manager.controller.state import ControllerState, Decision, Phase
from morph.contract.messages import WorkerId

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
    """Acknowledge, after a decision, the notices of those workers that have nothing left which anybody needs."""
    state = decision.state
    if not state.leaving or state.phase is Phase.ENDED:
        return decision
    free = tuple(worker for worker in sorted(state.leaving) if _is_free(state, worker))
    if not free:
        return decision
    actions = [AcknowledgeNotice(worker=worker, notice=state.workers[worker].notice or "") for worker in free]
    sentence = f"nothing of value is left on {', '.join(free)}: it may go"
    told = said(changed(state, leaving=state.leaving - set(free)), ReasonCode.NOTICE_ACKNOWLEDGED, sentence, *actions)
    return followed(decision, told, None if decision.reason.code in ROUTINE else decision.reason.code)


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
