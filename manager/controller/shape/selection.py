"""Chooses the best shape for the present workers, and judges what a change to it would gain and cost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from manager.controller.state.nodes import NodeState
from manager.controller.state.state import ControllerState, Flaps
from manager.controller.state.transition import Transition
from morph.contract.messages import WorkerId
from morph.contract.plan import Plan
from morph.contract.pool import Pool
from morph.contract.waits import Backoff


class Choice(NamedTuple):
    """A shape, the workers that may have a place in it, and its speed (examples/s), limited by the slowest of them."""

    plan: Plan
    workers: tuple[WorkerId, ...]
    examples_per_s: float


def chosen(transition: Transition) -> Choice | None:
    """Return the best shape now; it is chosen once per decision unless the set of workers changes."""
    state = transition.state
    return transition.once(choose, state.config, state.workers, state.member_units, state.failing)


def choose(state: ControllerState, now_s: float) -> Choice | None:
    """Return the best shape of the present workers; None when no plan fits them. Draining workers are never used.

    Flapping machines, and workers with errors, are used only if no plan fits without them; slow ones if they help.
    """
    steady, unsteady = _steady(state, now_s)
    pool = pool_of(state, steady)
    if unsteady and state.config.best_plan(pool) is None:
        steady = _in_order(state, (*steady, *unsteady))
        pool = pool_of(state, steady)
    slow = [worker for worker, entry in state.workers.items() if entry.node is NodeState.SUSPECT]
    slow.sort(key=lambda worker: state.workers[worker].pace.slowdown)
    best: Choice | None = None
    for count in range(len(slow) + 1):
        plan = state.config.best_plan(pool + pool_of(state, slow[:count]))
        if plan is None:
            continue
        slowdown = max(1.0, state.workers[slow[count - 1]].pace.slowdown) if count else 1.0
        speed = plan.expected.examples_per_s / slowdown
        if best is None or speed > best.examples_per_s:
            best = Choice(plan, _in_order(state, (*steady, *slow[:count])) if count else steady, speed)
    return best


def pool_of(state: ControllerState, workers: Iterable[WorkerId]) -> Pool:
    """Return the GPUs of some workers."""
    return Pool.counting([state.workers[worker].facts.node_type for worker in workers])


def present_speed(state: ControllerState) -> float:
    """Return the speed of the present shape (examples/s), limited by its slowest member; 0 without a shape."""
    if state.plan is None:
        return 0.0
    slowdowns = [state.workers[slot.worker].pace.slowdown for slot in state.slots if slot.worker in state.workers]
    return state.plan.expected.examples_per_s / max([1.0, *slowdowns])


def gain_of(state: ControllerState, choice: Choice) -> float:
    """Return how much faster a choice is than the present shape, as a share of its speed; 0 if it is not faster."""
    now = present_speed(state)
    if choice.examples_per_s <= now:
        return 0.0
    return choice.examples_per_s / now - 1 if now else float("inf")


def draining_members(state: ControllerState) -> tuple[WorkerId, ...]:
    """Return the members whose VMs have a notice."""
    return tuple(worker for worker in state.member_units if state.workers[worker].node is NodeState.DRAINING)


def nodes_to_come(state: ControllerState, now_s: float) -> tuple[tuple[float, str], ...]:
    """Return when (seconds) each worker in setup should be ready, and its type; overdue workers are left out."""
    expected_s = (
        state.measured.setup_s if state.measured.setup_s is not None else state.config.policy.rules.wait.setup_s
    )
    warming = [entry for entry in state.workers.values() if entry.node is NodeState.WARMING]
    times = [(entry.appeared_s + expected_s, entry.facts.node_type) for entry in warming]
    return tuple(sorted((time_s, of) for time_s, of in times if now_s <= time_s + expected_s))


def faster_with_those_to_come(state: ControllerState, choice: Choice, now_s: float, until_s: float) -> bool:
    """Whether a faster shape than this choice will fit once the workers that are expected by then are ready."""
    coming = Pool.counting(of for time_s, of in nodes_to_come(state, now_s) if time_s <= until_s)
    return state.config.speed_on(pool_of(state, choice.workers) + coming) > choice.examples_per_s


def cost_of_morph_s(state: ControllerState) -> float:
    """Return the cost of a planned change (seconds of training), as measured, or else as the policy expects."""
    return state.measured.morph_s if state.measured.morph_s is not None else state.config.policy.rules.wait.morph_s


def _steady(state: ControllerState, now_s: float) -> tuple[tuple[WorkerId, ...], tuple[WorkerId, ...]]:
    """Split the ready workers, in order: those to use; those on flapping machines or with an error in this step."""
    failed = state.failing.worker if state.failing is not None and not state.failing.final else None
    taken: list[WorkerId] = []
    left: list[WorkerId] = []
    for worker, entry in state.workers.items():
        if entry.node is NodeState.READY:
            steady = entry.eligible_s is None or now_s >= entry.eligible_s or worker in state.member_units
            (taken if steady and worker != failed else left).append(worker)
    return tuple(taken), tuple(left)


def _in_order(state: ControllerState, chosen: tuple[WorkerId, ...]) -> tuple[WorkerId, ...]:
    wanted = set(chosen)
    return tuple(worker for worker in state.workers if worker in wanted)


def record_flap(transition: Transition, host: str) -> None:
    """Record that a machine that had been ready became unreliable; forget old records."""
    state, now_s = transition.state, transition.now_s
    memory_s = state.config.policy.rules.flaps.memory_s
    recent = {name: entry for name, entry in state.provisioning.flaps.items() if now_s < entry.last_s + memory_s}
    num = recent[host].num + 1 if host in recent else 1
    transition.change_provisioning(flaps={**recent, host: Flaps(num=num, last_s=now_s)})


def hold_s(transition: Transition, host: str) -> float:
    """Return how long (seconds) a machine that is ready again must remain ready before it is used; 0: not at all."""
    rules, entry = transition.state.config.policy.rules.flaps, transition.state.provisioning.flaps.get(host)
    if entry is None or entry.num < 2 or transition.now_s >= entry.last_s + rules.memory_s:
        return 0.0
    return Backoff(rules.hold_s, rules.hold_max_s).pause_s(entry.num - 2)
