"""Forms the first generation of a run, after a bounded wait for its workers."""

from __future__ import annotations

from manager.controller.shape.formation import form, partly_lost_until_s
from manager.controller.shape.selection import (
    chosen,
)
from manager.controller.state.actions import ReasonCode
from manager.controller.state.transition import Transition
from morph.words import counted


def start_if_due(transition: Transition) -> None:
    """While starting: form the first generation once all expected workers are ready, or after a bounded wait."""
    state, now_s = transition.state, transition.now_s
    waits = state.waits
    if state.version >= state.config.num_steps:
        return transition.end("finished", f"all {state.config.num_steps} steps are done and saved already")
    choice, num_known = chosen(transition), len(state.workers)
    num_ready = len(choice.workers) if choice else len(state.ready_workers)
    waiting_since_s = now_s if waits.waiting_since_s is None else waits.waiting_since_s
    if choice is None:
        transition.change_waits(waiting_since_s=waiting_since_s, first_feasible_s=None)
        needed = counted(state.config.fewest_workers, "is needed", "are needed")
        sentence = f"{counted(num_ready, 'worker is', 'workers are')} ready, {needed} to start"
        return transition.say(ReasonCode.START_WAIT, sentence)
    until_s = partly_lost_until_s(state, now_s)
    if until_s is not None:
        transition.wake_by(until_s)
        return transition.say(ReasonCode.START_WAIT, f"{', '.join(waits.partly_lost)} may be lost as a whole")
    since_s = now_s if waits.first_feasible_s is None else waits.first_feasible_s
    transition.change_waits(waiting_since_s=waiting_since_s, first_feasible_s=since_s)
    if num_ready == num_known and state.num_appeared >= state.config.expected_nodes:
        told = "the one worker is ready" if num_ready == 1 else f"all {num_ready} workers are ready"
        transition.say(ReasonCode.FORMED, told)
        return form(transition)
    if now_s >= since_s + state.config.policy.start_patience_s:
        transition.say(ReasonCode.FORMED, f"{num_ready} of {num_known} workers are ready, the others are late")
        return form(transition)
    missing = max(num_known, state.config.expected_nodes) - num_ready
    sentence = f"{counted(num_ready, 'worker')} could start; waiting a while for {missing} more"
    return transition.say(ReasonCode.START_WAIT, sentence)
