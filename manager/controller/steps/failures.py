"""Losing workers: dissolving a generation and re-forming from the workers that are left."""

from __future__ import annotations

from collections.abc import Mapping

from manager.controller.shape.flapping import record_flap
from manager.controller.shape.formation import form_or_hold
from manager.controller.shape.pre_copy import without_pre_copy
from manager.controller.shape.salvage import note_prepared
from manager.controller.shape.selection import choose
from manager.controller.state.actions import Abort, EndWorker, ReasonCode
from manager.controller.state.bounds import give_up_bound_s
from manager.controller.state.state import ControllerState, Failing, Phase
from manager.controller.state.transition import Transition
from manager.controller.steps.recovery import begin_rest, find_whole, in_doubt, note_doubt, save_before_waiting
from manager.controller.steps.save_timing import record_shape_left, vms_lost
from morph.contract.messages import Failed, WorkerId
from morph.words import counted

FORMED_PHASES = frozenset({Phase.RESHAPING, Phase.TRAINING, Phase.COMMITTING})


def lose(transition: Transition, lost: Mapping[WorkerId, str]) -> None:
    """Forget lost workers (id -> cause); dissolve the generation if it needed one of them."""
    state = transition.state
    needed = any(_is_needed(state, worker) for worker in lost)
    for worker in lost:
        entry = state.workers[worker]
        if entry.ready and entry.host not in ("", worker):
            record_flap(transition, entry.host)
    transition.forget(lost)
    vms_lost(transition, {worker: state.workers[worker] for worker in lost})
    is_party = state.pre_copy is not None and not lost.keys().isdisjoint(state.pre_copy.parties)
    dropped = without_pre_copy(transition) if is_party else ()
    by_cause: dict[str, list[WorkerId]] = {}
    for worker, cause in lost.items():
        by_cause.setdefault(cause, []).append(worker)
    sentence = "; ".join(
        f"{', '.join(workers)} {'was' if len(workers) == 1 else 'were'} lost: {cause}"
        for cause, workers in by_cause.items()
    )
    transition.say(ReasonCode.WORKER_REMOVED, sentence, *dropped)
    if state.phase is Phase.ABORTING:
        settle(transition)
    elif state.phase is Phase.HOLDING:
        form_or_hold(transition)
    elif needed:
        dissolve(transition)


def dissolve(transition: Transition, *, planned: bool = False) -> None:
    """Abort every outstanding order of the generation; re-form at once if there is none.

    ``planned``: nothing is wrong, so the generation does not count towards those in a row that decided no step.
    """
    state = transition.state
    busy = state.busy_workers
    order = state.step.order
    if order is not None:
        order = order.model_copy(update={"abort_sent_s": transition.now_s, "give_up_s": give_up_bound_s(state)})
    pending = state.saving.pending.model_copy(update={"stale": True}) if state.saving.pending is not None else None
    transition.change(phase=Phase.ABORTING)
    transition.change_step(order=order)
    transition.change_saving(pending=pending)
    transition.change_waits(num_fruitless=state.waits.num_fruitless + (not planned))
    transition.change_measured(morph_began_s=None)
    record_shape_left(transition)
    dropped = without_pre_copy(transition)
    aborts = Abort.each("worker", busy, generation=state.generation)
    sentence = f"generation {state.generation} is dissolved, {len(busy)} orders aborted"
    transition.say(ReasonCode.ABORTING, sentence, *aborts, *dropped)
    if not busy:
        settle(transition)


def settle(transition: Transition) -> None:
    """While aborting: re-form once no worker has an order, after a rest if too many generations in a row failed."""
    state = transition.state
    if state.step.awaited:
        workers = counted(len(state.step.awaited), "worker has", "workers have")
        transition.say(ReasonCode.ABORTING, f"{workers} still to abandon their orders")
        return
    note_prepared(transition)
    if in_doubt(state):
        find_whole(transition)
    elif state.waits.num_fruitless >= state.config.policy.max_fruitless_generations:
        begin_rest(transition)
    elif not save_before_waiting(transition):
        form_or_hold(transition)


def _is_needed(state: ControllerState, worker: WorkerId) -> bool:
    if state.phase not in FORMED_PHASES:
        return False
    if worker in state.step.awaited:
        return True
    if state.phase is Phase.COMMITTING:
        return state.saving.pending is not None and worker in state.saving.pending.debtors
    return worker in state.member_units


# Errors inside a worker: some lose the worker, some are retried on other workers, and some end the run.


def failed(transition: Transition, worker: WorkerId, answer: Failed) -> None:
    """Handle a failed order.

    If a device is lost or runs out of memory, its worker is lost. If a device runs out of memory again at the same
    step, or no other worker could take over, the run ends. After an error in the job's code the step is tried once
    more, on other workers if they suffice; the run ends if that step fails again, or if a retry cannot mend the error.
    What workers hold is saved before the end. After a failure to load a checkpoint, an undamaged one is sought.
    """
    assert transition.state.step.order is not None, "nobody has an order"
    version, known = transition.state.step.order.version, transition.state.failing
    of_checkpoint = answer.cause == "checkpoint" and transition.state.step.order.kind == "reshape"
    transition.answered(worker)
    state = transition.state
    if of_checkpoint:
        note_doubt(transition, f"{worker} could not load version {version}: {answer.error}", worker)
        return _give_up(transition, f"{worker} could not load version {version}: {answer.error}")
    sentence = f"{worker} failed at step {version}: {answer.error}"
    if known is not None and known.generation == state.generation and (known.final or answer.cause != "device"):
        return _give_up(transition, sentence)  # another worker's part of the same failure
    if known is not None and known.final:
        return transition.end(
            "failed", f"{known.sentence}; progress since the last checkpoint is not saved: {sentence}"
        )
    again = known is not None and known.version == version
    if answer.cause == "device" or (answer.cause == "memory" and not again and _is_dispensable(transition, worker)):
        return _lost(transition, worker, answer, version)
    final = again or answer.cause != "job"
    if final:
        sentence += (
            _advice(state, answer) if known is None else f" (as before on {known.worker}){_advice(state, answer)}"
        )
    failing = Failing(
        version=version,
        generation=state.generation,
        worker=worker,
        sentence=sentence,
        traceback=answer.traceback,
        cause=answer.cause,
        final=final,
    )
    transition.change(failing=failing, stop_reason=sentence if final else state.stop_reason)
    if not final:  # others may take its place until the step is decided; it sends them its units
        sentence += "; tried once more"
    return _give_up(transition, sentence)


def _lost(transition: Transition, worker: WorkerId, answer: Failed, version: int) -> None:
    if answer.cause == "memory":
        sentence = f"{worker} failed at step {version}: {answer.error}"
        entry = Failing(version=version, generation=transition.state.generation, worker=worker, sentence=sentence)
        transition.change(failing=entry)
    transition.say(ReasonCode.WORKER_REMOVED, "given up", EndWorker(worker=worker))
    lose(transition, {worker: answer.error})
    if transition.state.phase in FORMED_PHASES:  # it is not a member, but had an order of the generation
        dissolve(transition)


def _give_up(transition: Transition, sentence: str) -> None:
    """Abort an order on all workers, because one worker gave it up."""
    transition.say(ReasonCode.ABORTING, sentence)
    next_one = settle if transition.state.phase is Phase.ABORTING else dissolve
    next_one(transition)


def _is_dispensable(transition: Transition, worker: WorkerId) -> bool:
    """Whether the run can continue without a worker: others suffice, or a replacement is requested."""
    if transition.state.config.target_nodes:
        return True
    workers = {name: entry for name, entry in transition.state.workers.items() if name != worker}
    return choose(transition.state.model_copy(update={"workers": workers}), transition.now_s) is not None


def _advice(state: ControllerState, answer: Failed) -> str:
    if answer.cause != "memory":
        return ""
    shape = f"shape {state.plan.shape}" if state.plan is not None else "this shape"
    return f"; {shape} needs more memory than there is: lower vms.memory_bytes, or calibrate smaller micro-batches"
