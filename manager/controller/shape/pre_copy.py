"""What is sent ahead of a planned change: what becomes of it, and how fast state travels."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set

from manager.controller.state.actions import SendPreCopy
from manager.controller.state.draft import Draft
from manager.controller.state.events import PreCopyReported
from manager.controller.state.reasons import ReasonCode
from manager.controller.state.state import PreCopy, mean_of
from morph.contract.messages import PreCopyMove, PreCopyOrder, Reshaped, ReshapeOrder, Source, UnitId, WorkerId
from morph.words import counted


def pre_copy_orders(ahead: PreCopy) -> tuple[SendPreCopy, ...]:
    """Tell every party its own moves."""
    return tuple(_order(ahead, worker) for worker in ahead.parties)


def without_pre_copy(draft: Draft, spared: Collection[WorkerId] = ()) -> tuple[SendPreCopy, ...]:
    """Forget what is sent ahead; return what tells its parties to drop it, but for those whose reshape says so."""
    ahead = draft.state.ahead
    if ahead is None:
        return ()
    told = [worker for worker in ahead.parties if worker in draft.state.workers and worker not in spared]
    draft.change(ahead=None, num_ahead=ahead.number + 1)
    nothing = ahead.model_copy(update={"number": ahead.number + 1, "moves": ()})
    return tuple(_order(nothing, worker) for worker in told)


def drop_if_stale(draft: Draft) -> None:
    """No change is due at this boundary: what is sent ahead goes on until its time is over, for one may be yet."""
    if draft.state.ahead is not None and draft.now_s >= draft.state.ahead.until_s:
        draft.actions += without_pre_copy(draft)


def with_pre_copy(order: ReshapeOrder, ahead: PreCopy, held: Mapping[WorkerId, Set[UnitId]]) -> ReshapeOrder:
    """Take what has arrived from where it was sent ahead, if the order forms the change that it was sent for.

    ``held``: a sender that fell out of step has sent no more since.
    """
    if order.slots != ahead.slots:
        return order
    senders = {
        (move.receiver, move.unit): move.sender
        for move in ahead.moves
        if move.unit in ahead.following.get(move.receiver, ()) and move.unit in held.get(move.sender, ())
    }

    def source_of(source: Source) -> Source:
        sender = senders.get((source.worker, source.unit))
        if source.kind != "peer" or sender is None:
            return source
        return source.model_copy(update={"kind": "ahead", "peer": sender})

    return order.model_copy(
        update={"sources": tuple(source_of(source) for source in order.sources), "ahead": ahead.number}
    )


def ahead_reported(draft: Draft, event: PreCopyReported) -> None:
    """Note what has arrived, and what will not."""
    ahead, report = draft.state.ahead, event.report
    if ahead is None or report.number != ahead.number:
        return draft.say(ReasonCode.IGNORED, f"what {event.worker} tells of units sent ahead is late")
    wanted = frozenset(move.unit for move in ahead.moves if move.receiver == event.worker)
    following = {**ahead.following, event.worker: wanted & set(report.following)}
    failed = ahead.failed | ({event.worker} if report.error else frozenset())
    ahead = ahead.model_copy(update={"following": following, "failed": failed})
    draft.change(ahead=ahead)
    if report.error:
        return draft.say(ReasonCode.AHEAD_DROPPED, f"{event.worker} lacks units sent ahead: {report.error}")
    sentence = (
        f"{ahead.num_following} of {counted(len(ahead.moves), 'unit has', 'units have')} arrived ahead of the change"
    )
    return draft.say(ReasonCode.AHEAD_NOTED, sentence)


def measure_speed(draft: Draft, answers: Mapping[WorkerId, Reshaped]) -> None:
    """Measure how fast units came from peers; where some came otherwise, nothing is measured."""
    order, sizes, mean = draft.state.reshape, draft.state.config.unit_bytes, draft.state.measured.state_bytes_per_s
    if order is None:
        return
    for worker, answer in answers.items():
        lacked = order.lacked.get(worker, ()) if answer.state_s > 0 else ()
        if answer.generation == order.generation and all(source.kind == "peer" for source in lacked):
            num_bytes = sum(sizes[source.unit] for source in lacked)
            mean = mean_of(mean, num_bytes / answer.state_s) if num_bytes else mean
    if mean != draft.state.measured.state_bytes_per_s:
        draft.change_measured(state_bytes_per_s=mean)


def _order(ahead: PreCopy, worker: WorkerId) -> SendPreCopy:
    moves: tuple[PreCopyMove, ...] = tuple(move for move in ahead.moves if worker in (move.sender, move.receiver))
    order = PreCopyOrder(
        number=ahead.number, num_micro_batches=ahead.plan.num_micro_batches, moves=moves, limit_s=ahead.limit_s
    )
    return SendPreCopy(worker=worker, order=order)
