"""What workers are held against: how all of them compare with the profile, and what others take for the same work."""

from __future__ import annotations

from manager.controller.state.nodes import NodeState
from manager.controller.state.state import ControllerState
from manager.controller.state.workers import Yardstick
from manager.controller.stragglers.outliers import Usual, usual
from morph.contract.messages import WorkerId


def members_by_stage(state: ControllerState) -> dict[int, list[WorkerId]]:
    """Return the members that are still there, by the stage that they hold."""
    stages: dict[int, list[WorkerId]] = {}
    for slot in state.slots:
        if slot.worker in state.workers:
            stages.setdefault(slot.stage, []).append(slot.worker)
    return stages


def usual_now(state: ControllerState) -> Usual | None:
    """Return how all members compare with the profile by their last windows; None until each of them has filled one.

    None as well without times of the profile, or with too few members to tell.
    """
    if state.plan is None:
        return None
    ratios = []
    for stage, members in members_by_stage(state).items():
        profiled_s = state.config.expected_compute_s(state.plan.stages[stage])
        for worker in members:
            median_s = state.workers[worker].pace.median_s
            if median_s is None or profiled_s is None:
                return None
            ratios.append(median_s / profiled_s)
    return usual(ratios)


def healthy_now_s(state: ControllerState, yardstick: Yardstick) -> float:
    """Return what a healthy worker takes (seconds) now for what a worker was slow at.

    What it was held against then, times how all members compare with the profile now and did then. Where healthy
    members do just that work and all take longer, as long as the fastest of them: a worker is not to be blamed for
    what everybody else needs too.
    """
    healthy_s, now = yardstick.healthy_s, usual_now(state)
    if now is not None and yardstick.usual is not None:
        healthy_s *= now.ratio / yardstick.usual
    sections = (yardstick.first_section, yardstick.end_section)
    taken_s = [
        median_s
        for stage, members in members_by_stage(state).items()
        if state.plan is not None
        and (state.plan.stages[stage].first_section, state.plan.stages[stage].end_section) == sections
        for worker in members
        if (median_s := state.workers[worker].pace.median_s) is not None
        and state.workers[worker].node is not NodeState.SUSPECT
    ]
    return max(healthy_s, min(taken_s, default=0.0))
