"""A checkpoint could not be loaded: the newest whole one is found, and the same workers go on from it."""

from __future__ import annotations

from typing import Any

from manager.controller.shape.forming import form_or_hold
from manager.controller.state.actions import FindCheckpoint
from manager.controller.state.bounds import retry_bound_s, why_retried_no_longer
from manager.controller.state.draft import Draft
from manager.controller.state.events import CheckpointFound, CheckpointNotFound
from manager.controller.state.reasons import ReasonCode
from manager.controller.state.saves import Doubt
from manager.controller.state.state import ControllerState, Phase
from manager.controller.steps.resting import PAUSES, rest
from morph.contract.messages import WorkerId


def in_doubt(state: ControllerState) -> bool:
    """Whether a whole checkpoint has to be found before anything else."""
    return state.saving.doubt is not None and state.saving.doubt.status != "answered"


def note_doubt(draft: Draft, sentence: str, *workers: WorkerId) -> None:
    """Workers could not load their parts of the version under way; the first sentence that says so is kept."""
    state, known = draft.state, draft.state.saving.doubt
    if known is None or not in_doubt(state):
        num_tries, unable = (known.num_tries, known.unable) if known is not None else (0, frozenset[WorkerId]())
        known = Doubt(version=state.version, sentence=sentence, num_tries=num_tries, unable=unable)
        draft.change_saving(doubt=known)
    _change(draft, failed=known.failed.union(workers))


def loading_workers(state: ControllerState) -> list[WorkerId]:
    """Who is still to answer a reshape for which it reads from storage: if that is late, storage is, not the worker."""
    if state.phase is not Phase.RESHAPING or state.reshape is None:
        return []
    readers = {source.peer or source.worker for source in state.reshape.sources if source.kind == "checkpoint"}
    return [worker for worker in state.busy_workers if worker in readers]


def find_whole(draft: Draft) -> None:
    """Nobody has an order: have the newest whole checkpoint found, at once the first time, then after growing pauses.

    It ends the run when no step was decided for ``policy.give_up_after_s`` since the first time, or at a stop.
    """
    state, now_s = draft.state, draft.now_s
    saving = state.saving
    assert saving.doubt is not None, "nothing is in doubt"
    since_s = now_s if state.waits.resting_since_s is None else state.waits.resting_since_s
    limit_s = retry_bound_s(state)
    if state.stop_reason is not None:
        return draft.end("stopped", f"{state.stop_reason}; {saving.doubt.sentence}")
    if now_s >= since_s + limit_s:
        limit = f"for {limit_s:g} s, {why_retried_no_longer(state)}"
        return draft.end("failed", f"{saving.doubt.sentence}; no step was decided {limit}")
    pause_s = PAUSES.pause_s(saving.doubt.num_tries - 1) if saving.doubt.num_tries else 0.0
    draft.change(phase=Phase.RESTING, reshape=None, member_units={})
    draft.change_waits(
        resting_since_s=since_s,
        rest_until_s=now_s + pause_s,
        hold_until_s=None,
        waiting_since_s=None,
        join_since_s=None,
    )
    if not pause_s:
        return _ask(draft)
    return draft.say(ReasonCode.RESTING, f"{saving.doubt.sentence}; storage is read again in {pause_s:g} s")


def find_if_due(draft: Draft) -> None:
    """While resting in doubt: read storage once the pause is over, and wait until it answers, or for too long."""
    state, now_s = draft.state, draft.now_s
    waits = state.waits
    assert state.saving.doubt is not None, "nothing is in doubt"
    if waits.rest_until_s is not None and now_s < waits.rest_until_s:
        return None
    if state.saving.doubt.status == "open":
        return _ask(draft)
    since_s = now_s if waits.resting_since_s is None else waits.resting_since_s
    if now_s >= since_s + retry_bound_s(state):
        return find_whole(draft)
    return draft.change_waits(rest_until_s=now_s + PAUSES.most_s)


def checkpoint_found(draft: Draft, event: CheckpointFound) -> None:
    """A whole checkpoint is known: form the next shape, which loads it where nobody holds what it needs."""
    state, found = draft.state, event.manifest
    saving = state.saving
    if saving.doubt is None or saving.doubt.status != "asked":
        return draft.say(ReasonCode.IGNORED, f"nobody waits for version {found.version} to be found")
    _change(draft, status="answered")
    if state.phase is not Phase.RESTING:
        return draft.say(ReasonCode.IGNORED, f"version {found.version} is whole, and not needed any more")
    draft.change_saving(checkpoint=found)
    draft.change_waits(rest_until_s=None)
    if found.version == saving.doubt.version:
        sentence = f"every byte of version {found.version} is right: it is loaded again{_read_for_others(draft)}"
    else:
        _change(draft, failed=frozenset(), unable=frozenset())
        told = event.passed_over or (f"version {saving.doubt.version} is gone",)
        sentence = f"{'; '.join(told)}; version {found.version} is loaded"
    draft.say(ReasonCode.RESTING, sentence)
    if state.waits.num_fruitless >= state.config.policy.max_fruitless_generations:
        return rest(draft)
    return form_or_hold(draft)


def _read_for_others(draft: Draft) -> str:
    """What a worker could not load is whole: from now on others read it for that one, if there are such; say so."""
    doubt, ready = draft.state.saving.doubt, frozenset(draft.state.ready_workers)
    assert doubt is not None, "nothing is in doubt"
    unable = (doubt.unable | doubt.failed) & ready
    if unable == ready:  # nobody is known to be able to, so that each tries again
        unable = frozenset()
    _change(draft, failed=frozenset(), unable=unable)
    return f"; others read what {', '.join(sorted(unable))} could not" if unable else ""


def checkpoint_not_found(draft: Draft, event: CheckpointNotFound) -> None:
    """None is whole, which ends the run; or storage does not say, which is no damage: it is asked again later."""
    state = draft.state
    saving = state.saving
    if saving.doubt is None or saving.doubt.status != "asked":
        return draft.say(ReasonCode.IGNORED, f"nobody waits for a checkpoint to be found: {event.error}")
    if event.damaged and state.phase is Phase.RESTING:
        return draft.end("failed", event.error)
    sentence = f"{event.error}: whether version {saving.doubt.version} is whole is not known"
    _change(draft, status="open", sentence=sentence)
    if state.phase is not Phase.RESTING:
        return draft.say(ReasonCode.IGNORED, sentence)
    return find_whole(draft)


def _ask(draft: Draft) -> None:
    doubt = draft.state.saving.doubt
    assert doubt is not None, "nothing is in doubt"
    _change(draft, status="asked", num_tries=doubt.num_tries + 1)
    draft.change_waits(rest_until_s=draft.now_s + PAUSES.most_s)
    sentence = f"version {doubt.version} could not be loaded: the newest checkpoint that is whole is looked for"
    draft.say(ReasonCode.RESTING, sentence, FindCheckpoint(doubted=doubt.version))


def _change(draft: Draft, **fields: Any) -> None:
    assert draft.state.saving.doubt is not None, "nothing is in doubt"
    draft.change_saving(doubt=draft.state.saving.doubt.model_copy(update=fields))
