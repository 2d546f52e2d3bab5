"""Probing slow workers that were left out, ever less often, until they are well or given up."""

from __future__ import annotations

from manager.controller.actions import EndWorker, ProbeWorker
from manager.controller.changes import followed, said, wake_by, with_node, with_worker
from manager.controller.events import WorkerProbed
from manager.controller.flapping import hold_s
from manager.controller.losing import lose
from manager.controller.measures import healthy_now_s
from manager.controller.nodes import NodeEvent
from manager.controller.reasons import ReasonCode
from manager.controller.state import ControllerState, Decision, Pace, Probation
from morph.contract.messages import WorkerId


def probed(state: ControllerState, event: WorkerProbed, now_s: float) -> Decision:
    """Take a probe's answer: some good ones in a row bring a worker back."""
    entry = state.workers.get(event.worker)
    probation = entry.probation if entry is not None else None
    if entry is None or probation is None or probation.asked_s is None or event.probe != probation.num_asked:
        return said(state, ReasonCode.IGNORED, f"no such probe of {event.worker} is awaited")
    rules = state.config.policy.rules.stutter
    if event.slowdown is None and probation.num_asked < rules.max_probes:
        again = probation.model_copy(update={"asked_s": None, "due_s": now_s + rules.probe_every_s})
        state = wake_by(with_worker(state, event.worker, probation=again), now_s + rules.probe_every_s)
        return said(state, ReasonCode.WORKER_PROBED, f"{event.worker} did not come to its probe; another is to follow")
    if event.slowdown is None:
        return _probe_failed(state, event.worker, "did not come to its last probe", now_s)
    if event.slowdown >= rules.well_ratio:
        return _probe_failed(state, event.worker, f"is still {event.slowdown:.2f} times slower", now_s)
    if probation.num_passed + 1 < rules.probe_passes:
        if probation.num_asked >= rules.max_probes:
            return _probe_failed(state, event.worker, "passed too few probes", now_s)
        passed = {"num_passed": probation.num_passed + 1, "asked_s": None, "due_s": now_s + rules.probe_every_s}
        state = with_worker(state, event.worker, probation=probation.model_copy(update=passed))
        state = wake_by(state, now_s + rules.probe_every_s)
        return said(state, ReasonCode.WORKER_PROBED, f"{event.worker} passed a probe; one more is to follow")
    wait_s = hold_s(state, entry.host or event.worker, now_s)
    eligible_s = now_s + wait_s if wait_s else None
    state = with_node(state, event.worker, NodeEvent.WELL, probation=None, pace=Pace(), eligible_s=eligible_s)
    return said(state, ReasonCode.WORKER_WELL, f"{event.worker} is well again, by {rules.probe_passes} probes")


def probe_due(state: ControllerState, worker: WorkerId, now_s: float) -> Decision | None:
    """Send a probe when it is time to, or count one that was never answered as failed; None: nothing is due."""
    probation = state.workers[worker].probation
    if probation is None or now_s < probe_at_s(state, probation):
        return None
    if probation.asked_s is not None:
        return _probe_failed(state, worker, "did not answer a probe", now_s)
    asked = probation.model_copy(update={"num_asked": probation.num_asked + 1, "asked_s": now_s})
    state = wake_by(with_worker(state, worker, probation=asked), probe_at_s(state, asked))
    return said(state, ReasonCode.WORKER_PROBED, f"{worker} is probed", probe_of(state, worker))


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


def probe_at_s(state: ControllerState, probation: Probation) -> float:
    """Return when the next probe is due, or the present one counts as failed."""
    if probation.asked_s is None:
        return probation.due_s
    return probation.asked_s + state.config.policy.order_timeout_s


def _probe_failed(state: ControllerState, worker: WorkerId, what: str, now_s: float) -> Decision:
    rules, probation = state.config.policy.rules.stutter, state.workers[worker].probation
    assert probation is not None, "nobody probed it"
    if probation.num_asked >= rules.max_probes:
        why = f"it {what}, after {probation.num_asked} probes"
        given_up = said(state, ReasonCode.WORKER_REMOVED, "given up", EndWorker(worker=worker))
        return followed(given_up, lose(state, {worker: why}, now_s))
    wait_s = min(rules.probe_every_s * float(2 ** min(probation.num_failed, 64)), rules.probe_every_max_s)
    failed = {
        "num_passed": 0,
        "num_failed": probation.num_failed + 1,
        "asked_s": None,
        "due_s": now_s + wait_s,
    }
    state = with_worker(state, worker, probation=probation.model_copy(update=failed))
    sentence = f"{worker} {what}: probed again in {wait_s:g} s"
    return said(wake_by(state, now_s + wait_s), ReasonCode.WORKER_PROBED, sentence)
