"""Generations come to nothing, one after the other: what is held is saved, and after a pause it is tried again."""

from __future__ import annotations

from manager.controller.saves.noting import save_begun
from manager.controller.shape.choosing import chosen
from manager.controller.shape.forming import form, form_or_hold
from manager.controller.state.bounds import commit_bound_s, retry_bound_s, why_retried_no_longer
from manager.controller.state.draft import Draft
from manager.controller.state.reasons import ReasonCode
from manager.controller.state.state import ControllerState, OutstandingOrder, Phase
from manager.controller.steps.stepping import commit_orders
from morph.contract.messages import UnitId, WorkerId
from morph.contract.waits import Backoff

PAUSES = Backoff(first_s=5.0, most_s=300.0)
"""Between tries that come to nothing."""


def rest(draft: Draft) -> None:
    """Nobody has an order, and too many generations in a row were dissolved: save what is held, and wait a while.

    Each further generation that comes to nothing is followed by a pause twice as long. The run ends when no step was
    decided for ``policy.give_up_after_s`` since the first of these pauses, or at a stop once everything is saved.
    """
    state, now_s = draft.state, draft.now_s
    waits = state.waits
    policy = state.config.policy
    since_s = now_s if waits.resting_since_s is None else waits.resting_since_s
    sentence = (
        f"{waits.num_fruitless} generations in a row were dissolved without a new step "
        f"(version {state.version} is decided)"
    )
    limit_s = retry_bound_s(state)
    if now_s >= since_s + limit_s:
        saved = 0 if state.saving.checkpoint is None else state.saving.checkpoint.version
        limit = f"for {limit_s:g} s, {why_retried_no_longer(state)}"
        return draft.end("failed", f"{sentence}, {limit}; version {saved} is saved")
    if state.stop_reason is not None and is_saved(state):
        return draft.end("stopped", f"{state.stop_reason}; version {state.version} is saved")
    pause_s = PAUSES.pause_s(waits.num_fruitless - policy.max_fruitless_generations)
    draft.change(phase=Phase.RESTING, reshape=None, member_units={})
    draft.change_waits(resting_since_s=since_s, rest_until_s=now_s + pause_s, join_since_s=None)
    draft.say(ReasonCode.RESTING, f"{sentence}: the next one is formed in {pause_s:g} s")
    return _save_held(draft)


def save_before_waiting(draft: Draft) -> bool:
    """Nobody has an order and no shape can be formed: have what is held written, before anything else is done.

    It costs nobody a step, and who waits for VMs may lose some that are left. Returns whether it is done: not where
    some unit has no holder, and not twice.
    """
    state = draft.state
    saving = state.saving
    known = {manifest.version for manifest in saving.sealing}
    if saving.pending is not None and not saving.pending.stale:
        known.add(saving.pending.version)
    if chosen(draft) is not None or is_saved(state) or state.version in known or _writers(state) is None:
        return False
    draft.change(phase=Phase.RESTING)
    draft.change_waits(rest_until_s=draft.now_s, hold_until_s=None, waiting_since_s=None)
    draft.change(reshape=None, member_units={})
    draft.change_waits(join_since_s=None)
    _save_held(draft)
    return True


def rest_over(draft: Draft) -> None:
    """While resting: form the next generation once the pause is over and everybody answered."""
    state = draft.state
    if not state.step.awaited and (state.waits.rest_until_s is None or draft.now_s >= state.waits.rest_until_s):
        draft.change_waits(rest_until_s=None)
        form_or_hold(draft)


def stop_while_resting(draft: Draft) -> None:
    """A stop was asked for: end if everything is saved, else once it is; or try what saves it."""
    state = draft.state
    saving = state.saving
    if is_saved(state):
        return draft.end("stopped", f"{state.stop_reason}; version {state.version} is saved")
    if state.step.awaited or saving.sealing or (saving.pending is not None and not saving.pending.stale):
        return draft.say(ReasonCode.STOP_NOTED, f"{state.stop_reason}: the run ends when what is held is saved")
    draft.change_waits(rest_until_s=None)
    return form(draft)


def is_saved(state: ControllerState) -> bool:
    """Whether the decided version is a complete checkpoint."""
    return (0 if state.saving.checkpoint is None else state.saving.checkpoint.version) == state.version


def _save_held(draft: Draft) -> None:
    """Have the decided version written by whoever holds it, without a generation, unless it is saved or not held."""
    state, now_s = draft.state, draft.now_s
    if is_saved(state) or any(manifest.version == state.version for manifest in state.saving.sealing):
        return
    writers = _writers(state)
    if writers is None:
        return
    order = OutstandingOrder(
        kind="commit",
        generation=state.generation + 1,
        version=state.version,
        sent_s=now_s,
        limit_s=commit_bound_s(state),
    )
    receivers = [worker for worker in state.workers if worker in writers.values()]
    draft.order(order, receivers)
    draft.change(generation=order.generation)
    save_begun(draft, writers, "emergency")
    sentence = f"version {state.version} is written by the {len(receivers)} workers that hold it"
    draft.say(ReasonCode.RESTING, sentence, *commit_orders(draft.state, writers, receivers))


def _writers(state: ControllerState) -> dict[UnitId, WorkerId] | None:
    """Deal the units to workers that hold them, about as many bytes to each; None: one has no holder."""
    writers: dict[UnitId, WorkerId] = {}
    load = dict.fromkeys(state.ready_workers, 0)
    for unit in state.config.units:
        holders = [worker for worker in load if unit in state.workers[worker].holds]
        if not holders:
            return None
        writers[unit] = min(holders, key=load.__getitem__)
        load[writers[unit]] += state.config.unit_bytes[unit]
    return writers
