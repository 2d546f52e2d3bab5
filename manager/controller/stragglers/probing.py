"""Probing slow workers that were left out, ever less often, until they are well or given up."""

from __future__ import annotations

from manager.controller.failures.lost_workers import lose
from manager.controller.shape.flapping import hold_s
from manager.controller.state.actions import EndWorker, ProbeWorker
from manager.controller.state.bounds import probe_bound_s
from manager.controller.state.draft import Draft
from manager.controller.state.events import WorkerProbed
from manager.controller.state.nodes import NodeEvent, NodeState
from manager.controller.state.reasons import ReasonCode
from manager.controller.state.state import ControllerState, Pace, WorkerState, Yardstick
from manager.controller.stragglers.outliers import Usual, usual
from morph.contract.messages import WorkerId
from morph.contract.waits import Backoff
from morph.words import counted


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


def probed(draft: Draft, event: WorkerProbed) -> None:
    """Take a probe's answer: some good ones in a row bring a worker back."""
    state, now_s = draft.state, draft.now_s
    entry = state.workers.get(event.worker)
    probation = entry.probation if entry is not None else None
    if entry is None or probation is None or probation.asked_s is None or event.probe != probation.num_asked:
        return draft.say(ReasonCode.IGNORED, f"no such probe of {event.worker} is awaited")
    rules = state.config.policy.rules.stutter
    if event.slowdown is None and probation.num_asked < rules.max_probes:
        again = probation.model_copy(update={"asked_s": None, "due_s": now_s + rules.probe_every_s})
        draft.change_worker(event.worker, probation=again)
        draft.wake_by(now_s + rules.probe_every_s)
        return draft.say(ReasonCode.WORKER_PROBED, f"{event.worker} did not come to its probe; another is to follow")
    if event.slowdown is None:
        return _probe_failed(draft, event.worker, "did not come to its last probe")
    if event.slowdown >= rules.well_ratio:
        return _probe_failed(draft, event.worker, f"is still {event.slowdown:.2f} times slower")
    if probation.num_passed + 1 < rules.probe_passes:
        if probation.num_asked >= rules.max_probes:
            return _probe_failed(draft, event.worker, "passed too few probes")
        passed = {"num_passed": probation.num_passed + 1, "asked_s": None, "due_s": now_s + rules.probe_every_s}
        draft.change_worker(event.worker, probation=probation.model_copy(update=passed))
        draft.wake_by(now_s + rules.probe_every_s)
        return draft.say(ReasonCode.WORKER_PROBED, f"{event.worker} passed a probe; one more is to follow")
    wait_s = hold_s(draft, entry.host or event.worker)
    eligible_s = now_s + wait_s if wait_s else None
    draft.change_node(event.worker, NodeEvent.WELL, probation=None, pace=Pace(), eligible_s=eligible_s)
    return draft.say(ReasonCode.WORKER_WELL, f"{event.worker} is well again, by {counted(rules.probe_passes, 'probe')}")


def probe_if_due(draft: Draft, worker: WorkerId) -> None:
    """Send a probe when it is time to, or count one that was never answered as failed."""
    state, now_s = draft.state, draft.now_s
    entry = state.workers[worker]
    probation = entry.probation
    if probation is None or now_s < probe_at_s(state, entry):
        return None
    if probation.asked_s is not None:
        return _probe_failed(draft, worker, "did not answer a probe")
    asked = probation.model_copy(update={"num_asked": probation.num_asked + 1, "asked_s": now_s})
    draft.change_worker(worker, probation=asked)
    draft.wake_by(probe_at_s(state, draft.state.workers[worker]))
    return draft.say(ReasonCode.WORKER_PROBED, f"{worker} is probed", probe_of(draft.state, worker))


def probe_of(state: ControllerState, worker: WorkerId) -> ProbeWorker:
    """Build the probe that this worker was asked last: on the stage on which it was slow, against what others take."""
    entry = state.workers[worker]
    yardstick = entry.pace.yardstick
    assert entry.probation is not None and yardstick is not None, f"{worker} was never found slow"  # noqa: PT018
    return ProbeWorker(
        worker=worker,
        probe=entry.probation.num_asked,
        step=state.version,
        first_section=yardstick.first_section,
        end_section=yardstick.end_section,
        healthy_s=healthy_now_s(state, yardstick),
    )


def probe_at_s(state: ControllerState, entry: WorkerState) -> float:
    """Return when the next probe of a worker on probation is due, or the present one counts as failed."""
    probation, yardstick = entry.probation, entry.pace.yardstick
    assert probation is not None and yardstick is not None, "it was never found slow"  # noqa: PT018
    if probation.asked_s is None:
        return probation.due_s
    return probation.asked_s + probe_bound_s(state, yardstick.healthy_s)


def _probe_failed(draft: Draft, worker: WorkerId, what: str) -> None:
    state = draft.state
    rules, probation = state.config.policy.rules.stutter, state.workers[worker].probation
    assert probation is not None, "nobody probed it"
    if probation.num_asked >= rules.max_probes:
        why = f"it {what}, after {probation.num_asked} probes"
        draft.say(ReasonCode.WORKER_REMOVED, "given up", EndWorker(worker=worker))
        return lose(draft, {worker: why})
    wait_s = Backoff(rules.probe_every_s, rules.probe_every_max_s).pause_s(probation.num_failed)
    failed = {
        "num_passed": 0,
        "num_failed": probation.num_failed + 1,
        "asked_s": None,
        "due_s": draft.now_s + wait_s,
    }
    draft.change_worker(worker, probation=probation.model_copy(update=failed))
    draft.wake_by(draft.now_s + wait_s)
    return draft.say(ReasonCode.WORKER_PROBED, f"{worker} {what}: probed again in {wait_s:g} s")
