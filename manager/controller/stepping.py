"""The training loop: first order of a generation, step boundaries, overflow, the last commit."""

from __future__ import annotations

from collections.abc import Sequence

from manager.controller.actions import SendCommit, SendStep, WriteManifest
from manager.controller.changes import (
    busy_workers,
    changed,
    ended,
    followed,
    member_units,
    said,
    with_orders,
)
from manager.controller.forming import form, join_gain
from manager.controller.placement import share_units, units_by_stage
from manager.controller.reasons import ReasonCode
from manager.controller.state import (
    ControllerState,
    Decision,
    OutstandingOrder,
    PendingCheckpoint,
    Phase,
    WorkerState,
)
from morph.contract.checkpoint import Manifest, UnitFile
from morph.contract.decided import decided_step
from morph.contract.errors import TrainingStopped
from morph.contract.messages import CommitOrder, StepOrder, UnitId, WorkerId

MAX_ATTEMPTS = 8


def begin(state: ControllerState, now_s: float) -> Decision:
    """Everybody is reshaped: give the first order of the generation; members drop what their stage does not need."""
    units = member_units(state)
    workers = {
        worker: entry.model_copy(update={"holds": units[worker]}) if worker in units else entry
        for worker, entry in state.workers.items()
    }
    return _go_on(changed(state, workers=workers), now_s)


def decide_step(state: ControllerState, now_s: float) -> Decision:
    """Every member prepared the step: run it again if a gradient overflowed, else decide the next version.

    A gradient that is not finite fits no scale: then the step is decided as skipped, whatever overflowed.
    """
    members = [state.workers[slot.worker] for slot in state.slots]
    overflowed = [slot.worker for slot in state.slots if state.workers[slot.worker].overflowed]
    if overflowed and not any(member.non_finite for member in members):
        return _retry(state, overflowed, now_s)
    try:
        state = _with_facts(state, members)
    except TrainingStopped as error:
        return ended(state, "failed", str(error))
    units = member_units(state)
    workers = {
        worker: entry.model_copy(update={"holds": units.get(worker, frozenset())})
        for worker, entry in state.workers.items()
    }
    step = state.version
    state = changed(state, version=step + 1, attempt=0, num_fruitless=0, workers=workers)
    sentence = f"every worker prepared step {step}: version {step + 1} is decided"
    if state.decided is not None and state.decided.skipped:
        sentence += ", its weights unchanged, for a gradient is not finite"
    decided = said(state, ReasonCode.STEP_DECIDED, sentence)
    if _is_last(state):
        return followed(decided, _commit(state, now_s))
    gain = join_gain(state)
    if gain > 0 and gain >= state.config.policy.min_join_gain:
        why = said(state, ReasonCode.FORMED, f"more workers are ready, {gain:.1%} faster")
        return followed(followed(decided, why), form(state, now_s))
    return followed(decided, _step(state, now_s), ReasonCode.STEP_DECIDED)


def seal_if_complete(state: ControllerState, now_s: float) -> Decision:
    """While committing: write the last manifest once every commit is answered and every unit written."""
    busy = busy_workers(state)
    if busy:
        return said(state, ReasonCode.COMMIT_WAIT, f"{len(busy)} workers have still to commit")
    if state.pending is None:
        return _end(state)
    missing = len(state.pending.writers) - len(state.pending.written)
    if missing:
        return said(state, ReasonCode.COMMIT_WAIT, f"{missing} units of the last checkpoint are still to be written")
    return seal(changed(state, phase=Phase.SEALING), state.pending, now_s)


def seal(state: ControllerState, pending: PendingCheckpoint, now_s: float) -> Decision:
    """Every unit is on storage: write the manifest."""
    files = [pending.written[unit] for unit in state.config.units]
    manifest = Manifest(
        fingerprint=state.config.fingerprint,
        version=pending.version,
        units=tuple(
            UnitFile(unit=entry.unit, file=entry.file, size_bytes=entry.size_bytes, sha256=entry.sha256)
            for entry in files
        ),
    )
    state = changed(state, pending=None, sealing=(*state.sealing, manifest), sealing_since_s=now_s)
    sentence = f"every unit of version {pending.version} is written: its manifest follows"
    return said(state, ReasonCode.CHECKPOINT_SEALED, sentence, WriteManifest(manifest=manifest))


def end_if_saved(state: ControllerState) -> Decision:
    """While sealing: end once the decided version is a complete checkpoint."""
    if state.checkpoint is not None and state.checkpoint.version == state.version:
        return _end(state)
    return said(state, ReasonCode.CHECKPOINT_COMPLETE, "an earlier checkpoint is complete; the last one is awaited")


def _with_facts(state: ControllerState, members: Sequence[WorkerState]) -> ControllerState:
    """Note what is decided of the step that is prepared, and the loss scale of the next one."""
    decided = decided_step(
        state.version + 1,
        [member.unit_norms_sq for member in members],
        [member.non_finite for member in members],
        state.config.units,
    )
    scale = state.loss_scale.after(skipped=decided.skipped) if state.loss_scale is not None else None
    return changed(state, decided=decided, loss_scale=scale)


def _end(state: ControllerState) -> Decision:
    if state.version >= state.config.num_steps:
        return ended(state, "finished", f"all {state.config.num_steps} steps are committed and saved")
    return ended(state, "stopped", f"{state.stop_reason}; version {state.version} is saved")


def _is_last(state: ControllerState) -> bool:
    return state.version >= state.config.num_steps or state.stop_reason is not None


def _go_on(state: ControllerState, now_s: float) -> Decision:
    return _commit(state, now_s) if _is_last(state) else _step(state, now_s)


def _step(state: ControllerState, now_s: float) -> Decision:
    """Order step ``state.version`` from every member, with a checkpoint of the version when one is due."""
    state, share = _with_due_checkpoint(state, now_s)
    sentence = f"step {state.version} is ordered"
    if share:
        sentence += f", with a checkpoint of version {state.version}"
    return _send_step(state, share, sentence, ReasonCode.STEP_STARTED, now_s)


def _retry(state: ControllerState, overflowed: list[WorkerId], now_s: float) -> Decision:
    attempt = state.attempt + 1
    sentence = f"a gradient of step {state.version} overflowed on {', '.join(overflowed)}"
    if attempt >= MAX_ATTEMPTS:
        return ended(state, "failed", f"{sentence}, {attempt} times in a row")
    sentence += f"; attempt {attempt} of the step is ordered"
    return _send_step(changed(state, attempt=attempt), {}, sentence, ReasonCode.OVERFLOW_RETRY, now_s)


def _send_step(
    state: ControllerState, share: dict[UnitId, WorkerId], sentence: str, code: ReasonCode, now_s: float
) -> Decision:
    generation, step, attempt = state.generation, state.version, state.attempt
    outstanding = OutstandingOrder(kind="step", generation=generation, version=step, attempt=attempt, sent_s=now_s)
    members = [slot.worker for slot in state.slots]
    actions = []
    for worker in members:
        mine = tuple(unit for unit, writer in share.items() if writer == worker)
        order = StepOrder(
            generation=generation,
            step=step,
            attempt=attempt,
            decided=state.decided,
            loss_scale=state.loss_scale,
            checkpoint_units=mine,
            record_timeline=step == state.config.timeline_step,
        )
        actions.append(SendStep(worker=worker, order=order))
    state = changed(with_orders(state, dict.fromkeys(members, outstanding)), phase=Phase.TRAINING)
    return said(state, code, sentence, *actions)


def _commit(state: ControllerState, now_s: float) -> Decision:
    """Order every member to apply the decided version, and to write it unless it is a complete checkpoint already."""
    saved = state.checkpoint is not None and state.checkpoint.version == state.version
    share = {} if saved else _shares(state)
    pending = None if saved else PendingCheckpoint(version=state.version, writers=share, started_s=now_s)
    outstanding = OutstandingOrder(kind="commit", generation=state.generation, version=state.version, sent_s=now_s)
    members = [slot.worker for slot in state.slots]
    actions = []
    for worker in members:
        mine = tuple(unit for unit, writer in share.items() if writer == worker)
        order = CommitOrder(
            generation=state.generation, version=state.version, decided=state.decided, checkpoint_units=mine
        )
        actions.append(SendCommit(worker=worker, order=order))
    state = changed(with_orders(state, dict.fromkeys(members, outstanding)), phase=Phase.COMMITTING, pending=pending)
    why = state.stop_reason or "it is the last"
    return said(state, ReasonCode.COMMIT_STARTED, f"version {state.version} is to be committed: {why}", *actions)


def _shares(state: ControllerState) -> dict[UnitId, WorkerId]:
    assert state.plan is not None, "no generation was formed"
    needed = units_by_stage(state.plan, state.config.units)
    return share_units(state.slots, needed, state.config.unit_bytes)


def _with_due_checkpoint(state: ControllerState, now_s: float) -> tuple[ControllerState, dict[UnitId, WorkerId]]:
    policy, pending = state.config.policy, state.pending
    if state.version - state.checkpoint_base < policy.checkpoint_every_steps or state.sealing:
        return state, {}
    if pending is not None and not pending.stale and now_s < pending.started_s + policy.order_timeout_s:
        return state, {}
    share = _shares(state)
    return changed(state, pending=PendingCheckpoint(version=state.version, writers=share, started_s=now_s)), share
