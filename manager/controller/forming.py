"""Forming a generation: which plan, who drives what, and where the state comes from."""

from __future__ import annotations

from manager.controller.actions import SendReshape
from manager.controller.changes import changed, ended, ready_workers, said, with_orders
from manager.controller.config import ControllerConfig
from manager.controller.placement import choose_sources, place, units_by_stage
from manager.controller.reasons import ReasonCode
from manager.controller.state import ControllerState, Decision, OutstandingOrder, Phase
from morph.contract.messages import ReshapeOrder, UnitId
from morph.contract.plan import Plan


def best_plan(config: ControllerConfig, num_ready: int) -> Plan | None:
    """Return the fastest plan that this many workers can run, the smaller of equals; None when none fits."""
    plans = [plan for count, plan in sorted(config.plans.items()) if count <= num_ready]
    return max(plans, key=lambda plan: (plan.expected.examples_per_s, -plan.num_workers), default=None)


def join_gain(state: ControllerState) -> float:
    """Return by which share of the present speed the ready workers could be faster; 0 when they could not."""
    assert state.plan is not None, "no generation was formed"
    better = best_plan(state.config, len(ready_workers(state)))
    now, then = state.plan.expected.examples_per_s, better.expected.examples_per_s if better else 0.0
    if then <= now:
        return 0.0
    return then / now - 1 if now else float("inf")


def form(state: ControllerState, now_s: float) -> Decision:
    """Form the next generation from every ready worker; nobody has an order.

    Waits when no plan fits them. When a unit has no living holder and the decided version cannot be read
    anywhere, the decided version goes back to the newest checkpoint's, or to 0.
    """
    ready = ready_workers(state)
    plan = best_plan(state.config, len(ready))
    if plan is None:
        state = changed(state, phase=Phase.WAITING, plan=None, slots=())
        if state.stop_reason is not None:
            return ended(
                state,
                "stopped",
                f"{state.stop_reason}; too few workers are left to save what came after "
                f"version {_restorable(state)[0]}",
            )
        fewest = min(state.config.plans)
        return said(state, ReasonCode.TOO_FEW_WORKERS, f"{len(ready)} workers are ready, {fewest} are needed")
    state, set_back = _with_living_state(state)
    version, kind = _restorable(state)
    restore = kind if version == state.version else None
    held = {worker: state.workers[worker].holds for worker in ready}
    needed = units_by_stage(plan, state.config.units)
    slots = place(plan, ready, held, needed, state.config.unit_bytes)
    sources = choose_sources(slots, needed, held, state.config.unit_bytes, restore)
    order = ReshapeOrder(
        generation=state.generation + 1,
        version=state.version,
        decided=state.decided,
        plan=plan,
        slots=slots,
        sources=sources,
    )
    taking_part = {slot.worker for slot in slots} | {source.peer for source in sources}
    receivers = [worker for worker in ready if worker in taking_part]
    outstanding = OutstandingOrder(kind="reshape", generation=order.generation, version=order.version, sent_s=now_s)
    state = changed(
        with_orders(state, dict.fromkeys(receivers, outstanding)),
        phase=Phase.RESHAPING,
        generation=order.generation,
        attempt=0,
        loss_scale=None,
        plan=plan,
        slots=slots,
    )
    sentence = (
        f"{set_back}generation {order.generation} is formed at version {order.version}: {plan.shape} on "
        f"{len(slots)} of {len(ready)} ready workers"
    )
    code = ReasonCode.SET_BACK if set_back else ReasonCode.FORMED
    return said(state, code, sentence, *(SendReshape(worker=worker, order=order) for worker in receivers))


def _restorable(state: ControllerState) -> tuple[int, str]:
    """Return the version that needs no living holder, and its kind of source."""
    if state.checkpoint is None:
        return 0, "initial"
    return state.checkpoint.version, "checkpoint"


def _with_living_state(state: ControllerState) -> tuple[ControllerState, str]:
    """Go back to the restorable version if a unit has no holder at another one; say so, or return ""."""
    held: set[UnitId] = set().union(*(state.workers[worker].holds for worker in ready_workers(state)))
    missing = sorted(set(state.config.units) - held)
    version, kind = _restorable(state)
    if not missing or version == state.version:
        return state, ""
    workers = {worker: entry.model_copy(update={"holds": frozenset()}) for worker, entry in state.workers.items()}
    where = "the newest checkpoint" if kind == "checkpoint" else "the start, there being no checkpoint"
    sentence = (
        f"no living worker holds {', '.join(missing)} at version {state.version}: back to version {version}, "
        f"{where}, {max(0, state.version - version)} steps are to be redone; "
    )
    state = changed(state, version=version, decided=None, workers=workers, pending=None, checkpoint_base=version)
    return state, sentence
