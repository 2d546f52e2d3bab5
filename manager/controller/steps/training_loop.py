"""The training loop: first order of a generation, step boundaries, overflow, the last commit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from manager.controller.shape.change_reasons import change_due, drain_due
from manager.controller.shape.formation import form
from manager.controller.shape.placement import share_units
from manager.controller.shape.planned_changes import starts_pre_copy
from manager.controller.shape.pre_copy import drop_if_stale
from manager.controller.state.actions import ReasonCode, SendCommit, SendStep
from manager.controller.state.bounds import commit_bound_s, save_bound_s, step_bound_s
from manager.controller.state.judging import (
    awaits_metrics,
    early_end,
    finisher,
    manifest_order,
    marked_with,
    take_evaluation,
)
from manager.controller.state.loss_judging import judges_losses, take_losses
from manager.controller.state.saves import PendingCheckpoint
from manager.controller.state.state import ControllerState, OutstandingOrder, Phase, WorkerState, mean_of
from manager.controller.state.transition import Transition
from manager.controller.steps.emergency_saves import emergency_due
from manager.controller.steps.save_measuring import (
    record_save_begun,
    record_step_decided,
    record_step_ordered,
    record_units_complete,
    tell_next,
)
from manager.controller.steps.save_timing import goes_back_to, is_due
from morph.contract.checkpoint import Manifest, SaveKind, UnitFile
from morph.contract.decided import Decided, decided_step
from morph.contract.errors import TrainingStopped
from morph.contract.messages import CommitOrder, StepOrder, UnitId, Version, WorkerId
from morph.words import counted

MAX_ATTEMPTS = 8


def begin(transition: Transition) -> None:
    """Give the first order of a generation once all workers have reshaped; members drop units that they do not need."""
    state = transition.state
    measured = state.measured
    if measured.morph_began_s is not None:
        transition.change_measured(
            morph_s=mean_of(measured.morph_s, transition.now_s - measured.morph_began_s), morph_began_s=None
        )
    leaving = drain_due(transition) if not state.is_last else None
    if leaving is not None:  # no order was given yet, so no worker dropped anything
        transition.say(ReasonCode.FORMED, leaving)
        return form(transition, planned=True)
    _settle_holdings(transition, others_keep=True)
    if state.is_last:
        return _commit(transition)
    _step(transition, ReasonCode.STEP_STARTED)
    return tell_next(transition)


def decide_step(transition: Transition, *, bad: bool = False) -> None:
    """Handle that every member prepared the step: run it again if a gradient overflowed, else decide the next version.

    No scale fits a gradient that is not finite, so such a step is decided as skipped, as is a ``bad`` one.
    """
    state = transition.state
    overflowed = [worker for worker in state.member_units if state.step.reports[worker].overflowed]
    if overflowed and not bad and not any(report.non_finite for report in state.step.reports.values()):
        return _retry(transition, overflowed)
    try:
        _decide_facts(transition, bad=bad)
        take_evaluation(transition)
    except TrainingStopped as error:
        return transition.end("failed", str(error))
    _settle_holdings(transition, others_keep=False)
    record_step_decided(transition)
    step = state.version
    transition.change(version=step + 1)
    transition.change_step(attempt=0)
    transition.change_waits(num_fruitless=0, resting_since_s=None, idle_vm_s=0.0)
    transition.change_saving(doubt=None)
    if state.failing is not None and state.failing.version <= step and not state.failing.final:
        transition.change(failing=None)
    state = transition.state
    sentence = f"every worker prepared step {step}: version {step + 1} is decided"
    if state.decided is not None and state.decided.skipped:
        cause = "none of its samples counts" if state.decided.gradient_factor == 0 else "a gradient is not finite"
        cause = "it is bad" if bad else cause
        sentence += f", its weights unchanged, because {cause}"
    transition.say(ReasonCode.STEP_DECIDED, sentence)
    seal_if_awaited(transition)
    state = transition.state
    if state.is_last:
        return _commit(transition)
    if state.version in state.leaps:
        return form(transition, planned=True)
    why = change_due(transition)
    if why is None:
        drop_if_stale(transition)
        return _step(transition, ReasonCode.STEP_DECIDED)
    transition.say(ReasonCode.FORMED, why)
    return _step(transition, ReasonCode.STEP_DECIDED) if starts_pre_copy(transition) else form(transition, planned=True)


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
        units = counted(missing, "unit is", "units are")
        return transition.say(ReasonCode.COMMIT_WAIT, f"{units} of the last checkpoint still to be written")
    transition.change(phase=Phase.SEALING)
    return seal(transition, saving.pending)


def seal_if_awaited(transition: Transition) -> None:
    """Write the manifests of checkpoints that only waited for the result of an earlier evaluation."""
    _seal_earlier(transition)
    state = transition.state
    pending = state.saving.pending
    if pending is not None and pending.complete and not awaits_metrics(state, pending.version):
        seal(transition, pending)


def _seal_earlier(transition: Transition) -> None:
    for one in transition.state.saving.earlier:
        if one.complete and not awaits_metrics(transition.state, one.version):
            seal(transition, one)


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
        transition.change_saving(earlier=tuple(one for one in state.saving.earlier if one.version != pending.version))
    sentence = f"every unit of version {pending.version} is written: its manifest follows"
    transition.say(ReasonCode.CHECKPOINT_SEALED, sentence, manifest_order(transition.state, manifest))


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


def repeat_orders(state: ControllerState) -> tuple[SendStep | SendCommit, ...]:
    """Build the unanswered step or commit orders again, unchanged."""
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
    """Build the orders to write the decided version; while resting, each worker writes what it holds."""
    units = _units_of(share)
    plain = CommitOrder(
        generation=state.generation,
        version=state.version,
        decided=state.decided,
        earlier_checkpoints=_earlier(state),
        held=state.phase is Phase.RESTING,
    )
    finishes = _finishes(state)
    return tuple(
        SendCommit(
            worker=worker,
            order=plain.model_copy(update={"checkpoint_units": units.get(worker, ()), **finishes.get(worker, {})}),
        )
        for worker in receivers
    )


def _decide_facts(transition: Transition, *, bad: bool) -> None:
    """Record the facts of the prepared step, and the loss scale of the next one."""
    state = transition.state
    step = state.step
    reports = [step.reports[slot.worker] for slot in state.slots]
    if bad:  # the step's norms may be unknown, because a gradient overflowed
        bad_loss = not any(report.non_finite for report in reports)
        decided = Decided(version=state.version + 1, skipped=True, bad_loss=bad_loss)
    else:
        decided = decided_step(
            state.version + 1,
            [report.unit_norms_sq for report in reports],
            [report.non_finite for report in reports],
            state.config.units,
            [report.weights for report in reports],
        )
    take_losses(transition, bad=bad)
    scale = decided.next_scale(step.loss_scale)
    transition.change(decided=decided)
    transition.change_step(loss_scale=scale)


def _settle_holdings(transition: Transition, *, others_keep: bool) -> None:
    """Members hold their stage's units and those kept for others; other workers nothing, unless ``others_keep``."""
    state = transition.state
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
        transition.change(workers=state.workers | changed)


def _end(transition: Transition) -> None:
    state = transition.state
    fails = state.failing is not None and state.failing.final
    if state.version >= state.config.num_steps and not fails:
        return transition.end("finished", f"all {state.config.num_steps} steps are done and saved")
    if not fails and (why := early_end(state)):
        return transition.end("finished", f"{why}; version {state.version} is saved")
    return transition.end("stopped", f"{state.stop_reason}; version {state.version} is saved")


def _step(transition: Transition, code: ReasonCode) -> None:
    """Order the step of the decided version from every member, with a checkpoint of this version if one is due."""
    share, why = _begin_checkpoint_if_due(transition)
    sentence = f"step {transition.state.version} is ordered"
    if share:
        sentence += f", with a checkpoint of version {transition.state.version}: {why}"
    record_step_ordered(transition)
    _send_step(transition, share, sentence, code)


def _retry(transition: Transition, overflowed: list[WorkerId]) -> None:
    state = transition.state
    attempt = state.step.attempt + 1
    sentence = f"a gradient of step {state.version} overflowed on {', '.join(overflowed)}"
    if attempt >= MAX_ATTEMPTS:
        return transition.end("failed", f"{sentence}, {attempt} times in a row")
    sentence += f"; attempt {attempt} of the step is ordered"
    transition.change_step(attempt=attempt)
    return _send_step(transition, {}, sentence, ReasonCode.OVERFLOW_RETRY)


def _send_step(transition: Transition, share: dict[UnitId, WorkerId], sentence: str, code: ReasonCode) -> None:
    state = transition.state
    assert state.reshape is not None, "no generation was formed"
    order = OutstandingOrder(
        kind="step",
        generation=state.generation,
        version=state.version,
        attempt=state.step.attempt,
        sent_s=transition.now_s,
        limit_s=step_bound_s(state, state.reshape, state.version),
    )
    transition.order(order, state.member_units)
    transition.change_step(kept={})
    transition.change(phase=Phase.TRAINING)
    transition.say(code, sentence, *_step_orders(state, share, state.member_units))


def _step_orders(
    state: ControllerState, share: dict[UnitId, WorkerId], receivers: Iterable[WorkerId]
) -> tuple[SendStep, ...]:
    assert state.plan is not None, "no generation was formed"
    num = state.num_micro_batches(state.plan)
    plain = StepOrder(
        generation=state.generation,
        step=state.version,
        attempt=state.step.attempt,
        decided=state.decided,
        loss_scale=state.step.loss_scale,
        earlier_checkpoints=_earlier(state),
        record_timeline=state.version == state.config.timeline_step,
        bears_non_finite=judges_losses(state),
        num_micro_batches=None if num == state.plan.num_micro_batches else num,
    )
    units = _units_of(share)
    orders = SendStep.each("worker", receivers, order=plain)
    own = {worker: {"checkpoint_units": units[worker]} for worker in units}
    for beside in (_finishes(state), _names(state)):
        for worker, more in beside.items():
            own[worker] = own.get(worker, {}) | more
    if not own:
        return tuple(orders)
    return tuple(
        each.model_copy(update={"order": plain.model_copy(update=own[each.worker])}) if each.worker in own else each
        for each in orders
    )


def _earlier(state: ControllerState) -> tuple[Version, ...]:
    return tuple(one.version for one in state.saving.earlier)


def _finishes(state: ControllerState) -> dict[WorkerId, dict[str, Any]]:
    """Return the additional fields of the order for the worker that computes the metrics of an evaluation."""
    found: dict[WorkerId, dict[str, Any]] = {}
    worker = finisher(state) if state.unfinished is not None else None
    if worker is not None:
        found[worker] = {"evaluated": state.unfinished}
    return found


def _names(state: ControllerState) -> dict[WorkerId, dict[str, Any]]:
    """Return the additional fields of the order for the worker that reports the samples of a bad step."""
    return {state.slots[0].worker: {"samples_of": state.unnamed[0]}} if state.unnamed else {}


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


def _commit(transition: Transition) -> None:
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


def _units_of(share: dict[UnitId, WorkerId]) -> dict[WorkerId, tuple[UnitId, ...]]:
    units: dict[WorkerId, tuple[UnitId, ...]] = {}
    for unit, writer in share.items():
        units[writer] = (*units.get(writer, ()), unit)
    return units


def _shares(state: ControllerState) -> dict[UnitId, WorkerId]:
    assert state.plan is not None, "no generation was formed"
    needed = state.config.units_of(state.plan)
    return share_units(state.slots, needed, state.config.unit_bytes)


def _may_be_best(state: ControllerState) -> bool:
    """Whether the decided version is evaluated with the next step, to find the best one.

    Its checkpoint replaces any other that is still under way, except those that may be the best.
    """
    size = state.evaluation
    is_due = size is not None and size.best is not None and size.is_due(state.version)
    return is_due and state.version > state.judged.last_version


def _begin_checkpoint_if_due(transition: Transition) -> tuple[dict[UnitId, WorkerId], str]:
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
        goes_back_to(state, one.version) and not one.stale for one in saving.under_way
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
