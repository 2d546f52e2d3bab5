"""Losing workers: dissolving a generation and re-forming from whoever is left."""

from __future__ import annotations

from collections.abc import Mapping

from manager.controller.actions import Abort, SendAhead
from manager.controller.ahead import without_ahead
from manager.controller.changes import busy_workers, changed, debtors, followed, said, without_workers
from manager.controller.flapping import flapped
from manager.controller.forming import form_or_hold
from manager.controller.reasons import ReasonCode
from manager.controller.resting import rest
from manager.controller.state import ControllerState, Decision, Phase
from morph.contract.messages import WorkerId

FORMED_PHASES = frozenset({Phase.RESHAPING, Phase.TRAINING, Phase.COMMITTING})


def lose(state: ControllerState, lost: Mapping[WorkerId, str], now_s: float) -> Decision:
    """Forget workers (id -> cause); when the generation needed one of them, dissolve it."""
    needed = any(_is_needed(state, worker) for worker in lost)
    for worker in lost:
        entry = state.workers[worker]
        if entry.ready and entry.host not in ("", worker):
            state = flapped(state, entry.host, now_s)
    state = without_workers(state, lost)
    dropped: tuple[SendAhead, ...] = ()
    if state.ahead is not None and not set(state.ahead.parties).isdisjoint(lost):
        state, dropped = without_ahead(state)
    by_cause: dict[str, list[WorkerId]] = {}
    for worker, cause in lost.items():
        by_cause.setdefault(cause, []).append(worker)
    sentence = "; ".join(
        f"{', '.join(workers)} {'was' if len(workers) == 1 else 'were'} lost: {cause}"
        for cause, workers in by_cause.items()
    )
    removed = said(state, ReasonCode.WORKER_REMOVED, sentence, *dropped)
    if state.phase is Phase.ABORTING:
        return followed(removed, settle(state, now_s))
    if state.phase is Phase.HOLDING:
        return followed(removed, form_or_hold(state, now_s))
    return followed(removed, dissolve(state, now_s)) if needed else removed


def dissolve(state: ControllerState, now_s: float) -> Decision:
    """Abort every outstanding order of the generation; re-form at once when there is none."""
    busy = busy_workers(state)
    order = state.order.model_copy(update={"abort_sent_s": now_s}) if state.order is not None else None
    pending = state.pending.model_copy(update={"stale": True}) if state.pending is not None else None
    state = changed(
        state,
        phase=Phase.ABORTING,
        order=order,
        pending=pending,
        num_fruitless=state.num_fruitless + 1,
        morph_began_s=None,
    )
    state, dropped = without_ahead(state)
    aborts = [Abort(worker=worker, generation=state.generation) for worker in busy]
    aborted = said(
        state,
        ReasonCode.ABORTING,
        f"generation {state.generation} is dissolved, {len(busy)} orders aborted",
        *aborts,
        *dropped,
    )
    return aborted if busy else followed(aborted, settle(state, now_s))


def settle(state: ControllerState, now_s: float) -> Decision:
    """While aborting: re-form once nobody has an order; after a rest, if too many generations in a row did nothing."""
    if state.awaited:
        return said(state, ReasonCode.ABORTING, f"{len(state.awaited)} workers have still to give up their orders")
    if state.num_fruitless >= state.config.policy.max_fruitless_generations:
        return rest(state, now_s)
    return form_or_hold(state, now_s)


def _is_needed(state: ControllerState, worker: WorkerId) -> bool:
    """Whether the present generation cannot go on without this worker."""
    if state.phase not in FORMED_PHASES:
        return False
    if worker in state.awaited:
        return True
    if state.phase is Phase.COMMITTING:
        return state.pending is not None and worker in debtors(state.pending)
    return worker in state.member_units
