"""The end of a mini-batch as SimPy processes: reductions beside the last backwards, commit barrier, optimizer step.

The other half of the reference engine (:mod:`simulator.engine.reference`): what :func:`simulator.costs.finish.finish`
works out by formulas, step by step and to the nanosecond.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import simpy

from simulator.costs.finish import Finish, optimizer_steps_ns
from simulator.costs.stage_costs import StageCosts
from simulator.engine.reference import Acting
from simulator.engine.times import Ints
from simulator.inputs.conditions import Conditions


def finish(
    costs: StageCosts,
    last_backward_ns: Ints,
    to_come_ns: Ints,
    conditions: Conditions | None = None,
    redone_ns: int = 0,
) -> Finish:
    """As :func:`simulator.costs.finish.finish`."""
    end = _End(costs, last_backward_ns, to_come_ns, conditions or Conditions(), redone_ns)
    end.env.run()
    return Finish(
        ready_ns=end.ready_ns,
        last_ready_ns=end.ready_ns[costs.reduced.begin],
        reduced_ns=end.reduced_ns,
        tied=tuple(sorted(end.tied)),
        prepared_ns=end.prepared_ns,
        optimizer_ns=int(end.env.now) - end.prepared_ns - costs.sections.commit_ns,
        mini_batch_ns=int(end.env.now),
    )


class _End:
    """``passed[k][d]``: the last backward of replica d has passed section k, so what k completes may be reduced."""

    def __init__(
        self, costs: StageCosts, last_backward_ns: Ints, to_come_ns: Ints, conditions: Conditions, redone_ns: int
    ) -> None:
        self.env, self.costs, self.conditions = simpy.Environment(), costs, conditions
        self.num_stages, self.num_replicas = last_backward_ns.shape
        num_sections = costs.sections.num_sections
        self.passed = [[self.env.event() for _ in range(self.num_replicas)] for _ in range(num_sections)]
        self.ready_ns = np.zeros(num_sections, np.int64)
        self.reduced_ns = np.zeros(self.num_stages, np.int64)
        self.tied: list[tuple[tuple[int, ...], int, int]] = []
        self.prepared_ns = 0
        self.sections = [range(first, end) for first, end in zip(*(span.tolist() for span in costs.spans), strict=True)]
        instants_ns = last_backward_ns[costs.reduced.stage] - to_come_ns
        self.backwards = [
            self.env.process(self.backward(stage, replica, instants_ns[:, replica].tolist()))
            for stage in range(self.num_stages)
            for replica in range(self.num_replicas)
        ]
        self.ended = simpy.AllOf(self.env, [self.env.timeout(int(ns)) for ns in last_backward_ns.flat])
        self.env.process(self.close(redone_ns))

    def backward(self, stage: int, replica: int, instants_ns: Sequence[int]) -> Acting:
        """The last backward of a worker goes through its sections, from the last one to the first."""
        for section in reversed(self.sections[stage]):
            if self.conditions.all_reduce == "late":
                yield self.ended
            else:
                yield self.env.timeout(instants_ns[section] - int(self.env.now))
            self.passed[section][replica].succeed()
            self.ready_ns[section] = int(self.env.now)

    def reduce(self, stage: int) -> Acting:
        """The stage's link carries what one section completes after the other, once it is complete on every replica.

        Each takes what it adds to the time of those behind it (:mod:`simulator.costs.reductions`).
        """
        first, behind_ns = self.sections[stage][0], self.costs.reduced.behind_ns(self.num_replicas)
        for section in reversed(self.sections[stage]):
            yield simpy.AllOf(self.env, self.passed[section])
            yield self.env.timeout(int(behind_ns[section] - (behind_ns[section - 1] if section > first else 0)))
        self.reduced_ns[stage] = int(self.env.now)

    def reduce_tied(self, stages: tuple[int, ...], duration_ns: int, before: Sequence[simpy.Event]) -> Acting:
        """A ring over stages that share weights begins when each of them is through with what comes before."""
        yield simpy.AllOf(self.env, before)
        self.tied.append((stages, int(self.env.now), duration_ns))
        yield self.env.timeout(duration_ns)

    def close(self, redone_ns: int) -> Acting:
        """The commit barrier waits for everybody, and the slowest optimizer step ends the mini-batch."""
        through: list[simpy.Event] = [self.env.process(self.reduce(stage)) for stage in range(self.num_stages)]
        tied_ns = self.costs.reduced.tied_ns(self.num_replicas)
        for stages, duration_ns in tied_ns:
            ring = self.env.process(self.reduce_tied(stages, duration_ns, [through[stage] for stage in stages]))
            for stage in stages:
                through[stage] = ring
        slots = self.conditions.compute_slots
        if slots is not None and slots < self.num_stages * self.num_replicas:
            through.append(self.env.process(self.reduce_on(slots)))
        yield simpy.AllOf(self.env, [*through, self.env.timeout(redone_ns)])
        self.prepared_ns = int(self.env.now)
        yield self.env.timeout(self.costs.sections.commit_ns)
        steps_ns = optimizer_steps_ns(self.costs, self.num_replicas, self.conditions)
        least_ns = 0 if slots is None else -(-int(steps_ns.sum()) // slots)
        yield simpy.AllOf(self.env, [self.env.timeout(int(ns)) for ns in (*steps_ns.flat, least_ns)])

    def reduce_on(self, slots: int) -> Acting:
        """On fewer cores than workers rings take as many as they have members, which share them evenly."""
        reduced = self.costs.reduced
        alone_ns = reduced.latest(reduced.behind_ns(self.num_replicas)).tolist()
        rings = [(self.num_replicas, duration_ns) for duration_ns in alone_ns]
        rings += [(self.num_replicas * len(stages), ns) for stages, ns in reduced.tied_ns(self.num_replicas)]
        yield self.ended
        yield self.env.timeout(sum(min(members, slots) * duration_ns for members, duration_ns in rings) // slots)
