"""Saves state that only VMs with a notice hold (Spotify, section 4.2)."""

from __future__ import annotations

from collections.abc import Iterable

from manager.controller.shape.selection import chosen, cost_of_morph_s, draining_members
from manager.controller.state.nodes import NodeState
from manager.controller.state.state import ControllerState, Phase
from manager.controller.state.transition import Transition
from manager.controller.steps.save_timing import save_seconds, step_seconds
from morph.contract.messages import WorkerId


def lacks_others(transition: Transition) -> bool:
    """Whether draining workers are the only holders of some unit, and no shape could be formed to take it over."""
    state = transition.state
    leaving = leaving_workers(state)
    if not leaving or chosen(transition) is not None:
        return False
    held: set[str] = set().union(*(e.holds for worker, e in state.workers.items() if worker not in leaving))
    return any(state.workers[worker].holds - held for worker in leaving)


def emergency_due(transition: Transition) -> bool:
    """Whether to save the decided version with the step ordered now, because VMs are about to be taken.

    A save is due when the work since the newest checkpoint equals the work that could still be done before the last
    possible save: at once if that checkpoint is old, again after half of the time, and so on, until the last moment at
    which a save can still be completed.
    """
    state, now_s = transition.state, transition.now_s
    if not draining_members(state) or not lacks_others(transition) or not fits(state, now_s):
        return False
    since_s = now_s if state.saving.save_times.since_s is None else state.saving.save_times.since_s
    return now_s - since_s >= taken_s(state) - save_seconds(state) - step_seconds(state) - now_s


def fits(state: ControllerState, now_s: float) -> bool:
    """Whether a save that begins now should be complete before the first draining VM is taken."""
    unknown = state.saving.save_times.durable_s is None  # then a save is tried
    return unknown or now_s + save_seconds(state) <= taken_s(state)


def step_outlasts(transition: Transition) -> bool:
    """Whether it is early enough to save, or change shape, before a member is taken, but too late after this step."""
    state, now_s = transition.state, transition.now_s
    ordered_s = state.saving.save_times.ordered_s
    if state.phase is not Phase.TRAINING or ordered_s is None or state.saving.save_times.step_s is None:
        return False
    leaving = draining_members(state)
    if not leaving:
        return False
    if chosen(transition) is not None:
        needed_s = cost_of_morph_s(state)
    elif lacks_others(transition):
        needed_s = save_seconds(state)
    else:
        return False
    ends_s = max(now_s, ordered_s + step_seconds(state))
    return now_s + needed_s <= taken_s(state, leaving) < ends_s + needed_s


def taken_s(state: ControllerState, leaving: Iterable[WorkerId] | None = None) -> float:
    """Return when (seconds) the first of these workers, or of all draining ones, is taken, as its notice says."""
    grace_s = state.config.policy.rules.requests.notice_grace_s
    times_s = [state.workers[worker].drain_until_s for worker in leaving or leaving_workers(state)]
    return min((time_s - grace_s for time_s in times_s if time_s is not None), default=float("inf"))


def leaving_workers(state: ControllerState) -> frozenset[WorkerId]:
    """Return all workers whose VMs have a notice."""
    return frozenset(worker for worker, entry in state.workers.items() if entry.node is NodeState.DRAINING)
