"""A new manager takes over: what the old one had decided and perhaps not done is done again."""

from __future__ import annotations

from manager.controller.actions import (
    Abort,
    Action,
    EndWorker,
    RequestNodes,
    SendReshape,
    StartWorker,
    WriteManifest,
)
from manager.controller.ahead import without_ahead
from manager.controller.changes import busy_workers, changed, debtors, followed, said
from manager.controller.events import ManagerResumed
from manager.controller.losing import lose
from manager.controller.nodes import NodeState
from manager.controller.probing import probe_of
from manager.controller.reasons import ReasonCode
from manager.controller.starting import start_if_due
from manager.controller.state import ControllerState, Decision, OutstandingOrder, Phase
from manager.controller.stepping import send_again


def resumed(state: ControllerState, event: ManagerResumed, now_s: float) -> Decision:
    """Order again what is not answered, end strangers, and lose the workers that are gone.

    Every wait begins anew: nobody could be heard meanwhile. An order that a worker has done already it answers
    again, one that it is at it goes on with.
    """
    state, dropped = without_ahead(_with_fresh_waits(state, now_s))
    strangers = [worker for worker in event.living if worker not in state.workers]
    gone = {
        worker: "it was gone when the new manager took over"
        for worker, entry in state.workers.items()
        if entry.ready and worker not in event.living
    }
    again = tuple(action for action in (*_again(state), *dropped) if getattr(action, "worker", None) not in gone)
    sentence = f"a new manager took over: {len(event.living)} workers live, {len(again)} actions are repeated"
    actions = (*(EndWorker(worker=worker) for worker in strangers), *again)
    decision = said(state, ReasonCode.MANAGER_RESUMED, sentence, *actions)
    if gone:
        decision = followed(decision, lose(state, gone, now_s))
    if state.phase is Phase.STARTING:
        decision = followed(decision, start_if_due(decision.state, now_s))
    return decision


def resumed_after_the_end(state: ControllerState, event: ManagerResumed, now_s: float) -> Decision:
    """The run was over: say so again."""
    del event, now_s
    assert state.finish is not None, "ended without an outcome"
    return said(state, ReasonCode.MANAGER_RESUMED, "the run had ended already", state.finish)


def _with_fresh_waits(state: ControllerState, now_s: float) -> ControllerState:
    """Begin every wait anew; units of the last checkpoint that are missing are asked for with their commits."""
    order, awaited, pending = state.order, state.awaited, state.pending
    if order is None and state.phase is Phase.COMMITTING and pending is not None:
        order = OutstandingOrder(kind="commit", generation=state.generation, version=state.version, sent_s=now_s)
    if order is not None:
        aborted = {} if order.abort_sent_s is None else {"abort_sent_s": now_s}
        order = order.model_copy(update={"sent_s": now_s, **aborted})
    if state.phase is Phase.COMMITTING and pending is not None:
        awaited |= debtors(pending) & set(state.workers)
        pending = pending.model_copy(update={"started_s": now_s})
    elif pending is not None:
        pending = pending.model_copy(update={"stale": True})
    workers = {
        worker: entry.model_copy(update={"appeared_s": now_s}) if entry.node is NodeState.WARMING else entry
        for worker, entry in state.workers.items()
    }
    return changed(
        state,
        order=order if awaited else None,
        awaited=awaited,
        pending=pending,
        workers=workers,
        sealing_since_s=None if state.sealing_since_s is None else now_s,
        morph_began_s=None,
    )


def _again(state: ControllerState) -> tuple[Action, ...]:
    """Build every action whose outcome is not known."""
    actions: list[Action] = []
    for worker, entry in state.workers.items():
        if not entry.ready:
            actions.append(StartWorker(worker=worker))
        if entry.probation is not None and entry.probation.asked_s is not None:
            actions.append(probe_of(state, worker))
    if state.order is not None:
        if state.order.kind == "reshape":
            assert state.reshape is not None, "no generation was formed"
            actions += [SendReshape(worker=worker, order=state.reshape) for worker in busy_workers(state)]
        else:
            actions += send_again(state)
        if state.order.abort_sent_s is not None:
            actions += [Abort(worker=worker, generation=state.generation) for worker in busy_workers(state)]
    actions += [WriteManifest(manifest=manifest) for manifest in state.sealing]
    for name, request in state.requests.items():
        if request.count:
            actions.append(RequestNodes(request=name, count=request.count))
    return tuple(actions)
