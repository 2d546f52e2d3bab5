"""Measures saves, steps and losses of VMs, and reports when the next save is due."""

from __future__ import annotations

from collections.abc import Mapping

from manager.controller.state.actions import NoteNextSave
from manager.controller.state.bounds import save_bound_s
from manager.controller.state.events import NodeAppeared
from manager.controller.state.judging import may_be_best
from manager.controller.state.saves import PendingCheckpoint
from manager.controller.state.state import Phase, WorkerState, mean_of
from manager.controller.state.transition import Transition
from manager.controller.steps.save_timing import RETRIES, goes_back_to, insurance_save, periodic_save, sooner
from morph.contract.checkpoint import Manifest, SaveKind
from morph.contract.messages import WorkerId
from morph.contract.vm_names import vm_of


def record_step_ordered(transition: Transition) -> None:
    """Record that a step begins; from the first step on there is work to lose."""
    transition.change_save_times(ordered_s=transition.now_s)
    if transition.state.saving.save_times.since_s is None:
        transition.change_save_times(saved_s=transition.now_s, since_s=transition.now_s)


def record_step_decided(transition: Transition) -> None:
    """Add the duration of a step to the mean."""
    times = transition.state.saving.save_times
    if times.ordered_s is not None:
        transition.change_save_times(step_s=mean_of(times.step_s, transition.now_s - times.ordered_s), ordered_s=None)


def record_shape_left(transition: Transition) -> None:
    """Drop the start of the step under way, which is dissolved."""
    transition.change_save_times(ordered_s=None)


def record_save_begun(transition: Transition, writers: dict[str, WorkerId], kind: SaveKind) -> PendingCheckpoint:
    """Record a save whose state is copied now, and written by ``writers`` after earlier ones; return it."""
    state, now_s = transition.state, transition.now_s
    earlier = [
        save
        for save in state.saving.under_way
        if save.version < state.version
        and save.debtors <= state.workers.keys()
        and now_s < save.started_s + save_bound_s(state)
    ]
    wanted = {save.version: save for save in may_be_best(state, [save for save in earlier if save.kind == "evaluated"])}
    wanted |= {save.version: save for save in earlier if goes_back_to(state, save.version)}
    pending = PendingCheckpoint(
        version=state.version,
        writers=writers,
        started_s=now_s,
        copied_s=now_s,
        kind=kind,
        shape="" if state.plan is None else state.plan.shape,
        judged=state.judged,
        losses=state.losses,
    )
    transition.change_saving(pending=pending, earlier=tuple(wanted[version] for version in sorted(wanted)))
    transition.change_save_times(since_s=now_s, retry_s=None, insurance=None)
    return pending


def record_units_complete(transition: Transition, pending: PendingCheckpoint) -> None:
    """Handle that every unit of a save is in storage: add the longest stall of any worker to the mean."""
    stall_s: dict[WorkerId, float] = {}
    for entry in pending.written.values():
        stall_s[entry.worker] = stall_s.get(entry.worker, 0.0) + entry.stall_s
    transition.change_save_times(
        stall_s=mean_of(transition.state.saving.save_times.stall_s, max(stall_s.values(), default=0.0))
    )


def record_save_complete(transition: Transition, manifest: Manifest) -> str:
    """Record a complete checkpoint; return the text about earlier saves that storage refused."""
    times = transition.state.saving.save_times
    if manifest.saved_s is not None:
        saved_s = manifest.saved_s if times.saved_s is None else max(times.saved_s, manifest.saved_s)
        transition.change_save_times(
            durable_s=mean_of(times.durable_s, transition.now_s - manifest.saved_s), saved_s=saved_s
        )
    transition.change_save_times(
        num_refused=0, retry_s=None, weighs=transition.state.config.policy.redundancy == "auto"
    )
    return f", after {times.num_refused} that storage refused" if times.num_refused else ""


def record_save_refused(transition: Transition) -> bool:
    """Record that storage refused a save, and delay the next one; returns whether it is the first refusal in a row."""
    num = transition.state.saving.save_times.num_refused + 1
    transition.change_save_times(num_refused=num, retry_s=transition.now_s + RETRIES.pause_s(num - 1))
    return num == 1


def vms_lost(transition: Transition, lost: Mapping[WorkerId, WorkerState]) -> None:
    """Count the VMs that are gone with these lost workers."""
    left = {vm_of(worker) for worker in transition.state.workers}
    appeared_s = {vm_of(worker): entry.appeared_s for worker, entry in lost.items() if vm_of(worker) not in left}
    if appeared_s:
        times = transition.state.saving.save_times
        lived_s = sum(max(0.0, transition.now_s - since_s) for since_s in appeared_s.values())
        transition.change_save_times(num_lost=times.num_lost + len(appeared_s), vm_s=times.vm_s + lived_s)


def vm_came(transition: Transition, event: NodeAppeared) -> None:
    """Add the time from a request to its VM to the mean."""
    request = transition.state.provisioning.requests.get(event.request) if event.request is not None else None
    if request is not None:
        transition.change_save_times(
            allocation_s=mean_of(
                transition.state.saving.save_times.allocation_s, transition.now_s - request.requested_s
            )
        )


def tell_next(transition: Transition) -> None:
    """Compute when the next save is due, and record it in the journal with the reason."""
    if transition.state.phase is not Phase.TRAINING:
        return
    state = transition.state
    saving = state.saving
    if not saving.sealing and (saving.pending is None or saving.pending.stale):  # the save under way failed
        transition.change_save_times(since_s=saving.save_times.saved_s)
    insurance = insurance_save(transition.state, transition.now_s)
    transition.change_save_times(insurance=insurance)
    save = sooner(periodic_save(transition.state, transition.now_s), insurance)
    if save is not None:
        transition.actions.append(NoteNextSave(next_save=save))
