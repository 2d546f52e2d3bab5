"""What follows the pipelines of a mini-batch: all-reduce, commit barrier, optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator.answers.costs import StageCosts
from simulator.given.conditions import Conditions
from simulator.playing.times import Ints


@dataclass(frozen=True)
class Finish:
    """What follows the pipelines, in ns from the start of the mini-batch.

    ``private_start_ns[s]`` is when stage s begins to reduce; ``tied`` holds (stages, start, duration) of each
    ring that spans stages; ``prepared_ns`` is when every worker has its gradients.
    """

    private_start_ns: Ints
    private_reduce_ns: Ints
    tied: tuple[tuple[tuple[int, ...], int, int], ...]
    prepared_ns: int
    optimizer_ns: int
    mini_batch_ns: int

    @property
    def reduce_ns(self) -> Ints:
        """AR_s: all the all-reduces of each stage together."""
        total = self.private_reduce_ns.copy()
        for stages, _, duration in self.tied:
            total[list(stages)] += duration
        return total


def finish(costs: StageCosts, last_backward_ns: Ints, conditions: Conditions | None = None) -> Finish:
    """Reduce, commit and apply once the pipelines are through.

    As the executor does, a stage reduces as soon as its last backward has ended on every replica, while stages
    before it still drain; with ``all_reduce="late"`` all wait for the last backward of all. Rings that span stages
    follow when all their stages are there. The commit barrier waits for all workers, and the slowest optimizer step
    ends the mini-batch; with fewer ``compute_slots`` than workers those steps queue for the cores.

    Args:
        costs: Of the stages.
        last_backward_ns: int64 of shape [P, D].
        conditions: Slots, slow workers and when to reduce.
    """
    conditions = conditions or Conditions()
    num_replicas = last_backward_ns.shape[1]
    start = last_backward_ns.max(axis=1)
    if conditions.all_reduce == "late":
        start = np.full_like(start, start.max())
    private = costs.private_reduce_ns(num_replicas)
    free = start + private
    tied = []
    for stages, duration in costs.tied_reduce_ns(num_replicas):
        begin = int(free[list(stages)].max())
        free[list(stages)] = begin + duration
        tied.append((stages, begin, duration))
    prepared = int(free.max())
    optimizer = optimizer_ns(costs, num_replicas, conditions)
    return Finish(
        private_start_ns=start,
        private_reduce_ns=private,
        tied=tuple(tied),
        prepared_ns=prepared,
        optimizer_ns=optimizer,
        mini_batch_ns=prepared + costs.sections.commit_ns + optimizer,
    )


def optimizer_ns(costs: StageCosts, num_replicas: int, conditions: Conditions) -> int:
    """The slowest optimizer step, or all of them one after the other on the slots."""
    steps = optimizer_steps_ns(costs, num_replicas, conditions)
    longest = int(steps.max())
    if conditions.compute_slots is None:
        return longest
    return max(longest, -(-int(steps.sum()) // conditions.compute_slots))


def optimizer_steps_ns(costs: StageCosts, num_replicas: int, conditions: Conditions) -> Ints:
    """[P, D]: of each worker."""
    steps = np.repeat(costs.optimizer_ns[:, None], num_replicas, axis=1).astype(np.float64)
    for stage, replica, factor in conditions.slow:
        steps[stage, slice(None) if replica is None else replica] *= factor
    return np.rint(steps).astype(np.int64)
