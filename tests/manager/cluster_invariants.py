"""What must hold after every event of a history; each is checked against what the simulated workers really have."""

from __future__ import annotations

from simulated_cluster import Observer, SimulatedCluster

from manager.controller.actions import Abort, EndWorker, SendCommit, SendReshape, SendStep, StartWorker
from manager.controller.events import Event, WorkerLost
from manager.controller.reasons import ReasonCode
from manager.controller.state import ControllerState, Decision, Phase

IDLE_PHASES = {Phase.STARTING, Phase.WAITING, Phase.SEALING, Phase.ENDED}
ORDER_KIND = {Phase.RESHAPING: "reshape", Phase.TRAINING: "step", Phase.COMMITTING: "commit"}


def phase_problem(state: ControllerState) -> str | None:
    """Say what breaks the phase's invariant, or None."""
    orders = {worker: entry.order for worker, entry in state.workers.items() if entry.order is not None}
    if state.phase in IDLE_PHASES and orders:
        return f"{state.phase}, but {sorted(orders)} have orders"
    if any(order.generation != state.generation for order in orders.values()):
        return "an order of another generation is outstanding"
    if state.phase in ORDER_KIND and any(order.kind != ORDER_KIND[state.phase] for order in orders.values()):
        return f"{state.phase}, but orders of another kind are outstanding"
    if state.phase in (Phase.RESHAPING, Phase.TRAINING, Phase.ABORTING) and not orders:
        return f"{state.phase}, but nobody has an order"
    if state.phase is Phase.ABORTING and any(order.abort_sent_s is None for order in orders.values()):
        return "aborting, but an order was not told to abort"
    if state.phase in ORDER_KIND and any(order.abort_sent_s is not None for order in orders.values()):
        return f"{state.phase}, but an order was told to abort"
    members = {slot.worker for slot in state.slots}
    if state.phase is Phase.TRAINING and not set(orders) <= members <= set(state.workers):
        return "training, but a member is missing or a stranger has an order"
    if state.phase in (Phase.RESHAPING, Phase.TRAINING) and not members <= set(state.workers):
        return f"{state.phase}, but a member is lost"
    if any(entry.holds and not entry.ready for entry in state.workers.values()):
        return "a worker that is not ready holds units"
    return None


def check_phase(cluster: SimulatedCluster, before: ControllerState, event: Event, decision: Decision) -> None:
    """The phase's invariant holds, and every decision says why."""
    problem = phase_problem(decision.state)
    cluster.check(problem is None, str(problem))
    cluster.check(bool(decision.reason.sentence), "a decision without a sentence")


def check_versions(cluster: SimulatedCluster, before: ControllerState, event: Event, decision: Decision) -> None:
    """A step is decided when every member prepared it, never otherwise; it is undone only when its state is lost."""
    old, new = before.version, decision.state.version
    if decision.reason.code is ReasonCode.SET_BACK:
        target = max(cluster.checkpoints, default=0)
        cluster.check(new == target, f"set to version {new}, the newest checkpoint is {target}")
        living = [cluster.workers[name] for name, entry in decision.state.workers.items() if entry.ready]
        living = [worker for worker in living if worker.alive]
        whole = all(any(worker.has(unit, old) for worker in living) for unit in before.config.units)
        cluster.check(not whole, f"set back from version {old}, which living workers hold completely")
    elif new != old:
        cluster.check(new == old + 1, f"version {old} becomes {new}")
        members = [cluster.workers[slot.worker] for slot in before.slots]
        skipped = any(worker.non_finite for worker in members)
        right = all(worker.prepared == old and (skipped or not worker.overflowed) for worker in members)
        decided = decision.state.decided
        cluster.check(decided is not None and decided.skipped == skipped, f"version {new} is decided with {decided}")
        cluster.check(right, f"version {new} is decided, but not every member prepared step {old}")


def check_orders(cluster: SimulatedCluster, before: ControllerState, event: Event, decision: Decision) -> None:
    """Nobody known to be dead gets anything; all the living work on one generation; steps go to all members."""
    state = decision.state
    if isinstance(event, WorkerLost):
        cluster.told_lost.add(event.worker)
    ordered = [action for action in decision.actions if isinstance(action, SendReshape | SendStep | SendCommit)]
    for action in decision.actions:
        if isinstance(action, SendReshape | SendStep | SendCommit | StartWorker | Abort):
            cluster.check(action.worker not in cluster.told_lost, f"{action.kind} to {action.worker}, which is dead")
        if isinstance(action, EndWorker):
            cluster.told_lost.add(action.worker)
    for action in ordered:
        cluster.check(action.order.generation == state.generation, f"{action.kind} of an older generation")
    busy = [
        worker.order.order.generation
        for name, worker in cluster.workers.items()
        if worker.alive and worker.order is not None and name not in cluster.told_lost
    ]
    cluster.check(not ordered or set(busy) <= {state.generation}, f"generations {busy} work beside {state.generation}")


def check_holdings(cluster: SimulatedCluster, before: ControllerState, event: Event, decision: Decision) -> None:
    """What the controller believes a worker holds, it holds; and what is needed is held or can be restored."""
    state = decision.state
    for name, entry in state.workers.items():
        worker = cluster.workers[name]
        if worker.alive and not any(
            isinstance(action, SendReshape | SendStep | SendCommit) for action in decision.actions
        ):
            missing = [unit for unit in entry.holds if not worker.has(unit, state.version)]
            cluster.check(not missing, f"{name} is believed to hold {missing} at version {state.version}")
    held = set().union(*(entry.holds for entry in state.workers.values()))
    saved = state.checkpoint is None or state.checkpoint.version in cluster.checkpoints
    cluster.check(saved, "the newest checkpoint is not on storage")
    if state.phase is Phase.TRAINING:
        cluster.check(held == set(state.config.units), f"training without {set(state.config.units) - held}")


def check_end(cluster: SimulatedCluster, before: ControllerState, event: Event, decision: Decision) -> None:
    """A finished run has all its steps, saved."""
    state = decision.state
    if decision.reason.code is ReasonCode.FINISHED:
        cluster.check(state.version == state.config.num_steps, f"finished at version {state.version}")
        cluster.check(state.version in cluster.checkpoints, "finished without a checkpoint of the last version")
    if before.phase is Phase.ENDED:
        cluster.check(not decision.actions, "an action after the end")


INVARIANTS: tuple[Observer, ...] = (check_phase, check_versions, check_orders, check_holdings, check_end)
