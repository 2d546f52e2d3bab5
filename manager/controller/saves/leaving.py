"""Saving what only VMs hold that are about to be taken (Spotify, section 4.2)."""

from __future__ import annotations

from collections.abc import Iterable

from manager.controller.saves.timing import save_seconds, step_seconds
from manager.controller.shape.choosing import chosen, cost_of_morph_s, draining_members
from manager.controller.state.draft import Draft
from manager.controller.state.nodes import NodeState
from manager.controller.state.state import ControllerState, Phase
from morph.contract.messages import WorkerId


def lacks_others(draft: Draft) -> bool:
    """Whether workers that drain hold what no other does, and no shape could be formed that takes it over."""
    state = draft.state
    leaving = leaving_workers(state)
    if not leaving or chosen(draft) is not None:
        return False
    held: set[str] = set().union(*(e.holds for worker, e in state.workers.items() if worker not in leaving))
    return any(state.workers[worker].holds - held for worker in leaving)


def emergency_due(draft: Draft) -> bool:
    """Whether the decided version is to be saved with the step that is ordered now, because VMs are about to go.

    That is when as much would be run again as could still be trained before the last save: at once if the newest
    checkpoint is old, again when half of the time is over, and so on, the last time as late as it is complete in time.
    """
    state, now_s = draft.state, draft.now_s
    if not draining_members(state) or not lacks_others(draft) or not fits(state, now_s):
        return False
    since_s = now_s if state.saving.save_times.since_s is None else state.saving.save_times.since_s
    return now_s - since_s >= taken_s(state) - save_seconds(state) - step_seconds(state) - now_s


def fits(state: ControllerState, now_s: float) -> bool:
    """Whether a save that begins now is complete before the first VM that drains is taken, as far as is known."""
    unknown = state.saving.save_times.durable_s is None  # then it is tried
    return unknown or now_s + save_seconds(state) <= taken_s(state)


def step_outlasts(draft: Draft) -> bool:
    """Whether the step under way ends too late for what is to be done before a member is taken, and now is not.

    That is a planned change where others can take over, else a save. The step would be lost with the VM in any case.
    """
    state, now_s = draft.state, draft.now_s
    ordered_s = state.saving.save_times.ordered_s
    if state.phase is not Phase.TRAINING or ordered_s is None or state.saving.save_times.step_s is None:
        return False
    leaving = draining_members(state)
    if not leaving:
        return False
    if chosen(draft) is not None:
        needed_s = cost_of_morph_s(state)
    elif lacks_others(draft):
        needed_s = save_seconds(state)
    else:
        return False
    ends_s = max(now_s, ordered_s + step_seconds(state))
    return now_s + needed_s <= taken_s(state, leaving) < ends_s + needed_s


def taken_s(state: ControllerState, leaving: Iterable[WorkerId] | None = None) -> float:
    """Return when the first worker that drains, or the first of these, is taken, as its notice says."""
    grace_s = state.config.policy.rules.requests.notice_grace_s
    times_s = [state.workers[worker].drain_until_s for worker in leaving or leaving_workers(state)]
    return min((time_s - grace_s for time_s in times_s if time_s is not None), default=float("inf"))


def leaving_workers(state: ControllerState) -> frozenset[WorkerId]:
    """Return all workers whose VMs are said to be taken."""
    return frozenset(worker for worker, entry in state.workers.items() if entry.node is NodeState.DRAINING)
