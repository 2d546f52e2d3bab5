"""Doubt whether a checkpoint can be loaded: finding one that can."""

from __future__ import annotations

from typing import Any

from manager.controller.shape.formation import form_or_hold
from manager.controller.state.actions import FindCheckpoint, ReasonCode
from manager.controller.state.bounds import retry_bound_s, why_retried_no_longer
from manager.controller.state.events import CheckpointFound, CheckpointNotFound
from manager.controller.state.saves import Doubt
from manager.controller.state.state import ControllerState, Phase
from manager.controller.state.transition import Transition
from manager.controller.steps.recovery import PAUSES, begin_rest
from morph.contract.messages import WorkerId


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
    """Have the newest undamaged checkpoint found, at once, then after growing pauses; no worker has an order."""
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
    state, manifest = transition.state, event.manifest
    saving = state.saving
    if saving.doubt is None or saving.doubt.status != "asked":
        return transition.say(ReasonCode.IGNORED, f"nobody waits for version {manifest.version} to be found")
    _change(transition, status="answered")
    if state.phase is not Phase.RESTING:
        return transition.say(ReasonCode.IGNORED, f"version {manifest.version} is whole, and not needed any more")
    transition.change_saving(checkpoint=manifest)
    transition.change_waits(rest_until_s=None)
    if manifest.version == saving.doubt.version:
        sentence = (
            f"every byte of version {manifest.version} is right: it is loaded again{_read_for_others(transition)}"
        )
    else:
        _change(transition, failed=frozenset(), unable=frozenset())
        gone = f"version {saving.doubt.version} is gone" if saving.doubt.at_most is None else saving.doubt.sentence
        passed_over = event.passed_over or (gone,)
        sentence = f"{'; '.join(passed_over)}; version {manifest.version} is loaded"
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
