"""What is sent ahead of a planned change: what becomes of it, and how fast state travels."""

from __future__ import annotations

from collections.abc import Iterable

from manager.controller.actions import SendAhead
from manager.controller.changes import changed, mean_of, said
from manager.controller.events import AheadReported
from manager.controller.reasons import ReasonCode
from manager.controller.state import Ahead, ControllerState, Decision
from morph.contract.messages import AheadMove, AheadOrder, Reshaped, ReshapeOrder, Source, WorkerId


def ahead_orders(ahead: Ahead) -> tuple[SendAhead, ...]:
    """Tell every party its own moves."""
    return tuple(_order(ahead, worker) for worker in ahead.parties)


def without_ahead(
    state: ControllerState, spared: Iterable[WorkerId] = ()
) -> tuple[ControllerState, tuple[SendAhead, ...]]:
    """Forget what is sent ahead; its parties are told to drop it, but for those whose reshape says so."""
    ahead = state.ahead
    if ahead is None:
        return state, ()
    told = [worker for worker in ahead.parties if worker in state.workers and worker not in set(spared)]
    state = changed(state, ahead=None, num_ahead=ahead.number + 1)
    nothing = ahead.model_copy(update={"number": ahead.number + 1, "moves": ()})
    return state, tuple(_order(nothing, worker) for worker in told)


def drop_if_stale(state: ControllerState, now_s: float) -> tuple[ControllerState, tuple[SendAhead, ...]]:
    """No change is due at this boundary: what is sent ahead goes on until its time is over, for one may be yet."""
    if state.ahead is None or now_s < state.ahead.until_s:
        return state, ()
    return without_ahead(state)


def with_ahead(order: ReshapeOrder, ahead: Ahead) -> ReshapeOrder:
    """Take what has arrived from where it was sent ahead, if the order forms the change that it was sent for."""
    if order.slots != ahead.slots:
        return order
    senders = {
        (move.receiver, move.unit): move.sender
        for move in ahead.moves
        if move.unit in ahead.following.get(move.receiver, ())
    }

    def source_of(source: Source) -> Source:
        sender = senders.get((source.worker, source.unit))
        if source.kind != "peer" or sender is None:
            return source
        return source.model_copy(update={"kind": "ahead", "peer": sender})

    return order.model_copy(
        update={"sources": tuple(source_of(source) for source in order.sources), "ahead": ahead.number}
    )


def ahead_reported(state: ControllerState, event: AheadReported, now_s: float) -> Decision:
    """Note what has arrived, and what will not."""
    del now_s
    ahead, report = state.ahead, event.report
    if ahead is None or report.number != ahead.number:
        return said(state, ReasonCode.IGNORED, f"what {event.worker} tells of units sent ahead is late")
    wanted = frozenset(move.unit for move in ahead.moves if move.receiver == event.worker)
    following = {**ahead.following, event.worker: wanted & set(report.following)}
    failed = ahead.failed | ({event.worker} if report.error else frozenset())
    state = changed(state, ahead=ahead.model_copy(update={"following": following, "failed": failed}))
    assert state.ahead is not None
    if report.error:
        return said(state, ReasonCode.AHEAD_DROPPED, f"{event.worker} lacks units sent ahead: {report.error}")
    sentence = f"{state.ahead.num_following} of {len(ahead.moves)} units have arrived ahead of the change"
    return said(state, ReasonCode.AHEAD_NOTED, sentence)


def with_measured_speed(state: ControllerState, answer: Reshaped) -> ControllerState:
    """Measure how fast units came from peers; where some came otherwise, nothing is measured."""
    order = state.reshape
    if order is None or answer.generation != order.generation or answer.state_s <= 0:
        return state
    mine = [source for source in order.sources if source.worker == answer.worker and source.kind != "keep"]
    if not mine or any(source.kind != "peer" for source in mine):
        return state
    num_bytes = sum(state.config.unit_bytes[source.unit] for source in mine)
    if not num_bytes:
        return state
    return changed(state, state_bytes_per_s=mean_of(state.state_bytes_per_s, num_bytes / answer.state_s))


def _order(ahead: Ahead, worker: WorkerId) -> SendAhead:
    moves: tuple[AheadMove, ...] = tuple(move for move in ahead.moves if worker in (move.sender, move.receiver))
    order = AheadOrder(number=ahead.number, num_micro_batches=ahead.plan.num_micro_batches, moves=moves)
    return SendAhead(worker=worker, order=order)
