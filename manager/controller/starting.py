"""Before the first generation."""

from __future__ import annotations

from manager.controller.changes import changed, ended, followed, ready_workers, said
from manager.controller.choosing import choose
from manager.controller.forming import form
from manager.controller.reasons import ReasonCode
from manager.controller.state import ControllerState, Decision


def start_if_due(state: ControllerState, now_s: float) -> Decision:
    """While starting: form the first generation once everybody expected is ready, or patience has run out."""
    if state.version >= state.config.num_steps:
        return ended(state, "finished", f"all {state.config.num_steps} steps are committed and saved already")
    since_s = now_s if state.waiting_since_s is None else state.waiting_since_s
    state = changed(state, waiting_since_s=since_s)
    choice, num_known = choose(state, now_s), len(state.workers)
    num_ready = len(choice.workers) if choice else len(ready_workers(state))
    if choice is None:
        state = changed(state, first_feasible_s=None)
        sentence = f"{num_ready} workers are ready, {state.config.fewest_workers} are needed to start"
        return said(state, ReasonCode.START_WAIT, sentence)
    since_s = now_s if state.first_feasible_s is None else state.first_feasible_s
    state = changed(state, first_feasible_s=since_s)
    if num_ready == num_known and state.num_appeared >= state.config.expected_nodes:
        everybody = said(state, ReasonCode.FORMED, f"all {num_ready} workers are ready")
        return followed(everybody, form(state, now_s))
    if now_s >= since_s + state.config.policy.start_patience_s:
        patience = said(state, ReasonCode.FORMED, f"{num_ready} of {num_known} workers are ready, the others are late")
        return followed(patience, form(state, now_s))
    missing = max(num_known, state.config.expected_nodes) - num_ready
    return said(state, ReasonCode.START_WAIT, f"{num_ready} workers could start; {missing} more are awaited a while")
