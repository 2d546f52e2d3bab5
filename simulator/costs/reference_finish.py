"""The end of a mini-batch as SimPy processes: optimizer step, reductions beside the last backwards, commit barrier.

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
    remaining_ns = reduced.remaining_ns(num_replicas)
    alone = Rings(reduced, remaining_ns, (np.array(stages),), tuple(stages), own, (reduced,))
    return replace(finish_together([kind], alone, [conditions or Conditions()], [num_replicas])[0], rings=None)


def finish_together(
    kinds: Sequence[Ended], rings: Rings, conditions: Sequence[Conditions], num_replicas: Sequence[int]
) -> tuple[Finish, ...]:
    """See :func:`simulator.costs.finish.finish_together`."""
    end = _End(kinds, rings, conditions, num_replicas)
    end.env.run()
    first_ns = min(end.begun_at_ns)
    return tuple(
        Finish(
            ready_ns=end.begun_ns - at_ns,
            last_ready_ns=kind.costs.reduced.latest(end.ready_ns) - at_ns,
            reduced_ns=end.reduced_ns[place] - at_ns,
            tied=tuple((holders[place], begin - at_ns, duration) for holders, begin, duration in sorted(end.tied)),
            prepared_ns=end.prepared_ns - at_ns,
            optimizer_ns=at_ns,
            mini_batch_ns=int(end.env.now),
            rings=rings,
            begin_ns=at_ns - first_ns,
        )
        for place, (kind, at_ns) in enumerate(zip(kinds, end.begun_at_ns, strict=True))
    )


class _End:
    """From one decision to the next: each kind of pipelines begins when its optimizer steps are done.

    ``passed[k]``: for each worker, the event that its last backward has passed section k, whose ring may then begin.

    ``waited_ns[g]`` is when the last member of the ring of span g has finished the rings before it, ``begun_at_ns``
    when the pipelines of each kind begin.
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
        self.begun_at_ns = [0] * len(kinds)
        begun = [self.env.process(self.step(place)) for place in range(len(kinds))]
        ended_ns = [kind.last_backward_ns.flat for kind in kinds]
        ended = [self.after(at, int(ns)) for at, of in zip(begun, ended_ns, strict=True) for ns in of]
        self.ended = simpy.AllOf(self.env, ended)
        self.redone = [self.after(at, kind.redone_ns) for at, kind in zip(begun, kinds, strict=True) if kind.redone_ns]
        for kind, start in zip(kinds, begun, strict=True):
            instants_ns = kind.last_backward_ns[kind.costs.reduced.stage] - kind.to_come_ns
            for first, end in zip(*(span.tolist() for span in kind.costs.spans), strict=True):
                for replica in range(kind.last_backward_ns.shape[1]):
                    self.env.process(self.backward(start, range(first, end), instants_ns[:, replica].tolist()))
        self.env.process(self.close())

    @property
    def begun_ns(self) -> Ints:
        """When each section's reduction could begin (ns)."""
        return np.maximum(self.ready_ns, self.waited_ns[self.rings.spans.stage])

    def step(self, place: int) -> Acting:
        """The optimizer steps of the mini-batch before: the slowest of a kind, or all on as many cores as there are."""
        kind, conditions = self.kinds[place], self.conditions[place]
        steps_ns = optimizer_steps_ns(kind.costs, self.num_replicas[place], conditions).flatten().tolist()
        slots = conditions.compute_slots
        least_ns = 0 if slots is None else -(-sum(steps_ns) // slots)
        yield simpy.AllOf(self.env, [self.env.timeout(ns) for ns in (*steps_ns, least_ns)])
        self.begun_at_ns[place] = int(self.env.now)

    def after(self, start: simpy.Event, delay_ns: int) -> simpy.Event:
        """An event some time after another one."""

        def wait() -> Acting:
            yield start
            yield self.env.timeout(delay_ns)

        return self.env.process(wait())

    def backward(self, start: simpy.Event, sections: range, instants_ns: Sequence[int]) -> Acting:
        """The last backward of a worker goes through its sections, from the last one to the first."""
        events = {section: self.env.event() for section in sections}
        for section, event in events.items():
            self.passed[section].append(event)
        yield start
        start_ns = int(self.env.now)
        for section in reversed(sections):
            if self.late:
                yield self.ended
            else:
                yield self.env.timeout(start_ns + instants_ns[section] - int(self.env.now))
            events[section].succeed()
            self.ready_ns[section] = int(self.env.now)

    def reduce(self, span: int, before: Sequence[simpy.Event]) -> Acting:
        """A ring reduces one section's gradients after the other, each once it is complete on every replica.

        Each takes the time that it adds to those queued behind it (:mod:`simulator.costs.reductions`). The ring waits
        for earlier rings that its members belong to.
        """
        yield simpy.AllOf(self.env, before)
        self.waited_ns[span] = int(self.env.now)
        sections, left_ns = np.flatnonzero(self.rings.spans.stage == span).tolist(), self.rings.remaining_ns
        for section in reversed(sections):
            yield simpy.AllOf(self.env, self.passed[section])
            yield self.env.timeout(int(left_ns[section] - (left_ns[section - 1] if section > sections[0] else 0)))
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
        """The commit barrier waits for all workers; the next mini-batch begins with their optimizer steps."""
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
        yield simpy.AllOf(self.env, [*prepared, *self.redone])
        self.prepared_ns = int(self.env.now)
        yield self.env.timeout(self.kinds[0].costs.sections.commit_ns)

    def reduce_on(self, slots: int) -> Acting:
        """With fewer cores than workers, each member of a ring takes one core, and all share the cores evenly."""
        spans, members = self.rings.spans, sum(self.num_replicas)
        rings = [(members, duration_ns) for duration_ns in spans.latest(self.rings.remaining_ns).tolist()]
        for holders, duration_ns in self.rings.tied:
            of_kinds = zip(self.num_replicas, holders, strict=True)
            rings.append((sum(number * len(stages) for number, stages in of_kinds), duration_ns))
        yield self.ended
        yield self.env.timeout(sum(min(members, slots) * duration_ns for members, duration_ns in rings) // slots)
