"""Bounds every wait: computes when the next wait expires, and acts when it does."""

from __future__ import annotations

from collections.abc import Mapping

from manager.controller.giving_up import idle_until_s, note_failed_setup
from manager.controller.node_requests import look_after_requests, nothing_comes, resend_at_s, why_requests_ended
from manager.controller.notices import spare
from manager.controller.probing import probe_at_s, probe_if_due
from manager.controller.shape.formation import form, form_or_hold, start_if_due
from manager.controller.state.actions import EndWorker, ReasonCode
from manager.controller.state.bounds import save_bound_s, setup_bound_s
from manager.controller.state.events import NobodyHeard, Tick
from manager.controller.state.nodes import NodeState
from manager.controller.state.state import ControllerState, OutstandingOrder, Phase, WorkerState
from manager.controller.state.transition import Transition
from manager.controller.steps.checkpoints import SAVING, end_if_saved, is_saved, save_if_due
from manager.controller.steps.doubt import find_if_due, in_doubt, loading_workers, note_doubt
from manager.controller.steps.failures import FORMED_PHASES, dissolve, lose
from manager.controller.steps.recovery import rest_over
from morph.contract.messages import Failed, WorkerId
from morph.words import counted


def wake_at_s(state: ControllerState) -> float | None:
    """Return a time (seconds) no later than the end of the first wait; None only if the run is over."""
    waits = state.waits
    saving = state.saving
    if state.phase is Phase.ENDED:
        return None
    policy = state.config.policy
    times = [time_s for time_s in (state.provisioning.nodes_wake_s, waits.hold_until_s) if time_s is not None]
    if state.step.order is not None:
        times.append(_order_until(state.step.order)[0])
    elif state.phase is Phase.RESTING and waits.rest_until_s is not None:
        times.append(waits.rest_until_s)
    elif state.phase is Phase.COMMITTING and saving.pending is not None:
        times.append(saving.pending.started_s + save_bound_s(state))
    if waits.waiting_since_s is not None:
        times.append(waits.waiting_since_s + policy.rules.wait.vms_patience_s)
    if state.phase is Phase.STARTING and waits.first_feasible_s is not None:
        times.append(max([waits.first_feasible_s + policy.start_patience_s, *waits.partly_lost.values()]))
    if state.phase is Phase.SEALING and saving.sealing_since_s is not None:
        times.append(saving.sealing_since_s + save_bound_s(state))
    if state.phase in SAVING and saving.save_retry_s is not None:
        times.append(saving.save_retry_s)
    if (until_s := idle_until_s(state)) is not None:
        times.append(until_s)
    return min(times, default=None)


def on_tick(transition: Transition, event: Tick) -> None:
    """Do everything that is due: give up late workers, update workers and requests, end waits that took too long."""
    del event
    if (
        transition.state.provisioning.nodes_wake_s is not None
        and transition.now_s >= transition.state.provisioning.nodes_wake_s
    ):
        transition.change_provisioning(nodes_wake_s=None)
        _look_after_nodes(transition)
    late = _late_workers(transition.state, transition.now_s)
    if late and (loading := loading_workers(transition.state)):
        sentence = (
            f"storage did not give {', '.join(loading)} their parts of version {transition.state.version} in time"
        )
        note_doubt(transition, sentence, *loading)
        transition.say(ReasonCode.ABORTING, sentence)
        dissolve(transition)
    elif _cannot_tell(transition.state, late):
        transition.say(
            ReasonCode.ABORTING, f"{counted(len(late), 'worker')} did not answer; which of them hang is not known"
        )
        dissolve(transition)
    elif late:
        transition.say(ReasonCode.WORKER_REMOVED, "given up", *(EndWorker(worker=worker) for worker in late))
        known = transition.state.workers
        lose(transition, late)
        for worker in (worker for worker in late if known[worker].node is NodeState.WARMING):
            answer = Failed(worker=worker, generation=0, error=late[worker])
            transition.say(ReasonCode.SETUP_FAILED, note_failed_setup(transition, worker, known[worker].host, answer))
        if transition.state.phase is Phase.STARTING:
            start_if_due(transition)
    else:
        _end_long_waits(transition)
    if transition.code is None:
        transition.say(ReasonCode.NOTHING_DUE, "nothing is due")


def on_nobody_heard(transition: Transition, event: NobodyHeard) -> None:
    """Extend the waits for workers by the time in which no worker could answer."""

    def later(since_s: float | None) -> float | None:
        return None if since_s is None else min(since_s + event.lasted_s, transition.now_s)

    state = transition.state
    order = state.step.order
    if order is not None:
        update = {"sent_s": later(order.sent_s), "abort_sent_s": later(order.abort_sent_s)}
        order = order.model_copy(update=update)
    workers = {
        worker: entry.model_copy(update={"appeared_s": later(entry.appeared_s)})
        if entry.node is NodeState.WARMING
        else entry
        for worker, entry in state.workers.items()
    }
    transition.change(workers=workers)
    transition.change_step(order=order)
    transition.change_under_way(lambda save: save.model_copy(update={"started_s": later(save.started_s)}))
    transition.say(ReasonCode.OUTAGE_OVER, f"no worker was heard for {event.lasted_s:.1f} s: that time does not count")


def _end_long_waits(transition: Transition) -> None:
    state, now_s = transition.state, transition.now_s
    waits = state.waits
    limit_s = save_bound_s(state)
    match state.phase:
        case Phase.STARTING | Phase.WAITING:
            _end_if_waited_too_long(transition)
            if transition.state.phase is Phase.STARTING:
                start_if_due(transition)
        case Phase.SEALING if (
            state.saving.sealing_since_s is not None and now_s >= state.saving.sealing_since_s + limit_s
        ):
            if is_saved(state):  # only manifests of earlier versions are missing
                transition.change_saving(sealing=(), sealing_since_s=None)
                end_if_saved(transition)
            else:
                sentence = f"the manifest of version {state.version} was not written within {limit_s:.4g} s"
                transition.end("failed", sentence)
        case Phase.COMMITTING | Phase.SEALING:
            save_if_due(transition)
        case Phase.HOLDING if waits.hold_until_s is not None and now_s >= waits.hold_until_s:
            form_or_hold(transition) if waits.partly_lost else form(transition)
        case Phase.HOLDING:
            form_or_hold(transition)
        case Phase.RESTING if in_doubt(state):
            find_if_due(transition)
        case Phase.RESTING:
            rest_over(transition)


def _end_if_waited_too_long(transition: Transition) -> None:
    state = transition.state
    limit_s, fewest = state.config.policy.rules.wait.vms_patience_s, state.config.fewest_workers
    if nothing_comes(state) and len(state.ready_workers) < fewest:
        transition.end("failed", why_requests_ended(state))
    elif state.waits.waiting_since_s is not None and transition.now_s >= state.waits.waiting_since_s + limit_s:
        sentence = f"there were never {fewest} ready workers within {limit_s:g} s"
        transition.end("stopped", sentence)


def _order_until(order: OutstandingOrder) -> tuple[float, str]:
    """Return the deadline (seconds) for answering an order, and the sentence that reports a missed deadline."""
    if order.abort_sent_s is not None:
        limit_s = order.give_up_s
        return order.abort_sent_s + limit_s, f"it did not give up its {order.kind} within {limit_s:.4g} s"
    return order.sent_s + order.limit_s, f"its {order.kind} was not answered within {order.limit_s:.4g} s"


def _cannot_tell(state: ControllerState, late: Mapping[WorkerId, str]) -> bool:
    """Whether most late workers may only wait for another; an abort tells: a hanging one does not give up its order."""
    waiting = state.step.awaited & set(late)
    return state.phase in FORMED_PHASES and len(waiting) > 1 and 2 * len(waiting) > len(state.slots)


def _late_workers(state: ControllerState, now_s: float) -> dict[WorkerId, str]:
    """Return the workers that are overdue, each with a sentence on its failure."""
    saving = state.saving
    late, limit_s = {}, setup_bound_s(state)
    for worker, entry in state.workers.items():
        if entry.node is NodeState.WARMING and now_s >= entry.appeared_s + limit_s:
            late[worker] = f"it was not set up within {limit_s:.4g} s"
    if state.step.order is not None:
        until_s, why = _order_until(state.step.order)
        late |= dict.fromkeys(state.busy_workers, why) if now_s >= until_s else {}
    elif state.phase is Phase.COMMITTING and saving.pending and now_s >= saving.pending.started_s + save_bound_s(state):
        why = f"for {save_bound_s(state):.4g} s none of its last units was written"
        late |= dict.fromkeys(sorted(saving.pending.debtors & set(state.workers)), why)
    return late


def _look_after_nodes(transition: Transition) -> None:
    """Take back workers that outlived their notice, probe slow ones, resend requests, and schedule the next check."""
    for worker, entry in transition.state.workers.items():
        if worker not in transition.state.workers:
            continue
        if (
            entry.node is NodeState.DRAINING
            and entry.drain_until_s is not None
            and transition.now_s >= entry.drain_until_s
        ):
            spare(transition, worker, "it was not taken")
        elif entry.node is NodeState.SUSPECT:
            probe_if_due(transition, worker)
    look_after_requests(transition)
    state = transition.state
    times = [time_s for entry in state.workers.values() for time_s in _node_times(state, entry)]
    times += _request_times(state)
    transition.change_provisioning(nodes_wake_s=min(times, default=None))


def _node_times(state: ControllerState, entry: WorkerState) -> list[float]:
    match entry.node:
        case NodeState.WARMING:
            return [entry.appeared_s + setup_bound_s(state)]
        case NodeState.DRAINING if entry.drain_until_s is not None:
            return [entry.drain_until_s]
        case NodeState.SUSPECT if entry.probation is not None:
            return [probe_at_s(state, entry)]
        case _:
            return []


def _request_times(state: ControllerState) -> list[float]:
    times: list[float] = []
    for request in state.provisioning.requests.values():
        times += [resend_at_s(state, request)] if request.count else []
        times += [since_s + state.config.policy.rules.requests.boot_s for since_s in request.booting.values()]
    return times
