"""Errors inside a worker: some lose the worker, some are retried on other workers, and some end the run."""

from __future__ import annotations

from manager.controller.shape.selection import choose
from manager.controller.state.actions import EndWorker, ReasonCode
from manager.controller.state.state import ControllerState, Failing, Phase
from manager.controller.state.transition import Transition
from manager.controller.steps.doubt import note_doubt
from manager.controller.steps.failures import FORMED_PHASES, dissolve, lose, settle
from morph.contract.messages import Failed, WorkerId


def failed(transition: Transition, worker: WorkerId, answer: Failed) -> None:
    """Handle a failed order by its cause.

    A worker whose device is lost or full is given up. If a checkpoint could not be loaded, another one is sought. After
    an error in the job's code the step is run again, on other workers if there are enough. If the error comes again, or
    a retry cannot help, what workers hold is saved and the run ends.
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
    if not final:  # until the step is decided, others may take the worker's place; it sends them its units
        sentence += "; the step is run once more"
    return _give_up(transition, sentence)


def _lost(transition: Transition, worker: WorkerId, answer: Failed, version: int) -> None:
    if answer.cause == "memory":
        sentence = f"{worker} failed at step {version}: {answer.error}"
        entry = Failing(version=version, generation=transition.state.generation, worker=worker, sentence=sentence)
        transition.change(failing=entry)
    transition.say(ReasonCode.WORKER_REMOVED, "given up", EndWorker(worker=worker))
    lose(transition, {worker: answer.error})
    if transition.state.phase in FORMED_PHASES:  # the worker is no member, but had an order of the generation
        dissolve(transition)


def _give_up(transition: Transition, sentence: str) -> None:
    """Abort an order on all workers, because one worker could not carry it out."""
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
    return f"; {shape} does not fit in the device's memory: lower vms.memory_bytes, or calibrate smaller micro-batches"
