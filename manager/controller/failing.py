"""Errors inside a worker: who is lost, what is tried again elsewhere, and what ends the run."""

from __future__ import annotations

from manager.controller.actions import EndWorker
from manager.controller.changes import answered_by, changed, ended, followed, said
from manager.controller.choosing import choose
from manager.controller.losing import FORMED_PHASES, dissolve, lose, settle
from manager.controller.reasons import ReasonCode
from manager.controller.state import ControllerState, Decision, Failing, Phase
from morph.contract.messages import Failed, WorkerId


def failed(state: ControllerState, worker: WorkerId, answer: Failed, now_s: float) -> Decision:
    """Take a failed order.

    A device that is lost, or has no memory left, takes its worker along; memory that runs out again at the same step,
    or where nobody could take the worker's place, ends the run. An error of the job's is tried once more, on others
    where these suffice; what comes again at the same step ends the run, as does what nothing would mend. What is held
    is saved before the end.
    """
    assert state.order is not None, "nobody has an order"
    version, known = state.order.version, state.failing
    state = answered_by(state, worker)
    sentence = f"{worker} failed at step {version}: {answer.error}"
    if known is not None and known.generation == state.generation and (known.final or answer.cause != "device"):
        return _given_up(state, said(state, ReasonCode.ABORTING, sentence), now_s)  # another one's part of the same
    if known is not None and known.final:
        return ended(state, "failed", f"{known.sentence}; what came after the last checkpoint is not saved: {sentence}")
    again = known is not None and known.version == version
    if answer.cause == "device" or (answer.cause == "memory" and not again and _is_dispensable(state, worker, now_s)):
        return _lost(state, worker, answer, version, now_s)
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
        final=final,
    )
    state = changed(state, failing=failing, stop_reason=sentence if final else state.stop_reason)
    if not final:  # others may take its place until the step is decided, and it gives them what it holds
        sentence += "; tried once more"
    return _given_up(state, said(state, ReasonCode.ABORTING, sentence), now_s)


def _lost(state: ControllerState, worker: WorkerId, answer: Failed, version: int, now_s: float) -> Decision:
    if answer.cause == "memory":
        sentence = f"{worker} failed at step {version}: {answer.error}"
        entry = Failing(version=version, generation=state.generation, worker=worker, sentence=sentence)
        state = changed(state, failing=entry)
    given_up = said(state, ReasonCode.WORKER_REMOVED, "given up", EndWorker(worker=worker))
    lost = followed(given_up, lose(state, {worker: answer.error}, now_s))
    if lost.state.phase in FORMED_PHASES:  # it is no member, but its order was the generation's
        return followed(lost, dissolve(lost.state, now_s))
    return lost


def _given_up(state: ControllerState, told: Decision, now_s: float) -> Decision:
    """Nobody goes on with an order that one worker gave up."""
    next_one = settle if state.phase is Phase.ABORTING else dissolve
    return followed(told, next_one(state, now_s))


def _is_dispensable(state: ControllerState, worker: WorkerId, now_s: float) -> bool:
    """Whether the run can go on without a worker: others suffice, or one is asked for in its place."""
    if state.config.target_nodes:
        return True
    workers = {name: entry for name, entry in state.workers.items() if name != worker}
    return choose(changed(state, workers=workers), now_s) is not None


def _advice(state: ControllerState, answer: Failed) -> str:
    if answer.cause != "memory":
        return ""
    shape = f"shape {state.plan.shape}" if state.plan is not None else "this shape"
    return f"; {shape} needs more memory than there is: lower vms.memory_bytes, or calibrate smaller micro-batches"
