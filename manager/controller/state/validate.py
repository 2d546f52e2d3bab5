"""Invariants of a state: one table of sentences, each with its test."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from manager.controller.state.nodes import NodeState
from manager.controller.state.state import ControllerState, Phase, WorkerState
from morph.contract.errors import MorphError

ORDER_KIND = {
    Phase.RESHAPING: "reshape",
    Phase.TRAINING: "step",
    Phase.COMMITTING: "commit",
    Phase.RESTING: "commit",
}
WITHOUT_ORDERS = (Phase.STARTING, Phase.WAITING, Phase.HOLDING, Phase.SEALING, Phase.ENDED)
WITH_ORDERS = (Phase.RESHAPING, Phase.TRAINING, Phase.ABORTING)
SHAPED = (Phase.RESHAPING, Phase.TRAINING)
UNSHAPED = (Phase.STARTING, Phase.WAITING, Phase.HOLDING, Phase.RESTING)
PRE_COPY_PHASES = (Phase.TRAINING, Phase.COMMITTING, Phase.SEALING, Phase.ENDED)
LIVING = (NodeState.WARMING, NodeState.READY, NodeState.SUSPECT, NodeState.DRAINING)


class BrokenState(MorphError):
    """An impossible state: a defect of the controller."""


def validate(state: ControllerState) -> None:
    """Check every invariant of the controller's state; BrokenState names the broken one, job, phase and last events.

    A live run checks each decision only if ``MORPH_VALIDATE=1`` is set, as it is in tests.
    """
    for sentence, holds in INVARIANTS.items():
        if not holds(state):
            history = "; ".join(state.recent) or "none"
            raise BrokenState(
                f"job {state.config.job}, {state.phase}: broken invariant: {sentence} (last events: {history})"
            )


def _of_each(holds: Callable[[WorkerState], bool]) -> Callable[[ControllerState], bool]:
    return lambda state: all(map(holds, state.workers.values()))


def _answers(state: ControllerState) -> bool:
    step = state.step
    return state.phase is not Phase.TRAINING or (
        set(step.reports) | step.awaited == set(state.member_units) and step.awaited.isdisjoint(step.reports)
    )


def _kind(state: ControllerState) -> bool:
    step = state.step
    return step.order is None or step.order.kind == ORDER_KIND.get(state.phase, step.order.kind)


def _commits(state: ControllerState) -> bool:
    missing = bool(state.step.awaited) or (state.saving.pending is not None and not state.saving.pending.complete)
    return missing or state.phase is not Phase.COMMITTING


def _members(state: ControllerState) -> bool:
    members = [slot.worker for slot in state.slots]
    return len(members) == len(state.member_units) and set(members) == set(state.member_units)


def _held(state: ControllerState) -> bool:
    if state.phase is not Phase.TRAINING:
        return True
    held: set[str] = set().union(*(entry.holds for entry in state.workers.values()))
    return held == set(state.config.units)


def _members_hold(state: ControllerState) -> bool:
    return state.phase is not Phase.TRAINING or all(
        units <= state.workers[worker].holds for worker, units in state.member_units.items()
    )


def _pending(state: ControllerState) -> bool:
    versions = [pending.version for pending in state.saving.under_way]
    return versions == sorted(set(versions)) and all(
        pending.version <= state.version
        and set(pending.writers) == set(state.config.units)
        and pending.written.keys() <= pending.writers.keys()
        and pending.refused <= set(pending.writers.values())
        for pending in state.saving.under_way
    )


def _probed(state: ControllerState) -> bool:
    return all(
        entry.probation is None or (entry.node is NodeState.SUSPECT and worker not in state.member_units)
        for worker, entry in state.workers.items()
    )


def _leaving(state: ControllerState) -> bool:
    return all(
        worker in state.workers and state.workers[worker].node is NodeState.DRAINING
        for worker in state.provisioning.leaving
    )


def _granted(state: ControllerState) -> bool:
    granted = [worker for request in state.provisioning.requests.values() for worker in request.granted]
    return len(granted) == len(set(granted)) and _unknown(state, granted)


def _unknown(state: ControllerState, workers: Iterable[str]) -> bool:
    return state.workers.keys().isdisjoint(workers)


def _pre_copy(state: ControllerState) -> bool:
    pre_copy = state.pre_copy
    return pre_copy is None or (
        state.phase in PRE_COPY_PHASES
        and pre_copy.number <= state.num_pre_copies
        and set(pre_copy.parties) <= state.workers.keys()
    )


def _moves(state: ControllerState) -> bool:
    if state.pre_copy is None or state.phase is not Phase.TRAINING:
        return True
    workers = state.workers
    follows = () if state.reshape is None else state.reshape.follows
    # a follower holds these only while it is in step
    kept = {(follow.follower, unit) for follow in follows for unit in follow.units}
    return all(
        (move.unit in workers[move.sender].holds or (move.sender, move.unit) in kept)
        and (move.unit not in workers[move.receiver].holds or (move.receiver, move.unit) in kept)
        for move in state.pre_copy.moves
    )


INVARIANTS: dict[str, Callable[[ControllerState], bool]] = {
    # orders
    "there is an order exactly while some worker has not answered it": lambda state: (
        (state.step.order is not None) == bool(state.step.awaited)
    ),
    "only known workers have orders": lambda state: state.step.awaited <= state.workers.keys(),
    "no worker has an order before the first shape, during a pause or after the end": lambda state: (
        state.step.order is None or state.phase not in WITHOUT_ORDERS
    ),
    "some worker has an order while a shape is formed, trains or is dissolved": lambda state: (
        state.step.order is not None or state.phase not in WITH_ORDERS
    ),
    "an order belongs to the present generation": lambda state: (
        state.step.order is None or state.step.order.generation == state.generation
    ),
    "the kind of an order is the one that belongs to the phase": _kind,
    "orders are aborted only while a generation is dissolved, and all of them are then": lambda state: (
        state.step.order is None or (state.step.order.abort_sent_s is not None) == (state.phase is Phase.ABORTING)
    ),
    "during training each member, and no other worker, either has the step's order or has prepared the step": _answers,
    "while committing, a commit or a unit of the last checkpoint is missing": _commits,
    # membership
    "the members are the workers of the slots, each once": _members,
    "there is no shape before the first generation or during pauses": lambda state: (
        state.reshape is None or state.phase not in UNSHAPED
    ),
    "no generation is formed during the start": lambda state: (
        state.generation == 0 or state.phase is not Phase.STARTING
    ),
    "a shape that is formed or trains belongs to the present generation": lambda state: (
        state.phase not in SHAPED or (state.reshape is not None and state.reshape.generation == state.generation)
    ),
    "every member of a shape that is formed or trains is a known worker": lambda state: (
        state.phase not in SHAPED or state.member_units.keys() <= state.workers.keys()
    ),
    "during training each unit has a holder": _held,
    "during training each member holds the units of its stage": _members_hold,
    # waits
    "a wait for a node that is almost ready has a deadline": lambda state: (
        state.phase is not Phase.HOLDING or state.waits.hold_until_s is not None
    ),
    "a wait for VMs has a start time": lambda state: (
        state.phase is not Phase.WAITING or state.waits.waiting_since_s is not None
    ),
    "a rest has an end time": lambda state: state.phase is not Phase.RESTING or state.waits.rest_until_s is not None,
    "a run has an outcome exactly when it has ended": lambda state: (
        (state.finish is not None) == (state.phase is Phase.ENDED)
    ),
    # steps and checkpoints
    "the last decision is about the present version": lambda state: (
        state.decided is None or state.decided.version == state.version
    ),
    "a final error stops the run": lambda state: (
        state.failing is None or not state.failing.final or state.stop_reason is not None
    ),
    "a checkpoint under way is of a decided version, and each unit is written by its one writer": _pending,
    "no partial sums are kept while a step runs": lambda state: (
        not state.step.kept or state.phase is not Phase.TRAINING
    ),
    "while sealing, a manifest is being written": lambda state: (
        bool(state.saving.sealing) or state.phase is not Phase.SEALING
    ),
    "a start time is recorded exactly while a manifest is being written": lambda state: (
        bool(state.saving.sealing) == (state.saving.sealing_since_s is not None)
    ),
    # workers and requests
    "the node of a worker is warming, ready, suspect or draining": _of_each(lambda entry: entry.node in LIVING),
    "a worker whose node is warming is not set up": _of_each(
        lambda entry: not entry.ready or entry.node is not NodeState.WARMING
    ),
    "a worker whose node is ready or suspect is set up": _of_each(
        lambda entry: entry.ready or entry.node not in (NodeState.READY, NodeState.SUSPECT)
    ),
    "a worker that is not set up holds no units": _of_each(lambda entry: entry.ready or not entry.holds),
    "a worker has a drain deadline exactly while its node drains": _of_each(
        lambda entry: (entry.node is NodeState.DRAINING) == (entry.drain_until_s is not None)
    ),
    "a probed worker is suspect and not a member": _probed,
    "a worker whose notice is still to be acknowledged drains": _leaving,
    "each open request still awaits a grant or a VM": lambda state: all(
        request.count or request.granted for request in state.provisioning.requests.values()
    ),
    "a granted node belongs to one request and is not up yet": _granted,
    "a node that waits in a queue was granted": lambda state: all(
        request.waiting <= request.granted.keys() for request in state.provisioning.requests.values()
    ),
    "notices are kept only for nodes that are not up yet": lambda state: _unknown(
        state, state.provisioning.kept_notices
    ),
    # pre-copied units
    "a pre-copy has an issued number and known workers, and exists only during training or the end": _pre_copy,
    "units are pre-copied from workers that hold them to workers that lack them": _moves,
}
"""Each invariant in words, with the function that tests it."""
