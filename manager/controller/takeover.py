"""A new manager takes over: actions that the old one had decided, but perhaps not carried out, are repeated."""

from __future__ import annotations

from manager.controller.probing import probe_of
from manager.controller.shape.formation import start_if_due
from manager.controller.shape.pre_copy import without_pre_copy
from manager.controller.state.actions import (
    Abort,
    Action,
    EndWorker,
    FindCheckpoint,
    MarkBest,
    ReasonCode,
    RequestNodes,
    SendReshape,
    StartWorker,
)
from manager.controller.state.bounds import commit_bound_s
from manager.controller.state.events import ManagerResumed
from manager.controller.state.judging import manifest_order
from manager.controller.state.nodes import NodeState
from manager.controller.state.state import ControllerState, OutstandingOrder, Phase
from manager.controller.state.transition import Transition
from manager.controller.steps.failures import lose
from manager.controller.steps.training_loop import repeat_orders
from morph.words import counted


def on_manager_resumed(transition: Transition, event: ManagerResumed) -> None:
    """Repeat unanswered orders, end unknown workers, handle the loss of those that are gone, restart every wait."""
    _begin_waits_anew(transition)
    transition.change_provisioning(requests_over="", failed_boots=None)  # the user may have mended the reason
    dropped = without_pre_copy(transition)
    state = transition.state
    unknown = [worker for worker in event.living if worker not in state.workers]
    gone = {
        worker: "it was gone when the new manager took over"
        for worker, entry in state.workers.items()
        if entry.ready and worker not in event.living
    }
    again = tuple(
        action for action in (*_repeated_orders(state), *dropped) if getattr(action, "worker", None) not in gone
    )
    requests = _requests(state)
    num_repeated = len(again) + len(requests)
    living = counted(len(event.living), "worker lives", "workers live")
    repeated = counted(num_repeated, "order is", "orders are")
    sentence = f"a new manager took over, and the run goes on: {living}, {repeated} sent again"
    actions = (*(EndWorker(worker=worker) for worker in unknown), *again)
    transition.say(ReasonCode.MANAGER_RESUMED, sentence, *actions)
    if gone:
        lose(transition, gone)
    transition.actions += requests  # after lost VMs are given back
    if state.phase is Phase.STARTING:
        start_if_due(transition)


def on_manager_resumed_after_end(transition: Transition, event: ManagerResumed) -> None:
    """Handle that the run was over: issue its ``Finish`` again."""
    del event
    assert transition.state.finish is not None, "ended without an outcome"
    transition.say(ReasonCode.MANAGER_RESUMED, "the run had ended already", transition.state.finish)


def _begin_waits_anew(transition: Transition) -> None:
    """Restart every wait; missing units of the last checkpoint are requested again with their commits."""
    state, now_s = transition.state, transition.now_s
    order, awaited, pending = state.step.order, state.step.awaited, state.saving.pending
    if order is None and state.phase is Phase.COMMITTING and pending is not None:
        limit_s = commit_bound_s(state)
        order = OutstandingOrder(
            kind="commit", generation=state.generation, version=state.version, sent_s=now_s, limit_s=limit_s
        )
    if order is not None:
        aborted = {} if order.abort_sent_s is None else {"abort_sent_s": now_s}
        order = order.model_copy(update={"sent_s": now_s, **aborted})
    if state.phase is Phase.COMMITTING and pending is not None:
        awaited |= pending.debtors & set(state.workers)
        pending = pending.model_copy(update={"started_s": now_s})
    elif pending is not None:
        pending = pending.model_copy(update={"stale": True})
    workers = {
        worker: entry.model_copy(update={"appeared_s": now_s}) if entry.node is NodeState.WARMING else entry
        for worker, entry in state.workers.items()
    }
    transition.change(workers=workers)
    transition.change_step(order=order if awaited else None, awaited=awaited)
    earlier = tuple(save.model_copy(update={"started_s": now_s}) for save in state.saving.earlier)
    transition.change_saving(earlier=earlier)
    transition.change_saving(pending=pending, sealing_since_s=None if state.saving.sealing_since_s is None else now_s)
    transition.change_measured(morph_began_s=None)


def _repeated_orders(state: ControllerState) -> tuple[Action, ...]:
    """Build every action whose outcome is unknown, except requests for VMs."""
    step = state.step
    saving = state.saving
    actions: list[Action] = []
    for worker, entry in state.workers.items():
        if not entry.ready:
            actions.append(StartWorker(worker=worker))
        if entry.probation is not None and entry.probation.requested_s is not None:
            actions.append(probe_of(state, worker))
    if step.order is not None:
        if step.order.kind == "reshape":
            assert state.reshape is not None, "no generation was formed"
            actions += [SendReshape(worker=worker, order=state.reshape) for worker in state.busy_workers]
        else:
            actions += repeat_orders(state)
        if step.order.abort_sent_s is not None:
            actions += [Abort(worker=worker, generation=state.generation) for worker in state.busy_workers]
    actions += [manifest_order(state, manifest) for manifest in saving.sealing]
    if saving.marked is not None:
        actions.append(MarkBest(best=saving.marked))
    if saving.doubt is not None and saving.doubt.status == "asked":
        actions.append(FindCheckpoint(doubted=saving.doubt.version, at_most=saving.doubt.at_most))
    return tuple(actions)


def _requests(state: ControllerState) -> list[RequestNodes]:
    requests = state.provisioning.requests.items()
    return [
        RequestNodes(request=name, count=request.count, node_type=request.node_type)
        for name, request in requests
        if request.count
    ]
