"""Learning from compute times what the profile has too short or too long."""

from __future__ import annotations

from manager.controller.state.actions import NoteCorrection
from manager.controller.state.draft import Draft
from manager.controller.state.events import ComputeTimesSeen
from manager.controller.state.learned import correction_of, is_material, with_times
from manager.controller.state.nodes import NodeState


def learn(draft: Draft, event: ComputeTimesSeen) -> None:
    """Take compute times of members that are well; tell what is known of the profile's when that changed materially."""
    state, profiled_s = draft.state, draft.state.config.section_compute_s
    measured = state.measured
    if state.plan is None or not all(profiled_s) or not profiled_s:
        return
    stage_of = {slot.worker: slot.stage for slot in state.slots}
    samples_s: dict[int, list[float]] = {}
    for times in event.times:
        entry = state.workers.get(times.worker)
        well = entry is not None and entry.node is NodeState.READY
        if well and times.generation == state.generation and times.worker in stage_of:
            samples_s.setdefault(stage_of[times.worker], []).extend(times.device_s or times.compute_s)
    sections = {stage: state.plan.stages[stage].sections for stage in samples_s}
    seen = with_times(measured.stage_ratios, sections, samples_s, profiled_s)
    if seen is measured.stage_ratios:
        return
    draft.change_measured(stage_ratios=seen)
    found = correction_of(seen, profiled_s)
    if is_material(measured.correction, found, seen, profiled_s):
        draft.change_measured(correction=found)
        draft.add(found.sentence, NoteCorrection(correction=found))
