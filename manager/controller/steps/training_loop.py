"""The training loop: first order of a generation, step boundaries, overflow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from manager.controller.shape.change_reasons import change_due, drain_due
from manager.controller.shape.formation import form
from manager.controller.shape.planned_changes import starts_pre_copy
from manager.controller.shape.pre_copy import drop_if_stale
from manager.controller.state.actions import ReasonCode, SendCommit, SendStep
from manager.controller.state.bounds import step_bound_s
from manager.controller.state.judging import judges_losses, take_evaluation, take_losses
from manager.controller.state.state import ControllerState, OutstandingOrder, Phase, WorkerState, mean_of
from manager.controller.state.transition import Transition
from manager.controller.steps.checkpoints import (
    begin_checkpoint_if_due,
    commit,
    commit_orders,
    finish_fields,
    seal_if_awaited,
    units_by_writer,
)
from manager.controller.steps.save_measuring import record_step_decided, record_step_ordered, tell_next
from morph.contract.decided import Decided, decided_step
from morph.contract.errors import TrainingStopped
from morph.contract.messages import StepOrder, UnitId, WorkerId

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
        return commit(transition)
    _step(transition, ReasonCode.STEP_STARTED)
    return tell_next(transition)


def decide_step(transition: Transition, *, bad: bool = False) -> None:
    """Every member prepared the step: run it again if a gradient overflowed, else decide it, as skipped if ``bad``."""
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
        return commit(transition)
    if state.version in state.leaps:
        return form(transition, planned=True)
    why = change_due(transition)
    if why is None:
        drop_if_stale(transition)
        return _step(transition, ReasonCode.STEP_DECIDED)
    transition.say(ReasonCode.FORMED, why)
    return _step(transition, ReasonCode.STEP_DECIDED) if starts_pre_copy(transition) else form(transition, planned=True)


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


def _step(transition: Transition, code: ReasonCode) -> None:
    """Order the step of the decided version from every member, with a checkpoint of this version if one is due."""
    share, why = begin_checkpoint_if_due(transition)
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
        earlier_checkpoints=tuple(save.version for save in state.saving.earlier),
        record_timeline=state.version == state.config.timeline_step,
        bears_non_finite=judges_losses(state),
        num_micro_batches=None if num == state.plan.num_micro_batches else num,
    )
    units = units_by_writer(share)
    orders = SendStep.each("worker", receivers, order=plain)
    own = {worker: {"checkpoint_units": units[worker]} for worker in units}
    for beside in (finish_fields(state), _names(state)):
        for worker, more in beside.items():
            own[worker] = own.get(worker, {}) | more
    if not own:
        return tuple(orders)
    return tuple(
        each.model_copy(update={"order": plain.model_copy(update=own[each.worker])}) if each.worker in own else each
        for each in orders
    )


def _names(state: ControllerState) -> dict[WorkerId, dict[str, Any]]:
    """Return the additional fields of the order for the worker that reports the samples of a bad step."""
    return {state.slots[0].worker: {"samples_of": state.unnamed[0]}} if state.unnamed else {}
