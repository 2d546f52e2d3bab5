"""Recovery from repeated failures: rests between generations, and finding a checkpoint that can be loaded."""

from __future__ import annotations

from typing import Any

from manager.controller.shape.formation import form, form_or_hold
from manager.controller.shape.selection import chosen
from manager.controller.state.actions import FindCheckpoint, ReasonCode
from manager.controller.state.bounds import commit_bound_s, retry_bound_s, why_retried_no_longer
from manager.controller.state.events import CheckpointFound, CheckpointNotFound
from manager.controller.state.saves import Doubt
from manager.controller.state.state import ControllerState, OutstandingOrder, Phase
from manager.controller.state.transition import Transition
from manager.controller.steps.save_timing import record_save_begun
from manager.controller.steps.training_loop import commit_orders
from morph.contract.messages import UnitId, WorkerId
from morph.contract.waits import Backoff
from morph.words import counted

# Several generations in a row decide no step: what workers hold is saved, and a pause precedes the next attempt.


PAUSES = Backoff(first_s=5.0, most_s=300.0)
"""Seconds between failed attempts."""


def begin_rest(transition: Transition) -> None:
    """Save what workers hold and pause, because too many generations in a row were dissolved; no worker has an order.

    The pause doubles with each further generation that decides no step. The run ends when no step was decided for
    ``policy.give_up_after_s`` since the first of these pauses, or, after a stop request, once everything is saved.
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
    transition.say(ReasonCode.RESTING, f"{sentence}: it is tried again in {pause_s:g} s")
    return _save_held(transition)


def save_before_waiting(transition: Transition) -> bool:
    """No worker has an order and no shape can be formed: have workers write what they hold.

    This delays no step, and further workers may be lost while the run waits for VMs. Return whether they write: not if
    some unit has no holder, nor if it was tried before.
    """
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
    """While resting: form the next generation once the pause is over and every order is answered."""
    state = transition.state
    if not state.step.awaited and (state.waits.rest_until_s is None or transition.now_s >= state.waits.rest_until_s):
        transition.change_waits(rest_until_s=None)
        form_or_hold(transition)


def stop_while_resting(transition: Transition) -> None:
    """Handle a stop request: end if everything is saved, else once it is, or form a generation that can save it."""
    state = transition.state
    saving = state.saving
    if is_saved(state):
        return transition.end("stopped", f"{state.stop_reason}; version {state.version} is saved")
    if state.step.awaited or saving.sealing or (saving.pending is not None and not saving.pending.stale):
        return transition.say(ReasonCode.STOP_NOTED, f"{state.stop_reason}: the run ends once its state is saved")
    transition.change_waits(rest_until_s=None)
    return form(transition)


def is_saved(state: ControllerState) -> bool:
    """Whether the decided version is a complete checkpoint."""
    return (0 if state.saving.checkpoint is None else state.saving.checkpoint.version) == state.version


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
    """Distribute the units over their holders, about as many bytes to each; None: some unit has no holder."""
    writers: dict[UnitId, WorkerId] = {}
    load = dict.fromkeys(state.ready_workers, 0)
    for unit in state.config.units:
        holders = [worker for worker in load if unit in state.workers[worker].holds]
        if not holders:
            return None
        writers[unit] = min(holders, key=load.__getitem__)
        load[writers[unit]] += state.config.unit_bytes[unit]
    return writers


def in_doubt(state: ControllerState) -> bool:
    """Whether an undamaged checkpoint must be found before anything else."""
    return state.saving.doubt is not None and state.saving.doubt.status != "answered"


def note_doubt(transition: Transition, sentence: str, *workers: WorkerId) -> None:
    """Record that workers could not load their parts of the version; the sentence of the first failure is kept."""
    state, known = transition.state, transition.state.saving.doubt
    if known is None or not in_doubt(state):
        num_tries, unable = (known.num_tries, known.unable) if known is not None else (0, frozenset[WorkerId]())
        known = Doubt(version=state.version, sentence=sentence, num_tries=num_tries, unable=unable)
        transition.change_saving(doubt=known)
    _change(transition, failed=known.failed.union(workers))


def loading_workers(state: ControllerState) -> list[WorkerId]:
    """Return workers whose reshape must read from storage and is not answered: if late, storage is at fault."""
    if state.phase is not Phase.RESHAPING or state.reshape is None:
        return []
    readers = {source.peer or source.worker for source in state.reshape.sources if source.kind == "checkpoint"}
    return [worker for worker in state.busy_workers if worker in readers]


def find_whole(transition: Transition) -> None:
    """Have the newest undamaged checkpoint found, at once the first time, then after growing pauses; no worker has an
    order. The run ends after ``policy.give_up_after_s`` without a decided step, or at a stop request.
    """
    state, now_s = transition.state, transition.now_s
    saving = state.saving
    assert saving.doubt is not None, "nothing is in doubt"
    since_s = now_s if state.waits.resting_since_s is None else state.waits.resting_since_s
    limit_s = retry_bound_s(state)
    if state.stop_reason is not None:
        return transition.end("stopped", f"{state.stop_reason}; {saving.doubt.sentence}")
    if now_s >= since_s + limit_s:
        limit = f"for {limit_s:g} s, {why_retried_no_longer(state)}"
        return transition.end("failed", f"{saving.doubt.sentence}; no step was decided {limit}")
    pause_s = PAUSES.pause_s(saving.doubt.num_tries - 1) if saving.doubt.num_tries else 0.0
    transition.change(phase=Phase.RESTING, reshape=None, member_units={})
    transition.change_waits(
        resting_since_s=since_s,
        rest_until_s=now_s + pause_s,
        hold_until_s=None,
        waiting_since_s=None,
        join_since_s=None,
    )
    if not pause_s:
        return _ask(transition)
    return transition.say(ReasonCode.RESTING, f"{saving.doubt.sentence}; storage is read again in {pause_s:g} s")


def find_if_due(transition: Transition) -> None:
    """While resting in doubt: read storage once the pause is over, and wait for its answer for a bounded time."""
    state, now_s = transition.state, transition.now_s
    waits = state.waits
    assert state.saving.doubt is not None, "nothing is in doubt"
    if waits.rest_until_s is not None and now_s < waits.rest_until_s:
        return None
    if state.saving.doubt.status == "open":
        return _ask(transition)
    since_s = now_s if waits.resting_since_s is None else waits.resting_since_s
    if now_s >= since_s + retry_bound_s(state):
        return find_whole(transition)
    return transition.change_waits(rest_until_s=now_s + PAUSES.most_s)


def on_checkpoint_found(transition: Transition, event: CheckpointFound) -> None:
    """An undamaged checkpoint is known: form the next shape, which loads units without a holder from it."""
    state, found = transition.state, event.manifest
    saving = state.saving
    if saving.doubt is None or saving.doubt.status != "asked":
        return transition.say(ReasonCode.IGNORED, f"nobody waits for version {found.version} to be found")
    _change(transition, status="answered")
    if state.phase is not Phase.RESTING:
        return transition.say(ReasonCode.IGNORED, f"version {found.version} is whole, and not needed any more")
    transition.change_saving(checkpoint=found)
    transition.change_waits(rest_until_s=None)
    if found.version == saving.doubt.version:
        sentence = f"every byte of version {found.version} is right: it is loaded again{_read_for_others(transition)}"
    else:
        _change(transition, failed=frozenset(), unable=frozenset())
        gone = f"version {saving.doubt.version} is gone" if saving.doubt.at_most is None else saving.doubt.sentence
        told = event.passed_over or (gone,)
        sentence = f"{'; '.join(told)}; version {found.version} is loaded"
    transition.say(ReasonCode.RESTING, sentence)
    if state.waits.num_fruitless >= state.config.policy.max_fruitless_generations:
        return begin_rest(transition)
    return form_or_hold(transition)


def _read_for_others(transition: Transition) -> str:
    """Let others, if any, read for workers that could not load undamaged files; return the text that says so."""
    doubt, ready = transition.state.saving.doubt, frozenset(transition.state.ready_workers)
    assert doubt is not None, "nothing is in doubt"
    unable = (doubt.unable | doubt.failed) & ready
    if unable == ready:  # no worker is known to be able to read, so each tries again
        unable = frozenset()
    _change(transition, failed=frozenset(), unable=unable)
    return f"; others read what {', '.join(sorted(unable))} could not" if unable else ""


def on_checkpoint_not_found(transition: Transition, event: CheckpointNotFound) -> None:
    """End the run if every checkpoint is damaged; if storage could not be read, try again later."""
    state = transition.state
    saving = state.saving
    if saving.doubt is None or saving.doubt.status != "asked":
        return transition.say(ReasonCode.IGNORED, f"nobody waits for a checkpoint to be found: {event.error}")
    if event.none and saving.doubt.at_most is not None and state.phase is Phase.RESTING:
        _change(transition, status="answered")
        transition.change_saving(checkpoint=None)
        transition.change_waits(rest_until_s=None)
        transition.say(ReasonCode.RESTING, event.error)
        return form_or_hold(transition)
    if event.damaged and state.phase is Phase.RESTING:
        return transition.end("failed", event.error)
    sentence = f"{event.error}: whether version {saving.doubt.version} is whole is not known"
    _change(transition, status="open", sentence=sentence)
    if state.phase is not Phase.RESTING:
        return transition.say(ReasonCode.IGNORED, sentence)
    return find_whole(transition)


def _ask(transition: Transition) -> None:
    doubt = transition.state.saving.doubt
    assert doubt is not None, "nothing is in doubt"
    _change(transition, status="asked", num_tries=doubt.num_tries + 1)
    transition.change_waits(rest_until_s=transition.now_s + PAUSES.most_s)
    sentence = f"version {doubt.version} could not be loaded: looking for the newest undamaged checkpoint"
    if doubt.at_most is not None:
        sentence = f"{doubt.sentence}: looking for the newest undamaged checkpoint up to version {doubt.at_most}"
    transition.say(ReasonCode.RESTING, sentence, FindCheckpoint(doubted=doubt.version, at_most=doubt.at_most))


def _change(transition: Transition, **fields: Any) -> None:
    assert transition.state.saving.doubt is not None, "nothing is in doubt"
    transition.change_saving(doubt=transition.state.saving.doubt.model_copy(update=fields))
