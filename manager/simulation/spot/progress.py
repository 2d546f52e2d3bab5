"""Computes the progress of a step after some of its time, and the time of a step that is partly done."""

from __future__ import annotations

import math
from typing import NamedTuple

from morph.contract.plan import Plan
from morph.contract.salvage import Salvage, share_in

_PER_S = 1024
"""Times are rounded to this fraction of a second, whose sums are exact, so that skipping steps changes nothing."""


class StagePace(NamedTuple):
    """When (s) a stage has run the first micro-batch of a step backward, and the time (s) for each further one."""

    first_s: float
    period_s: float

    def num_backwards(self, share: int, elapsed_s: float) -> int:
        """Return how many micro-batches of a share are run backward this number of seconds after the step began."""
        if elapsed_s < self.first_s:
            return 0
        return min(share, 1 + math.floor((elapsed_s - self.first_s) / self.period_s)) if self.period_s else share


def stage_pace(plan: Plan, stage: int, step_s: float) -> StagePace:
    """Return a stage's pace in a step that takes ``step_s`` as a whole.

    A pipeline of even stages completes one micro-batch every t once it is full: P forwards come before the first
    backward of the last stage, and P - s - 1 backwards of later stages before the first of stage s. t is that of the
    whole step.
    """
    replica = plan.replicas_of(stage)[0]
    period_s, forward, depth = period_of(plan, replica, step_s), _forward_share(plan), plan.kind_of(replica).num_stages
    return StagePace((depth * forward + (depth - plan.position(stage)) * (1 - forward)) * period_s, period_s)


def copied(done: int, every: int, share: int) -> int:
    """Return the number of micro-batches in the last copy of a worker's partial sums that arrived.

    Copies are made whenever a multiple of ``every`` micro-batches of the ``share`` is left to do.
    """
    left = max(1, math.ceil((share - done) / every)) * every
    return max(0, share - left)


def rounded(time_s: float) -> float:
    """Round a time up to one whose sums are exact."""
    return math.ceil(time_s * _PER_S) / _PER_S


def partial_step_s(plan: Plan, step_s: float, salvage: Salvage | None) -> float:
    """Return the time of a step that runs only its missing part; ``step_s`` is the time of a whole one."""
    if salvage is None:
        return step_s
    pipelines_s = [0.0]
    for replica in range(plan.num_replicas):
        if num := len(share_in(plan, replica, salvage)):
            pipelines_s.append((num + plan.kind_of(replica).num_stages - 1) * period_of(plan, replica, step_s))
    return rounded(_rest_share(plan) * step_s + max(pipelines_s))


def period_of(plan: Plan, replica: int, step_s: float) -> float:
    """Return the time between two micro-batches of a replica whose kind of pipeline is busy for the whole step."""
    kind = plan.kind_of(replica)
    return (1 - _rest_share(plan)) * step_s / (kind.longest_share + kind.num_stages - 1)


def _rest_share(plan: Plan) -> float:
    """Return the part of a step's time outside the pipelines."""
    parts_s = plan.expected.parts_s
    known_s = sum(parts_s.values())
    return sum(parts_s.get(part, 0.0) for part in ("all_reduce", "optimizer", "commit")) / known_s if known_s else 0.0


def _forward_share(plan: Plan) -> float:
    """Return the forward's share of a micro-batch's time in a stage; a third if the plan does not say."""
    parts_s = plan.expected.parts_s
    compute_s = sum(parts_s.get(part, 0.0) for part in ("forward", "recompute", "backward"))
    return parts_s["forward"] / compute_s if compute_s and "forward" in parts_s else 1 / 3
