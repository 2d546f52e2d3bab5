"""How fast the members of a shape compute: by stage, beside the profile, and without their wait for cores."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable

from manager.controller.fail_stutter import Usual, usual
from manager.controller.state.state import ControllerState, Pace
from morph.contract.messages import WorkerId
from morph.contract.plan import StagePlan


def all_lack_cores(state: ControllerState) -> bool:
    """Return whether every member waits so long for cores that this alone would keep it from counting as healthy."""
    most = state.config.policy.rules.stutter.well_ratio - 1
    paces = [state.workers[slot.worker].pace for slot in state.slots if slot.worker in state.workers]
    return bool(paces) and all(queued_share(pace) >= most for pace in paces)


def queued_share(pace: Pace) -> float:
    """Return the queued time as a share of the other time, in the window being filled or else in the last one."""
    if not pace.samples_s:
        return pace.queued
    other_s = sum(unqueued_s(pace))
    return sum(pace.queued_s) / other_s if other_s > 0 else 0.0


def usually_waited_s(state: ControllerState, workers: Iterable[WorkerId]) -> float:
    """Return the time (seconds) that these workers usually waited for cores in their last windows, if all did."""
    return statistics.median(state.workers[worker].pace.waited_s for worker in workers)


def unqueued_s(pace: Pace) -> tuple[float, ...]:
    """Return the times of micro-batches in the window being filled (seconds), without queued time."""
    pairs = itertools.zip_longest(pace.samples_s, pace.queued_s, fillvalue=0.0)
    return tuple(max(0.0, sample_s - queued_s) for sample_s, queued_s in pairs)


def members_by_stage(state: ControllerState) -> dict[int, list[WorkerId]]:
    """Return the present members by stage; stages with the same sections and GPU type count as the first of them."""
    stages: dict[int, list[WorkerId]] = {}
    alike: dict[tuple[int, int, str], int] = {}
    for slot in state.slots:
        if slot.worker in state.workers and state.plan is not None:
            work = work_of(state.plan.stages[slot.stage])
            stages.setdefault(alike.setdefault(work, slot.stage), []).append(slot.worker)
    return stages


def work_of(stage: StagePlan) -> tuple[int, int, str]:
    """Return what stages with the same work have in common: sections and type of worker."""
    return stage.first_section, stage.end_section, stage.node_type


def usual_now(state: ControllerState, of: Callable[[Pace], float | None] = lambda pace: pace.median_s) -> Usual | None:
    """Return how all members compare with the profile by their last windows; None until each has filled one."""
    if state.plan is None:
        return None
    ratios = []
    for stage, members in members_by_stage(state).items():
        profiled_s = state.config.expected_compute_s(state.plan.stages[stage])
        for worker in members:
            taken_s = of(state.workers[worker].pace)
            if taken_s is None or profiled_s is None:
                return None
            ratios.append(taken_s / profiled_s)
    return usual(ratios)
