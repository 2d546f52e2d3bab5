"""Probing slow workers that were left out, at growing intervals, until they are well or given up."""

from __future__ import annotations

from manager.controller.paces import all_lack_cores, members_by_stage, usual_now, usually_waited_s, work_of
from manager.controller.shape.selection import hold_s
from manager.controller.state.actions import EndWorker, ProbeWorker, ReasonCode
from manager.controller.state.bounds import probe_bound_s
from manager.controller.state.events import WorkerProbed
from manager.controller.state.nodes import NodeEvent, NodeState
from manager.controller.state.state import ControllerState, Pace, WorkerState, Yardstick
from manager.controller.state.transition import Transition
from manager.controller.steps.failures import lose
from morph.contract.messages import WorkerId
from morph.contract.waits import Backoff
from morph.words import counted


def healthy_now_s(state: ControllerState, yardstick: Yardstick) -> float:
    """Return the time (seconds) that a healthy worker takes now for the work at which a worker was slow.

    It is the time of that comparison, scaled as members' pace has changed, or the fastest member's if that is more.
    """
    healthy_s, now = yardstick.healthy_s, usual_now(state)
    if now is not None and yardstick.usual is not None:
        healthy_s *= now.ratio / yardstick.usual
    work = (yardstick.first_section, yardstick.end_section, yardstick.node_type)
    taken_s = [
        median_s
        for stage, members in members_by_stage(state).items()
        if state.plan is not None and work_of(state.plan.stages[stage]) == work
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
    waited_s = usually_waited_s(state, members) if all_lack_cores(state) else None
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
