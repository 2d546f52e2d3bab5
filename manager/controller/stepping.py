"""The training loop: first order of a generation, step boundaries, overflow, the last commit."""

from __future__ import annotations

from collections.abc import Iterable

from manager.controller.actions import SendCommit, SendStep, WriteManifest
from manager.controller.ahead import drop_if_stale
from manager.controller.boundary import change_due, drain_due, draining_members
from manager.controller.changes import busy_workers, changed, ended, followed, mean_of, said, with_order
from manager.controller.forming import form
from manager.controller.placement import share_units, units_by_stage
from manager.controller.reasons import ReasonCode
from manager.controller.sending import send_ahead
from manager.controller.state import ControllerState, Decision, OutstandingOrder, PendingCheckpoint, Phase
from morph.contract.checkpoint import Manifest, UnitFile
from morph.contract.decided import decided_step
from morph.contract.errors import TrainingStopped
from morph.contract.messages import CommitOrder, StepOrder, UnitId, WorkerId

MAX_ATTEMPTS = 8


def begin(state: ControllerState, now_s: float) -> Decision:
    """Everybody is reshaped: give the first order of the generation; members drop what their stage does not need."""
    if state.morph_began_s is not None:
        took_s = now_s - state.morph_began_s
        state = changed(state, morph_s=mean_of(state.morph_s, took_s), morph_began_s=None)
    leaving = drain_due(state, now_s) if not _is_last(state) else None
    if leaving is not None:  # nobody was given an order yet, so nobody dropped anything
        return followed(said(state, ReasonCode.FORMED, leaving), form(state, now_s, planned=True))
    state = _with_holdings(state, others_keep=True)
    return _commit(state, now_s) if _is_last(state) else _step(state, now_s)


def decide_step(state: ControllerState, now_s: float) -> Decision:
    """Every member prepared the step: run it again if a gradient overflowed, else decide the next version.

    A gradient that is not finite fits no scale: then the step is decided as skipped, whatever overflowed.
    """
    overflowed = [worker for worker in state.member_units if state.reports[worker].overflowed]
    if overflowed and not any(report.non_finite for report in state.reports.values()):
        return _retry(state, overflowed, now_s)
    try:
        state = _with_facts(state)
    except TrainingStopped as error:
        return ended(state, "failed", str(error))
    state = _with_holdings(state, others_keep=False)
    step = state.version
    state = changed(state, version=step + 1, attempt=0, num_fruitless=0, resting_since_s=None)
    if state.failing is not None and state.failing.version <= step and not state.failing.final:
        state = changed(state, failing=None)
    sentence = f"every worker prepared step {step}: version {step + 1} is decided"
    if state.decided is not None and state.decided.skipped:
        sentence += ", its weights unchanged, for a gradient is not finite"
    decided = said(state, ReasonCode.STEP_DECIDED, sentence)
    if _is_last(state):
        return followed(decided, _commit(state, now_s))
    state, why = change_due(state, now_s)
    if why is None:
        state, dropped = drop_if_stale(state, now_s)
        decided = decided.model_copy(update={"actions": dropped})
        return followed(decided, _step(state, now_s), ReasonCode.STEP_DECIDED)
    decided = followed(decided, said(state, ReasonCode.FORMED, why))
    waiting = send_ahead(state, now_s)
    if waiting is None:
        return followed(decided, form(state, now_s, planned=True))
    return followed(followed(decided, waiting), _step(waiting.state, now_s), ReasonCode.STEP_DECIDED)


def seal_if_complete(state: ControllerState, now_s: float) -> Decision:
    """While committing: write the last manifest once every commit is answered and every unit written."""
    if state.awaited:
        return said(state, ReasonCode.COMMIT_WAIT, f"{len(state.awaited)} workers have still to commit")
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
    state = changed(state, unsaved_since_s=None, save_again_s=None)
    sentence = f"every unit of version {pending.version} is written: its manifest follows"
    return said(state, ReasonCode.CHECKPOINT_SEALED, sentence, WriteManifest(manifest=manifest))


def end_if_saved(state: ControllerState) -> Decision:
    """While sealing: end once the decided version is a complete checkpoint."""
    if state.checkpoint is not None and state.checkpoint.version == state.version:
        return _end(state)
    return said(state, ReasonCode.CHECKPOINT_COMPLETE, "an earlier checkpoint is complete; the last one is awaited")


def send_again(state: ControllerState) -> tuple[SendStep | SendCommit, ...]:
    """Build the step or commit orders that are not answered once more, as they were."""
    assert state.order is not None, "nothing is outstanding"
    pending = state.pending
    share = pending.writers if pending is not None and pending.version == state.version else {}
    receivers = busy_workers(state)
    if state.order.kind == "commit":
        return commit_orders(state, share, receivers)
    return _step_orders(state, share if state.attempt == 0 and not state.order.abort_sent_s else {}, receivers)


def commit_orders(
    state: ControllerState, share: dict[UnitId, WorkerId], receivers: Iterable[WorkerId]
) -> tuple[SendCommit, ...]:
    """Build the orders to write the decided version; while resting, of what each holds without a generation."""
    units = _units_of(share)
    plain = CommitOrder(
        generation=state.generation,
        version=state.version,
        decided=state.decided,
        held=state.phase is Phase.RESTING,
    )
    return tuple(
        SendCommit(worker=worker, order=plain.model_copy(update={"checkpoint_units": units.get(worker, ())}))
        for worker in receivers
    )


def _with_facts(state: ControllerState) -> ControllerState:
    """Note what is decided of the step that is prepared, and the loss scale of the next one."""
    reports = [state.reports[slot.worker] for slot in state.slots]
    decided = decided_step(
        state.version + 1,
        [report.unit_norms_sq for report in reports],
        [report.non_finite for report in reports],
        state.config.units,
    )
    scale = state.loss_scale.after(skipped=decided.skipped) if state.loss_scale is not None else None
    return changed(state, decided=decided, loss_scale=scale)


def _with_holdings(state: ControllerState, *, others_keep: bool) -> ControllerState:
    """Members hold their stage's units and nothing else; others what they held, or nothing any more."""
    workers = dict(state.workers)
    for worker, entry in state.workers.items():
        holds = state.member_units.get(worker, entry.holds if others_keep else frozenset())
        if entry.holds is not holds:
            workers[worker] = entry.model_copy(update={"holds": holds})
    return changed(state, workers=workers)


def _end(state: ControllerState) -> Decision:
    if state.version >= state.config.num_steps and (state.failing is None or not state.failing.final):
        return ended(state, "finished", f"all {state.config.num_steps} steps are committed and saved")
    return ended(state, "stopped", f"{state.stop_reason}; version {state.version} is saved")


def _is_last(state: ControllerState) -> bool:
    return state.version >= state.config.num_steps or state.stop_reason is not None


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
    order = OutstandingOrder(
        kind="step", generation=state.generation, version=state.version, attempt=state.attempt, sent_s=now_s
    )
    state = changed(with_order(state, order, state.member_units), phase=Phase.TRAINING)
    return said(state, code, sentence, *_step_orders(state, share, state.member_units))


def _step_orders(
    state: ControllerState, share: dict[UnitId, WorkerId], receivers: Iterable[WorkerId]
) -> tuple[SendStep, ...]:
    plain = StepOrder(
        generation=state.generation,
        step=state.version,
        attempt=state.attempt,
        decided=state.decided,
        loss_scale=state.loss_scale,
        record_timeline=state.version == state.config.timeline_step,
    )
    units = _units_of(share)
    return tuple(
        SendStep(
            worker=worker,
            order=plain.model_copy(update={"checkpoint_units": units[worker]}) if worker in units else plain,
        )
        for worker in receivers
    )


def _commit(state: ControllerState, now_s: float) -> Decision:
    """Order every member to apply the decided version, and to write it unless it is a complete checkpoint already."""
    saved = state.checkpoint is not None and state.checkpoint.version == state.version
    share = {} if saved else _shares(state)
    pending = None if saved else PendingCheckpoint(version=state.version, writers=share, started_s=now_s)
    order = OutstandingOrder(kind="commit", generation=state.generation, version=state.version, sent_s=now_s)
    state = changed(with_order(state, order, state.member_units), phase=Phase.COMMITTING, pending=pending)
    state = changed(state, unsaved_since_s=None, save_again_s=None)
    sentence = f"version {state.version} is to be committed: {state.stop_reason or 'it is the last'}"
    return said(state, ReasonCode.COMMIT_STARTED, sentence, *commit_orders(state, share, state.member_units))


def _units_of(share: dict[UnitId, WorkerId]) -> dict[WorkerId, tuple[UnitId, ...]]:
    units: dict[WorkerId, tuple[UnitId, ...]] = {}
    for unit, writer in share.items():
        units[writer] = (*units.get(writer, ()), unit)
    return units


def _shares(state: ControllerState) -> dict[UnitId, WorkerId]:
    assert state.plan is not None, "no generation was formed"
    needed = units_by_stage(state.plan, state.config.units)
    return share_units(state.slots, needed, state.config.unit_bytes)


def _with_due_checkpoint(state: ControllerState, now_s: float) -> tuple[ControllerState, dict[UnitId, WorkerId]]:
    """Begin a checkpoint when one is due: every so many steps, and while a member that cannot be spared drains."""
    policy, pending = state.config.policy, state.pending
    due_after = 1 if draining_members(state) else policy.checkpoint_every_steps
    if state.version - state.checkpoint_base < due_after or state.sealing:
        return state, {}
    if pending is not None and not pending.stale and now_s < pending.started_s + policy.order_timeout_s:
        return state, {}
    share = _shares(state)
    return changed(state, pending=PendingCheckpoint(version=state.version, writers=share, started_s=now_s)), share
