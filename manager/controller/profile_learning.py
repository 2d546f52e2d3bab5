"""Learns from compute times how the profile's sections really compare; reports corrections of it."""

from __future__ import annotations

from manager.controller.state.actions import NoteCorrection
from manager.controller.state.events import ComputeTimesSeen
from manager.controller.state.nodes import NodeState
from manager.controller.state.profile_correction import correction_of, is_material, with_forecasts, with_times
from manager.controller.state.transition import Transition


def learn(transition: Transition, event: ComputeTimesSeen) -> None:
    """Learn from compute times of healthy members with a device each; report corrections that changed materially."""
    state, profiled_s = transition.state, transition.state.config.compute_s
    measured = state.measured
    if state.plan is None or state.config.shares_cores(state.plan):
        return
    if not all(times_s and all(times_s) for times_s in profiled_s.values()):
        return
    stage_of = {slot.worker: slot.stage for slot in state.slots}
    samples_s: dict[int, list[float]] = {}
    for times in event.times:
        entry = state.workers.get(times.worker)
        well = entry is not None and entry.node is NodeState.READY
        if well and times.generation == state.generation and times.worker in stage_of:
            samples_s.setdefault(stage_of[times.worker], []).extend(times.device_s or times.compute_s)
    stages = {stage: state.plan.stages[stage] for stage in samples_s}
    seen = with_times(measured.stage_ratios, stages, samples_s, profiled_s)
    if seen is measured.stage_ratios:
        return
    forecasts = with_forecasts(measured.forecasts, measured.stage_ratios, seen, profiled_s)
    transition.change_measured(stage_ratios=seen, forecasts=forecasts)
    found = correction_of(() if forecasts.are_worse else seen, profiled_s)
    if is_material(measured.correction, found, seen, profiled_s):
        transition.change_measured(correction=found)
        transition.add(found.sentence, NoteCorrection(correction=found))
