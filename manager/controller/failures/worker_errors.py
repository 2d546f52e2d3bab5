"""Errors inside a worker: who is lost, what is tried again elsewhere, and what ends the run."""

from __future__ import annotations

from manager.controller.failures.lost_workers import FORMED_PHASES, dissolve, lose, settle
from manager.controller.shape.choosing import choose
from manager.controller.state.actions import EndWorker
from manager.controller.state.draft import Draft
from manager.controller.state.reasons import ReasonCode
from manager.controller.state.state import ControllerState, Failing, Phase
from manager.controller.steps.restoring import note_doubt
from morph.contract.messages import Failed, WorkerId


def failed(draft: Draft, worker: WorkerId, answer: Failed) -> None:
    """Take a failed order.

    A device that is lost, or has no memory left, takes its worker along; memory that runs out again at the same step,
    or where nobody could take the worker's place, ends the run. An error of the job's is tried once more, on others
    where these suffice; what comes again at the same step ends the run, as does what nothing would mend. What is held
    is saved before the end. A checkpoint that cannot be loaded ends nothing: a whole one is looked for.
    """
    assert draft.state.step.order is not None, "nobody has an order"
    version, known = draft.state.step.order.version, draft.state.failing
    of_checkpoint = answer.cause == "checkpoint" and draft.state.step.order.kind == "reshape"
    draft.answered(worker)
    state = draft.state
    if of_checkpoint:
        note_doubt(draft, f"{worker} could not load version {version}: {answer.error}", worker)
        return _give_up(draft, f"{worker} could not load version {version}: {answer.error}")
    sentence = f"{worker} failed at step {version}: {answer.error}"
    if known is not None and known.generation == state.generation and (known.final or answer.cause != "device"):
        return _give_up(draft, sentence)  # another one's part of the same
    if known is not None and known.final:
        return draft.end("failed", f"{known.sentence}; what came after the last checkpoint is not saved: {sentence}")
    again = known is not None and known.version == version
    if answer.cause == "device" or (answer.cause == "memory" and not again and _is_dispensable(draft, worker)):
        return _lost(draft, worker, answer, version)
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
    draft.change(failing=failing, stop_reason=sentence if final else state.stop_reason)
    if not final:  # others may take its place until the step is decided, and it gives them what it holds
        sentence += "; tried once more"
    return _give_up(draft, sentence)


def _lost(draft: Draft, worker: WorkerId, answer: Failed, version: int) -> None:
    if answer.cause == "memory":
        sentence = f"{worker} failed at step {version}: {answer.error}"
        entry = Failing(version=version, generation=draft.state.generation, worker=worker, sentence=sentence)
        draft.change(failing=entry)
    draft.say(ReasonCode.WORKER_REMOVED, "given up", EndWorker(worker=worker))
    lose(draft, {worker: answer.error})
    if draft.state.phase in FORMED_PHASES:  # it is no member, but its order was the generation's
        dissolve(draft)


def _give_up(draft: Draft, sentence: str) -> None:
    """Nobody goes on with an order that one worker gave up."""
    draft.say(ReasonCode.ABORTING, sentence)
    next_one = settle if draft.state.phase is Phase.ABORTING else dissolve
    next_one(draft)


def _is_dispensable(draft: Draft, worker: WorkerId) -> bool:
    """Whether the run can go on without a worker: others suffice, or one is asked for in its place."""
    if draft.state.config.target_nodes:
        return True
    workers = {name: entry for name, entry in draft.state.workers.items() if name != worker}
    return choose(draft.state.model_copy(update={"workers": workers}), draft.now_s) is not None


def _advice(state: ControllerState, answer: Failed) -> str:
    if answer.cause != "memory":
        return ""
    shape = f"shape {state.plan.shape}" if state.plan is not None else "this shape"
    return f"; {shape} needs more memory than there is: lower vms.memory_bytes, or calibrate smaller micro-batches"
