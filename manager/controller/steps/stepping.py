"""The training loop: first order of a generation, step boundaries, overflow, the last commit."""

from __future__ import annotations

from collections.abc import Iterable

from manager.controller.saves.leaving import emergency_due
from manager.controller.saves.noting import save_begun, step_decided, step_ordered, tell_next, units_complete
from manager.controller.saves.timing import is_due
from manager.controller.shape.boundary import change_due, drain_due
from manager.controller.shape.forming import form
from manager.controller.shape.placement import share_units
from manager.controller.shape.postponing import sends_ahead
from manager.controller.shape.pre_copy import drop_if_stale
from manager.controller.state.actions import SendCommit, SendStep, WriteManifest
from manager.controller.state.bounds import commit_bound_s, save_bound_s, step_bound_s
from manager.controller.state.draft import Draft
from manager.controller.state.reasons import ReasonCode
from manager.controller.state.saves import PendingCheckpoint
from manager.controller.state.state import ControllerState, OutstandingOrder, Phase, WorkerState, mean_of
from morph.contract.checkpoint import Manifest, SaveKind, UnitFile
from morph.contract.decided import decided_step
from morph.contract.errors import TrainingStopped
from morph.contract.messages import CommitOrder, StepOrder, UnitId, WorkerId
from morph.words import counted

MAX_ATTEMPTS = 8


def begin(draft: Draft) -> None:
    """Everybody is reshaped: give the first order of the generation; members drop what their stage does not need."""
    state = draft.state
    measured = state.measured
    if measured.morph_began_s is not None:
        draft.change_measured(
            morph_s=mean_of(measured.morph_s, draft.now_s - measured.morph_began_s), morph_began_s=None
        )
    leaving = drain_due(draft) if not _is_last(state) else None
    if leaving is not None:  # nobody was given an order yet, so nobody dropped anything
        draft.say(ReasonCode.FORMED, leaving)
        return form(draft, planned=True)
    _settle_holdings(draft, others_keep=True)
    if _is_last(state):
        return _commit(draft)
    _step(draft, ReasonCode.STEP_STARTED)
    return tell_next(draft)


def decide_step(draft: Draft) -> None:
    """Every member prepared the step: run it again if a gradient overflowed, else decide the next version.

    A gradient that is not finite fits no scale: then the step is decided as skipped, whatever overflowed.
    """
    state = draft.state
    overflowed = [worker for worker in state.member_units if state.step.reports[worker].overflowed]
    if overflowed and not any(report.non_finite for report in state.step.reports.values()):
        return _retry(draft, overflowed)
    try:
        _decide_facts(draft)
    except TrainingStopped as error:
        return draft.end("failed", str(error))
    _settle_holdings(draft, others_keep=False)
    step_decided(draft)
    step = state.version
    draft.change(version=step + 1)
    draft.change_step(attempt=0)
    draft.change_waits(num_fruitless=0, resting_since_s=None)
    draft.change_saving(doubt=None)
    if state.failing is not None and state.failing.version <= step and not state.failing.final:
        draft.change(failing=None)
    state = draft.state
    sentence = f"every worker prepared step {step}: version {step + 1} is decided"
    if state.decided is not None and state.decided.skipped:
        cause = "nothing in it counts" if state.decided.gradient_factor == 0 else "a gradient is not finite"
        sentence += f", its weights unchanged, for {cause}"
    draft.say(ReasonCode.STEP_DECIDED, sentence)
    if _is_last(state):
        return _commit(draft)
    why = change_due(draft)
    if why is None:
        drop_if_stale(draft)
        return _step(draft, ReasonCode.STEP_DECIDED)
    draft.say(ReasonCode.FORMED, why)
    return _step(draft, ReasonCode.STEP_DECIDED) if sends_ahead(draft) else form(draft, planned=True)


def seal_if_complete(draft: Draft) -> None:
    """While committing: write the last manifest once every commit is answered and every unit written."""
    state = draft.state
    saving = state.saving
    if state.step.awaited:
        workers = counted(len(state.step.awaited), "worker has", "workers have")
        return draft.say(ReasonCode.COMMIT_WAIT, f"{workers} still to commit")
    if saving.pending is None:
        return _end(draft)
    missing = len(saving.pending.writers) - len(saving.pending.written)
    if missing:
        units = counted(missing, "unit is", "units are")
        return draft.say(ReasonCode.COMMIT_WAIT, f"{units} still to be written of the last checkpoint")
    draft.change(phase=Phase.SEALING)
    return seal(draft, saving.pending)


def seal(draft: Draft, pending: PendingCheckpoint) -> None:
    """Every unit is on storage: write the manifest."""
    state = draft.state
    files = [pending.written[unit] for unit in state.config.units]
    units_complete(draft, pending)
    manifest = Manifest(
        fingerprint=state.config.fingerprint,
        version=pending.version,
        kind=pending.kind,
        shape=pending.shape,
        saved_s=pending.started_s if pending.copied_s is None else pending.copied_s,
        units=tuple(
            UnitFile.model_construct(**{key: getattr(file, key) for key in UnitFile.model_fields}) for file in files
        ),
    )
    draft.change_saving(pending=None, sealing=(*state.saving.sealing, manifest), sealing_since_s=draft.now_s)
    draft.change_saving(unsaved_since_s=None, save_again_s=None)
    sentence = f"every unit of version {pending.version} is written: its manifest follows"
    draft.say(ReasonCode.CHECKPOINT_SEALED, sentence, WriteManifest(manifest=manifest))


def end_if_saved(draft: Draft) -> None:
    """While sealing: end once the decided version is a complete checkpoint."""
    state = draft.state
    if state.saving.checkpoint is not None and state.saving.checkpoint.version == state.version:
        return _end(draft)
    return draft.say(ReasonCode.CHECKPOINT_COMPLETE, "an earlier checkpoint is complete; the last one is awaited")


def send_again(state: ControllerState) -> tuple[SendStep | SendCommit, ...]:
    """Build the step or commit orders that are not answered once more, as they were."""
    step = state.step
    assert step.order is not None, "nothing is outstanding"
    pending = state.saving.pending
    share = pending.writers if pending is not None and pending.version == state.version else {}
    receivers = state.busy_workers
    if step.order.kind == "commit":
        return commit_orders(state, share, receivers)
    return _step_orders(state, share if step.attempt == 0 and not step.order.abort_sent_s else {}, receivers)


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


def _decide_facts(draft: Draft) -> None:
    """Note what is decided of the step that is prepared, and the loss scale of the next one."""
    state = draft.state
    step = state.step
    reports = [step.reports[slot.worker] for slot in state.slots]
    decided = decided_step(
        state.version + 1,
        [report.unit_norms_sq for report in reports],
        [report.non_finite for report in reports],
        state.config.units,
        [report.weights for report in reports],
    )
    draft.change(decided=decided)
    draft.change_step(loss_scale=decided.next_scale(step.loss_scale))


def _settle_holdings(draft: Draft, *, others_keep: bool) -> None:
    """Members hold their stage's units, and what they keep for others; others what they held, or nothing any more.

    ``others_keep``: no step was run yet, and a follower has what it had.
    """
    state = draft.state
    nothing: frozenset[UnitId] = frozenset()
    follows = () if state.reshape is None else state.reshape.follows
    kept: dict[WorkerId, frozenset[UnitId]] = {}
    for follow in follows:
        if follow.units and (others_keep or state.step.reports[follow.worker].followed):
            units = follow.known if others_keep else follow.units
            kept[follow.follower] = kept.get(follow.follower, nothing).union(units)
    changed: dict[WorkerId, WorkerState] = {}
    of_members = state.member_units
    for worker, entry in state.workers.items():
        held = entry.holds
        holds = of_members.get(worker, held if others_keep else nothing)
        if worker in kept:
            holds |= kept[worker]
        if held is not holds and held != holds:
            changed[worker] = entry.model_copy(update={"holds": holds})
    if changed:
        draft.change(workers=state.workers | changed)


def _end(draft: Draft) -> None:
    state = draft.state
    if state.version >= state.config.num_steps and (state.failing is None or not state.failing.final):
        return draft.end("finished", f"all {state.config.num_steps} steps are committed and saved")
    return draft.end("stopped", f"{state.stop_reason}; version {state.version} is saved")


def _is_last(state: ControllerState) -> bool:
    return state.version >= state.config.num_steps or state.stop_reason is not None


def _step(draft: Draft, code: ReasonCode) -> None:
    """Order the step of the decided version from every member, with a checkpoint of it when one is due."""
    share, why = _begin_checkpoint_if_due(draft)
    sentence = f"step {draft.state.version} is ordered"
    if share:
        sentence += f", with a checkpoint of version {draft.state.version}: {why}"
    step_ordered(draft)
    _send_step(draft, share, sentence, code)


def _retry(draft: Draft, overflowed: list[WorkerId]) -> None:
    state = draft.state
    attempt = state.step.attempt + 1
    sentence = f"a gradient of step {state.version} overflowed on {', '.join(overflowed)}"
    if attempt >= MAX_ATTEMPTS:
        return draft.end("failed", f"{sentence}, {attempt} times in a row")
    sentence += f"; attempt {attempt} of the step is ordered"
    draft.change_step(attempt=attempt)
    return _send_step(draft, {}, sentence, ReasonCode.OVERFLOW_RETRY)


def _send_step(draft: Draft, share: dict[UnitId, WorkerId], sentence: str, code: ReasonCode) -> None:
    state = draft.state
    assert state.reshape is not None, "no generation was formed"
    order = OutstandingOrder(
        kind="step",
        generation=state.generation,
        version=state.version,
        attempt=state.step.attempt,
        sent_s=draft.now_s,
        limit_s=step_bound_s(state, state.reshape, state.version),
    )
    draft.order(order, state.member_units)
    draft.change_step(kept={})
    draft.change(phase=Phase.TRAINING)
    draft.say(code, sentence, *_step_orders(state, share, state.member_units))


def _step_orders(
    state: ControllerState, share: dict[UnitId, WorkerId], receivers: Iterable[WorkerId]
) -> tuple[SendStep, ...]:
    plain = StepOrder(
        generation=state.generation,
        step=state.version,
        attempt=state.step.attempt,
        decided=state.decided,
        loss_scale=state.step.loss_scale,
        record_timeline=state.version == state.config.timeline_step,
    )
    units = _units_of(share)
    orders = SendStep.each("worker", receivers, order=plain)
    if not units:
        return tuple(orders)
    return tuple(
        each.model_copy(update={"order": plain.model_copy(update={"checkpoint_units": units[each.worker]})})
        if each.worker in units
        else each
        for each in orders
    )


def _commit(draft: Draft) -> None:
    """Order every member to apply the decided version, and to write it unless it is a complete checkpoint already."""
    state, now_s = draft.state, draft.now_s
    saved = state.saving.checkpoint is not None and state.saving.checkpoint.version == state.version
    share = {} if saved else _shares(state)
    draft.change(phase=Phase.COMMITTING)
    draft.change_saving(unsaved_since_s=None, save_again_s=None, pending=None)
    draft.change_step(kept={})
    if not saved:
        save_begun(draft, share, "final")
    limit_s = commit_bound_s(state)
    order = OutstandingOrder(
        kind="commit", generation=state.generation, version=state.version, sent_s=now_s, limit_s=limit_s
    )
    draft.order(order, state.member_units)
    sentence = f"version {state.version} is to be committed: {state.stop_reason or 'it is the last'}"
    draft.say(ReasonCode.COMMIT_STARTED, sentence, *commit_orders(draft.state, share, state.member_units))


def _units_of(share: dict[UnitId, WorkerId]) -> dict[WorkerId, tuple[UnitId, ...]]:
    units: dict[WorkerId, tuple[UnitId, ...]] = {}
    for unit, writer in share.items():
        units[writer] = (*units.get(writer, ()), unit)
    return units


def _shares(state: ControllerState) -> dict[UnitId, WorkerId]:
    assert state.plan is not None, "no generation was formed"
    needed = state.config.units_of(state.plan)
    return share_units(state.slots, needed, state.config.unit_bytes)


def _begin_checkpoint_if_due(draft: Draft) -> tuple[dict[UnitId, WorkerId], str]:
    """Begin a checkpoint when one is due, one at a time; return who writes what, and why."""
    state, now_s = draft.state, draft.now_s
    saving = state.saving
    pending = saving.pending
    under_way = pending is not None and not pending.stale and now_s < pending.started_s + save_bound_s(state)
    if under_way or saving.sealing or state.version == saving.checkpoint_base:
        return {}, ""
    kind: SaveKind
    if emergency_due(draft):
        kind, why = "emergency", "VMs that hold what no other does are about to be taken"
    elif (due := is_due(state, now_s)) is not None:
        kind, why = due
    else:
        return {}, ""
    share = _shares(state)
    save_begun(draft, share, kind)
    return share, why
