"""Bounds on every wait: when the next one runs out, and what is done then."""

from __future__ import annotations

from manager.controller.actions import EndWorker
from manager.controller.answering import start_if_due
from manager.controller.changes import busy_workers, debtors, ended, followed, said
from manager.controller.events import Tick
from manager.controller.losing import lose
from manager.controller.reasons import ReasonCode
from manager.controller.state import ControllerState, Decision, Phase
from morph.contract.messages import WorkerId


def worker_deadlines(state: ControllerState) -> dict[WorkerId, tuple[float, str]]:
    """Return, for each worker that is awaited, until when (seconds) and what for."""
    policy = state.config.policy
    deadlines: dict[WorkerId, tuple[float, str]] = {}
    for worker, entry in state.workers.items():
        order = entry.order
        if not entry.ready:
            deadlines[worker] = (
                entry.appeared_s + policy.order_timeout_s,
                f"it was not set up within {policy.order_timeout_s:g} s",
            )
        elif order is not None and order.abort_sent_s is not None:
            deadlines[worker] = (
                order.abort_sent_s + policy.heartbeat_timeout_s,
                f"it did not give up its {order.kind} within {policy.heartbeat_timeout_s:g} s",
            )
        elif order is not None:
            deadlines[worker] = (
                order.sent_s + policy.order_timeout_s,
                f"its {order.kind} was not answered within {policy.order_timeout_s:g} s",
            )
    if state.phase is Phase.COMMITTING and state.pending is not None and not busy_workers(state):
        until_s = state.pending.started_s + policy.order_timeout_s
        for worker in sorted(debtors(state.pending) & set(state.workers)):
            deadlines[worker] = (until_s, f"its last units were not written within {policy.order_timeout_s:g} s")
    return deadlines


def wake_at_s(state: ControllerState) -> float | None:
    """Return when the first wait runs out; None when nothing is bounded by time."""
    if state.phase is Phase.ENDED:
        return None
    times = [until_s for until_s, _ in worker_deadlines(state).values()]
    if state.phase is Phase.STARTING and state.first_feasible_s is not None:
        times.append(state.first_feasible_s + state.config.policy.start_patience_s)
    if state.phase is Phase.SEALING and state.sealing_since_s is not None:
        times.append(state.sealing_since_s + state.config.policy.order_timeout_s)
    return min(times, default=None)


def tick(state: ControllerState, event: Tick, now_s: float) -> Decision:
    """Give up the workers that were awaited too long; start with whoever is ready when patience has run out."""
    del event
    late = {worker: why for worker, (until_s, why) in worker_deadlines(state).items() if now_s >= until_s}
    if late:
        given_up = said(state, ReasonCode.WORKER_REMOVED, "given up", *(EndWorker(worker=worker) for worker in late))
        decision = followed(given_up, lose(state, late, now_s))
        state = decision.state
        if state.phase is Phase.STARTING:
            return followed(decision, start_if_due(state, now_s))
        return decision
    if state.phase is Phase.STARTING:
        return start_if_due(state, now_s)
    limit_s = state.config.policy.order_timeout_s
    if state.phase is Phase.SEALING and state.sealing_since_s is not None and now_s >= state.sealing_since_s + limit_s:
        return ended(state, "failed", f"the manifest of version {state.version} was not written within {limit_s:g} s")
    return said(state, ReasonCode.NOTHING_DUE, "nothing is due")
