"""Bounds on every wait: when the next one runs out, and what is done then."""

from __future__ import annotations

from collections.abc import Mapping

from manager.controller.actions import EndWorker
from manager.controller.asking import nothing_comes, requests_due, resend_at_s, why_no_more
from manager.controller.changes import busy_workers, changed, debtors, ended, followed, ready_workers, said
from manager.controller.events import NobodyHeard, Tick
from manager.controller.forming import form, form_or_hold
from manager.controller.losing import FORMED_PHASES, dissolve, lose
from manager.controller.nodes import NodeState
from manager.controller.noticing import spare
from manager.controller.probing import probe_at_s, probe_due
from manager.controller.reasons import ReasonCode
from manager.controller.resting import rest_over
from manager.controller.saving import SAVING, save_if_due
from manager.controller.starting import start_if_due
from manager.controller.state import ControllerState, Decision, OutstandingOrder, Phase, WorkerState
from morph.contract.cluster import Policy
from morph.contract.messages import WorkerId


def wake_at_s(state: ControllerState) -> float | None:
    """Return when the first wait runs out, or earlier; None only when the run is over.

    Waits for nodes are found by looking at all of them, so a bound is kept that a ``Tick`` brings up to date.
    """
    if state.phase is Phase.ENDED:
        return None
    policy = state.config.policy
    times = [time_s for time_s in (state.nodes_wake_s, state.hold_until_s) if time_s is not None]
    if state.order is not None:
        times.append(_order_until(state.order, policy)[0])
    elif state.phase is Phase.RESTING and state.rest_until_s is not None:
        times.append(state.rest_until_s)
    elif state.phase is Phase.COMMITTING and state.pending is not None:
        times.append(state.pending.started_s + policy.order_timeout_s)
    if state.waiting_since_s is not None:
        times.append(state.waiting_since_s + policy.rules.wait.vms_patience_s)
    if state.phase is Phase.STARTING and state.first_feasible_s is not None:
        times.append(state.first_feasible_s + policy.start_patience_s)
    if state.phase is Phase.SEALING and state.sealing_since_s is not None:
        times.append(state.sealing_since_s + policy.order_timeout_s)
    if state.phase in SAVING and state.save_again_s is not None:
        times.append(state.save_again_s)
    return min(times, default=None)


def tick(state: ControllerState, event: Tick, now_s: float) -> Decision:
    """Do what is due: give up workers that were awaited too long, look after nodes and requests, end long waits."""
    del event
    decision = said(state, ReasonCode.NOTHING_DUE, "nothing is due")
    if state.nodes_wake_s is not None and now_s >= state.nodes_wake_s:
        decision = _look_after_nodes(changed(state, nodes_wake_s=None), now_s)
    late = _late_workers(decision.state, now_s)
    if _cannot_tell(decision.state, late):
        several = said(
            decision.state, ReasonCode.ABORTING, f"{len(late)} workers did not answer: who hangs is not known"
        )
        return _then(decision, followed(several, dissolve(decision.state, now_s)))
    if late:
        given_up = said(
            decision.state, ReasonCode.WORKER_REMOVED, "given up", *(EndWorker(worker=worker) for worker in late)
        )
        decision = _then(decision, followed(given_up, lose(decision.state, late, now_s)))
        if decision.state.phase is Phase.STARTING:
            return followed(decision, start_if_due(decision.state, now_s))
        return decision
    if decision.state.phase is Phase.STARTING:
        return _then(decision, _waited_too_long(decision.state, now_s) or start_if_due(decision.state, now_s))
    return _then(decision, _phase_due(decision.state, now_s))


def nobody_heard(state: ControllerState, event: NobodyHeard, now_s: float) -> Decision:
    """Wait for workers longer by the time in which none could answer."""

    def later(since_s: float | None) -> float | None:
        return None if since_s is None else min(since_s + event.lasted_s, now_s)

    order, pending = state.order, state.pending
    if order is not None:
        update = {"sent_s": later(order.sent_s), "abort_sent_s": later(order.abort_sent_s)}
        order = order.model_copy(update=update)
    if pending is not None:
        pending = pending.model_copy(update={"started_s": later(pending.started_s)})
    workers = {
        worker: entry.model_copy(update={"appeared_s": later(entry.appeared_s)})
        if entry.node is NodeState.WARMING
        else entry
        for worker, entry in state.workers.items()
    }
    state = changed(state, order=order, pending=pending, workers=workers)
    return said(state, ReasonCode.OUTAGE_OVER, f"nobody was heard for {event.lasted_s:.1f} s: that time does not count")


def _then(first: Decision, second: Decision | None) -> Decision:
    if second is None:
        return first
    if first.reason.code is ReasonCode.NOTHING_DUE and not first.actions:
        return second
    return followed(first, second)


def _phase_due(state: ControllerState, now_s: float) -> Decision | None:
    """End a phase that only waits, when its time is over; None: it is not."""
    limit_s = state.config.policy.order_timeout_s
    if state.phase is Phase.SEALING and state.sealing_since_s is not None and now_s >= state.sealing_since_s + limit_s:
        return ended(state, "failed", f"the manifest of version {state.version} was not written within {limit_s:g} s")
    if state.phase in SAVING:
        return save_if_due(state, now_s)
    if state.phase is Phase.HOLDING:
        overdue = state.hold_until_s is not None and now_s >= state.hold_until_s
        return form(state, now_s) if overdue else form_or_hold(state, now_s)
    if state.phase is Phase.RESTING:
        return rest_over(state, now_s)
    return _waited_too_long(state, now_s) if state.phase is Phase.WAITING else None


def _waited_too_long(state: ControllerState, now_s: float) -> Decision | None:
    if nothing_comes(state) and len(ready_workers(state)) < state.config.fewest_workers:
        return ended(state, "failed", why_no_more(state))
    limit_s = state.config.policy.rules.wait.vms_patience_s
    if state.waiting_since_s is None or now_s < state.waiting_since_s + limit_s:
        return None
    fewest = state.config.fewest_workers
    return ended(state, "stopped", f"{fewest} ready workers were awaited for {limit_s:g} s: there were never as many")


def _order_until(order: OutstandingOrder, policy: Policy) -> tuple[float, str]:
    """Return until when (seconds) an order may be answered, and what for."""
    if order.abort_sent_s is not None:
        limit_s = policy.heartbeat_timeout_s
        return order.abort_sent_s + limit_s, f"it did not give up its {order.kind} within {limit_s:g} s"
    limit_s = policy.order_timeout_s
    return order.sent_s + limit_s, f"its {order.kind} was not answered within {limit_s:g} s"


def _cannot_tell(state: ControllerState, late: Mapping[WorkerId, str]) -> bool:
    """Whether so many are late that most of them only wait for one another: who hangs will not give up its order."""
    waiting = state.awaited & set(late)
    return state.phase in FORMED_PHASES and len(waiting) > 1 and 2 * len(waiting) > len(state.slots)


def _late_workers(state: ControllerState, now_s: float) -> dict[WorkerId, str]:
    """Return the workers that were awaited too long, with what they were awaited for."""
    policy, late = state.config.policy, {}
    limit_s = policy.order_timeout_s
    for worker, entry in state.workers.items():
        if entry.node is NodeState.WARMING and now_s >= entry.appeared_s + limit_s:
            late[worker] = f"it was not set up within {limit_s:g} s"
    if state.order is not None:
        until_s, why = _order_until(state.order, policy)
        late |= dict.fromkeys(busy_workers(state), why) if now_s >= until_s else {}
    elif state.phase is Phase.COMMITTING and state.pending and now_s >= state.pending.started_s + limit_s:
        why = f"its last units were not written within {limit_s:g} s"
        late |= dict.fromkeys(sorted(debtors(state.pending) & set(state.workers)), why)
    return late


def _look_after_nodes(state: ControllerState, now_s: float) -> Decision:
    """Take back who outlived a notice, probe the slow, send requests again; then say when to look again."""
    decision = said(state, ReasonCode.NOTHING_DUE, "nothing is due")
    for worker, entry in state.workers.items():
        if worker not in decision.state.workers:
            continue
        if entry.node is NodeState.DRAINING and entry.drain_until_s is not None and now_s >= entry.drain_until_s:
            decision = _then(decision, spare(decision.state, worker, "nobody came for it", now_s))
        elif entry.node is NodeState.SUSPECT:
            decision = _then(decision, probe_due(decision.state, worker, now_s))
    if state.requests:
        due = requests_due(decision.state, now_s)
        decision = _then(decision, due if due.reason.code is not ReasonCode.NOTHING_DUE else None)
    state = decision.state
    times = [time_s for entry in state.workers.values() for time_s in _node_times(state, entry)]
    times += _request_times(state)
    return decision.model_copy(update={"state": changed(state, nodes_wake_s=min(times, default=None))})


def _node_times(state: ControllerState, entry: WorkerState) -> list[float]:
    match entry.node:
        case NodeState.WARMING:
            return [entry.appeared_s + state.config.policy.order_timeout_s]
        case NodeState.DRAINING if entry.drain_until_s is not None:
            return [entry.drain_until_s]
        case NodeState.SUSPECT if entry.probation is not None:
            return [probe_at_s(state, entry.probation)]
        case _:
            return []


def _request_times(state: ControllerState) -> list[float]:
    times: list[float] = []
    for request in state.requests.values():
        times += [resend_at_s(state, request)] if request.count else []
        times += [since_s + state.config.policy.rules.requests.boot_s for since_s in request.granted.values()]
    return times
