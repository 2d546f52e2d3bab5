"""Follows checkpoints on their way to storage."""

from __future__ import annotations

from manager.controller.state.actions import ReasonCode
from manager.controller.state.events import MANIFEST_WRITER, CheckpointFailed, ManifestWritten, UnitsWritten
from manager.controller.state.judging import awaits_metrics, manifest_order, note_complete
from manager.controller.state.saves import PendingCheckpoint
from manager.controller.state.state import ControllerState, Phase
from manager.controller.state.transition import Transition
from manager.controller.steps.recovery import is_saved
from manager.controller.steps.save_measuring import record_save_complete, record_save_refused, tell_next
from manager.controller.steps.training_loop import commit_orders, end_if_saved, seal, seal_if_complete
from morph.contract.messages import UnitId, UnitWritten

SAVING = (Phase.COMMITTING, Phase.SEALING)
FIRST_PAUSE_S = 1.0
MOST_PAUSE_S = 30.0
"""Seconds between two attempts to write the last checkpoint."""


def on_units_written(transition: Transition, event: UnitsWritten) -> None:
    """Record units that are in storage; after the last one, have the manifest written.

    Only its assigned writer's report counts: unless accumulation is exact, a worker of an earlier history may differ.
    """
    saving = transition.state.saving
    if not saving.under_way:
        return transition.say(ReasonCode.IGNORED, "no checkpoint is being written")
    new = {one.version: entries for one in saving.under_way if (entries := _awaited(one, event))}
    if not new:
        versions = ", ".join(str(one.version) for one in saving.under_way)
        return transition.say(ReasonCode.IGNORED, f"nothing of these is awaited for version {versions}")
    first = min(new)

    def note(one: PendingCheckpoint) -> PendingCheckpoint:
        if one.version < first:
            return one
        written = {**one.written, **new.get(one.version, {})}
        return one.model_copy(update={"written": written, "started_s": transition.now_s})

    transition.change_under_way(note)
    noted = transition.state.saving.under_way
    counts = (
        f"{len(one.written)} of {len(one.writers)} units of version {one.version}"
        for one in noted
        if one.version in new
    )
    transition.say(ReasonCode.UNITS_NOTED, f"{' and '.join(counts)} are written")
    if transition.state.phase is Phase.COMMITTING:
        return seal_if_complete(transition)
    trains = transition.state.phase is Phase.TRAINING
    for one in noted:
        if one.complete and not (trains and awaits_metrics(transition.state, one.version)):
            seal(transition, one)
    return None


def _awaited(pending: PendingCheckpoint, event: UnitsWritten) -> dict[UnitId, UnitWritten]:
    return {
        entry.unit: entry
        for entry in event.written
        if entry.version == pending.version
        and pending.writers.get(entry.unit) == entry.worker == event.worker
        and entry.unit not in pending.written
    }


def on_checkpoint_failed(transition: Transition, event: CheckpointFailed) -> None:
    """Give up a failed checkpoint until the next is due; a run's last one and its manifest are tried until stored."""
    state = transition.state
    saving = state.saving
    sentence = f"{event.worker} could not write its part of a checkpoint: {event.error}"
    if event.worker == MANIFEST_WRITER and saving.sealing:
        if state.phase is Phase.SEALING and event.version in (None, state.version):
            told = f"the manifest of version {state.version} cannot be written: {event.error}"
            return _save_later(transition, told)
        left = tuple(entry for entry in saving.sealing if event.version not in (None, entry.version))
        since_s = saving.sealing_since_s if left else None
        transition.change_saving(sealing=left, sealing_since_s=since_s, checkpoint_base=_last_try(state))
        _abandon(transition, f"the manifest cannot be written: {event.error}")
        return end_if_saved(transition) if state.phase is Phase.SEALING else None
    lasting = tuple(one for one in saving.earlier if one.version != event.version or event.worker not in one.debtors)
    if lasting != saving.earlier:
        transition.change_saving(earlier=lasting)  # writing earlier checkpoints has delayed this one
        transition.change_under_way(lambda one: one.model_copy(update={"started_s": transition.now_s}))
        return _abandon(transition, sentence)
    if (
        saving.pending is None
        or event.worker not in saving.pending.debtors
        or event.version not in (None, saving.pending.version)
    ):
        return transition.say(ReasonCode.IGNORED, f"{event.worker} had nothing to write: {event.error}")
    if state.phase is Phase.COMMITTING:
        pending = saving.pending.model_copy(update={"refused": saving.pending.refused | {event.worker}})
        transition.change_saving(pending=pending)
        return _save_later(transition, sentence)
    transition.change_saving(pending=None, checkpoint_base=_last_try(state))
    return _abandon(transition, sentence)


def _abandon(transition: Transition, sentence: str) -> None:
    """Abandon the pending checkpoint; only the first of several failures in a row is reported."""
    first = record_save_refused(transition)
    tell_next(transition)
    transition.say(ReasonCode.CHECKPOINT_ABANDONED if first else ReasonCode.UNITS_NOTED, sentence)


def on_manifest_written(transition: Transition, event: ManifestWritten) -> None:
    """Handle that a checkpoint is complete: from now on, lost state is restored from it."""
    state = transition.state
    saving = state.saving
    manifest = next((entry for entry in saving.sealing if entry.version == event.version), None)
    if manifest is None:
        return transition.say(ReasonCode.IGNORED, f"no manifest of version {event.version} is awaited")
    left = tuple(entry for entry in saving.sealing if entry.version != event.version)
    newest = manifest
    if saving.checkpoint is not None and saving.checkpoint.version > manifest.version:
        newest = saving.checkpoint
    transition.change_saving(
        sealing=left,
        sealing_since_s=saving.sealing_since_s if left else None,
        checkpoint=newest,
        checkpoint_base=max(saving.checkpoint_base, min(manifest.version, state.version)),
    )
    note_complete(transition, manifest.version)
    if state.phase is Phase.RESTING and state.stop_reason is not None and is_saved(transition.state):
        return transition.end("stopped", f"{state.stop_reason}; version {state.version} is saved")
    before = record_save_complete(transition, manifest)
    transition.say(ReasonCode.CHECKPOINT_COMPLETE, f"the checkpoint of version {event.version} is complete{before}")
    tell_next(transition)
    if state.phase is Phase.SEALING:
        end_if_saved(transition)
    return None


def _save_later(transition: Transition, sentence: str) -> None:
    """Try again after a pause that is as long as the wait so far, between ``FIRST_PAUSE_S`` and ``MOST_PAUSE_S``."""
    state, now_s = transition.state, transition.now_s
    saving = state.saving
    since_s = now_s if saving.unsaved_since_s is None else saving.unsaved_since_s
    retry_s = now_s + min(MOST_PAUSE_S, max(FIRST_PAUSE_S, now_s - since_s))
    code = ReasonCode.CHECKPOINT_ABANDONED if saving.unsaved_since_s is None else ReasonCode.UNITS_NOTED
    pending = None if saving.pending is None else saving.pending.model_copy(update={"started_s": retry_s})
    sealing_since_s = None if saving.sealing_since_s is None else retry_s
    transition.change_saving(pending=pending, sealing_since_s=sealing_since_s)
    transition.change_saving(unsaved_since_s=since_s, save_retry_s=retry_s)
    transition.say(code, f"{sentence}; it is tried again until it succeeds")


def save_if_due(transition: Transition) -> None:
    """Try again to write the last checkpoint, for which the end of the run waits, if it is time."""
    state, now_s = transition.state, transition.now_s
    saving = state.saving
    since_s, retry_s = saving.unsaved_since_s, saving.save_retry_s
    if state.phase not in SAVING or since_s is None or retry_s is None or now_s < retry_s:
        return None
    limit_s = state.config.policy.rules.wait.vms_patience_s
    if now_s >= since_s + limit_s:
        return transition.end("failed", f"version {state.version} could not be written for {limit_s:g} s")
    transition.change_saving(save_retry_s=None)
    sentence = f"version {state.version} is written once more"
    if state.phase is Phase.SEALING:
        manifests = [manifest_order(state, manifest) for manifest in saving.sealing]
        return transition.say(ReasonCode.CHECKPOINT_SEALED, sentence, *manifests)
    if saving.pending is None:
        return None
    pending = saving.pending
    owed = {unit: worker for unit, worker in pending.writers.items() if unit not in pending.written}
    orders = commit_orders(state, owed, sorted(pending.refused & pending.debtors))
    transition.change_saving(pending=pending.model_copy(update={"refused": frozenset()}))
    return transition.say(ReasonCode.COMMIT_STARTED, sentence, *orders)


def _last_try(state: ControllerState) -> int:
    """Return the version from which the next interval counts: that of the failed checkpoint, to spare the storage."""
    saving = state.saving
    tried = [entry.version for entry in saving.sealing]
    if saving.pending is not None:
        tried.append(saving.pending.version)
    return max(saving.checkpoint_base, min(max(tried), state.version))
