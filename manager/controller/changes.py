"""Small pure changes and questions that every part of the controller needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from manager.controller.actions import Abort, Finish
from manager.controller.placement import units_by_stage
from manager.controller.reasons import Reason, ReasonCode
from manager.controller.state import ControllerState, Decision, OutstandingOrder, PendingCheckpoint, Phase, WorkerState
from morph.contract.messages import UnitId, WorkerId


def changed(state: ControllerState, **fields: Any) -> ControllerState:
    """Return the state with some fields replaced."""
    return state.model_copy(update=fields)


def with_worker(state: ControllerState, worker: WorkerId, **fields: Any) -> ControllerState:
    """Return the state with some fields of one worker replaced."""
    return changed(state, workers={**state.workers, worker: state.workers[worker].model_copy(update=fields)})


def with_orders(state: ControllerState, orders: dict[WorkerId, OutstandingOrder]) -> ControllerState:
    """Return the state with these orders outstanding, besides those that are already."""
    nothing: dict[str, Any] = {"overflowed": False, "unit_norms_sq": {}, "non_finite": False}
    workers = {
        worker: entry.model_copy(update={"order": orders[worker], **nothing}) if worker in orders else entry
        for worker, entry in state.workers.items()
    }
    return changed(state, workers=workers)


def without_workers(state: ControllerState, lost: Iterable[WorkerId]) -> ControllerState:
    """Forget workers; a pending checkpoint that one of them still had to write to becomes stale."""
    gone = set(lost)
    workers = {worker: entry for worker, entry in state.workers.items() if worker not in gone}
    pending = state.pending
    if pending is not None and gone & debtors(pending):
        pending = pending.model_copy(update={"stale": True})
    return changed(state, workers=workers, pending=pending)


def debtors(pending: PendingCheckpoint) -> set[WorkerId]:
    """Return the workers that still have units of this checkpoint to write."""
    return {worker for unit, worker in pending.writers.items() if unit not in pending.written}


def ready_workers(state: ControllerState) -> tuple[WorkerId, ...]:
    """Return the workers that can be given a slot, in order of appearance."""
    return tuple(worker for worker, entry in state.workers.items() if entry.ready)


def busy_workers(state: ControllerState) -> tuple[WorkerId, ...]:
    """Return the workers with an outstanding order."""
    return tuple(worker for worker, entry in state.workers.items() if entry.order is not None)


def member_units(state: ControllerState) -> dict[WorkerId, frozenset[UnitId]]:
    """Return the units of each member's stage in the present generation."""
    assert state.plan is not None, "no generation was formed"
    needed = units_by_stage(state.plan, state.config.units)
    return {slot.worker: frozenset(needed[slot.stage]) for slot in state.slots}


def said(state: ControllerState, code: ReasonCode, sentence: str, *actions: Any) -> Decision:
    """Build a decision."""
    return Decision(state=state, actions=actions, reason=Reason(code=code, sentence=sentence))


def followed(first: Decision, second: Decision, code: ReasonCode | None = None) -> Decision:
    """Join two decisions of which the second was made from the first's state."""
    sentence = f"{first.reason.sentence}; {second.reason.sentence}"
    return Decision(
        state=second.state,
        actions=first.actions + second.actions,
        reason=Reason(code=code or second.reason.code, sentence=sentence),
    )


def ended(state: ControllerState, outcome: Literal["finished", "stopped", "failed"], sentence: str) -> Decision:
    """End the run: abort what is outstanding, then finish."""
    aborts = [Abort(worker=worker, generation=state.generation) for worker in busy_workers(state)]
    workers: dict[WorkerId, WorkerState] = {
        worker: entry.model_copy(update={"order": None}) for worker, entry in state.workers.items()
    }
    state = changed(state, phase=Phase.ENDED, workers=workers)
    return said(state, ReasonCode(outcome), sentence, *aborts, Finish(outcome=outcome, sentence=sentence))
