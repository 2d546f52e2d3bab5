"""Finds slow members by their compute times over several windows of micro-batches."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from manager.controller.fail_stutter import PEERS, Judgement, Usual, error_of_median, judge, spread, usual
from manager.controller.profile_learning import learn
from manager.controller.shape.flapping import hold_s, record_flap
from manager.controller.state.actions import EndWorker, ProbeWorker, ReasonCode
from manager.controller.state.bounds import probe_bound_s
from manager.controller.state.events import ComputeTimesSeen, WorkerProbed
from manager.controller.state.nodes import NodeEvent, NodeState
from manager.controller.state.state import ControllerState, Pace, WorkerState, Yardstick
from manager.controller.state.transition import Transition
from manager.controller.steps.failures import lose
from morph.contract.messages import WorkerId
from morph.contract.plan import StagePlan
from morph.contract.waits import Backoff
from morph.words import counted

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
    learn(transition, event)
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

    Each worker's queued time is left out of its times if all members lack cores. Otherwise it counts, because the
    pipeline waits for a worker whose machine is busy with other things.
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
            samples_s = _unqueued_s(pace) if without_queue else pace.samples_s
            median_s = statistics.median(samples_s)
            update = {
                "samples_s": (),
                "queued_s": (),
                "queued": _queued(pace),
                "waited_s": statistics.fmean(pace.queued_s) if without_queue else 0.0,
                "median_s": median_s,
                "error_s": error_of_median(samples_s),
                "past_s": (*pace.past_s, median_s)[-PAST_WINDOWS - rules.windows :],
                "past_means_s": (*pace.past_means_s, statistics.fmean(samples_s))[-PAST_WINDOWS:],
            }
            workers[worker] = workers[worker].model_copy(update={"pace": pace.model_copy(update=update)})
    transition.change(workers=workers)
    return full


def all_lack_cores(state: ControllerState) -> bool:
    """Return whether every member waits so long for cores that this alone would keep it from counting as healthy."""
    most = state.config.policy.rules.stutter.well_ratio - 1
    paces = [state.workers[slot.worker].pace for slot in state.slots if slot.worker in state.workers]
    return bool(paces) and all(_queued(pace) >= most for pace in paces)


def _queued(pace: Pace) -> float:
    """Return the queued time as a share of the other time, in the window being filled or else in the last one."""
    if not pace.samples_s:
        return pace.queued
    other_s = sum(_unqueued_s(pace))
    return sum(pace.queued_s) / other_s if other_s > 0 else 0.0


def _waited_s(state: ControllerState, workers: Iterable[WorkerId]) -> float:
    """Return the time (seconds) that these workers usually waited for cores in their last windows, if all did."""
    return statistics.median(state.workers[worker].pace.waited_s for worker in workers)


def _unqueued_s(pace: Pace) -> tuple[float, ...]:
    pairs = itertools.zip_longest(pace.samples_s, pace.queued_s, fillvalue=0.0)
    return tuple(max(0.0, sample_s - queued_s) for sample_s, queued_s in pairs)


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
        judged |= judge(medians_s, expected, rules, errors_s, _waited_s(state, members[stage]))
    return judged


def _with_sums(
    state: ControllerState, stages: Sequence[int], judged: Mapping[WorkerId, Judgement]
) -> dict[WorkerId, Judgement]:
    """Judge workers also by the total time of many windows: a worker that stops now and then has a good median.

    The differences between windows show how much of a total is chance. Many windows and a clear excess are required,
    because a core that is taken away stays away for several windows.
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
        waited_s = _waited_s(state, members[stage])
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


# Probing slow workers that were left out, at growing intervals, until they are well or given up.


def members_by_stage(state: ControllerState) -> dict[int, list[WorkerId]]:
    """Return the members that are still there, by stage; stages of unequal pipelines with the same sections and type of
    GPU do the same work and count as one stage, the first of them.
    """
    stages: dict[int, list[WorkerId]] = {}
    alike: dict[tuple[int, int, str], int] = {}
    for slot in state.slots:
        if slot.worker in state.workers and state.plan is not None:
            work = _work(state.plan.stages[slot.stage])
            stages.setdefault(alike.setdefault(work, slot.stage), []).append(slot.worker)
    return stages


def _work(stage: StagePlan) -> tuple[int, int, str]:
    return stage.first_section, stage.end_section, stage.node_type


def _last_median_s(pace: Pace) -> float | None:
    return pace.median_s


def usual_now(state: ControllerState, of: Callable[[Pace], float | None] = _last_median_s) -> Usual | None:
    """Return how all members compare with the profile by their last windows; None until each has filled one, without
    profiled times, or with too few members to tell. ``of``: the time (seconds) to compare.
    """
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


def healthy_now_s(state: ControllerState, yardstick: Yardstick) -> float:
    """Return the time (seconds) that a healthy worker takes now for the work at which a worker was slow.

    It is the time with which the worker was compared then, scaled by the change since then in how members compare with
    the profile. If healthy members do the same work and all take longer, it is the time of the fastest of them.
    """
    healthy_s, now = yardstick.healthy_s, usual_now(state)
    if now is not None and yardstick.usual is not None:
        healthy_s *= now.ratio / yardstick.usual
    work = (yardstick.first_section, yardstick.end_section, yardstick.node_type)
    taken_s = [
        median_s
        for stage, members in members_by_stage(state).items()
        if state.plan is not None and _work(state.plan.stages[stage]) == work
        for worker in members
        if (median_s := state.workers[worker].pace.median_s) is not None
        and state.workers[worker].node is not NodeState.SUSPECT
    ]
    return max(healthy_s, min(taken_s, default=0.0))


def on_worker_probed(transition: Transition, event: WorkerProbed) -> None:
    """Handle the answer to a probe: several good ones in a row bring a worker back."""
    state, now_s = transition.state, transition.now_s
    entry = state.workers.get(event.worker)
    probation = entry.probation if entry is not None else None
    if entry is None or probation is None or probation.requested_s is None or event.probe != probation.num_requested:
        return transition.say(ReasonCode.IGNORED, f"no such probe of {event.worker} is awaited")
    rules = state.config.policy.rules.stutter
    if event.slowdown is None and probation.num_requested < rules.max_probes:
        again = probation.model_copy(update={"requested_s": None, "due_s": now_s + rules.probe_every_s})
        transition.change_worker(event.worker, probation=again)
        transition.wake_by(now_s + rules.probe_every_s)
        return transition.say(ReasonCode.WORKER_PROBED, f"{event.worker} could not run its probe; another will follow")
    if event.slowdown is None:
        return _probe_failed(transition, event.worker, "did not come to its last probe")
    if event.slowdown >= rules.well_ratio:
        return _probe_failed(transition, event.worker, f"is still {event.slowdown:.2f} times slower")
    if probation.num_passed + 1 < rules.probe_passes:
        if probation.num_requested >= rules.max_probes:
            return _probe_failed(transition, event.worker, "passed too few probes")
        passed = {"num_passed": probation.num_passed + 1, "requested_s": None, "due_s": now_s + rules.probe_every_s}
        transition.change_worker(event.worker, probation=probation.model_copy(update=passed))
        transition.wake_by(now_s + rules.probe_every_s)
        return transition.say(ReasonCode.WORKER_PROBED, f"{event.worker} passed a probe; one more will follow")
    wait_s = hold_s(transition, entry.host or event.worker)
    eligible_s = now_s + wait_s if wait_s else None
    transition.change_node(event.worker, NodeEvent.WELL, probation=None, pace=Pace(), eligible_s=eligible_s)
    return transition.say(
        ReasonCode.WORKER_WELL,
        f"{event.worker} is as fast as it should be again, {counted(rules.probe_passes, 'test')} in a row",
    )


def probe_if_due(transition: Transition, worker: WorkerId) -> None:
    """Send a probe when it is due, or count an unanswered one as failed."""
    state, now_s = transition.state, transition.now_s
    entry = state.workers[worker]
    probation = entry.probation
    if probation is None or now_s < probe_at_s(state, entry):
        return None
    if probation.requested_s is not None:
        return _probe_failed(transition, worker, "did not answer a probe")
    requested = probation.model_copy(update={"num_requested": probation.num_requested + 1, "requested_s": now_s})
    transition.change_worker(worker, probation=requested)
    transition.wake_by(probe_at_s(state, transition.state.workers[worker]))
    return transition.say(ReasonCode.WORKER_PROBED, f"{worker} is probed", probe_of(transition.state, worker))


def probe_of(state: ControllerState, worker: WorkerId) -> ProbeWorker:
    """Build the worker's present probe: the stage on which it was slow, and a healthy worker's time for it."""
    entry = state.workers[worker]
    yardstick = entry.pace.yardstick
    assert entry.probation is not None and yardstick is not None, f"{worker} was never found slow"  # noqa: PT018
    members = [slot.worker for slot in state.slots if slot.worker in state.workers]
    waited_s = _waited_s(state, members) if all_lack_cores(state) else None
    return ProbeWorker(
        worker=worker,
        probe=entry.probation.num_requested,
        step=state.version,
        first_section=yardstick.first_section,
        end_section=yardstick.end_section,
        by_sums=yardstick.by_sums,
        waited_s=waited_s,
        healthy_s=healthy_now_s(state, yardstick) + (waited_s or 0.0),
    )


def probe_at_s(state: ControllerState, entry: WorkerState) -> float:
    """Return when the next probe of a worker on probation is due, or the present one counts as failed."""
    probation, yardstick = entry.probation, entry.pace.yardstick
    assert probation is not None and yardstick is not None, "it was never found slow"  # noqa: PT018
    if probation.requested_s is None:
        return probation.due_s
    return probation.requested_s + probe_bound_s(state, yardstick.healthy_s)


def _probe_failed(transition: Transition, worker: WorkerId, what: str) -> None:
    state = transition.state
    rules, probation = state.config.policy.rules.stutter, state.workers[worker].probation
    assert probation is not None, "nobody probed it"
    if probation.num_requested >= rules.max_probes:
        why = f"it {what}, after {probation.num_requested} probes"
        transition.say(ReasonCode.WORKER_REMOVED, "given up", EndWorker(worker=worker))
        return lose(transition, {worker: why})
    wait_s = Backoff(rules.probe_every_s, rules.probe_every_max_s).pause_s(probation.num_failed)
    failed = {
        "num_passed": 0,
        "num_failed": probation.num_failed + 1,
        "requested_s": None,
        "due_s": transition.now_s + wait_s,
    }
    transition.change_worker(worker, probation=probation.model_copy(update=failed))
    transition.wake_by(transition.now_s + wait_s)
    return transition.say(ReasonCode.WORKER_PROBED, f"{worker} {what}: probed again in {wait_s:g} s")
