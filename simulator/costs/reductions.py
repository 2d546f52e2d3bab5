"""Reductions of stages, and how long they continue after the last backward.

A unit is reduced as soon as its gradient is complete: when the last micro-batch's backward has passed the first section
that uses it, while the backward of earlier sections continues. A stage's link carries one unit after the other; units
shared with other stages come last. With C_k the bytes of the units that section k completes, and B_j the last
micro-batch's backward of section j, a stage whose first section is f completes the reduction of its own units later
than its backward by at most

    E = max over its sections k of [ AR(C_f + ... + C_k) - (B_f + ... + B_(k-1)) ],

the exposed part of its reduction. Each unit occupies the link for the time that it adds to those queued behind it, so
that all units together take AR of their bytes, like one all-reduce of the whole stage.

Pipelines that are cut in several ways meet in their rings: :class:`Rings`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from morph.contract.plan import reduction_rounds
from morph.contract.profile import Profile
from simulator.engine.times import Floats, Ints
from simulator.inputs.transfer import AnyAllReduce, SlowestAllReduce


@dataclass(frozen=True)
class ReducedUnit:
    """The gradient of a parameter unit in a reduction."""

    sections: tuple[int, ...]
    reduced_bytes: int


@dataclass(frozen=True)
class Reductions:
    """What the reductions of the P stages of a shape depend on.

    ``begin``: int64[P], first sections. ``sum_bytes``: [K + 1], running sums over sections of the bytes that only one
    stage holds. ``tied``: (stages, bytes) for each set of stages that share a unit.
    """

    begin: Ints
    sum_bytes: Floats
    tied: tuple[tuple[tuple[int, ...], float], ...]
    all_reduce: AnyAllReduce
    _remaining_ns: dict[int, Ints] = field(default_factory=dict)
    _tied_ns: dict[int, tuple[tuple[tuple[int, ...], int], ...]] = field(default_factory=dict)

    @cached_property
    def first(self) -> Ints:
        """The first section of each section's stage: int64[K]."""
        return _unchanging(self.begin[self.stage])

    @cached_property
    def stage(self) -> Ints:
        """The stage of each section: int64[K]."""
        num_sections = len(self.sum_bytes) - 1
        return _unchanging(np.repeat(np.arange(len(self.begin)), np.diff(self.begin, append=num_sections)))

    def remaining_ns(self, num_replicas: int) -> Ints:
        """Return AR, over a ring of D, of the bytes not yet reduced when each section's backward ends: int64[K]."""
        if num_replicas not in self._remaining_ns:
            sizes = self.sum_bytes[1:] - self.sum_bytes[self.first]
            self._remaining_ns[num_replicas] = _unchanging(self.all_reduce.by_section_ns(num_replicas, sizes))
        return self._remaining_ns[num_replicas]

    def tied_ns(self, num_replicas: int) -> tuple[tuple[tuple[int, ...], int], ...]:
        """Return (stages, AR) for units that several stages hold, over a ring of D for each of the stages."""
        if num_replicas not in self._tied_ns:
            self._tied_ns[num_replicas] = tuple(
                (stages, int(self.all_reduce.times_ns(num_replicas * len(stages), np.array([size]))[0]))
                for stages, size in self.tied
            )
        return self._tied_ns[num_replicas]

    def latest(self, values: Ints) -> Ints:
        """Return the maximum over each stage's sections: from [K, ...] to [P, ...]."""
        largest: Ints = np.maximum.reduceat(values, self.begin, axis=0)
        return largest

    def exposed_ns(self, num_replicas: int, to_come_ns: Ints) -> Ints:
        """Return E of each stage plus its tied rings, given the rest of the last backward at each section: int64[P]."""
        exposed = self.latest(self.remaining_ns(num_replicas) - to_come_ns)
        for stages, duration in self.tied_ns(num_replicas):
            exposed[list(stages)] += duration
        return exposed


def _unchanging(values: Ints) -> Ints:
    values.setflags(write=False)
    return values


def reductions(
    own_sum_bytes: Floats, shared: tuple[ReducedUnit, ...], begin: Ints, all_reduce: AnyAllReduce
) -> Reductions:
    """Return the reductions of stages with these first sections.

    ``own_sum_bytes``: [K + 1], running sums of the bytes of units that one section uses; several use ``shared``.
    """
    sum_bytes = own_sum_bytes
    tied: dict[tuple[int, ...], float] = {}
    for unit in shared:
        stages = tuple(int(stage) for stage in np.unique(np.searchsorted(begin, unit.sections, side="right") - 1))
        if len(stages) == 1:
            sum_bytes = sum_bytes + np.where(np.arange(len(sum_bytes)) > min(unit.sections), unit.reduced_bytes, 0)
        else:
            tied[stages] = tied.get(stages, 0.0) + unit.reduced_bytes
    return Reductions(begin, sum_bytes, tuple(sorted(tied.items())), all_reduce)


@dataclass(frozen=True)
class Rings:
    """Reductions of pipelines of several kinds, which are cut in different places.

    A *span* is a run of sections that no pipeline cuts. Its units have one ring, which consists of the stages that hold
    them in each pipeline. A worker's link carries the rings of its stage's spans one after the other, in rounds
    (:func:`morph.contract.plan.reduction_rounds`), and then the rings of units in several stages of some pipeline.

    Attributes:
        spans: First sections and reductions of the spans, in the form of stages.
        remaining_ns: AR of the rest of a span when each section's backward ends: int64[K].
        holders: By kind of pipeline, the stage of each span: int64[spans].
        order: The spans in the order in which their rings are formed.
        tied: For each unit in several stages, these stages by kind, and AR of the unit.
        of_kind: Reductions of each kind's stages if they never waited for other kinds.
    """

    spans: Reductions
    remaining_ns: Ints
    holders: tuple[Ints, ...]
    order: tuple[int, ...]
    tied: tuple[tuple[tuple[tuple[int, ...], ...], int], ...]
    of_kind: tuple[Reductions, ...]

    @cached_property
    def whole_ns(self) -> Ints:
        """AR of each span: int64[spans]."""
        return self.spans.latest(self.remaining_ns)

    @cached_property
    def waits_for(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Each span before which some worker reduces other spans, in ring order, with the last of those others."""
        waits, last = [], dict[tuple[int, int], int]()
        for span in self.order:
            members = [(kind, int(stages[span])) for kind, stages in enumerate(self.holders)]
            before = {last[member] for member in members if member in last}
            if before:
                waits.append((span, tuple(before)))
            last |= dict.fromkeys(members, span)
        return tuple(waits)

    @cached_property
    def last_of(self) -> tuple[Ints, ...]:
        """By kind, the span that each stage reduces last."""
        last = [np.zeros(len(np.unique(stages)), np.int64) for stages in self.holders]
        for of_kind, stages in zip(last, self.holders, strict=True):
            of_kind[stages[list(self.order)]] = self.order  # the last value written to a place stays
        return tuple(last)


def rings(kinds: Sequence[tuple[Reductions, int]], own_sum_bytes: Floats, shared: tuple[ReducedUnit, ...]) -> Rings:
    """Return rings of pipelines that reduce together; ``kinds``: each one's reductions alone, number of pipelines."""
    members = sum(number for _, number in kinds)
    begin = np.unique(np.concatenate([reduced.begin for reduced, _ in kinds]))
    slowest = SlowestAllReduce.of(reduced.all_reduce for reduced, _ in kinds)
    spans = reductions(own_sum_bytes, shared, begin, slowest)
    remaining_ns = spans.remaining_ns(members)
    holders = tuple(np.searchsorted(reduced.begin, begin, side="right") - 1 for reduced, _ in kinds)
    sizes: dict[tuple[tuple[int, ...], ...], float] = {}
    for tied, size in spans.tied:
        key = tuple(tuple(np.unique(stages[list(tied)]).tolist()) for stages in holders)
        sizes[key] = sizes.get(key, 0.0) + size
    tied_ns = []
    for key, size in sorted(sizes.items()):
        workers = sum(number * len(stages) for (_, number), stages in zip(kinds, key, strict=True))
        tied_ns.append((key, int(slowest.times_ns(workers, np.array([size]))[0])))
    rounds = reduction_rounds([np.searchsorted(begin, reduced.begin).tolist() for reduced, _ in kinds], len(begin))
    order, whole = np.lexsort((-begin, np.array(rounds))), spans.latest(remaining_ns)
    of_kind = []
    for place, (reduced, number) in enumerate(kinds):
        more, left = np.zeros(len(begin), np.int64), np.zeros(len(reduced.begin), np.int64)
        for span in order[::-1].tolist():
            more[span] = left[holders[place][span]]
            left[holders[place][span]] += whole[span]
        more = more[spans.stage]
        own = tuple((key[place], duration) for key, duration in tied_ns)
        of_kind.append(
            Reductions(reduced.begin, reduced.sum_bytes, (), slowest, {number: remaining_ns + more}, {number: own})
        )
    return Rings(spans, remaining_ns, holders, tuple(order.tolist()), tuple(tied_ns), tuple(of_kind))


def reduced_units(profile: Profile) -> tuple[ReducedUnit, ...]:
    """Return the units with their bytes: number of parameters times ``accumulator_bytes_per_parameter``.

    A unit's number of parameters is its share of ``job.num_parameters`` (float32 if that is unknown).
    """
    held = [(unit.sections, unit.parameter_bytes) for unit in profile.units]
    held = held or [((section.index,), section.parameter_bytes) for section in profile.sections]
    total_bytes = sum(size for _, size in held)
    per_byte = profile.job.num_parameters / total_bytes if total_bytes and profile.job.num_parameters else 0.25
    scale = per_byte * profile.accumulator_bytes_per_parameter
    return tuple(ReducedUnit(sections, round(size * scale)) for sections, size in held)
