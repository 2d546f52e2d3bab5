"""Invariants that are checked after each event of a history, besides ``validate``: changes, and workers' real state."""

from __future__ import annotations

import math

from simulated_cluster import Observer, SimulatedCluster
from simulated_job import SUMMED
from simulated_workers import order_key

from manager.controller.node_requests import MAX_SENT
from manager.controller.state.actions import (
    Abort,
    AcknowledgeNotice,
    EndWorker,
    ProbeWorker,
    ReasonCode,
    ReleaseNodes,
    RequestNodes,
    SendCommit,
    SendPreCopy,
    SendReshape,
    SendStep,
    StartWorker,
)
from manager.controller.state.bounds import pre_copy_bound_s, save_bound_s
from manager.controller.state.events import (
    CheckpointFailed,
    Event,
    ManagerResumed,
    ManifestWritten,
    NodesGranted,
    Tick,
    WorkerLost,
)
from manager.controller.state.nodes import NodeState
from manager.controller.state.state import ControllerState, Decision, Phase
from manager.controller.state.validate import BrokenState, validate
from manager.controller.steps.recovery import PAUSES
from manager.simulation.spot.sums import UnitSection
from morph.contract.vm_names import beside, vm_of


def check_state(cluster: SimulatedCluster, before: ControllerState, event: Event, decision: Decision) -> None:
    try:
        validate(decision.state)
    except BrokenState as error:
        raise cluster.broken(str(error)) from error
    cluster.check(bool(decision.reason.sentence), "a decision without a sentence")


def check_versions(cluster: SimulatedCluster, before: ControllerState, event: Event, decision: Decision) -> None:
    """Check that a step is decided exactly when all members prepared it, and undone only if its state is lost."""
    old, new = before.version, decision.state.version
    if isinstance(event, ManifestWritten):
        cluster.told_written.add(event.version)
    if decision.reason.code is ReasonCode.SET_BACK:
        target = max(cluster.told_written, default=0)
        cluster.check(new == target, f"set to version {new}, the newest checkpoint is {target}")
        living = [cluster.workers[name] for name, entry in decision.state.workers.items() if entry.ready]
        living = [worker for worker in living if worker.alive]
        whole = all(any(worker.has(unit, old) for worker in living) for unit in before.config.units)
        cluster.check(not whole, f"set back from version {old}, which living workers hold completely")
        ordered = {action.worker for action in decision.actions if isinstance(action, SendReshape)}
        for name in cluster.workers.keys() - ordered:
            cluster.workers[name].forget()  # its state belongs to steps that are repeated, and will not be requested
    elif new != old:
        cluster.check(new == old + 1, f"version {old} becomes {new}")
        members = [cluster.workers[slot.worker] for slot in before.slots]
        skipped = any(worker.non_finite for worker in members)
        right = all(worker.prepared == old and (skipped or not worker.overflowed) for worker in members)
        decided = decision.state.decided
        cluster.check(decided is not None and decided.skipped == skipped, f"version {new} is decided with {decided}")
        cluster.check(right, f"version {new} is decided, but not every member prepared step {old}")
        check_counted(cluster, before)


def check_counted(cluster: SimulatedCluster, before: ControllerState) -> None:
    """Check that, in the decided step, each section and micro-batch contributed to exactly one sum."""
    whole = (1 << before.reshape.plan.num_micro_batches) - 1
    total: dict[UnitSection, int] = {}
    for slot in before.slots:
        for place, mask in (cluster.workers[slot.worker].sums.counted or {}).items():
            cluster.check(not total.get(place, 0) & mask, f"a contribution to step {before.version} is in two sums")
            total[place] = total.get(place, 0) | mask
    places = {(unit, section) for unit, sections in SUMMED.items() for section in sections}
    missing = sorted(place for place in places if total.get(place, 0) != whole)
    cluster.check(not missing, f"contributions to step {before.version} are missing in {missing}")


def check_orders(cluster: SimulatedCluster, before: ControllerState, event: Event, decision: Decision) -> None:
    """Check that dead workers get no orders, living ones work on one generation, and steps go to all members."""
    state = decision.state
    if isinstance(event, WorkerLost):
        cluster.told_lost.update(event.workers)
    ordered = [action for action in decision.actions if isinstance(action, SendReshape | SendStep | SendCommit)]
    for action in decision.actions:
        if isinstance(action, SendReshape | SendStep | SendCommit | StartWorker | Abort):
            cluster.check(action.worker not in cluster.told_lost, f"{action.kind} to {action.worker}, which is dead")
        if isinstance(action, EndWorker):
            cluster.told_lost.add(action.worker)
    for action in ordered:
        cluster.check(action.order.generation == state.generation, f"{action.kind} of an older generation")
        if isinstance(action, SendReshape) and not isinstance(event, ManagerResumed):
            placed = {state.workers[slot.worker].node for slot in action.order.slots}
            cluster.check(placed <= {NodeState.READY, NodeState.SUSPECT}, f"a place is given to one that is {placed}")
            for slot in action.order.slots:
                wanted, there = action.order.plan.stages[slot.stage].node_type, state.workers[slot.worker].facts
                cluster.check(wanted in ("", there.node_type), f"{slot.worker}, {there}, drives a stage for {wanted}")
    if isinstance(event, ManagerResumed) and before.phase is not Phase.ENDED:
        ended = {action.worker for action in decision.actions if isinstance(action, EndWorker)}
        strangers = set(event.living) - set(before.workers)
        cluster.check(strangers <= ended, f"{strangers - ended} are unknown and live on")
    busy = [
        worker.order.order.generation
        for name, worker in cluster.workers.items()
        if worker.alive and worker.order is not None and name not in cluster.told_lost
    ]
    cluster.check(not ordered or set(busy) <= {state.generation}, f"generations {busy} work beside {state.generation}")


def check_holdings(cluster: SimulatedCluster, before: ControllerState, event: Event, decision: Decision) -> None:
    """Check that workers hold what the controller believes, and that every needed unit is held or can be restored."""
    state = decision.state
    saved = state.saving.checkpoint is None or state.saving.checkpoint.version in cluster.checkpoints
    cluster.check(saved or state.saving.doubt is not None, "the newest checkpoint is not on storage")
    if any(isinstance(action, SendReshape | SendStep | SendCommit) for action in decision.actions):
        return  # a worker that is about to apply a version has not applied it yet
    for name, entry in state.workers.items():
        worker = cluster.workers[name]
        if worker.alive and entry.holds:
            for unit in entry.holds:
                if not worker.has(unit, state.version):
                    raise cluster.broken(f"{name} is believed to hold {unit} at version {state.version}")


def check_waits(cluster: SimulatedCluster, before: ControllerState, event: Event, decision: Decision) -> None:
    """Check that every wait is bounded: the controller always has a next time to look, which is near."""
    state = decision.state
    if state.phase is Phase.ENDED:
        return
    policy, now_s = state.config.policy, cluster.clock_s()
    nobody = state.phase is Phase.STARTING and not state.workers
    cluster.check(decision.wake_at_s is not None or nobody, f"{state.phase} waits without a bound")
    if decision.wake_at_s is not None:
        bound_s = max(save_bound_s(state), policy.start_patience_s)
        if state.phase is Phase.RESTING:
            bound_s = max(bound_s, PAUSES.most_s)
        if state.phase in (Phase.WAITING, Phase.STARTING):
            bound_s = policy.rules.wait.vms_patience_s
        set_back_s = sum(max(0.0, -by_s) for _, by_s in cluster.faults.clock_jumps)
        wait_s = decision.wake_at_s - now_s
        cluster.check(wait_s <= bound_s + set_back_s + 1e-6, f"{state.phase} waits {wait_s:.1f} s without a look")


def check_patience(cluster: SimulatedCluster, before: ControllerState, event: Event, decision: Decision) -> None:
    """Check that training waits for a node no longer than the policy allows, and that no worker drains forever."""
    state, rules = decision.state, decision.state.config.policy.rules
    set_back_s = sum(max(0.0, -by_s) for _, by_s in cluster.faults.clock_jumps)
    if state.phase is Phase.HOLDING and state.waits.hold_until_s is not None:
        wait_s = state.waits.hold_until_s - cluster.clock_s()
        cluster.check(wait_s <= rules.wait.hold_patience_s + set_back_s + 1e-6, f"training stands for {wait_s:.1f} s")
    if isinstance(event, Tick):
        for worker, entry in state.workers.items():
            late = entry.drain_until_s is not None and entry.drain_until_s <= cluster.clock_s()
            cluster.check(not late, f"{worker} drains for ever")


def check_rest(cluster: SimulatedCluster, before: ControllerState, event: Event, decision: Decision) -> None:
    """Check that, before a rest, all units that have holders are written, and no worker keeps another order."""
    state = decision.state
    if state.phase is not Phase.RESTING or before.waits.rest_until_s == state.waits.rest_until_s:
        return
    held = set().union(*(entry.holds for entry in state.workers.values() if entry.ready))
    known = state.saving.checkpoint.version if state.saving.checkpoint is not None else 0
    if set(state.config.units) <= held and state.version not in (known, *(one.version for one in state.saving.sealing)):
        written = [action.order for action in decision.actions if isinstance(action, SendCommit)]
        units = [unit for order in written for unit in order.checkpoint_units]
        cluster.check(sorted(units) == sorted(state.config.units), f"before a rest only {sorted(units)} are written")


def check_repeats(cluster: SimulatedCluster, before: ControllerState, event: Event, decision: Decision) -> None:
    """Check that nothing is requested forever.

    A request is repeated a limited number of times, and never for too many VMs; an order is sent once per manager. A
    commit is ordered again each time that storage refused its units.
    """
    state, stutter = decision.state, decision.state.config.policy.rules.stutter
    if isinstance(event, CheckpointFailed):
        cluster.refused[event.worker] += 1
    if isinstance(event, NodesGranted):
        cluster.refused_until_s = -math.inf
    for action in decision.actions:
        match action:
            case SendReshape() | SendStep():
                repeats, limit = (action.worker, *order_key(action)), 1
            case SendCommit():
                repeats, limit = (action.worker, *order_key(action)), 1 + cluster.refused[action.worker]
            case SendPreCopy():
                repeats, limit = ("ahead", action.worker, action.order.number), 1
            case StartWorker():
                repeats, limit = ("start", action.worker), 1
            case ProbeWorker():
                repeats, limit = ("probe", action.worker, action.probe, state.generation), 1
                cluster.check(action.probe <= stutter.max_probes, f"{action.worker} is probed {action.probe} times")
            case RequestNodes():
                repeats, limit = ("request", action.request), MAX_SENT
                refused = state.provisioning.refused.get(action.node_type)
                until_s = refused.until_s if refused is not None else cluster.refused_until_s
                late = bool(action.node_type) and refused is None  # this type was not refused
                early = cluster.asked[repeats] == 0 and not late and cluster.clock_s() < until_s
                cluster.check(not early, f"{action.request} comes right after a refusal")
                cluster.check(action.request in state.provisioning.requests, f"{action.request} is forgotten at once")
            case _:
                continue
        cluster.asked[repeats] += 1
        times = cluster.asked[repeats]
        cluster.check(times < limit + cluster.num_managers, f"{repeats} is requested {times} times")
    if decision.reason.code is ReasonCode.REQUEST_REFUSED:
        cluster.refused_until_s = cluster.clock_s() + state.config.policy.rules.requests.backoff_s - 1e-6
    target = state.config.target_nodes
    if target and any(isinstance(action, RequestNodes) for action in decision.actions):
        living = sum(entry.node is not NodeState.DRAINING for entry in state.workers.values())
        coming = sum(request.count + len(request.granted) for request in state.provisioning.requests.values())
        known = sum(request.count for request in before.provisioning.requests.values())
        most = target + cluster.faults.num_devices - 1  # the last VM may bring more devices than were missing
        right = living + coming <= most or isinstance(event, ManagerResumed) or known > 0
        cluster.check(right, f"{living} live, {coming} are to come, {target} are wanted")


def check_ahead(cluster: SimulatedCluster, before: ControllerState, event: Event, decision: Decision) -> None:
    """Check that holders pre-copy units to workers that lack them, in bounded time, and only arrived ones are used."""
    state, known = decision.state, before.pre_copy
    for action in decision.actions:
        if isinstance(action, SendPreCopy):
            cluster.check(action.worker not in cluster.told_lost, f"units are pre-copied with dead {action.worker}")
        if isinstance(action, SendReshape) and not isinstance(event, ManagerResumed):
            for source in action.order.sources:
                if source.kind == "ahead":
                    there = known is not None and source.unit in known.synced.get(source.worker, ())
                    cluster.check(there, f"{source.worker} is to have {source.unit} ahead, which has not arrived")
                    right = known is not None and action.order.ahead == known.number
                    cluster.check(right, f"the change uses what was pre-copied as {action.order.ahead}")
    pre_copy = state.pre_copy
    if pre_copy is None:
        return
    late_s = sum(max(0.0, -by_s) for _, by_s in cluster.faults.clock_jumps)
    left_s = pre_copy.until_s - cluster.clock_s()
    bound_s = pre_copy_bound_s(state, 2 * state.plan.expected.mini_batch_s if state.plan else 0.0)
    cluster.check(left_s <= bound_s + late_s + 1e-6, f"a change is put off for {left_s:.1f} s")
    if known is not None and known.number == pre_copy.number and state.version > before.version:
        going_on = any(isinstance(action, SendStep) for action in decision.actions)
        cluster.check(not going_on or left_s > 0, "a change is put off for longer than it was to be")


def check_acknowledged(cluster: SimulatedCluster, before: ControllerState, event: Event, decision: Decision) -> None:
    """Check that a notice is acknowledged only if its VM drains, has no order, and holds nothing unique."""
    state = decision.state
    for name in [action.worker for action in decision.actions if isinstance(action, AcknowledgeNotice)]:
        for each in (name, *beside(name, state.workers)):
            check_may_go(cluster, state, each)


def check_may_go(cluster: SimulatedCluster, state: ControllerState, name: str) -> None:
    worker, entry = cluster.workers[name], state.workers[name]
    cluster.check(entry.node is NodeState.DRAINING, f"{name} may go, and is {entry.node}")
    cluster.check(name not in state.member_units, f"{name} may go, and is a member")
    if not worker.alive or name in cluster.told_lost:
        return
    cluster.check(worker.order is None, f"{name} may go, and has an order")
    others = [other for at, other in cluster.workers.items() if other.alive and vm_of(at) != vm_of(name)]
    saved = state.saving.checkpoint is not None and state.saving.checkpoint.version == state.version
    for unit in state.config.units:
        alone = worker.has(unit, state.version) and not any(other.has(unit, state.version) for other in others)
        cluster.check(saved or not alone, f"{name} may go with the only {unit} at {state.version}")


def check_given_back(cluster: SimulatedCluster, before: ControllerState, event: Event, decision: Decision) -> None:
    """Check that exactly the nodes that are no longer known are given back, and before others are requested."""
    if not before.config.target_nodes:
        return
    state = decision.state
    releases = [action for action in decision.actions if isinstance(action, ReleaseNodes)]
    given_back = {node for action in releases for node in action.nodes}
    awaited, awaits = (
        {node for request in each.provisioning.requests.values() for node in request.granted}
        for each in (before, state)
    )
    kept = (before.workers.keys() | awaited) - state.workers.keys() - awaits - given_back
    cluster.check(not kept, f"{sorted(kept)} are forgotten and not given back")
    known = sorted(given_back & state.workers.keys())
    cluster.check(not known, f"{known} are given back and known")
    kinds = [type(action) for action in decision.actions if isinstance(action, RequestNodes | ReleaseNodes)]
    cluster.check(kinds == sorted(kinds, key=lambda kind: kind is RequestNodes), "a request comes before room is made")


def check_end(cluster: SimulatedCluster, before: ControllerState, event: Event, decision: Decision) -> None:
    """Check that a finished run has all its steps, and that the last one is saved."""
    state = decision.state
    if decision.reason.code is ReasonCode.FINISHED:
        early = state.evaluation is not None and state.judged.is_over(state.evaluation.best)
        cluster.check(early or state.version == state.config.num_steps, f"finished at version {state.version}")
        cluster.check(state.version in cluster.checkpoints, "finished without a checkpoint of the last version")
    if before.phase is Phase.ENDED and not isinstance(event, ManagerResumed):
        cluster.check(not decision.actions, "an action after the end")


INVARIANTS: tuple[Observer, ...] = (
    check_state,
    check_versions,
    check_orders,
    check_holdings,
    check_waits,
    check_patience,
    check_rest,
    check_repeats,
    check_ahead,
    check_acknowledged,
    check_end,
    check_given_back,
)
