"""Whether a planned change is put off, and for how long: while its units are sent ahead, or while a notice lasts."""

from __future__ import annotations

from collections import Counter

from manager.controller.shape.choosing import (
    Choice,
    chosen,
    cost_of_morph_s,
    draining_members,
    gain_of,
    present_speed,
)
from manager.controller.shape.forming import next_order
from manager.controller.shape.pre_copy import pre_copy_orders, without_pre_copy
from manager.controller.state.bounds import ahead_bound_s
from manager.controller.state.draft import Draft
from manager.controller.state.reasons import ReasonCode
from manager.controller.state.state import ControllerState, PreCopy
from morph.contract.messages import PreCopyMove, ReshapeOrder, WorkerId
from morph.words import counted

GRADIENT_SHARE = 1 / 3
"""Of a unit's state with Adam, the default of what is left for the boundary: the last step's gradients."""

MARGIN = 2.0
"""A drain is not put off unless this many times what it takes is left."""
STEP_MARGIN = 1.5
"""Before whoever drains runs one more step, this many times what a step takes is left beside that."""


def stays(draft: Draft) -> bool:
    """Whether members that will be taken run one more step: the shape without them is slower, and there is time.

    For that step, for what is sent ahead after it, and for the change. The step and the change are those measured in
    this run: before a step was, nobody stays. What comes meanwhile is taken in by the same change; and a shape that is
    no slower is not waited with, for VMs may be taken early.
    """
    state, choice = draft.state, chosen(draft)
    if choice is None or state.plan is None or state.saving.save_times.step_s is None:
        return False
    if choice.examples_per_s >= present_speed(state):
        return False
    step_s = max(state.saving.save_times.step_s, state.plan.expected.mini_batch_s)
    left_s = _deadline_s(state) - draft.now_s - STEP_MARGIN * step_s
    return left_s > 0 and left_s > (_wait_s(state, choice, _moves(next_order(draft)[0])) or 0.0)


def sends_ahead(draft: Draft) -> bool:
    """A planned change is due: send its units ahead and train on, if that is worth it; else it is to be formed now.

    It is formed now when everything has arrived that will, when the time for that is over, and when nothing is to be
    gained. What is sent for another change, because workers came or left since, is dropped and the new one's sent,
    within the same time.
    """
    state, now_s, choice = draft.state, draft.now_s, chosen(draft)
    if choice is None:
        return False
    order, _ = next_order(draft)
    ahead = state.ahead
    if ahead is not None and (now_s >= ahead.until_s or now_s >= _deadline_s(state)):
        return False
    if ahead is not None and ahead.slots == order.slots and ahead.plan == order.plan:
        if ahead.settled:
            return False
        sentence = f"{ahead.num_following} of {counted(len(ahead.moves), 'unit has', 'units have')} arrived ahead of it"
        draft.say(ReasonCode.AHEAD_NOTED, sentence)
        return True
    moves = _moves(order)
    until_s = _until_s(state, choice, moves, now_s)
    if until_s is None or state.reshape is None:
        return False
    if ahead is not None:
        until_s = min(until_s, ahead.until_s)
    dropped = without_pre_copy(draft)
    number = draft.state.num_ahead + 1
    limit_s = max(state.reshape.limit_s, until_s - now_s)
    ahead = PreCopy(number=number, plan=order.plan, slots=order.slots, moves=moves, until_s=until_s, limit_s=limit_s)
    draft.change(ahead=ahead, num_ahead=number)
    receivers = counted(len({move.receiver for move in moves}), "worker")
    sentence = (
        f"{counted(len(moves), 'unit is', 'units are')} sent ahead to {receivers} while training goes on, "
        f"for {until_s - now_s:.1f} s at most"
    )
    draft.say(ReasonCode.AHEAD_NOTED, sentence, *dropped, *pre_copy_orders(ahead))
    return True


def _moves(order: ReshapeOrder) -> tuple[PreCopyMove, ...]:
    """Return what could be sent ahead."""
    return tuple(
        PreCopyMove.model_construct(unit=source.unit, sender=source.peer, receiver=source.worker)
        for source in order.sources
        if source.kind == "peer" and source.peer is not None
    )


def _until_s(state: ControllerState, choice: Choice, moves: tuple[PreCopyMove, ...], now_s: float) -> float | None:
    """Return until when a change is put off at most so that these are sent, or None when it is not worth it."""
    rules, wait_s = state.config.policy.rules.ahead, _wait_s(state, choice, moves)
    if wait_s is None or now_s + wait_s >= _deadline_s(state):
        return None
    if rules.when == "always":
        return now_s + ahead_bound_s(state, wait_s)
    return now_s + min(ahead_bound_s(state, wait_s), MARGIN * wait_s)


def _wait_s(state: ControllerState, choice: Choice, moves: tuple[PreCopyMove, ...]) -> float | None:
    """Return what sending these ahead takes until the boundary after it, or None when it is not worth it.

    Sending takes ``transfer_s`` for whoever sends or receives most, longer for the gradients that travel beside it, up
    to a step more until the next boundary; and it saves the change most of ``transfer_s``. Going without the gain
    meanwhile must cost less: ``wait * gain`` against ``saved * (1 + gain)``, in work of the present shape. Leaving
    out who will be taken gains nothing, so it can wait.
    """
    rules, plan = state.config.policy.rules.ahead, state.plan
    assert plan is not None, "no generation was formed"
    if rules.when == "never" or not moves:
        return None
    transfer_s = _most_bytes(state, moves) / (state.measured.state_bytes_per_s or rules.bytes_per_s)
    step_s = plan.expected.mini_batch_s
    busy_share = GRADIENT_SHARE * transfer_s / step_s  # of the link, by the gradients of every unit
    wait_s = transfer_s / max(0.1, 1 - busy_share / 2) + step_s
    saved_s = (1 - GRADIENT_SHARE) * transfer_s
    gain = gain_of(state, choice)
    worth = saved_s >= rules.min_saved_s and busy_share < 1 and wait_s * gain <= saved_s * (1 + gain)
    return wait_s if worth or rules.when == "always" else None


def _most_bytes(state: ControllerState, moves: tuple[PreCopyMove, ...]) -> int:
    """Return what the worker that sends or receives most has to."""
    load: Counter[tuple[str, WorkerId]] = Counter()
    for move in moves:
        size = state.config.unit_bytes[move.unit]
        load["sends", move.sender] += size
        load["receives", move.receiver] += size
    return max(load.values())


def _deadline_s(state: ControllerState) -> float:
    """Return until when everybody is sure to be there: a while before the first member that drains is taken."""
    grace_s = state.config.policy.rules.requests.notice_grace_s
    taken_s = [state.workers[worker].drain_until_s for worker in draining_members(state)]
    return min((time_s - grace_s for time_s in taken_s if time_s is not None), default=float("inf")) - (
        MARGIN * cost_of_morph_s(state)
    )
