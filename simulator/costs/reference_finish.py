"""The end of a mini-batch as SimPy processes: reductions beside the last backwards, commit barrier, optimizer step.

The other half of the reference engine (:mod:`simulator.engine.reference`): it simulates step by step, to the
nanosecond, what :func:`simulator.costs.finish.finish` computes by formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import simpy

from simulator.costs.finish import Ended, Finish, optimizer_steps_ns
from simulator.costs.reductions import Rings
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
    """See :func:`simulator.costs.finish.finish`."""
    num_replicas = last_backward_ns.shape[1]
    kind, reduced = Ended(costs, last_backward_ns, to_come_ns, redone_ns), costs.reduced
    own = tuple(((stages,), duration) for stages, duration in reduced.tied_ns(num_replicas))
    stages = range(len(costs.boundaries))
    behind_ns = reduced.behind_ns(num_replicas)
    alone = Rings(reduced, behind_ns, (np.array(stages),), tuple(stages), own, (reduced,))
    return replace(finish_together([kind], alone, [conditions or Conditions()], [num_replicas])[0], rings=None)


def finish_together(
    kinds: Sequence[Ended], rings: Rings, conditions: Sequence[Conditions], num_replicas: Sequence[int]
) -> tuple[Finish, ...]:
    """See :func:`simulator.costs.finish.finish_together`."""
    end = _End(kinds, rings, conditions, num_replicas)
    end.env.run()
    commit_ns = kinds[0].costs.sections.commit_ns
    return tuple(
        Finish(
            ready_ns=end.begun_ns,
            last_ready_ns=kind.costs.reduced.latest(end.ready_ns),
            reduced_ns=end.reduced_ns[place],
            tied=tuple((holders[place], begin, duration) for holders, begin, duration in sorted(end.tied)),
            prepared_ns=end.prepared_ns,
            optimizer_ns=int(end.env.now) - end.prepared_ns - commit_ns,
            mini_batch_ns=int(end.env.now),
            rings=rings,
        )
        for place, kind in enumerate(kinds)
    )


class _End:
    """``passed[k]``: for each worker, the event that its last backward has passed section k, whose ring may then begin.

    ``waited_ns[g]`` is when the last member of the ring of span g has finished the rings before it.
    """

    def __init__(
        self, kinds: Sequence[Ended], rings: Rings, conditions: Sequence[Conditions], num_replicas: Sequence[int]
    ) -> None:
        self.env, self.kinds, self.rings, self.conditions = simpy.Environment(), kinds, rings, conditions
        self.num_replicas = num_replicas
        num_sections = kinds[0].costs.sections.num_sections
        self.passed: list[list[simpy.Event]] = [[] for _ in range(num_sections)]
        self.ready_ns = np.zeros(num_sections, np.int64)
        self.waited_ns = np.zeros(len(rings.spans.begin), np.int64)
        self.reduced_ns = [np.zeros(len(kind.last_backward_ns), np.int64) for kind in kinds]
        self.tied: list[tuple[tuple[tuple[int, ...], ...], int, int]] = []
        self.prepared_ns = 0
        self.late = any(each.all_reduce == "late" for each in conditions)
        self.ended = simpy.AllOf(
            self.env, [self.env.timeout(int(ns)) for kind in kinds for ns in kind.last_backward_ns.flat]
        )
        for kind in kinds:
            instants_ns = kind.last_backward_ns[kind.costs.reduced.stage] - kind.to_come_ns
            for first, end in zip(*(span.tolist() for span in kind.costs.spans), strict=True):
                for replica in range(kind.last_backward_ns.shape[1]):
                    self.env.process(self.backward(range(first, end), instants_ns[:, replica].tolist()))
        self.env.process(self.close())

    @property
    def begun_ns(self) -> Ints:
        """When each section's reduction could begin (ns)."""
        return np.maximum(self.ready_ns, self.waited_ns[self.rings.spans.stage])

    def backward(self, sections: range, instants_ns: Sequence[int]) -> Acting:
        """The last backward of a worker goes through its sections, from the last one to the first."""
        events = {section: self.env.event() for section in sections}
        for section, event in events.items():
            self.passed[section].append(event)
        for section in reversed(sections):
            if self.late:
                yield self.ended
            else:
                yield self.env.timeout(instants_ns[section] - int(self.env.now))
            events[section].succeed()
            self.ready_ns[section] = int(self.env.now)

    def reduce(self, span: int, before: Sequence[simpy.Event]) -> Acting:
        """A ring reduces one section's gradients after the other, each once it is complete on every replica.

        Each takes the time that it adds to those queued behind it (:mod:`simulator.costs.reductions`). The ring waits
        for earlier rings that its members belong to.
        """
        yield simpy.AllOf(self.env, before)
        self.waited_ns[span] = int(self.env.now)
        sections, behind_ns = np.flatnonzero(self.rings.spans.stage == span).tolist(), self.rings.behind_ns
        for section in reversed(sections):
            yield simpy.AllOf(self.env, self.passed[section])
            yield self.env.timeout(int(behind_ns[section] - (behind_ns[section - 1] if section > sections[0] else 0)))
        for reduced_ns, holders in zip(self.reduced_ns, self.rings.holders, strict=True):
            reduced_ns[holders[span]] = int(self.env.now)

    def reduce_tied(
        self, holders: tuple[tuple[int, ...], ...], duration_ns: int, before: Sequence[simpy.Event]
    ) -> Acting:
        """A ring over stages that share weights begins when each of them has finished its earlier rings."""
        yield simpy.AllOf(self.env, before)
        self.tied.append((holders, int(self.env.now), duration_ns))
        yield self.env.timeout(duration_ns)

    def close(self) -> Acting:
        """The commit barrier waits for all workers, and the slowest optimizer step ends the mini-batch."""
        through: dict[tuple[int, int], simpy.Event] = {}
        for span in self.rings.order:
            members = [(place, int(stages[span])) for place, stages in enumerate(self.rings.holders)]
            before = [through[member] for member in members if member in through]
            through |= dict.fromkeys(members, self.env.process(self.reduce(span, before)))
        for holders, duration_ns in self.rings.tied:
            members = [(place, stage) for place, stages in enumerate(holders) for stage in stages]
            ring = self.env.process(self.reduce_tied(holders, duration_ns, [through[member] for member in members]))
            through |= dict.fromkeys(members, ring)
        slots = min((each.compute_slots for each in self.conditions if each.compute_slots is not None), default=None)
        prepared = list(through.values())
        if slots is not None and slots < sum(kind.last_backward_ns.size for kind in self.kinds):
            prepared.append(self.env.process(self.reduce_on(slots)))
        yield simpy.AllOf(self.env, [*prepared, *(self.env.timeout(kind.redone_ns) for kind in self.kinds)])
        self.prepared_ns = int(self.env.now)
        yield self.env.timeout(self.kinds[0].costs.sections.commit_ns)
        steps_ns = [
            int(ns)
            for kind, number, each in zip(self.kinds, self.num_replicas, self.conditions, strict=True)
            for ns in optimizer_steps_ns(kind.costs, number, each).flat
        ]
        least_ns = 0 if slots is None else -(-sum(steps_ns) // slots)
        yield simpy.AllOf(self.env, [self.env.timeout(ns) for ns in (*steps_ns, least_ns)])

    def reduce_on(self, slots: int) -> Acting:
        """With fewer cores than workers, each member of a ring takes one core, and all share the cores evenly."""
        spans, members = self.rings.spans, sum(self.num_replicas)
        rings = [(members, duration_ns) for duration_ns in spans.latest(self.rings.behind_ns).tolist()]
        for holders, duration_ns in self.rings.tied:
            of_kinds = zip(self.num_replicas, holders, strict=True)
            rings.append((sum(number * len(stages) for number, stages in of_kinds), duration_ns))
        yield self.ended
        yield self.env.timeout(sum(min(members, slots) * duration_ns for members, duration_ns in rings) // slots)
