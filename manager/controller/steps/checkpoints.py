"""Checkpoints: begun with a step or a commit, followed on their way to storage, sealed by a manifest; the run's end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from manager.controller.shape.placement import share_units
from manager.controller.state.actions import ReasonCode, SendCommit
from manager.controller.state.bounds import commit_bound_s, save_bound_s
from manager.controller.state.events import MANIFEST_WRITER, CheckpointFailed, ManifestWritten, UnitsWritten
from manager.controller.state.judging import (
    awaits_metrics,
    early_end,
    finisher,
    manifest_order,
    marked_with,
    note_complete,
    take_evaluation,
)
from manager.controller.state.saves import PendingCheckpoint
from manager.controller.state.state import ControllerState, OutstandingOrder, Phase
from manager.controller.state.transition import Transition
from manager.controller.steps.save_measuring import (
    record_save_begun,
    record_save_complete,
    record_save_refused,
    record_units_complete,
    tell_next,
)
from manager.controller.steps.save_timing import emergency_due, goes_back_to, is_due
from morph.contract.checkpoint import Manifest, SaveKind, UnitFile
from morph.contract.errors import TrainingStopped
from morph.contract.messages import CommitOrder, UnitId, UnitWritten, WorkerId
from morph.words import counted

SAVING = (Phase.COMMITTING, Phase.SEALING)
FIRST_PAUSE_S = 1.0
MOST_PAUSE_S = 30.0
"""Seconds between two attempts to write the last checkpoint."""


def begin_checkpoint_if_due(transition: Transition) -> tuple[dict[UnitId, WorkerId], str]:
    """Begin a checkpoint if one is due and none is under way; return the writers of units, and the reason."""
    state, now_s = transition.state, transition.now_s
    saving = state.saving
    pending = saving.pending
    under_way = pending is not None and not pending.stale and now_s < pending.started_s + save_bound_s(state)
    kind: SaveKind
    if state.version == saving.checkpoint_base:
        return {}, ""
    if _may_be_best(state) and not (under_way and pending is not None and pending.version == state.version):
        share = _shares(state)
        record_save_begun(transition, share, "evaluated")
        return share, "it is evaluated, and may be the best"
    begins = goes_back_to(state, state.version) and not any(
        goes_back_to(state, save.version) and not save.stale for save in saving.under_way
    )
    if (under_way or saving.sealing) and not begins:
        return {}, ""
    if emergency_due(transition):
        kind, why = "emergency", "VMs that are the only holders of some state are about to be taken"
    elif (due := is_due(state, now_s)) is not None:
        kind, why = due
    else:
        return {}, ""
    share = _shares(state)
    record_save_begun(transition, share, kind)
    return share, why


def _may_be_best(state: ControllerState) -> bool:
    """Whether the decided version is evaluated with the next step, to find the best one."""
    size = state.evaluation
    is_due = size is not None and size.best is not None and size.is_due(state.version)
    return is_due and state.version > state.judged.last_version


def _shares(state: ControllerState) -> dict[UnitId, WorkerId]:
    assert state.plan is not None, "no generation was formed"
    needed = state.config.units_of(state.plan)
    return share_units(state.slots, needed, state.config.unit_bytes)


def on_units_written(transition: Transition, event: UnitsWritten) -> None:
    """Record units that their assigned writers put into storage; after the last one, have the manifest written."""
    saving = transition.state.saving
    if not saving.under_way:
        return transition.say(ReasonCode.IGNORED, "no checkpoint is being written")
    new = {save.version: entries for save in saving.under_way if (entries := _awaited(save, event))}
    if not new:
        versions = ", ".join(str(save.version) for save in saving.under_way)
        return transition.say(ReasonCode.IGNORED, f"nothing of these is awaited for version {versions}")
    first = min(new)

    def note(save: PendingCheckpoint) -> PendingCheckpoint:
        if save.version < first:
            return save
        written = {**save.written, **new.get(save.version, {})}
        return save.model_copy(update={"written": written, "started_s": transition.now_s})

    transition.change_under_way(note)
    noted = transition.state.saving.under_way
    counts = (
        f"{len(save.written)} of {len(save.writers)} units of version {save.version}"
        for save in noted
        if save.version in new
    )
    transition.say(ReasonCode.UNITS_NOTED, f"{' and '.join(counts)} are written")
    if transition.state.phase is Phase.COMMITTING:
        return seal_if_complete(transition)
    trains = transition.state.phase is Phase.TRAINING
    for save in noted:
        if save.complete and not (trains and awaits_metrics(transition.state, save.version)):
            seal(transition, save)
    return None


def _awaited(pending: PendingCheckpoint, event: UnitsWritten) -> dict[UnitId, UnitWritten]:
    return {
        entry.unit: entry
        for entry in event.written
        if entry.version == pending.version
        and pending.writers.get(entry.unit) == entry.worker == event.worker
        and entry.unit not in pending.written
    }


def seal_if_awaited(transition: Transition) -> None:
    """Write the manifests of checkpoints that only waited for the result of an earlier evaluation."""
    _seal_earlier(transition)
    state = transition.state
    pending = state.saving.pending
    if pending is not None and pending.complete and not awaits_metrics(state, pending.version):
        seal(transition, pending)


def _seal_earlier(transition: Transition) -> None:
    for save in transition.state.saving.earlier:
        if save.complete and not awaits_metrics(transition.state, save.version):
            seal(transition, save)


def seal(transition: Transition, pending: PendingCheckpoint) -> None:
    """Handle that every unit is in storage: write the manifest."""
    state = transition.state
    files = [pending.written[unit] for unit in state.config.units]
    record_units_complete(transition, pending)
    manifest = Manifest(
        fingerprint=state.config.fingerprint,
        version=pending.version,
        kind=pending.kind,
        shape=pending.shape,
        saved_s=pending.started_s if pending.copied_s is None else pending.copied_s,
        judged=pending.judged,
        losses=pending.losses,
        marked=marked_with(state, pending.version, *(before.version for before in state.saving.sealing)),
        units=tuple(
            UnitFile.model_construct(**{key: getattr(file, key) for key in UnitFile.model_fields}) for file in files
        ),
    )
    transition.change_saving(sealing=(*state.saving.sealing, manifest), sealing_since_s=transition.now_s)
    if state.saving.pending is not None and state.saving.pending.version == pending.version:
        transition.change_saving(pending=None, unsaved_since_s=None, save_retry_s=None)
    else:
        transition.change_saving(earlier=tuple(old for old in state.saving.earlier if old.version != pending.version))
    sentence = f"every unit of version {pending.version} is written: its manifest follows"
    transition.say(ReasonCode.CHECKPOINT_SEALED, sentence, manifest_order(transition.state, manifest))


def on_checkpoint_failed(transition: Transition, event: CheckpointFailed) -> None:
    """Give up a failed checkpoint until the next is due; a run's last one and its manifest are tried until stored."""
    state = transition.state
    saving = state.saving
    sentence = f"{event.worker} could not write its part of a checkpoint: {event.error}"
    if event.worker == MANIFEST_WRITER and saving.sealing:
        if state.phase is Phase.SEALING and event.version in (None, state.version):
            reason = f"the manifest of version {state.version} cannot be written: {event.error}"
            return _save_later(transition, reason)
        left = tuple(entry for entry in saving.sealing if event.version not in (None, entry.version))
        since_s = saving.sealing_since_s if left else None
        transition.change_saving(sealing=left, sealing_since_s=since_s, checkpoint_base=_last_try(state))
        _abandon(transition, f"the manifest cannot be written: {event.error}")
        return end_if_saved(transition) if state.phase is Phase.SEALING else None
    lasting = tuple(
        save for save in saving.earlier if save.version != event.version or event.worker not in save.debtors
    )
    if lasting != saving.earlier:
        transition.change_saving(earlier=lasting)  # writing earlier checkpoints has delayed this one
        transition.change_under_way(lambda save: save.model_copy(update={"started_s": transition.now_s}))
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


def commit(transition: Transition) -> None:
    """Order every member to apply the decided version, and to write it unless it is a complete checkpoint already."""
    state, now_s = transition.state, transition.now_s
    saved = state.saving.checkpoint is not None and state.saving.checkpoint.version == state.version
    share = {} if saved else _shares(state)
    transition.change(phase=Phase.COMMITTING)
    transition.change_saving(unsaved_since_s=None, save_retry_s=None)
    transition.change_step(kept={})
    if saved:
        transition.change_saving(pending=None)
    else:
        record_save_begun(transition, share, "final")
    limit_s = commit_bound_s(state)
    order = OutstandingOrder(
        kind="commit", generation=state.generation, version=state.version, sent_s=now_s, limit_s=limit_s
    )
    transition.order(order, state.member_units)
    sentence = f"version {state.version} must be committed: {state.stop_reason or early_end(state) or 'it is the last'}"
    transition.say(ReasonCode.COMMIT_STARTED, sentence, *commit_orders(transition.state, share, state.member_units))


def commit_orders(
    state: ControllerState, share: dict[UnitId, WorkerId], receivers: Iterable[WorkerId]
) -> tuple[SendCommit, ...]:
    """Build the orders to write the decided version; while resting, each worker writes what it holds."""
    units = units_by_writer(share)
    plain = CommitOrder(
        generation=state.generation,
        version=state.version,
        decided=state.decided,
        earlier_checkpoints=tuple(save.version for save in state.saving.earlier),
        held=state.phase is Phase.RESTING,
    )
    fields = finish_fields(state)
    return tuple(
        SendCommit(
            worker=worker,
            order=plain.model_copy(update={"checkpoint_units": units.get(worker, ()), **fields.get(worker, {})}),
        )
        for worker in receivers
    )


def units_by_writer(share: dict[UnitId, WorkerId]) -> dict[WorkerId, tuple[UnitId, ...]]:
    """Return the units that each worker writes."""
    units: dict[WorkerId, tuple[UnitId, ...]] = {}
    for unit, writer in share.items():
        units[writer] = (*units.get(writer, ()), unit)
    return units


def finish_fields(state: ControllerState) -> dict[WorkerId, dict[str, Any]]:
    """Return the additional fields of the order for the worker that computes the metrics of an evaluation."""
    fields: dict[WorkerId, dict[str, Any]] = {}
    worker = finisher(state) if state.unfinished is not None else None
    if worker is not None:
        fields[worker] = {"evaluated": state.unfinished}
    return fields


def seal_if_complete(transition: Transition) -> None:
    """While committing: write the last manifest once every commit is answered and every unit written."""
    state = transition.state
    saving = state.saving
    if state.step.awaited:
        workers = counted(len(state.step.awaited), "worker has", "workers have")
        return transition.say(ReasonCode.COMMIT_WAIT, f"{workers} still to commit")
    try:
        take_evaluation(transition)
    except TrainingStopped as error:
        return transition.end("failed", str(error))
    transition.change_step(shares=(), finished=None)  # these were used, and answers of other kinds follow
    _seal_earlier(transition)
    state, saving = transition.state, transition.state.saving
    if state.unfinished is not None and (worker := finisher(state)) is not None:
        return _finish_evaluation(transition, worker)
    if saving.pending is None:
        return _end(transition)
    missing = len(saving.pending.writers) - len(saving.pending.written)
    if missing:
        sentence = f"{counted(missing, 'unit')} of the last checkpoint must still be written"
        return transition.say(ReasonCode.COMMIT_WAIT, sentence)
    transition.change(phase=Phase.SEALING)
    return seal(transition, saving.pending)


def _finish_evaluation(transition: Transition, worker: WorkerId) -> None:
    """While committing: have the metrics of the last evaluation computed, once every member has committed."""
    state = transition.state
    order = OutstandingOrder(
        kind="commit",
        generation=state.generation,
        version=state.version,
        sent_s=transition.now_s,
        limit_s=commit_bound_s(state),
    )
    transition.order(order, (worker,))
    sentence = f"{worker} computes the metrics of the evaluation at version {state.version}"
    transition.say(ReasonCode.COMMIT_WAIT, sentence, *commit_orders(transition.state, {}, (worker,)))


def end_if_saved(transition: Transition) -> None:
    """While sealing: end once the decided version and earlier ones that may be the best are complete, in any order."""
    state = transition.state
    if state.saving.checkpoint is not None and state.saving.checkpoint.version == state.version:
        if not state.saving.sealing:
            return _end(transition)
        return transition.say(
            ReasonCode.CHECKPOINT_COMPLETE, "the last checkpoint is complete; earlier ones are awaited"
        )
    return transition.say(ReasonCode.CHECKPOINT_COMPLETE, "an earlier checkpoint is complete; the last one is awaited")


def is_saved(state: ControllerState) -> bool:
    """Whether the decided version is a complete checkpoint."""
    return (0 if state.saving.checkpoint is None else state.saving.checkpoint.version) == state.version


def _end(transition: Transition) -> None:
    state = transition.state
    fails = state.failing is not None and state.failing.final
    if state.version >= state.config.num_steps and not fails:
        return transition.end("finished", f"all {state.config.num_steps} steps are done and saved")
    if not fails and (why := early_end(state)):
        return transition.end("finished", f"{why}; version {state.version} is saved")
    return transition.end("stopped", f"{state.stop_reason}; version {state.version} is saved")


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
