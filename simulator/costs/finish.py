"""The end of a mini-batch after its pipelines: all-reduce, commit barrier, optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.costs.reductions import Rings
from simulator.costs.stage_costs import StageCosts
from simulator.engine.times import Ints
from simulator.inputs.conditions import Conditions


@dataclass(frozen=True)
class Finish:
    """Instants after the pipelines, in ns from the start of the mini-batch.

    ``ready_ns[k]``: when the gradients that section k completes may be reduced; ``last_ready_ns[s]``: when the last
    gradients of stage s may; ``reduced_ns[s]``: when the gradients that only stage s holds are reduced. ``tied``:
    (stages, start, duration) of each ring that spans stages; ``prepared_ns``: when every worker has its gradients.
    ``rings``: those of pipelines of several kinds. ``begin_ns``: how much later these pipelines begin than those of
    the kind that begins first.
    """

    ready_ns: Ints
    last_ready_ns: Ints
    reduced_ns: Ints
    tied: tuple[tuple[tuple[int, ...], int, int], ...]
    prepared_ns: int
    optimizer_ns: int
    mini_batch_ns: int
    rings: Rings | None = None
    begin_ns: int = 0

    @property
    def exposed_ns(self) -> Ints:
        """The part of each stage's all-reduces that nothing overlaps: int64[P]."""
        total = self.reduced_ns - self.last_ready_ns
        for stages, _, duration in self.tied:
            total[list(stages)] += duration
        return total


def finish(
    costs: StageCosts,
    last_backward_ns: Ints,
    to_come_ns: Ints,
    conditions: Conditions | None = None,
    redone_ns: int = 0,
) -> Finish:
    """Reduce, commit and apply once the pipelines are through.

    As the executor does, a stage reduces a section's gradients as soon as the last backward has passed the section on
    every replica, while that backward continues, one section after the other (:mod:`simulator.costs.reductions`); with
    ``all_reduce="late"`` all reductions wait for the last backward of all. Rings that span stages follow when all their
    stages have finished. The commit barrier waits for all workers, and the slowest optimizer step ends the mini-batch.
    With fewer ``compute_slots`` than workers these steps queue for the cores, and reductions take cores from computing:
    one for each member of a ring.

    ``last_backward_ns``: int64[P, D]. ``to_come_ns``: the part of the last backward that follows each section's,
    int64[K, D], or [K, 1] if equal for all replicas. ``redone_ns``: when the last redundant task has ended.
    """
    conditions = conditions or Conditions()
    num_replicas, reduced = last_backward_ns.shape[1], costs.reduced
    if conditions.all_reduce == "late":
        ready = np.full(len(to_come_ns), last_backward_ns.max())
    else:
        ready = (last_backward_ns[reduced.stage] - to_come_ns).max(axis=1)
    alone = reduced.latest(ready + reduced.remaining_ns(num_replicas))
    free, tied = alone.copy(), []
    for stages, duration in reduced.tied_ns(num_replicas):
        begin = int(free[list(stages)].max())
        free[list(stages)] = begin + duration
        tied.append((stages, begin, duration))
    prepared = max(redone_ns, int(free.max()))
    slots = conditions.compute_slots
    if slots is not None and slots < last_backward_ns.size:
        rings = [(num_replicas, int(duration)) for duration in reduced.latest(reduced.remaining_ns(num_replicas))]
        rings += [(num_replicas * len(stages), duration) for stages, _, duration in tied]
        cores_ns = sum(min(members, slots) * duration for members, duration in rings)
        prepared = max(prepared, int(last_backward_ns.max()) + cores_ns // slots)
    optimizer = optimizer_ns(costs, num_replicas, conditions)
    return Finish(
        ready_ns=ready,
        last_ready_ns=ready[reduced.begin],
        reduced_ns=alone,
        tied=tuple(tied),
        prepared_ns=prepared,
        optimizer_ns=optimizer,
        mini_batch_ns=prepared + costs.sections.commit_ns + optimizer,
    )


@dataclass(frozen=True)
class Ended:
    """The end of the pipelines of one kind: arguments of :func:`finish`."""

    costs: StageCosts
    last_backward_ns: Ints
    to_come_ns: Ints
    redone_ns: int = 0

    def ready_ns(self) -> Ints:
        """Return when the last backward of all replicas has passed each section: int64[K]."""
        ready: Ints = (self.last_backward_ns[self.costs.reduced.stage] - self.to_come_ns).max(axis=1)
        return ready


def finish_together(
    kinds: Sequence[Ended], rings: Rings, conditions: Sequence[Conditions], num_replicas: Sequence[int]
) -> tuple[Finish, ...]:
    """Reduce, commit and apply once pipelines of several kinds are through; returns each kind's end, from its own
    begin.

    Pipelines do not interact before. Those of each kind begin once its own optimizer steps are done, without waiting
    for slower types of node. A ring begins when the last backward of all pipelines has passed its span, and its members
    have completed the rings before it. Workers have devices of their own.
    """
    spans = rings.spans
    steps = [
        optimizer_ns(kind.costs, number, each)
        for kind, each, number in zip(kinds, conditions, num_replicas, strict=True)
    ]
    begins = [step - min(steps) for step in steps]
    ready = np.max([kind.ready_ns() + begin for kind, begin in zip(kinds, begins, strict=True)], axis=0)
    if any(each.all_reduce == "late" for each in conditions):
        last = max(int(kind.last_backward_ns.max()) + begin for kind, begin in zip(kinds, begins, strict=True))
        ready = np.full(len(ready), last)
    ends, waits = spans.latest(ready + rings.remaining_ns), np.zeros(len(spans.begin), np.int64)
    for span, before in rings.waits_for:
        waits[span] = max(ends[earlier] for earlier in before)
        ends[span] = max(ends[span], waits[span] + rings.whole_ns[span])
    free, tied = [ends[last] for last in rings.last_of], []
    for holders, duration in rings.tied:
        begin = max(int(link[list(stages)].max()) for link, stages in zip(free, holders, strict=True))
        for link, stages in zip(free, holders, strict=True):
            link[list(stages)] = begin + duration
        tied.append((holders, begin, duration))
    redone = [kind.redone_ns + begin for kind, begin in zip(kinds, begins, strict=True) if kind.redone_ns]
    prepared = max([*redone, *(int(link.max()) for link in free)])
    begun = np.maximum(ready, waits[spans.stage])
    return tuple(
        Finish(
            ready_ns=begun - begin,
            last_ready_ns=kind.costs.reduced.latest(ready) - begin,
            reduced_ns=ends[last] - begin,
            tied=tuple((holders[place], start - begin, duration) for holders, start, duration in tied),
            prepared_ns=prepared - begin,
            optimizer_ns=step,
            rings=rings,
            mini_batch_ns=prepared + kind.costs.sections.commit_ns + min(steps),
            begin_ns=begin,
        )
        for place, (kind, last, step, begin) in enumerate(zip(kinds, rings.last_of, steps, begins, strict=True))
    )


def optimizer_ns(costs: StageCosts, num_replicas: int, conditions: Conditions) -> int:
    """Return the time of the slowest optimizer step, or of all steps queueing for the slots."""
    steps = optimizer_steps_ns(costs, num_replicas, conditions)
    longest = int(steps.max())
    if conditions.compute_slots is None:
        return longest
    return max(longest, -(-int(steps.sum()) // conditions.compute_slots))


def optimizer_steps_ns(costs: StageCosts, num_replicas: int, conditions: Conditions) -> Ints:
    """Return the time of each worker's optimizer step: int64[P, D]."""
    steps = np.repeat(costs.optimizer_ns[:, None], num_replicas, axis=1).astype(np.float64)
    for stage, replica, factor in conditions.slow:
        steps[stage, slice(None) if replica is None else replica] *= factor
    return np.rint(steps).astype(np.int64)
