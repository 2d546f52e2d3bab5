"""Decides whether and how long to postpone a planned change, to pre-copy its units or because a notice leaves time."""

from __future__ import annotations

from collections import Counter

from manager.controller.shape.formation import next_order
from manager.controller.shape.pre_copy import pre_copy_orders, without_pre_copy
from manager.controller.shape.selection import (
    Choice,
    chosen,
    cost_of_morph_s,
    draining_members,
    gain_of,
    present_speed,
)
from manager.controller.state.actions import ReasonCode
from manager.controller.state.bounds import pre_copy_bound_s
from manager.controller.state.state import ControllerState, PreCopy
from manager.controller.state.transition import Transition
from morph.contract.messages import PreCopyMove, ReshapeOrder, WorkerId
from morph.words import counted

GRADIENT_SHARE = 1 / 3
"""Gradients as a share of a unit's state with Adam: the part that is sent at the boundary, after a pre-copy."""

MARGIN = 2.0
"""A drain is postponed only if at least this many times its duration is left."""
STEP_MARGIN = 1.5
"""Draining workers run one more step only if, in addition to the drain, this many times a step's duration is left."""


def stays(transition: Transition) -> bool:
    """Whether draining members run one more step, because the shape without them is slower and there is enough time.

    The time must suffice for that step, for the pre-copy and for the change, by the durations measured in this run.
    """
    state, choice = transition.state, chosen(transition)
    if choice is None or state.plan is None or state.saving.save_times.step_s is None:
        return False
    if choice.examples_per_s >= present_speed(state):
        return False
    step_s = max(state.saving.save_times.step_s, state.plan.expected.mini_batch_s)
    left_s = _deadline_s(state) - transition.now_s - STEP_MARGIN * step_s
    return left_s > 0 and left_s > (_wait_s(state, choice, _moves(next_order(transition)[0])) or 0.0)


def starts_pre_copy(transition: Transition) -> bool:
    """Whether to pre-copy the units of a planned change that is due and train on; otherwise, it is formed now.

    If workers came or left since, the new change's pre-copy begins, within the same time limit.
    """
    state, now_s, choice = transition.state, transition.now_s, chosen(transition)
    if choice is None:
        return False
    order, _ = next_order(transition)
    pre_copy = state.pre_copy
    if pre_copy is not None and (now_s >= pre_copy.until_s or now_s >= _deadline_s(state)):
        return False
    if pre_copy is not None and pre_copy.slots == order.slots and pre_copy.plan == order.plan:
        if pre_copy.settled:
            return False
        sentence = f"{pre_copy.num_synced} of {counted(len(pre_copy.moves), 'unit has', 'units have')} arrived so far"
        transition.say(ReasonCode.PRE_COPY_NOTED, sentence)
        return True
    moves = _moves(order)
    until_s = _until_s(state, choice, moves, now_s)
    if until_s is None or state.reshape is None:
        return False
    if pre_copy is not None:
        until_s = min(until_s, pre_copy.until_s)
    dropped = without_pre_copy(transition)
    number = transition.state.num_pre_copies + 1
    limit_s = max(state.reshape.limit_s, until_s - now_s)
    pre_copy = PreCopy(number=number, plan=order.plan, slots=order.slots, moves=moves, until_s=until_s, limit_s=limit_s)
    transition.change(pre_copy=pre_copy, num_pre_copies=number)
    receivers = counted(len({move.receiver for move in moves}), "worker")
    sentence = (
        f"{counted(len(moves), 'unit is', 'units are')} pre-copied to {receivers} while training goes on, "
        f"for {until_s - now_s:.1f} s at most"
    )
    transition.say(ReasonCode.PRE_COPY_NOTED, sentence, *dropped, *pre_copy_orders(pre_copy))
    return True


def _moves(order: ReshapeOrder) -> tuple[PreCopyMove, ...]:
    """Return the transfers that could be done before the change."""
    return tuple(
        PreCopyMove.model_construct(unit=source.unit, sender=source.peer, receiver=source.worker)
        for source in order.sources
        if source.kind == "peer" and source.peer is not None
    )


def _until_s(state: ControllerState, choice: Choice, moves: tuple[PreCopyMove, ...], now_s: float) -> float | None:
    """Return the time (seconds) until which a change may be postponed for these transfers; None if it does not pay."""
    rules, wait_s = state.config.policy.rules.ahead, _wait_s(state, choice, moves)
    if wait_s is None or now_s + wait_s >= _deadline_s(state):
        return None
    if rules.when == "always":
        return now_s + pre_copy_bound_s(state, wait_s)
    return now_s + min(pre_copy_bound_s(state, wait_s), MARGIN * wait_s)


def _wait_s(state: ControllerState, choice: Choice, moves: tuple[PreCopyMove, ...]) -> float | None:
    """Return the seconds from now to the boundary after these transfers, or None if waiting does not pay.

    The gain in speed that is lost while waiting (``wait * gain``, in work of the present shape) must not exceed the
    transfer that is saved (``saved * (1 + gain)``). Leaving out draining members gains nothing.
    """
    rules, plan = state.config.policy.rules.ahead, state.plan
    assert plan is not None, "no generation was formed"
    if rules.when == "never" or not moves:
        return None
    transfer_s = _most_bytes(state, moves) / (state.measured.state_bytes_per_s or rules.bytes_per_s)
    step_s = plan.expected.mini_batch_s
    busy_share = GRADIENT_SHARE * transfer_s / step_s  # share of the link's time that gradients of all units take
    wait_s = transfer_s / max(0.1, 1 - busy_share / 2) + step_s
    saved_s = (1 - GRADIENT_SHARE) * transfer_s
    gain = gain_of(state, choice)
    worth = saved_s >= rules.min_saved_s and busy_share < 1 and wait_s * gain <= saved_s * (1 + gain)
    return wait_s if worth or rules.when == "always" else None


def _most_bytes(state: ControllerState, moves: tuple[PreCopyMove, ...]) -> int:
    load: Counter[tuple[str, WorkerId]] = Counter()
    for move in moves:
        size = state.config.unit_bytes[move.unit]
        load["sends", move.sender] += size
        load["receives", move.receiver] += size
    return max(load.values())


def _deadline_s(state: ControllerState) -> float:
    """Return the time (seconds) until which all members certainly remain: a margin before the first is taken."""
    grace_s = state.config.policy.rules.requests.notice_grace_s
    taken_s = [state.workers[worker].drain_until_s for worker in draining_members(state)]
    return min((time_s - grace_s for time_s in taken_s if time_s is not None), default=float("inf")) - (
        MARGIN * cost_of_morph_s(state)
    )
