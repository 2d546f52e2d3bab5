"""How far a step has come after some of its time, and how long one takes of which a part is done already."""

from __future__ import annotations

import math
from typing import NamedTuple

from morph.contract.plan import Plan
from morph.contract.salvage import Salvage, share_in

_PER_S = 1024
"""Times are rounded to such parts of a second, of which sums are exact: then what is passed over changes nothing."""


class StagePace(NamedTuple):
    """When a stage has run its first micro-batch of a step backward, and how long after it each further one (s)."""

    first_s: float
    period_s: float

    def num_backwards(self, share: int, elapsed_s: float) -> int:
        """Return how many of a share of micro-batches are run backward so many seconds after the step began."""
        if elapsed_s < self.first_s:
            return 0
        return min(share, 1 + math.floor((elapsed_s - self.first_s) / self.period_s)) if self.period_s else share


def stage_pace(plan: Plan, stage: int, step_s: float) -> StagePace:
    """Return how a stage goes through a step that takes ``step_s`` as a whole.

    A pipeline of even stages ends one micro-batch every t once it is full: P forwards come before the first backward
    of the last stage, and P - s - 1 backwards of later stages before the first of stage s. t is that of the whole step.
    """
    period_s, _ = _period_s(plan, step_s)
    forward = _forward_share(plan)
    depth = plan.pipeline_depth
    return StagePace((depth * forward + (depth - stage) * (1 - forward)) * period_s, period_s)


def copied(done: int, every: int, share: int) -> int:
    """Return of how many micro-batches the last copy of a worker's partial sums was that arrived.

    Copies are made whenever a multiple of ``every`` of the ``share`` is left to do.
    """
    left = max(1, math.ceil((share - done) / every)) * every
    return max(0, share - left)


def rounded(time_s: float) -> float:
    """Round a time up, to one of which sums are exact."""
    return math.ceil(time_s * _PER_S) / _PER_S


def partial_step_s(plan: Plan, step_s: float, salvage: Salvage | None) -> float:
    """Return what a step takes of which only what is missing runs; ``step_s`` is what a whole one takes."""
    if salvage is None:
        return step_s
    period_s, rest_s = _period_s(plan, step_s)
    longest = max(len(share_in(plan, replica, salvage)) for replica in range(plan.num_replicas))
    partial_s = rest_s + (longest + plan.pipeline_depth - 1) * period_s if longest else rest_s
    return rounded(partial_s)


def _period_s(plan: Plan, step_s: float) -> tuple[float, float]:
    """Return the time between two micro-batches of a replica, and the time of a step that is not the pipeline's."""
    parts_s = plan.expected.parts_s
    known_s = sum(parts_s.values())
    rest = sum(parts_s.get(part, 0.0) for part in ("all_reduce", "optimizer", "commit")) / known_s if known_s else 0.0
    filled = plan.micro_batches_per_replica[0] + plan.pipeline_depth - 1
    return (1 - rest) * step_s / filled, rest * step_s


def _forward_share(plan: Plan) -> float:
    """Return the forward's part of a micro-batch's time in a stage; a third where the plan does not say."""
    parts_s = plan.expected.parts_s
    compute_s = sum(parts_s.get(part, 0.0) for part in ("forward", "recompute", "backward"))
    return parts_s["forward"] / compute_s if compute_s and "forward" in parts_s else 1 / 3
