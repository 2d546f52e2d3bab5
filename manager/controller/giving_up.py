"""Ends or rests a run whose VMs achieve nothing: setups keep failing in one way, or no step is trained for too long."""

from __future__ import annotations

from manager.controller.node_requests import VARYING
from manager.controller.shape.formation import form
from manager.controller.state.actions import ReasonCode
from manager.controller.state.nodes import NodeState
from manager.controller.state.state import ControllerState, FailedSetups, Phase
from manager.controller.state.transition import Transition
from manager.controller.steps.doubt import find_whole, in_doubt
from manager.controller.steps.recovery import stop_while_resting
from morph.contract.messages import Failed, WorkerId
from morph.contract.vm_names import vm_of
from morph.words import counted

UNTRAINED = (Phase.STARTING, Phase.WAITING, Phase.RESTING)
"""Phases in which no shape trains or is about to train."""
_IDLE = (Phase.STARTING, Phase.WAITING)
_GIVES_UP = (*UNTRAINED, Phase.HOLDING, Phase.RESHAPING, Phase.TRAINING, Phase.ABORTING)
_SECONDS_PER_H = 3600.0


def note_failed_setup(transition: Transition, worker: WorkerId, host: str, answer: Failed) -> str:
    """Record that a worker on this machine could not be set up; return the sentence on it."""
    known, way = transition.state.provisioning.failed_setups, _way_of(answer)
    before = known if known is not None and known.way == way else None
    sentence = f"{worker} could not be set up: {answer.error}"
    failed = FailedSetups(
        way=way,
        num=1 if before is None else before.num + 1,
        hosts=frozenset({host or worker}) | (frozenset() if before is None else before.hosts),
        since_s=transition.now_s if before is None else before.since_s,
        last_s=transition.now_s,
        sentence=sentence,
        traceback=answer.traceback,
        cause=answer.cause,
    )
    transition.change_provisioning(failed_setups=failed)
    return f"{sentence}{_as_before(failed)}"


def _way_of(answer: Failed) -> str:
    """Return a key of the cause: the line of the user's code, else the message without numbers, addresses and names."""
    frames = [line.strip() for line in answer.traceback.splitlines() if line.startswith("  File ")]
    where = frames[-1] if frames else VARYING.sub("#", answer.error.replace(answer.worker, ""))
    return f"{answer.cause}, {answer.detail}: {where}"


def _as_before(failed: FailedSetups) -> str:
    return f" ({failed.num} workers in a row, in the same way)" if failed.num > 1 else ""


def count_idle(transition: Transition) -> None:
    """Add the time since the last event to the VM time paid for without training; call before handling an event."""
    state, waits = transition.state, transition.state.waits
    if waits.idle_at_s is not None:
        passed_s = max(0.0, transition.now_s - waits.idle_at_s)
        transition.change_waits(idle_vm_s=waits.idle_vm_s + passed_s * _num_vms(state), idle_at_s=None)


def note_idle(transition: Transition) -> None:
    """Start counting idle VM time from now if no step is trained after this event."""
    if transition.state.config.idle_vm_h is not None and transition.state.phase in UNTRAINED:
        transition.change_waits(idle_at_s=transition.now_s)


def idle_until_s(state: ControllerState) -> float | None:
    """Return when (seconds) idle VMs reach the limit, if nothing changes; None if they never do."""
    idle_at_s, left_s = state.waits.idle_at_s, _idle_left_s(state)
    if idle_at_s is None or left_s is None or left_s <= 0 or not (num_vms := _num_vms(state)):
        return None
    return idle_at_s + left_s / num_vms


def give_up_if_due(transition: Transition) -> None:
    """End the run, after saving what workers hold, if the VMs that it pays for achieve nothing."""
    state = transition.state
    if state.stop_reason is not None or state.phase not in _GIVES_UP:
        return None
    setups = _why_setups_end_it(state, transition.now_s)
    why = setups or _why_idle_vms_end_it(state)
    if not why:
        return None
    pending = state.saving.pending
    if state.phase in _IDLE and (state.saving.sealing or (pending is not None and not pending.stale)):
        return None  # workers are still writing what they hold
    transition.change_provisioning(gives_up="setups" if setups else "limit")
    return _end(transition, why)


def gives_up_at_start(transition: Transition) -> None:
    """Before the first shape, one failure of the job's own code is enough: it would fail on any worker."""
    failed = transition.state.provisioning.failed_setups
    assert failed is not None, "no setup failed"
    transition.change_provisioning(gives_up="setups")
    _end(transition, failed.sentence)


def _end(transition: Transition, why: str) -> None:
    state = transition.state
    if state.phase in _IDLE:
        saved = 0 if state.saving.checkpoint is None else state.saving.checkpoint.version
        return transition.end("stopped", f"{why}; version {saved} is saved" if saved else why)
    transition.change(stop_reason=why)
    transition.say(ReasonCode.STOP_NOTED, f"{why}: the run ends once its state is saved")
    if state.phase is Phase.RESTING:
        return find_whole(transition) if in_doubt(state) else stop_while_resting(transition)
    return form(transition) if state.phase is Phase.HOLDING else None


def _why_setups_end_it(state: ControllerState, now_s: float) -> str:
    failed, rules = state.provisioning.failed_setups, state.config.policy.rules.setups
    if failed is None or failed.num < rules.alike:
        return ""
    if state.phase in _IDLE:
        for entry in state.workers.values():
            if entry.node is NodeState.WARMING and entry.appeared_s <= failed.last_s:
                return ""  # the next worker may succeed
    elif len(failed.hosts) < rules.alike or now_s < failed.since_s + rules.beside_training_s:
        return ""  # one machine may be at fault while the others train
    return f"{failed.sentence}{_as_before(failed)}"


def _why_idle_vms_end_it(state: ControllerState) -> str:
    left_s, limit_h = _idle_left_s(state), state.config.idle_vm_h
    if state.phase not in UNTRAINED or left_s is None or left_s > 1e-6:
        return ""
    sentence = f"VMs were paid for {limit_h:g} hours together while no step was trained (vms.limits.idle_vm_h)"
    failed, fewest = state.provisioning.failed_setups, counted(state.config.fewest_workers, "worker is", "workers are")
    return f"{sentence}: {fewest} needed" if failed is None else f"{sentence}: {failed.sentence}"


def _idle_left_s(state: ControllerState) -> float | None:
    limit_h = state.config.idle_vm_h
    return None if limit_h is None else limit_h * _SECONDS_PER_H - state.waits.idle_vm_s


def _num_vms(state: ControllerState) -> int:
    booting = (worker for request in state.provisioning.requests.values() for worker in request.booting)
    return len({vm_of(worker) for worker in (*state.workers, *booting)})
