"""Finds slow members by their compute times over several windows of micro-batches, and corrects the profile by them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from manager.controller.fail_stutter import PEERS, Judgement, Usual, error_of_median, judge, spread
from manager.controller.paces import (
    all_lack_cores,
    members_by_stage,
    queued_share,
    unqueued_s,
    usual_now,
    usually_waited_s,
)
from manager.controller.shape.selection import record_flap
from manager.controller.state.actions import NoteCorrection, ReasonCode
from manager.controller.state.events import ComputeTimesSeen
from manager.controller.state.nodes import NodeEvent, NodeState
from manager.controller.state.profile_correction import (
    correction_of,
    established,
    is_material,
    with_forecasts,
    with_times,
)
from manager.controller.state.state import ControllerState, Pace, WorkerState, Yardstick
from manager.controller.state.transition import Transition
from morph.contract.messages import WorkerId

PAST_WINDOWS = 12
SUMS_EXCESS = 10 / 3
"""A worker is slow by its sums if its excess is above this multiple of that in ``StutterRules.ratio``."""


def on_compute_times(transition: Transition, event: ComputeTimesSeen) -> None:
    """Record compute times of members; judge each stage whose replicas have all filled their windows."""
    state = transition.state
    rules, workers = state.config.policy.rules.stutter, dict(state.workers)
    num_samples = 0
    for times in event.times:
        entry = workers.get(times.worker)
        if entry is None or times.generation != state.generation or times.worker not in state.member_units:
            continue
        num_samples += len(times.compute_s)
        samples_s = (*entry.pace.samples_s, *times.compute_s)[-4 * rules.samples :]
        is_known = len(times.queued_s) == len(times.compute_s)
        new_s = times.queued_s if is_known else (0.0,) * len(times.compute_s)
        queued_s = (*entry.pace.queued_s, *new_s)[-4 * rules.samples :]
        pace = entry.pace.model_copy(update={"samples_s": samples_s, "queued_s": queued_s})
        workers[times.worker] = entry.model_copy(update={"pace": pace})
    transition.change(workers=workers)
    transition.say(ReasonCode.TIMES_NOTED, f"{num_samples} micro-batches were timed")
    _learn(transition, event)
    full = _close_windows(transition)
    state = transition.state
    usual = usual_now(state)
    judged = _with_sums(state, full, _judged(state, full, usual)) if full else {}
    workers = dict(state.workers)
    stage_of = {slot.worker: slot.stage for slot in state.slots}
    for worker, judgement in judged.items():
        assert state.plan is not None, "nobody is judged without a shape"
        stage = state.plan.stages[stage_of[worker]]
        yardstick = Yardstick(
            first_section=stage.first_section,
            end_section=stage.end_section,
            node_type=stage.node_type,
            healthy_s=judgement.healthy_s,
            usual=usual.ratio if usual is not None else None,
            by_sums=judgement.by_sums,
        )
        pace = _counted(workers[worker], judgement).model_copy(update={"yardstick": yardstick})
        workers[worker] = workers[worker].model_copy(update={"pace": pace})
    transition.change(workers=workers)
    for worker, judgement in judged.items():
        _take_judgement(transition, worker, judgement)


def _close_windows(transition: Transition) -> list[int]:
    """Close the windows of each stage whose replicas all have a full one; return these stages.

    Queued time counts, since the pipeline waits for a busy machine, unless all members lack cores.
    """
    state = transition.state
    rules, workers = state.config.policy.rules.stutter, dict(state.workers)
    without_queue = all_lack_cores(state)
    full: list[int] = []
    for stage, members in members_by_stage(state).items():
        if any(len(state.workers[worker].pace.samples_s) < rules.samples for worker in members):
            continue
        full.append(stage)
        for worker in members:
            pace = workers[worker].pace
            samples_s = unqueued_s(pace) if without_queue else pace.samples_s
            median_s = statistics.median(samples_s)
            update = {
                "samples_s": (),
                "queued_s": (),
                "queued": queued_share(pace),
                "waited_s": statistics.fmean(pace.queued_s) if without_queue else 0.0,
                "median_s": median_s,
                "error_s": error_of_median(samples_s),
                "past_s": (*pace.past_s, median_s)[-PAST_WINDOWS - rules.windows :],
                "past_means_s": (*pace.past_means_s, statistics.fmean(samples_s))[-PAST_WINDOWS:],
            }
            workers[worker] = workers[worker].model_copy(update={"pace": pace.model_copy(update=update)})
    transition.change(workers=workers)
    return full


def _judged(state: ControllerState, stages: Sequence[int], usual: Usual | None) -> dict[WorkerId, Judgement]:
    """Judge workers of these stages by their last window; with few peers, by each one's spread before it grew slow."""
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
        judged |= judge(medians_s, expected, rules, errors_s, usually_waited_s(state, members[stage]))
    return judged


def _with_sums(
    state: ControllerState, stages: Sequence[int], judged: Mapping[WorkerId, Judgement]
) -> dict[WorkerId, Judgement]:
    """Judge workers also by the total time of many windows: a worker that stops now and then has a good median.

    A clear excess is required, because a core that is taken away stays away for several windows.
    """
    assert state.plan is not None, "no shape is formed"
    members, rules = members_by_stage(state), state.config.policy.rules.stutter
    rules, merged = rules.model_copy(update={"ratio": 1 + SUMS_EXCESS * (rules.ratio - 1)}), dict(judged)
    usual_s = usual_now(state, _long_mean_s)
    for stage in stages:
        means_s = {worker: _long_mean_s(state.workers[worker].pace) for worker in members[stage]}
        known_s = {worker: mean_s for worker, mean_s in means_s.items() if mean_s is not None}
        if len(known_s) < len(means_s):
            continue
        profiled_s = state.config.expected_compute_s(state.plan.stages[stage])
        expected = usual_s.expects(profiled_s) if usual_s is not None and profiled_s is not None else None
        errors_s = {
            worker: statistics.stdev(state.workers[worker].pace.past_means_s) / math.sqrt(PAST_WINDOWS)
            for worker in known_s
        }
        waited_s = usually_waited_s(state, members[stage])
        for worker, judgement in judge(known_s, expected, rules, errors_s, waited_s).items():
            known = merged.get(worker)
            if known is not None and judgement.slow and not known.slow:
                merged[worker] = judgement._replace(by_sums=True)
            elif known is not None and not judgement.well:
                merged[worker] = known._replace(well=False)
    return merged


def _long_mean_s(pace: Pace) -> float | None:
    """Return the mean time of a micro-batch (seconds) over many windows; None: too few windows in this generation."""
    return statistics.fmean(pace.past_means_s) if len(pace.past_means_s) == PAST_WINDOWS else None


def _counted(entry: WorkerState, judgement: Judgement) -> Pace:
    """Return the worker's pace with the streak of slow or good windows updated."""
    streak = entry.pace.streak
    streak = max(streak, 0) + 1 if judgement.slow else min(streak, 0) - 1 if judgement.well else 0
    slowdown = max(1.0, judgement.ratio) if entry.node is NodeState.SUSPECT else 1.0
    return entry.pace.model_copy(update={"streak": streak, "slowdown": slowdown})


def _take_judgement(transition: Transition, worker: WorkerId, judgement: Judgement) -> None:
    """Mark a worker as slow after enough slow windows in a row, and a slow member as well after enough good ones."""
    state = transition.state
    entry, windows = state.workers[worker], state.config.policy.rules.stutter.windows
    if entry.node is NodeState.READY and entry.pace.streak >= windows:
        record_flap(transition, entry.host or worker)
        pace = entry.pace.model_copy(update={"slowdown": judgement.ratio})
        transition.change_node(worker, NodeEvent.SLOW, pace=pace)
        streak = f"{entry.pace.streak} measurements in a row"
        sentence = f"{worker} takes {judgement.ratio:.2f} times as long as it should, {streak}"
        transition.say(ReasonCode.WORKER_SLOW, sentence)
    if entry.node is NodeState.SUSPECT and entry.pace.streak <= -windows:
        pace = entry.pace.model_copy(update={"slowdown": 1.0})
        transition.change_node(worker, NodeEvent.WELL, pace=pace)
        transition.say(ReasonCode.WORKER_WELL, f"{worker} is as fast as it should be again")


def _learn(transition: Transition, event: ComputeTimesSeen) -> None:
    """Learn from compute times of healthy members with a device each; report corrections that changed materially."""
    state, profiled_s = transition.state, transition.state.config.compute_s
    measured = state.measured
    if state.plan is None or state.config.shares_cores:
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
    known = established(seen)
    forecasts = with_forecasts(measured.forecasts, established(measured.stage_ratios), known, profiled_s)
    transition.change_measured(stage_ratios=seen, forecasts=forecasts)
    correction = correction_of(() if forecasts.are_worse else known, profiled_s)
    if is_material(measured.correction, correction, known, profiled_s):
        transition.change_measured(correction=correction)
        transition.add(correction.sentence, NoteCorrection(correction=correction))
