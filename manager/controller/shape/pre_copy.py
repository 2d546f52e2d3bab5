"""Builds the orders of pre-copies for planned changes, records their progress, and measures how fast state travels."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set

from manager.controller.state.actions import ReasonCode, SendPreCopy
from manager.controller.state.events import PreCopyReported
from manager.controller.state.state import PreCopy, mean_of
from manager.controller.state.transition import Transition
from morph.contract.messages import PreCopyMove, PreCopyOrder, Reshaped, ReshapeOrder, StateSource, UnitId, WorkerId
from morph.words import counted


def pre_copy_orders(pre_copy: PreCopy) -> tuple[SendPreCopy, ...]:
    """Build the order for each party, with the moves that concern it."""
    return tuple(_order(pre_copy, worker) for worker in pre_copy.parties)


def without_pre_copy(transition: Transition, spared: Collection[WorkerId] = ()) -> tuple[SendPreCopy, ...]:
    """Forget the pre-copy; return the orders to drop it. ``spared`` workers need none: their reshape drops it."""
    pre_copy = transition.state.pre_copy
    if pre_copy is None:
        return ()
    receivers = [worker for worker in pre_copy.parties if worker in transition.state.workers and worker not in spared]
    transition.change(pre_copy=None, num_pre_copies=pre_copy.number + 1)
    nothing = pre_copy.model_copy(update={"number": pre_copy.number + 1, "moves": ()})
    return tuple(_order(nothing, worker) for worker in receivers)


def drop_if_stale(transition: Transition) -> None:
    """Drop a pre-copy whose time is over. Until then it continues even if no change is due: one may be due later."""
    if transition.state.pre_copy is not None and transition.now_s >= transition.state.pre_copy.until_s:
        transition.actions += without_pre_copy(transition)


def with_pre_copy(order: ReshapeOrder, pre_copy: PreCopy, held: Mapping[WorkerId, Set[UnitId]]) -> ReshapeOrder:
    """Use arrived units as sources, except from senders that no longer hold them, if the order forms their change."""
    if order.slots != pre_copy.slots:
        return order
    senders = {
        (move.receiver, move.unit): move.sender
        for move in pre_copy.moves
        if move.unit in pre_copy.synced.get(move.receiver, ()) and move.unit in held.get(move.sender, ())
    }

    def source_of(source: StateSource) -> StateSource:
        sender = senders.get((source.worker, source.unit))
        if source.kind != "peer" or sender is None:
            return source
        return source.model_copy(update={"kind": "ahead", "peer": sender})

    return order.model_copy(
        update={"sources": tuple(source_of(source) for source in order.sources), "ahead": pre_copy.number}
    )


def on_pre_copy_reported(transition: Transition, event: PreCopyReported) -> None:
    """Record which units have arrived, and which will not."""
    pre_copy, report = transition.state.pre_copy, event.report
    if pre_copy is None or report.number != pre_copy.number:
        return transition.say(ReasonCode.IGNORED, f"the report of {event.worker} on pre-copied units is late")
    wanted = frozenset(move.unit for move in pre_copy.moves if move.receiver == event.worker)
    synced = {**pre_copy.synced, event.worker: wanted & set(report.following)}
    failed = pre_copy.failed | ({event.worker} if report.error else frozenset())
    pre_copy = pre_copy.model_copy(update={"synced": synced, "failed": failed})
    transition.change(pre_copy=pre_copy)
    if report.error:
        return transition.say(ReasonCode.PRE_COPY_DROPPED, f"{event.worker} lacks pre-copied units: {report.error}")
    sentence = (
        f"{pre_copy.num_synced} of {counted(len(pre_copy.moves), 'unit has', 'units have')} arrived before the change"
    )
    return transition.say(ReasonCode.PRE_COPY_NOTED, sentence)


def measure_speed(transition: Transition, answers: Mapping[WorkerId, Reshaped]) -> None:
    """Measure how fast units came from peers; nothing is measured if some came from elsewhere."""
    order, sizes, mean = (
        transition.state.reshape,
        transition.state.config.unit_bytes,
        transition.state.measured.state_bytes_per_s,
    )
    if order is None:
        return
    for worker, answer in answers.items():
        lacked = order.lacked.get(worker, ()) if answer.state_s > 0 else ()
        if lacked and answer.generation == order.generation and all(source.kind == "peer" for source in lacked):
            num_bytes = sum(sizes[source.unit] for source in lacked)
            mean = mean_of(mean, num_bytes / answer.state_s) if num_bytes else mean
    if mean != transition.state.measured.state_bytes_per_s:
        transition.change_measured(state_bytes_per_s=mean)


def _order(pre_copy: PreCopy, worker: WorkerId) -> SendPreCopy:
    moves: tuple[PreCopyMove, ...] = tuple(move for move in pre_copy.moves if worker in (move.sender, move.receiver))
    order = PreCopyOrder(
        number=pre_copy.number, num_micro_batches=pre_copy.plan.num_micro_batches, moves=moves, limit_s=pre_copy.limit_s
    )
    return SendPreCopy(worker=worker, order=order)
