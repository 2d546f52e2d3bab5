"""Slow members: found by their compute times, over several windows of micro-batches."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from manager.controller.shape.flapping import flapped
from manager.controller.state.actions import NoteCorrection
from manager.controller.state.draft import Draft
from manager.controller.state.events import ComputeTimesSeen
from manager.controller.state.learned import correction_of, is_material, with_times
from manager.controller.state.nodes import NodeEvent, NodeState
from manager.controller.state.reasons import ReasonCode
from manager.controller.state.state import ControllerState, Pace, WorkerState, Yardstick
from manager.controller.stragglers.outliers import PEERS, Judgement, Usual, error_of_median, judge, spread
from manager.controller.stragglers.probing import members_by_stage, usual_now
from morph.contract.messages import WorkerId


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


PAST_WINDOWS = 12


def times_seen(draft: Draft, event: ComputeTimesSeen) -> None:
    """Take compute times of members; judge each stage of which every replica filled its window."""
    state = draft.state
    rules, workers = state.config.policy.rules.stutter, dict(state.workers)
    num_samples = 0
    for times in event.times:
        entry = workers.get(times.worker)
        if entry is None or times.generation != state.generation or times.worker not in state.member_units:
            continue
        num_samples += len(times.compute_s)
        samples_s = (*entry.pace.samples_s, *times.compute_s)[-4 * rules.samples :]
        pace = entry.pace.model_copy(update={"samples_s": samples_s})
        workers[times.worker] = entry.model_copy(update={"pace": pace})
    draft.change(workers=workers)
    draft.say(ReasonCode.TIMES_NOTED, f"{num_samples} micro-batches were timed")
    learn(draft, event)
    full = _close_windows(draft)
    state = draft.state
    usual = usual_now(state)
    judged = _judged(state, full, usual) if full else {}
    workers = dict(state.workers)
    stage_of = {slot.worker: slot.stage for slot in state.slots}
    for worker, judgement in judged.items():
        assert state.plan is not None, "nobody is judged without a shape"
        stage = state.plan.stages[stage_of[worker]]
        yardstick = Yardstick(
            first_section=stage.first_section,
            end_section=stage.end_section,
            healthy_s=judgement.healthy_s,
            usual=usual.ratio if usual is not None else None,
        )
        pace = _counted(workers[worker], judgement).model_copy(update={"yardstick": yardstick})
        workers[worker] = workers[worker].model_copy(update={"pace": pace})
    draft.change(workers=workers)
    for worker, judgement in judged.items():
        _take_judgement(draft, worker, judgement)


def _close_windows(draft: Draft) -> list[int]:
    """Close the windows of each stage of which every replica has a full one; say which stages these are."""
    state = draft.state
    rules, workers = state.config.policy.rules.stutter, dict(state.workers)
    full: list[int] = []
    for stage, members in members_by_stage(state).items():
        if any(len(state.workers[worker].pace.samples_s) < rules.samples for worker in members):
            continue
        full.append(stage)
        for worker in members:
            pace = workers[worker].pace
            median_s, error_s = statistics.median(pace.samples_s), error_of_median(pace.samples_s)
            past_s = (*pace.past_s, median_s)[-PAST_WINDOWS - rules.windows :]
            update = {"samples_s": (), "median_s": median_s, "error_s": error_s, "past_s": past_s}
            workers[worker] = workers[worker].model_copy(update={"pace": pace.model_copy(update=update)})
    draft.change(workers=workers)
    return full


def _judged(state: ControllerState, stages: Sequence[int], usual: Usual | None) -> dict[WorkerId, Judgement]:
    """Judge every worker of these stages by its last window.

    Where there are too few peers to show what is chance, each worker's own windows have to, those before it grew slow.
    """
    assert state.plan is not None, "no shape is formed"
    members, rules = members_by_stage(state), state.config.policy.rules.stutter
    judged: dict[WorkerId, Judgement] = {}
    for stage in stages:
        profiled_s = state.config.expected_compute_s(state.plan.stages[stage])
        expected = usual.expects(profiled_s) if usual is not None and profiled_s is not None else None
        paces = {worker: state.workers[worker].pace for worker in members[stage]}
        medians_s = {worker: pace.median_s for worker, pace in paces.items() if pace.median_s is not None}
        errors_s = {worker: pace.error_s for worker, pace in paces.items()}
        if len(paces) < PEERS:
            before_s = {worker: pace.past_s[: -1 - max(pace.streak, 0)] for worker, pace in paces.items()}
            if any(len(each_s) < rules.windows for each_s in before_s.values()):
                continue
            errors_s = {worker: max(paces[worker].error_s, spread(each_s)) for worker, each_s in before_s.items()}
        judged |= judge(medians_s, expected, rules, errors_s)
    return judged


def _counted(entry: WorkerState, judgement: Judgement) -> Pace:
    """Count windows in a row."""
    streak = entry.pace.streak
    streak = max(streak, 0) + 1 if judgement.slow else min(streak, 0) - 1 if judgement.well else 0
    slowdown = max(1.0, judgement.ratio) if entry.node is NodeState.SUSPECT else 1.0
    return entry.pace.model_copy(update={"streak": streak, "slowdown": slowdown})


def _take_judgement(draft: Draft, worker: WorkerId, judgement: Judgement) -> None:
    """Enough slow windows in a row make a worker slow, enough good ones make a slow member well again."""
    state = draft.state
    entry, windows = state.workers[worker], state.config.policy.rules.stutter.windows
    if entry.node is NodeState.READY and entry.pace.streak >= windows:
        flapped(draft, entry.host or worker)
        pace = entry.pace.model_copy(update={"slowdown": judgement.ratio})
        draft.change_node(worker, NodeEvent.SLOW, pace=pace)
        sentence = (
            f"{worker} takes {judgement.ratio:.2f} times as long as it should, {entry.pace.streak} windows in a row"
        )
        draft.say(ReasonCode.WORKER_SLOW, sentence)
    if entry.node is NodeState.SUSPECT and entry.pace.streak <= -windows:
        pace = entry.pace.model_copy(update={"slowdown": 1.0})
        draft.change_node(worker, NodeEvent.WELL, pace=pace)
        draft.say(ReasonCode.WORKER_WELL, f"{worker} is as fast as it should be again")
