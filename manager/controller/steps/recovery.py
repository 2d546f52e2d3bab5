"""Handles generations that fail one after the other: what workers hold is saved, and the next attempt is delayed."""

from __future__ import annotations

from manager.controller.shape.formation import form, form_or_hold
from manager.controller.shape.selection import chosen
from manager.controller.state.actions import ReasonCode
from manager.controller.state.bounds import commit_bound_s, retry_bound_s, why_retried_no_longer
from manager.controller.state.state import ControllerState, OutstandingOrder, Phase
from manager.controller.state.transition import Transition
from manager.controller.steps.checkpoints import commit_orders, is_saved
from manager.controller.steps.save_measuring import record_save_begun
from morph.contract.messages import UnitId, WorkerId
from morph.contract.waits import Backoff
from morph.words import counted

PAUSES = Backoff(first_s=5.0, most_s=300.0)
"""Seconds between failed attempts."""


def begin_rest(transition: Transition) -> None:
    """Save what workers hold and pause, after too many dissolved generations in a row, while no worker has an order.

    Each pause is twice the one before. The run ends ``policy.give_up_after_s`` after the first pause began, or once the
    state is saved if a stop was requested.
    """
    state, now_s = transition.state, transition.now_s
    waits = state.waits
    policy = state.config.policy
    since_s = now_s if waits.resting_since_s is None else waits.resting_since_s
    sentence = (
        f"training was interrupted {waits.num_fruitless} times in a row before a step was complete "
        f"({counted(state.version, 'step is', 'steps are')} done)"
    )
    limit_s = retry_bound_s(state)
    if now_s >= since_s + limit_s:
        saved = 0 if state.saving.checkpoint is None else state.saving.checkpoint.version
        limit = f"for {limit_s:g} s, {why_retried_no_longer(state)}"
        return transition.end("failed", f"{sentence}, {limit}; version {saved} is saved")
    if state.stop_reason is not None and is_saved(state):
        return transition.end("stopped", f"{state.stop_reason}; version {state.version} is saved")
    pause_s = PAUSES.pause_s(waits.num_fruitless - policy.max_fruitless_generations)
    transition.change(phase=Phase.RESTING, reshape=None, member_units={})
    transition.change_waits(resting_since_s=since_s, rest_until_s=now_s + pause_s, join_since_s=None)
    transition.say(ReasonCode.RESTING, f"{sentence}: the next attempt is in {pause_s:g} s")
    return _save_held(transition)


def save_before_waiting(transition: Transition) -> bool:
    """If no shape can be formed, have workers write what they hold; return whether they do."""
    state = transition.state
    saving = state.saving
    known = {manifest.version for manifest in saving.sealing}
    if saving.pending is not None and not saving.pending.stale:
        known.add(saving.pending.version)
    if chosen(transition) is not None or is_saved(state) or state.version in known or _writers(state) is None:
        return False
    transition.change(phase=Phase.RESTING)
    transition.change_waits(rest_until_s=transition.now_s, hold_until_s=None, waiting_since_s=None)
    transition.change(reshape=None, member_units={})
    transition.change_waits(join_since_s=None)
    _save_held(transition)
    return True


def rest_over(transition: Transition) -> None:
    """Form the next generation after a rest, once the pause is over and every order is answered."""
    state = transition.state
    if not state.step.awaited and (state.waits.rest_until_s is None or transition.now_s >= state.waits.rest_until_s):
        transition.change_waits(rest_until_s=None)
        form_or_hold(transition)


def stop_while_resting(transition: Transition) -> None:
    """Handle a stop request: end once everything is saved; if nobody is saving, form a generation that can."""
    state = transition.state
    saving = state.saving
    if is_saved(state):
        return transition.end("stopped", f"{state.stop_reason}; version {state.version} is saved")
    if state.step.awaited or saving.sealing or (saving.pending is not None and not saving.pending.stale):
        return transition.say(ReasonCode.STOP_NOTED, f"{state.stop_reason}: the run ends once its state is saved")
    transition.change_waits(rest_until_s=None)
    return form(transition)


def _save_held(transition: Transition) -> None:
    """Have holders write the decided version, without a generation, unless it is saved or a unit has no holder."""
    state, now_s = transition.state, transition.now_s
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
    transition.order(order, receivers)
    transition.change(generation=order.generation)
    record_save_begun(transition, writers, "emergency")
    sentence = f"version {state.version} is written by the {len(receivers)} workers that hold it"
    transition.say(ReasonCode.RESTING, sentence, *commit_orders(transition.state, writers, receivers))


def _writers(state: ControllerState) -> dict[UnitId, WorkerId] | None:
    """Choose a holder to write each unit, so that all write about as many bytes; None: some unit has no holder."""
    writers: dict[UnitId, WorkerId] = {}
    load = dict.fromkeys(state.ready_workers, 0)
    for unit in state.config.units:
        holders = [worker for worker in load if unit in state.workers[worker].holds]
        if not holders:
            return None
        writers[unit] = min(holders, key=load.__getitem__)
        load[writers[unit]] += state.config.unit_bytes[unit]
    return writers
