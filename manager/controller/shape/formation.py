"""Forms a generation from a plan, its workers and the sources of their state; decides on bounded waits before that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from manager.controller.shape.followers import redundancy_of, zones_of
from manager.controller.shape.placement import choose_sources, place
from manager.controller.shape.pre_copy import with_pre_copy, without_pre_copy
from manager.controller.shape.salvage import choose_salvage, keeps_sums
from manager.controller.shape.selection import (
    Choice,
    chosen,
    cost_of_morph_s,
    faster_with_those_to_come,
    nodes_to_come,
    pool_of,
)
from manager.controller.state.actions import ReasonCode, SendReshape
from manager.controller.state.bounds import reshape_bound_s, step_bound_s
from manager.controller.state.judging import set_back_judged
from manager.controller.state.nodes import NodeState
from manager.controller.state.state import ControllerState, OutstandingOrder, Phase, Probation, WorkerState
from manager.controller.state.transition import Transition
from morph.contract.messages import ReshapeOrder, UnitId, WorkerId
from morph.contract.pool import Pool
from morph.contract.vm_names import beside, vm_of
from morph.words import counted

GATHER_S = 1.0
"""The longest time, in seconds, between the ends of one VM's processes that are killed together.

The kernel frees their memory first: 0.38 s was measured with 17 processes that waited for two cores.
"""


def record_partly_lost_vms(transition: Transition, lost: Iterable[WorkerId]) -> None:
    """Record the VMs of workers that are being lost, and forget VMs that are known to be lost as a whole."""
    state, gone = transition.state, set(lost)
    partly_lost = {vm: until_s for vm, until_s in state.waits.partly_lost.items() if transition.now_s < until_s}
    for worker in gone:
        if not gone.issuperset(beside(worker, state.workers)):
            partly_lost.setdefault(vm_of(worker), transition.now_s + GATHER_S)
    if partly_lost != state.waits.partly_lost:
        transition.change_waits(partly_lost=partly_lost)


def partly_lost_until_s(state: ControllerState, now_s: float) -> float | None:
    """Return the time (seconds) until which VMs that lost a worker may lose more; None if there is no such VM."""
    if not state.waits.partly_lost:
        return None
    living = {vm_of(worker) for worker in state.workers}
    return max(
        (until_s for vm, until_s in state.waits.partly_lost.items() if vm in living and now_s < until_s), default=None
    )


def form_or_hold(transition: Transition) -> None:
    """While no worker has an order: form the next generation, or wait for a worker that is almost ready.

    Waiting w seconds costs ``w * now`` (examples/s), a later change that takes c seconds ``c * then``. The bound is set
    when the wait begins, so that workers that come one by one cannot prolong it.
    """
    if transition.state.waits.partly_lost and _await_partly_lost_vms(transition):
        return None
    state, now_s, choice = transition.state, transition.now_s, chosen(transition)
    if choice is None or state.is_last:
        return form(transition)
    held_until_s = state.waits.hold_until_s if state.phase is Phase.HOLDING else None
    until_s = _hold_until_s(state, choice, now_s) if held_until_s is None else held_until_s
    if until_s is None or now_s >= until_s or not faster_with_those_to_come(state, choice, now_s, until_s):
        return form(transition)
    transition.change(phase=Phase.HOLDING, reshape=None, member_units={})
    transition.change_waits(hold_until_s=until_s)
    sentence = f"{counted(len(choice.workers), 'worker')} could continue; one more is almost ready"
    return transition.say(ReasonCode.HOLDING, f"{sentence}: waiting {until_s - now_s:.1f} s at most")


def _await_partly_lost_vms(transition: Transition) -> bool:
    """Hold while a VM that lost a worker may lose its other workers too; return whether to hold."""
    until_s = partly_lost_until_s(transition.state, transition.now_s)
    if until_s is None:
        transition.change_waits(partly_lost={}, hold_until_s=None)
    if until_s is None or chosen(transition) is None:
        return False
    transition.change(phase=Phase.HOLDING, reshape=None, member_units={})
    transition.change_waits(hold_until_s=until_s)
    vms = ", ".join(transition.state.waits.partly_lost)
    transition.say(
        ReasonCode.HOLDING, f"{vms} may be lost as a whole: waiting {until_s - transition.now_s:.1f} s at most"
    )
    return True


def form(transition: Transition, *, planned: bool = False) -> None:
    """Form the next generation from the ready workers, none of which has an order; wait if no plan fits them."""
    if not planned:
        _go_by_what_was_learned(transition)
    choice, now_s = chosen(transition), transition.now_s
    if choice is None:
        return _wait(transition)
    set_back = _set_back(transition)
    (order, note), state = next_order(transition), transition.state
    if planned and state.pre_copy is not None:
        held = {worker: state.workers[worker].holds for worker in state.ready_workers}
        order = with_pre_copy(order, state.pre_copy, held)
    reshape_s = reshape_bound_s(state, order)
    order = order.model_copy(update={"limit_s": max(reshape_s, step_bound_s(state, order))})
    taking_part = {slot.worker for slot in order.slots} | {source.peer for source in order.sources}
    taking_part |= set() if order.salvage is None else {entry.holder for entry in order.salvage.sums}
    receivers = [worker for worker in state.ready_workers if worker in taking_part]
    needed = [frozenset(units) for units in state.config.units_of(order.plan)]
    outstanding = OutstandingOrder(
        kind="reshape", generation=order.generation, version=order.version, sent_s=now_s, limit_s=reshape_s
    )
    transition.order(outstanding, receivers)
    transition.change_step(attempt=0, loss_scale=None)
    if not order.keep_sums:
        transition.change_step(kept={})
    members = {slot.worker: needed[slot.stage] for slot in order.slots}
    transition.change(phase=Phase.RESHAPING, generation=order.generation, reshape=order, member_units=members)
    transition.change_waits(waiting_since_s=None, hold_until_s=None, join_since_s=None)
    transition.change_measured(morph_began_s=now_s if planned else None)
    dropped = without_pre_copy(transition, spared=receivers)
    _measure_anew(transition)
    sentence = (
        f"{set_back}generation {order.generation} is formed at version {order.version}: {order.plan.shape} on "
        f"{len(order.slots)} of {len(state.ready_workers)} ready workers{_spared(order)}{'; ' if note else ''}{note}"
    )
    code = ReasonCode.SET_BACK if set_back else ReasonCode.FORMED
    reshapes = SendReshape.each("worker", receivers, order=order)
    return transition.say(code, sentence, *reshapes, *dropped)


def next_order(transition: Transition) -> tuple[ReshapeOrder, str]:
    """Return the order that forms the best shape now, with sources for missing units, and a note on followers."""
    state, choice = transition.state, chosen(transition)
    saving = state.saving
    assert choice is not None, "no plan fits"
    of_time = (
        state.generation,
        state.version,
        state.decided,
        saving.checkpoint,
        saving.doubt,
        state.step.kept,
        saving.save_times,
    )
    return transition.once(_OrderOf(choice), choice, state.workers, *of_time, state.measured.state_bytes_per_s)


@dataclass(frozen=True)
class _OrderOf:
    """Builds the order that forms a choice; all instances are equal, so that ``Transition.once`` caches them as one."""

    choice: Choice = field(compare=False)

    def __call__(self, state: ControllerState, now_s: float) -> tuple[ReshapeOrder, str]:
        return _order(state, self.choice, now_s)


def _order(state: ControllerState, choice: Choice, now_s: float) -> tuple[ReshapeOrder, str]:
    version, kind = _restorable(state)
    restore = kind if version == state.version else None
    held = {worker: state.workers[worker].holds for worker in state.ready_workers}
    needed = state.config.units_of(choice.plan)
    types = {worker: state.workers[worker].facts.node_type for worker in choice.workers}
    slots = place(choice.plan, choice.workers, held, needed, state.config.unit_bytes, zones_of(state), types)
    kept = {worker: sums for worker, sums in state.step.kept.items() if worker in held}
    unable = frozenset[WorkerId]() if state.saving.doubt is None else state.saving.doubt.unable
    redundancy = redundancy_of(state, choice.plan, slots, held, now_s)
    num, sizes = state.num_micro_batches(choice.plan), state.config.unit_bytes
    keeps = keeps_sums(state.config, choice.plan)
    order = ReshapeOrder.model_construct(  # skips validation of thousands of values that were validated before
        generation=state.generation + 1,
        version=state.version,
        decided=state.decided,
        plan=choice.plan,
        slots=slots,
        sources=choose_sources(slots, needed, held, sizes, restore, unable),
        salvage=choose_salvage(kept if keeps else {}, choice.plan, slots, needed, state.config.units, sizes, num),
        keep_sums=keeps,
        follows=redundancy.follows,
        follow_in_host=redundancy.in_host,
        copy_sums_every=redundancy.copy_sums_every,
    )
    return order, redundancy.told


def _spared(order: ReshapeOrder) -> str:
    if order.salvage is None:
        return ""
    done, left = order.salvage.num_spared, sum(end - first for first, end in order.salvage.remaining)
    return f"; {done} of the {done + left} micro-batches of step {order.version} are done and kept"


def _wait(transition: Transition) -> None:
    """Wait for more workers, because no plan fits; or end if a stop was requested."""
    state = transition.state
    since_s = transition.now_s if state.waits.waiting_since_s is None else state.waits.waiting_since_s
    transition.change(phase=Phase.WAITING, reshape=None, member_units={})
    transition.change_waits(waiting_since_s=since_s, hold_until_s=None, join_since_s=None)
    if state.stop_reason is not None:
        sentence = "too few workers are left to save the steps after version"
        return transition.end("stopped", f"{state.stop_reason}; {sentence} {_restorable(state)[0]}")
    num_usable = sum(entry.node in (NodeState.READY, NodeState.SUSPECT) for entry in state.workers.values())
    needed = counted(state.config.fewest_workers, "is needed", "are needed")
    sentence = f"{counted(num_usable, 'worker is', 'workers are')} ready, {needed}"
    return transition.say(ReasonCode.TOO_FEW_WORKERS, sentence)


def _hold_until_s(state: ControllerState, choice: Choice, now_s: float) -> float | None:
    """Return until when (seconds) waiting for the next worker costs less than adding it later; None: never."""
    coming = nodes_to_come(state, now_s)[:1]
    better = state.config.speed_on(pool_of(state, choice.workers) + Pool.counting(of for _, of in coming))
    if better <= choice.examples_per_s or not choice.examples_per_s:
        return None
    patience_s = cost_of_morph_s(state) * better / choice.examples_per_s
    return now_s + min(patience_s, state.config.policy.rules.wait.hold_patience_s)


def _go_by_what_was_learned(transition: Transition) -> None:
    """From now on choose shapes by corrected times; a correction alone never makes a run leave its shape."""
    measured = transition.state.measured
    if measured.correction is None:
        return
    factors = measured.correction.factors
    type_factors = {name: each.factors for name, each in measured.correction.types.items()}
    if (factors, type_factors) != (measured.planned_with, measured.types_planned_with):
        transition.change(config=transition.state.config.corrected(factors, type_factors))
        transition.change_measured(planned_with=factors, types_planned_with=type_factors)


def _measure_anew(transition: Transition) -> None:
    """Restart the measurement of members, whose stages changed; begin to probe slow workers that are left out."""
    state = transition.state
    due_s = transition.now_s + state.config.policy.rules.stutter.probe_every_s
    workers = dict(state.workers)
    for worker, entry in state.workers.items():
        fresh: WorkerState = entry
        if entry.pace.samples_s or entry.pace.median_s is not None:
            update = {"samples_s": (), "queued_s": (), "median_s": None, "past_s": (), "past_means_s": ()}
            fresh = fresh.model_copy(update={"pace": entry.pace.model_copy(update=update)})
        if worker in state.member_units:
            fresh = fresh.model_copy(update={"probation": None}) if entry.probation else fresh
        elif entry.node is NodeState.SUSPECT and entry.probation is None:
            fresh = fresh.model_copy(update={"probation": Probation(due_s=due_s)})
            transition.wake_by(due_s)
        workers[worker] = fresh
    transition.change(workers=workers)


def _restorable(state: ControllerState) -> tuple[int, str]:
    """Return the newest version that can be restored without a living holder, and its kind of source."""
    if state.saving.checkpoint is None:
        return 0, "initial"
    return state.saving.checkpoint.version, "checkpoint"


def _set_back(transition: Transition) -> str:
    """Go back to the restorable version if some unit has no holder; return the sentence that says so, or ""."""
    state = transition.state
    held: set[UnitId] = set().union(*(state.workers[worker].holds for worker in state.ready_workers))
    missing = sorted(set(state.config.units) - held)
    version, kind = _restorable(state)
    if not missing or version == state.version:
        return ""
    workers = {worker: entry.model_copy(update={"holds": frozenset()}) for worker, entry in state.workers.items()}
    where = "the newest checkpoint" if kind == "checkpoint" else "the start, because there is no checkpoint"
    sentence = (
        f"no living worker holds {', '.join(missing)} at version {state.version}: back to version {version}, "
        f"{where}, {counted(max(0, state.version - version), 'step is', 'steps are')} to be redone; "
    )
    times = {"saved_s": transition.now_s, "since_s": transition.now_s, "ordered_s": None, "insurance": None}
    saves = state.saving.save_times.model_copy(update=times)
    transition.change(version=version, decided=None, workers=workers)
    transition.change_saving(pending=None, earlier=(), checkpoint_base=version, save_times=saves)
    transition.change_step(kept={})
    set_back_judged(transition, version)
    return sentence


def start_if_due(transition: Transition) -> None:
    """While starting: form the first generation once all expected workers are ready, or after a bounded wait."""
    state, now_s = transition.state, transition.now_s
    waits = state.waits
    if state.version >= state.config.num_steps:
        return transition.end("finished", f"all {state.config.num_steps} steps are done and saved already")
    choice, num_known = chosen(transition), len(state.workers)
    num_ready = len(choice.workers) if choice else len(state.ready_workers)
    waiting_since_s = now_s if waits.waiting_since_s is None else waits.waiting_since_s
    if choice is None:
        transition.change_waits(waiting_since_s=waiting_since_s, first_feasible_s=None)
        needed = counted(state.config.fewest_workers, "is needed", "are needed")
        sentence = f"{counted(num_ready, 'worker is', 'workers are')} ready, {needed} to start"
        return transition.say(ReasonCode.START_WAIT, sentence)
    until_s = partly_lost_until_s(state, now_s)
    if until_s is not None:
        transition.wake_by(until_s)
        return transition.say(ReasonCode.START_WAIT, f"{', '.join(waits.partly_lost)} may be lost as a whole")
    since_s = now_s if waits.first_feasible_s is None else waits.first_feasible_s
    transition.change_waits(waiting_since_s=waiting_since_s, first_feasible_s=since_s)
    if num_ready == num_known and state.num_appeared >= state.config.expected_nodes:
        reason = "the one worker is ready" if num_ready == 1 else f"all {num_ready} workers are ready"
        transition.say(ReasonCode.FORMED, reason)
        return form(transition)
    if now_s >= since_s + state.config.policy.start_patience_s:
        transition.say(ReasonCode.FORMED, f"{num_ready} of {num_known} workers are ready, the others are late")
        return form(transition)
    missing = max(num_known, state.config.expected_nodes) - num_ready
    sentence = f"{counted(num_ready, 'worker')} could start; waiting a while for {missing} more"
    return transition.say(ReasonCode.START_WAIT, sentence)
