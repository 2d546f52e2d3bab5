"""Skips steps between which nothing else happens: the controller would decide the same each time.

``tests/manager/test_jumping.py`` plays both ways, and checks that every later event and decision is equal.
"""

from __future__ import annotations

import math

from manager.controller.deadlines import wake_at_s
from manager.controller.state.bounds import save_bound_s
from manager.controller.state.nodes import NodeState
from manager.controller.state.state import ControllerState, OutstandingOrder, Phase, mean_of
from manager.controller.steps.save_timing import is_due
from morph.contract.decided import Decided


def steps_alike(state: ControllerState, now_s: float, step_s: float, until_s: float) -> int:
    """Return how many steps, including the one ordered at ``now_s``, are each followed by an ordinary one; each takes
    ``step_s`` until it is decided, and ``until_s`` is the time of the next other event.
    """
    saving = state.saving
    if not _is_steady(state, now_s):
        return 0
    quiet_s = min(until_s, wake_at_s(_with_order(state, None)) or math.inf)
    under_way = saving.pending is not None and not saving.pending.stale
    if saving.pending is not None and under_way:
        quiet_s = min(quiet_s, saving.pending.started_s + save_bound_s(state))
    most = state.config.num_steps - 1 - state.version
    if quiet_s < math.inf:
        most = min(most, math.ceil((quiet_s - now_s) / step_s) - 1)
    if under_way or saving.sealing:  # no other save begins
        return max(0, most)
    every = state.config.policy.checkpoint_every_steps
    if every is not None:
        most = min(most, saving.checkpoint_base + every - state.version - 1)
    if saving.save_times.insurance is not None:
        most = min(most, math.ceil((saving.save_times.insurance.due_s - now_s) / step_s))
    while most > 0 and is_due(*_passed(state, now_s, step_s, most)) is not None:
        most -= 1
    return max(0, most)


def passed(state: ControllerState, now_s: float, step_s: float, num_steps: int) -> ControllerState:
    """Return the state after this number of steps are decided and the next one is ordered."""
    later, _ = _passed(state, now_s, step_s, num_steps)
    return later


def _passed(state: ControllerState, now_s: float, step_s: float, num_steps: int) -> tuple[ControllerState, float]:
    assert state.step.order is not None, "a step is ordered"
    version, saves = state.version + num_steps, state.saving.save_times
    mean_s = saves.step_s
    for _ in range(min(num_steps, 128)):  # the mean no longer changes by then
        mean_s = mean_of(mean_s, step_s)
    now_s += num_steps * step_s
    later = _with_order(state, state.step.order.model_copy(update={"version": version, "sent_s": now_s}))
    times = saves.model_copy(update={"step_s": mean_s, "ordered_s": now_s})
    changes = {
        "version": version,
        "decided": Decided(version=version),
        "saving": state.saving.model_copy(update={"save_times": times}),
        "waits": state.waits.model_copy(update={"num_fruitless": 0, "resting_since_s": None}),
    }
    return later.model_copy(update=changes), now_s


def _with_order(state: ControllerState, order: OutstandingOrder | None) -> ControllerState:
    return state.model_copy(update={"step": state.step.model_copy(update={"order": order})})


def _is_steady(state: ControllerState, now_s: float) -> bool:
    """Return whether the running step is one of many: no change of shape, save or known loss is near."""
    step = state.step
    if state.phase is not Phase.TRAINING or step.order is None or step.order.version != state.version:
        return False
    if step.attempt or state.stop_reason is not None or state.failing is not None or state.pre_copy is not None:
        return False
    if state.waits.join_since_s is not None or step.loss_scale is not None or state.saving.save_times.weighs:
        return False
    for entry in state.workers.values():
        waits = entry.eligible_s is not None and entry.eligible_s > now_s
        if waits or entry.node is NodeState.DRAINING or entry.node is NodeState.SUSPECT:
            return False
    return state.saving.save_times.retry_s is None
