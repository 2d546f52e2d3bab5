"""Losing workers: dissolving a generation and re-forming from the workers that are left."""

from __future__ import annotations

from collections.abc import Mapping

from manager.controller.shape.formation import form_or_hold
from manager.controller.shape.pre_copy import without_pre_copy
from manager.controller.shape.salvage import note_prepared
from manager.controller.shape.selection import record_flap
from manager.controller.state.actions import Abort, ReasonCode
from manager.controller.state.bounds import give_up_bound_s
from manager.controller.state.state import ControllerState, Phase
from manager.controller.state.transition import Transition
from manager.controller.steps.doubt import find_whole, in_doubt
from manager.controller.steps.recovery import begin_rest, save_before_waiting
from manager.controller.steps.save_measuring import record_shape_left, vms_lost
from morph.contract.messages import WorkerId
from morph.words import counted

FORMED_PHASES = frozenset({Phase.RESHAPING, Phase.TRAINING, Phase.COMMITTING})


def lose(transition: Transition, lost: Mapping[WorkerId, str]) -> None:
    """Forget lost workers (id -> cause); dissolve the generation if it needed one of them."""
    state = transition.state
    needed = any(_is_needed(state, worker) for worker in lost)
    for worker in lost:
        entry = state.workers[worker]
        if entry.ready and entry.host not in ("", worker):
            record_flap(transition, entry.host)
    transition.forget(lost)
    vms_lost(transition, {worker: state.workers[worker] for worker in lost})
    is_party = state.pre_copy is not None and not lost.keys().isdisjoint(state.pre_copy.parties)
    dropped = without_pre_copy(transition) if is_party else ()
    by_cause: dict[str, list[WorkerId]] = {}
    for worker, cause in lost.items():
        by_cause.setdefault(cause, []).append(worker)
    sentence = "; ".join(
        f"{', '.join(workers)} {'was' if len(workers) == 1 else 'were'} lost: {cause}"
        for cause, workers in by_cause.items()
    )
    transition.say(ReasonCode.WORKER_REMOVED, sentence, *dropped)
    if state.phase is Phase.ABORTING:
        settle(transition)
    elif state.phase is Phase.HOLDING:
        form_or_hold(transition)
    elif needed:
        dissolve(transition)


def dissolve(transition: Transition, *, planned: bool = False) -> None:
    """Abort the generation's orders, re-form at once if there are none; ``planned``: nothing is wrong."""
    state = transition.state
    busy = state.busy_workers
    order = state.step.order
    if order is not None:
        order = order.model_copy(update={"abort_sent_s": transition.now_s, "give_up_s": give_up_bound_s(state)})
    pending = state.saving.pending.model_copy(update={"stale": True}) if state.saving.pending is not None else None
    transition.change(phase=Phase.ABORTING)
    transition.change_step(order=order)
    transition.change_saving(pending=pending)
    transition.change_waits(num_fruitless=state.waits.num_fruitless + (not planned))
    transition.change_measured(morph_began_s=None)
    record_shape_left(transition)
    dropped = without_pre_copy(transition)
    aborts = Abort.each("worker", busy, generation=state.generation)
    sentence = f"generation {state.generation} is dissolved, {len(busy)} orders aborted"
    transition.say(ReasonCode.ABORTING, sentence, *aborts, *dropped)
    if not busy:
        settle(transition)


def settle(transition: Transition) -> None:
    """While aborting: re-form once no worker has an order, after a rest if too many generations in a row failed."""
    state = transition.state
    if state.step.awaited:
        workers = counted(len(state.step.awaited), "worker has", "workers have")
        transition.say(ReasonCode.ABORTING, f"{workers} still to abandon their orders")
        return
    note_prepared(transition)
    if in_doubt(state):
        find_whole(transition)
    elif state.waits.num_fruitless >= state.config.policy.max_fruitless_generations:
        begin_rest(transition)
    elif not save_before_waiting(transition):
        form_or_hold(transition)


def _is_needed(state: ControllerState, worker: WorkerId) -> bool:
    if state.phase not in FORMED_PHASES:
        return False
    if worker in state.step.awaited:
        return True
    if state.phase is Phase.COMMITTING:
        return state.saving.pending is not None and worker in state.saving.pending.debtors
    return worker in state.member_units
