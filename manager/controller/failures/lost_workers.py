"""Losing workers: dissolving a generation and re-forming from whoever is left."""

from __future__ import annotations

from collections.abc import Mapping

from manager.controller.saves.noting import shape_left, vms_lost
from manager.controller.shape.flapping import flapped
from manager.controller.shape.forming import form_or_hold
from manager.controller.shape.pre_copy import without_pre_copy
from manager.controller.shape.salvage import note_prepared
from manager.controller.state.actions import Abort
from manager.controller.state.bounds import give_up_bound_s
from manager.controller.state.draft import Draft
from manager.controller.state.reasons import ReasonCode
from manager.controller.state.state import ControllerState, Phase
from manager.controller.steps.resting import rest, save_before_waiting
from manager.controller.steps.restoring import find_whole, in_doubt
from morph.contract.messages import WorkerId
from morph.words import counted

FORMED_PHASES = frozenset({Phase.RESHAPING, Phase.TRAINING, Phase.COMMITTING})


def lose(draft: Draft, lost: Mapping[WorkerId, str]) -> None:
    """Forget workers (id -> cause); when the generation needed one of them, dissolve it."""
    state = draft.state
    needed = any(_is_needed(state, worker) for worker in lost)
    for worker in lost:
        entry = state.workers[worker]
        if entry.ready and entry.host not in ("", worker):
            flapped(draft, entry.host)
    draft.forget(lost)
    vms_lost(draft, {worker: state.workers[worker] for worker in lost})
    is_party = state.ahead is not None and not lost.keys().isdisjoint(state.ahead.parties)
    dropped = without_pre_copy(draft) if is_party else ()
    by_cause: dict[str, list[WorkerId]] = {}
    for worker, cause in lost.items():
        by_cause.setdefault(cause, []).append(worker)
    sentence = "; ".join(
        f"{', '.join(workers)} {'was' if len(workers) == 1 else 'were'} lost: {cause}"
        for cause, workers in by_cause.items()
    )
    draft.say(ReasonCode.WORKER_REMOVED, sentence, *dropped)
    if state.phase is Phase.ABORTING:
        settle(draft)
    elif state.phase is Phase.HOLDING:
        form_or_hold(draft)
    elif needed:
        dissolve(draft)


def dissolve(draft: Draft, *, planned: bool = False) -> None:
    """Abort every outstanding order of the generation; re-form at once when there is none.

    ``planned``: nothing is wrong, so that it is none of those in a row that come to nothing.
    """
    state = draft.state
    busy = state.busy_workers
    order = state.step.order
    if order is not None:
        order = order.model_copy(update={"abort_sent_s": draft.now_s, "give_up_s": give_up_bound_s(state)})
    pending = state.saving.pending.model_copy(update={"stale": True}) if state.saving.pending is not None else None
    draft.change(phase=Phase.ABORTING)
    draft.change_step(order=order)
    draft.change_saving(pending=pending)
    draft.change_waits(num_fruitless=state.waits.num_fruitless + (not planned))
    draft.change_measured(morph_began_s=None)
    shape_left(draft)
    dropped = without_pre_copy(draft)
    aborts = Abort.each("worker", busy, generation=state.generation)
    sentence = f"generation {state.generation} is dissolved, {len(busy)} orders aborted"
    draft.say(ReasonCode.ABORTING, sentence, *aborts, *dropped)
    if not busy:
        settle(draft)


def settle(draft: Draft) -> None:
    """While aborting: re-form once nobody has an order; after a rest, if too many generations in a row did nothing."""
    state = draft.state
    if state.step.awaited:
        workers = counted(len(state.step.awaited), "worker has", "workers have")
        draft.say(ReasonCode.ABORTING, f"{workers} still to give up what was ordered")
        return
    note_prepared(draft)
    if in_doubt(state):
        find_whole(draft)
    elif state.waits.num_fruitless >= state.config.policy.max_fruitless_generations:
        rest(draft)
    elif not save_before_waiting(draft):
        form_or_hold(draft)


def _is_needed(state: ControllerState, worker: WorkerId) -> bool:
    """Whether the present generation cannot go on without this worker."""
    if state.phase not in FORMED_PHASES:
        return False
    if worker in state.step.awaited:
        return True
    if state.phase is Phase.COMMITTING:
        return state.saving.pending is not None and worker in state.saving.pending.debtors
    return worker in state.member_units
