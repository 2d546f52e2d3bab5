"""Planned changes: what is worth a morph between two steps, where no work is lost, or in the midst of one."""

from __future__ import annotations

from manager.controller.shape.choosing import (
    Choice,
    chosen,
    cost_of_morph_s,
    draining_members,
    gain_of,
    nodes_to_come,
)
from manager.controller.shape.following import followers_due
from manager.controller.shape.postponing import stays
from manager.controller.state.draft import Draft
from manager.controller.state.nodes import NodeState
from manager.controller.state.state import ControllerState, Phase

MARGIN = 2.0
"""A step is given up for newcomers if they make up this many times what that costs."""


def drain_due(draft: Draft) -> str | None:
    """Say which members are to be left out now because their VMs will be taken.

    None: nobody, no plan fits then, or there is time for another step with them.
    """
    leaving = draining_members(draft.state)
    if not leaving or chosen(draft) is None or stays(draft):
        return None
    return f"{', '.join(leaving)} will be taken and is left out"


def change_due(draft: Draft) -> str | None:
    """Say why the shape is to be changed at this boundary; None when it is not, or not yet.

    A drain that cannot wait and a slow member that costs more than it gives are dealt with at once. A better shape
    with newcomers waits for a further node that is about to be ready while that costs less than a second change: going
    without the gain for w seconds costs ``w * gain``, a change its own time. The same shape is formed anew where it is
    to have followers from now on, or none any more.
    """
    leaving = drain_due(draft)
    if leaving is not None:
        return leaving
    choice, state = chosen(draft), draft.state
    gain = gain_of(state, choice) if choice else 0.0
    if choice is None or gain <= 0 or gain < state.config.policy.min_join_gain:
        if state.waits.join_since_s is not None:
            draft.change_waits(join_since_s=None)
        return None if choice is None else followers_due(draft)
    slow = [worker for worker in state.member_units if state.workers[worker].node is NodeState.SUSPECT]
    slow = [worker for worker in slow if worker not in choice.workers]
    if slow:
        return f"{', '.join(slow)} is slow and left out, {gain:.1%} faster"
    if state.waits.join_since_s is None:
        draft.change_waits(join_since_s=draft.now_s)
    if _next_is_near(draft.state, choice, gain, draft.now_s):
        return None
    return f"more workers are ready, {gain:.1%} faster"


def worth_giving_up(draft: Draft) -> str | None:
    """Say why the step under way is to be given up for those that got ready, or None: they wait for its end.

    Its partial sums are kept, so that it costs the change and what is between the stages, which runs again: a pipeline
    empties and fills once more. In what is left of the step they make up their gain. Not while a checkpoint is written,
    for its writers may change, nor before another node that is near.
    """
    state, choice, now_s = draft.state, chosen(draft), draft.now_s
    order, formed = state.step.order, state.reshape
    if choice is None or formed is None or order is None or state.phase is not Phase.TRAINING or order.kind != "step":
        return None
    if not formed.keep_sums or state.step.attempt or state.saving.pending or state.stop_reason or state.failing:
        return None
    plan, gain = formed.plan, gain_of(state, choice)
    step_s, num = plan.expected.mini_batch_s, plan.num_micro_batches
    if formed.salvage is not None and formed.version == state.version:
        num = sum(end - first for first, end in formed.salvage.remaining)
    left_s = order.sent_s + step_s * num / plan.num_micro_batches - now_s
    depth = plan.pipeline_depth
    cost_s = cost_of_morph_s(state) + 2 * (depth - 1) * step_s / (plan.micro_batches_per_replica[0] + depth - 1)
    if gain < state.config.policy.min_join_gain or left_s * gain <= MARGIN * cost_s * (1 + gain):
        return None
    patience_s = min(cost_of_morph_s(state) / gain, state.config.policy.rules.wait.join_patience_s)
    if any(time_s <= now_s + patience_s for time_s in nodes_to_come(state, now_s)):
        return None
    return f"{gain:.1%} faster with more workers, of which {left_s:.0f} s of the step are worth giving it up"


def _next_is_near(state: ControllerState, choice: Choice, gain: float, now_s: float) -> bool:
    assert state.waits.join_since_s is not None, "nobody waits"
    patience_s = min(cost_of_morph_s(state) / gain, state.config.policy.rules.wait.join_patience_s)
    until_s = state.waits.join_since_s + patience_s
    coming = sum(time_s <= until_s for time_s in nodes_to_come(state, now_s))
    better = state.config.best_plan(len(choice.workers) + coming)
    return now_s < until_s and better is not None and better.expected.examples_per_s > choice.examples_per_s
