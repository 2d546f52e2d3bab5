"""Before the first generation."""

from __future__ import annotations

from manager.controller.shape.choosing import chosen
from manager.controller.shape.forming import form, torn_until_s
from manager.controller.state.draft import Draft
from manager.controller.state.reasons import ReasonCode
from morph.words import counted


def start_if_due(draft: Draft) -> None:
    """While starting: form the first generation once everybody expected is ready, or patience has run out."""
    state, now_s = draft.state, draft.now_s
    waits = state.waits
    if state.version >= state.config.num_steps:
        return draft.end("finished", f"all {state.config.num_steps} steps are committed and saved already")
    choice, num_known = chosen(draft), len(state.workers)
    num_ready = len(choice.workers) if choice else len(state.ready_workers)
    waiting_since_s = now_s if waits.waiting_since_s is None else waits.waiting_since_s
    if choice is None:
        draft.change_waits(waiting_since_s=waiting_since_s, first_feasible_s=None)
        needed = counted(state.config.fewest_workers, "is needed", "are needed")
        sentence = f"{counted(num_ready, 'worker is', 'workers are')} ready, {needed} to start"
        return draft.say(ReasonCode.START_WAIT, sentence)
    until_s = torn_until_s(state, now_s)
    if until_s is not None:
        draft.wake_by(until_s)
        return draft.say(ReasonCode.START_WAIT, f"{', '.join(waits.torn)} may go as a whole")
    since_s = now_s if waits.first_feasible_s is None else waits.first_feasible_s
    draft.change_waits(waiting_since_s=waiting_since_s, first_feasible_s=since_s)
    if num_ready == num_known and state.num_appeared >= state.config.expected_nodes:
        told = "the one worker is ready" if num_ready == 1 else f"all {num_ready} workers are ready"
        draft.say(ReasonCode.FORMED, told)
        return form(draft)
    if now_s >= since_s + state.config.policy.start_patience_s:
        draft.say(ReasonCode.FORMED, f"{num_ready} of {num_known} workers are ready, the others are late")
        return form(draft)
    missing = max(num_known, state.config.expected_nodes) - num_ready
    sentence = f"{counted(num_ready, 'worker')} could start; {counted(missing, 'more is', 'more are')} awaited a while"
    return draft.say(ReasonCode.START_WAIT, sentence)
