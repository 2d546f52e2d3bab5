"""Noting what saves and steps take and how VMs fare, and telling when the next save comes."""

from __future__ import annotations

from collections.abc import Mapping

from manager.controller.saves.timing import RETRIES, insurance_save, periodic_save, sooner
from manager.controller.state.actions import NoteNextSave
from manager.controller.state.draft import Draft
from manager.controller.state.events import NodeAppeared
from manager.controller.state.saves import PendingCheckpoint
from manager.controller.state.state import Phase, WorkerState, mean_of
from morph.contract.checkpoint import Manifest, SaveKind
from morph.contract.messages import WorkerId
from morph.contract.vm_names import vm_of


def step_ordered(draft: Draft) -> None:
    """A step begins; with the first one there is something to lose."""
    draft.change_save_times(ordered_s=draft.now_s)
    if draft.state.saving.save_times.since_s is None:
        draft.change_save_times(saved_s=draft.now_s, since_s=draft.now_s)


def step_decided(draft: Draft) -> None:
    """Take the time of a step into the mean."""
    times = draft.state.saving.save_times
    if times.ordered_s is not None:
        draft.change_save_times(step_s=mean_of(times.step_s, draft.now_s - times.ordered_s), ordered_s=None)


def shape_left(draft: Draft) -> None:
    """The step under way is dissolved: its time is of no use."""
    draft.change_save_times(ordered_s=None)


def save_begun(draft: Draft, writers: dict[str, WorkerId], kind: SaveKind) -> PendingCheckpoint:
    """The decided version's state is copied now, and written by these."""
    state, now_s = draft.state, draft.now_s
    pending = PendingCheckpoint(
        version=state.version,
        writers=writers,
        started_s=now_s,
        copied_s=now_s,
        kind=kind,
        shape="" if state.plan is None else state.plan.shape,
    )
    draft.change_saving(pending=pending)
    draft.change_save_times(since_s=now_s, retry_s=None, insurance=None)
    return pending


def units_complete(draft: Draft, pending: PendingCheckpoint) -> None:
    """Every unit of a save is on storage: take its stall into the mean, that of the worker that stood longest."""
    stall_s: dict[WorkerId, float] = {}
    for entry in pending.written.values():
        stall_s[entry.worker] = stall_s.get(entry.worker, 0.0) + entry.stall_s
    draft.change_save_times(stall_s=mean_of(draft.state.saving.save_times.stall_s, max(stall_s.values(), default=0.0)))


def save_complete(draft: Draft, manifest: Manifest) -> str:
    """A checkpoint is complete; returns what is to be told of those before it that storage did not take."""
    times = draft.state.saving.save_times
    if manifest.saved_s is not None:
        saved_s = manifest.saved_s if times.saved_s is None else max(times.saved_s, manifest.saved_s)
        draft.change_save_times(durable_s=mean_of(times.durable_s, draft.now_s - manifest.saved_s), saved_s=saved_s)
    draft.change_save_times(num_refused=0, retry_s=None, weighs=draft.state.config.policy.redundancy == "auto")
    return f", after {times.num_refused} that storage did not take" if times.num_refused else ""


def save_refused(draft: Draft) -> bool:
    """Storage did not take a save: the next one is tried after a while. Returns whether it is the first in a row."""
    num = draft.state.saving.save_times.num_refused + 1
    draft.change_save_times(num_refused=num, retry_s=draft.now_s + RETRIES.pause_s(num - 1))
    return num == 1


def vms_lost(draft: Draft, lost: Mapping[WorkerId, WorkerState]) -> None:
    """Workers were lost and are forgotten: count the VMs that are gone with them."""
    left = {vm_of(worker) for worker in draft.state.workers}
    appeared_s = {vm_of(worker): entry.appeared_s for worker, entry in lost.items() if vm_of(worker) not in left}
    if appeared_s:
        times = draft.state.saving.save_times
        lived_s = sum(max(0.0, draft.now_s - since_s) for since_s in appeared_s.values())
        draft.change_save_times(num_lost=times.num_lost + len(appeared_s), vm_s=times.vm_s + lived_s)


def vm_came(draft: Draft, event: NodeAppeared) -> None:
    """Take the time from a request to its VM into the mean."""
    request = draft.state.provisioning.requests.get(event.request) if event.request is not None else None
    if request is not None:
        draft.change_save_times(
            allocation_s=mean_of(draft.state.saving.save_times.allocation_s, draft.now_s - request.asked_s)
        )


def tell_next(draft: Draft) -> None:
    """Work out when the next save comes, and put it into the journal with the reason."""
    if draft.state.phase is not Phase.TRAINING:
        return
    state = draft.state
    saving = state.saving
    if not saving.sealing and (saving.pending is None or saving.pending.stale):  # what was under way came to nothing
        draft.change_save_times(since_s=saving.save_times.saved_s)
    insurance = insurance_save(draft.state, draft.now_s)
    draft.change_save_times(insurance=insurance)
    save = sooner(periodic_save(draft.state, draft.now_s), insurance)
    if save is not None:
        draft.actions.append(NoteNextSave(next_save=save))
