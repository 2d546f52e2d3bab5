"""Reasons for a planned change: a morph between two steps, where no work is lost, or within a step."""

from __future__ import annotations

from manager.controller.shape.followers import followers_due
from manager.controller.shape.planned_changes import MARGIN, stays
from manager.controller.shape.selection import (
    Choice,
    chosen,
    cost_of_morph_s,
    draining_members,
    faster_with_those_to_come,
    gain_of,
    nodes_to_come,
)
from manager.controller.state.nodes import NodeState
from manager.controller.state.state import ControllerState, Phase
from manager.controller.state.transition import Transition


def drain_due(transition: Transition) -> str | None:
    """Return a sentence on members to leave out now; None: none, no plan fits then, or one more step comes first."""
    leaving = draining_members(transition.state)
    if not leaving or chosen(transition) is None or stays(transition):
        return None
    return f"{', '.join(leaving)} will be taken and is left out"


def change_due(transition: Transition) -> str | None:
    """Return why the shape should change at this boundary; None if it should not, or not yet.

    Training without a gain for w seconds costs ``w * gain``, a change costs its duration: so a better shape with new
    workers waits for a further one that is almost ready while that costs less than a second change.
    """
    leaving = drain_due(transition)
    if leaving is not None:
        return leaving
    choice, state = chosen(transition), transition.state
    gain = gain_of(state, choice) if choice else 0.0
    if choice is None or gain <= 0 or gain < state.config.policy.min_join_gain:
        if state.waits.join_since_s is not None:
            transition.change_waits(join_since_s=None)
        return None if choice is None else followers_due(transition)
    slow = [worker for worker in state.member_units if state.workers[worker].node is NodeState.SUSPECT]
    slow = [worker for worker in slow if worker not in choice.workers]
    if slow:
        return f"{', '.join(slow)} is slow and left out, {gain:.1%} faster"
    if state.waits.join_since_s is None:
        transition.change_waits(join_since_s=transition.now_s)
    if _next_is_near(transition.state, choice, gain, transition.now_s):
        return None
    return f"more workers are ready, {gain:.1%} faster"


def worth_giving_up(transition: Transition) -> str | None:
    """Return why the step under way should be abandoned for new workers; None: they wait for its end.

    Its partial sums are kept, so it costs the change, and the micro-batches between stages, which run again. No step is
    abandoned while a checkpoint is written or another worker is almost ready.
    """
    state, choice, now_s = transition.state, chosen(transition), transition.now_s
    order, formed = state.step.order, state.reshape
    if choice is None or formed is None or order is None or state.phase is not Phase.TRAINING or order.kind != "step":
        return None
    if not formed.keep_sums or state.step.attempt or state.saving.under_way or state.stop_reason or state.failing:
        return None
    plan, gain = formed.plan, gain_of(state, choice)
    step_s, num = plan.expected.mini_batch_s, state.num_micro_batches(plan)
    if formed.salvage is not None and formed.version == state.version:
        num = sum(end - first for first, end in formed.salvage.remaining)
    left_s = order.sent_s + step_s * num / plan.num_micro_batches - now_s
    filling = max((kind.num_stages - 1) / (kind.longest_share + kind.num_stages - 1) for kind in plan.pipeline_kinds)
    cost_s = cost_of_morph_s(state) + 2 * filling * step_s
    if gain < state.config.policy.min_join_gain or left_s * gain <= MARGIN * cost_s * (1 + gain):
        return None
    patience_s = min(cost_of_morph_s(state) / gain, state.config.policy.rules.wait.join_patience_s)
    if any(time_s <= now_s + patience_s for time_s, _ in nodes_to_come(state, now_s)):
        return None
    return f"{gain:.1%} faster with more workers, and the step, given up for them, would take {left_s:.0f} s more"


def _next_is_near(state: ControllerState, choice: Choice, gain: float, now_s: float) -> bool:
    assert state.waits.join_since_s is not None, "nobody waits"
    patience_s = min(cost_of_morph_s(state) / gain, state.config.policy.rules.wait.join_patience_s)
    until_s = state.waits.join_since_s + patience_s
    return now_s < until_s and faster_with_those_to_come(state, choice, now_s, until_s)
