"""Possible cuts of pipelines with one micro-batch size, with or without recompute, within memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from operator import le
from typing import NamedTuple

import numpy as np

from morph.contract.plan import Schedule
from morph.contract.profile import Profile
from simulator.costs.memory import MOMENTS, NEVER, spans
from simulator.costs.stage_costs import SectionCosts, StageCosts, stage_costs
from simulator.engine.schedules import recomputes, stage_windows
from simulator.engine.times import Flags, Ints
from simulator.inputs.layout import Layout
from simulator.inputs.request import MemoryRules
from simulator.search.micro_batch import num_micro_batches
from simulator.search.partition import (
    PartitionTable,
    bounds_ns,
    frugal_table,
    least_bytes,
    least_host_bytes,
    partition_table,
)

SCHEDULES: tuple[Schedule, ...] = ("varuna", "1f1b", "gpipe")
"""All schedules. Of equally fast ones the first is chosen: Varuna's rules tolerate unforeseen delays best."""


class Rule(NamedTuple):
    """A schedule and its windows; see :func:`simulator.engine.schedules.stage_windows` for the slope."""

    schedule: Schedule
    slope: int


class Setting:
    """One m, with recompute or without, under one or several schedules.

    ``grouped``: with recompute, a stage that does not fit otherwise recomputes its sections in groups. This includes
    the last stage, under every schedule. ``schedules`` are those that may be used; ``rules``: what a run holds besides
    the needs of a step.
    """

    def __init__(
        self,
        profile: Profile,
        micro_batch_size: int,
        recompute: bool,
        schedules: tuple[Schedule, ...],
        memory_bytes: int | None,
        rules: MemoryRules = MemoryRules(),  # noqa: B008 (frozen)
        *,
        grouped: bool = False,
    ) -> None:
        self.sections = SectionCosts(profile, micro_batch_size, recompute=recompute, rules=rules, grouped=grouped)
        self.grouped = grouped
        self.num_micro_batches = num_micro_batches(profile, micro_batch_size)
        self.schedules, self.memory_bytes = schedules, memory_bytes
        self._free: dict[bool, PartitionTable] = {}
        self._even: dict[tuple[bool, int], tuple[int, ...]] = {}
        self._room: dict[tuple[bool, bool, tuple[int, ...]], tuple[int, ...]] = {}
        self._tight: dict[tuple[Rule, int, bool], PartitionTable] = {}
        self._cuts: dict[tuple[Rule, int, int], tuple[int, ...] | None] = {}
        self._rooms: dict[bool, Ints] = {}
        self._alike: dict[bool, Ints] = {}
        self._bounds: dict[int, Ints] = {}
        self._within: dict[tuple[int, bool], Ints] = {}
        self._reduces: dict[tuple[bool, int], int] = {}
        self._unlimited: Setting | None = None
        self._stages: dict[tuple[object, ...], StageCosts] = {}

    def sections_at(self, boundaries: Sequence[int]) -> SectionCosts:  # noqa: ARG002 (of several types)
        """Return the costs of the sections in stages with these first sections."""
        return self.sections

    def by_sections(self, cuts: Ints) -> Iterator[tuple[SectionCosts, slice | Flags]]:
        """Yield costs of sections, each with the rows of ``cuts``, [M, P], for which the sections have these costs."""
        yield self.sections, slice(0, len(cuts))

    def under(self, schedule: Schedule) -> Setting:
        """Return this setting with only one schedule."""
        other = copy(self)
        other.schedules, other._bounds, other._within, other._unlimited = (schedule,), {}, {}, None
        return other

    def without_stages(self) -> Setting:
        """Return this setting without the stages whose costs it keeps."""
        other = copy(self)
        other._stages, other._unlimited = {}, None
        return other

    def bound_ns(self, depth: int, most: int) -> int:
        """Return a lower bound for P stages over all cuts, windows and placements; ``most``: as for ``bounds_ns``."""
        return int(self.bounds_ns(most)[depth])

    def bounds_ns(self, most: int) -> Ints:
        """Return the lower bound for every P, if the busiest replica has ``most`` micro-batches: int64[K + 1]."""
        if most not in self._bounds:
            bounds = bounds_ns(self.sections, self.schedules[0], most, self.least_link_ns)
            self._bounds[most] = bounds + self.sections.commit_ns
        return self._bounds[most]

    @property
    def least_link_ns(self) -> int:
        """The least time for an activation and its gradient between two stages."""
        links = (self.sections.inter_node, self.sections.intra_node)
        times = [(link.activation_ns + link.gradient_ns)[:-1] for link in links]
        return min(int(each.min()) if len(each) else 0 for each in times)

    def slowest_ns(self, held: int) -> Ints:
        """Return the slowest stage's time in the most even cut that memory allows, by P; 2**62 where none fits.

        The windows are the smallest of the first schedule for ``held`` micro-batches: int64[K + 1].
        """
        rule = self.frugal(held)[0]
        table = self._free_table(rule.schedule) if self.memory_bytes is None else self._tight_table(rule, held)
        return table.bottleneck_ns

    def widest(self, held: int) -> Ints:
        """Return the most micro-batches that are not flushed before others begin, by P; GPipe flushes its windows."""
        if self.schedules[0] != "gpipe":
            return np.full(self.sections.num_sections + 1, NEVER)
        return np.minimum(held, self._widest_alike(self.single(held)))

    def first_reduce_ns(self, depth: int, replicas: int) -> int:
        """Return a lower bound, over cuts and placements, of the first stage's reduction after all backwards.

        The stage holds the first section, and together with the last stage the units of the first and last section.
        """
        key = (depth > 1, replicas)
        if key not in self._reduces:
            sections, ends = self.sections, (0, self.sections.num_sections - 1)
            tied = sum(unit.reduced_bytes for unit in sections.shared_units if unit.sections == ends and depth > 1)
            own = float(sections.own_reduced_sum_bytes[1])
            in_flight = {entry.in_flight for entry in sections.profile.all_reduce} or {1}
            own_and_tied = [(replicas, own), (2 * replicas, tied)]
            self._reduces[key] = min(
                sum(int(sections.all_reduce(number).times_ns(ring, np.array([size]))[0]) for ring, size in own_and_tied)
                for number in in_flight
            )
        return self._reduces[key]

    def fits(self, depth: int, most: int) -> bool:
        """Return whether P stages fit in memory with some cut, if the busiest replica has ``most`` micro-batches."""
        return self.memory_bytes is None or any(self.has_room(rule, depth, most) for rule in self.frugal(most))

    def within_ns(self, most: int, *, beside: bool = False) -> Ints:
        """Return the lower bound for every P over the cuts that fit in memory: int64[K + 1].

        The bound is 2**62 where no cut fits. The slowest stage is busy with each micro-batch, and the slowest stage of
        the most even cut is fastest with the windows that need least memory. ``beside``: there are several replicas.
        """
        if (most, beside) not in self._within:
            free, held = self.bounds_ns(most), min(most, max(1, self.num_micro_batches - 1)) if beside else most
            found = np.full(len(free), NEVER) if self.memory_bytes is not None else free.copy()
            for rule in () if self.memory_bytes is None else self.frugal(held):
                slowest = self._tight_table(rule, held).bottleneck_ns
                fits = slowest < NEVER
                busy = most * slowest[fits] + self.sections.commit_ns
                found[fits] = np.minimum(found[fits], np.maximum(free[fits], busy))
            found[0] = NEVER
            self._within[most, beside] = found
        return self._within[most, beside]

    def least_ns(self, depth: int, most: int) -> int:
        """Return the lower bound for P stages over the cuts that fit in memory; 2**62 if no cut fits."""
        return int(self.within_ns(most)[depth])

    def fitting(self, most: int) -> Flags:
        """Return whether P stages fit in memory with some cut, for every P: bool[K + 1]."""
        return self.within_ns(most) < NEVER

    def least_bytes(self, depth: int, most: int) -> int:
        """Return the least memory per device that P stages need."""
        return min(self._least(rule, depth, most) for rule in self.frugal(most))

    def _least(self, rule: Rule, depth: int, most: int) -> int:
        single = self.single(most)
        return int(
            least_bytes(self.sections, rule.schedule, num_micro_batches=most, slope=rule.slope, single=single)[depth]
        )

    def least_host_bytes(self, depth: int, most: int) -> int:
        """Return the least host memory per device that P stages need."""
        return int(least_host_bytes(self.sections, single=self.single(most))[depth])

    def host_sizes(self, most: int) -> Ints:
        """Return the host memory per device for every run of sections that a stage may have."""
        begin, end = np.triu_indices(self.sections.num_sections)
        return self.sections.memory(single=self.single(most)).host_bytes(begin, end + 1)

    def fullest(self, depth: int, most: int) -> str:
        """Return in words the moment and largest part of the memory of the fullest of the most frugal P stages."""
        rule = min(self.frugal(most), key=lambda rule: self._least(rule, depth, most))
        single = self.single(most)
        table = frugal_table(self.sections, rule.schedule, num_micro_batches=most, slope=rule.slope, single=single)
        windows, cuts = stage_windows(rule.schedule, depth, most, rule.slope), table.boundaries(depth)
        live = self._live(rule.schedule, windows, cuts, int(table.bottleneck_ns[depth]), single=single)
        costs = stage_costs(self.sections, cuts, windows, rule.schedule, single=single, live=live)
        moment, parts = costs.memory_parts(int(costs.memory_bytes.argmax()))
        return f"while {MOMENTS[moment]}, {_largest(parts)}"

    def fullest_host(self, depth: int, most: int) -> str:
        """Return in words the largest part of the host memory of the fullest of P stages."""
        begin, end = spans(self._most_even("varuna", depth), self.sections.num_sections)
        memory = self.sections.memory(single=self.single(most))
        stage = int(memory.host_bytes(begin, end).argmax())
        parts = memory.host_parts(begin[stage : stage + 1], end[stage : stage + 1])
        return f"in host memory, {_largest({part: int(np.max(size)) for part, size in parts.items()})}"

    def single(self, most: int) -> bool:
        """Return whether there is only one replica, given that the busiest has ``most`` micro-batches."""
        return most == self.num_micro_batches

    def cut(self, rule: Rule, depth: int, most: int) -> tuple[int, ...] | None:
        """Return the first section of each of P stages, cut as evenly as memory allows; None if nothing fits."""
        key = (rule, depth, most)
        if key not in self._cuts:
            even = self._most_even(rule.schedule, depth)
            self._cuts[key] = even if self._holds(rule, even, most) else self._tight_cut(rule, depth, most)
        return self._cuts[key]

    def has_room(self, rule: Rule, depth: int, most: int) -> bool:
        """Return whether P stages fit in memory with some cut under this rule; for GPipe this computes no cut."""
        if self.memory_bytes is None:
            return True
        if rule.schedule != "gpipe":
            longest = self.num_micro_batches - 1  # with the largest windows, so that one table serves all numbers
            if most < longest and self.cut(rule, depth, longest) is not None:
                return True
            return self.cut(rule, depth, most) is not None
        return -(-most // rule.slope) <= int(self._widest_alike(self.single(most))[depth])

    def stages(
        self, rule: Rule, most: int, layout: Layout, boundaries: tuple[int, ...] | None = None, *, depth: int = 0
    ) -> StageCosts | None:
        """Return stages with these first sections, or P stages cut as evenly as possible; None if they do not fit."""
        cuts = self.cut(rule, depth, most) if boundaries is None else boundaries
        if cuts is None:
            return None
        windows = stage_windows(rule.schedule, len(cuts), most, rule.slope)
        return self.windowed(rule.schedule, windows, cuts, layout, single=self.single(most))

    def windowed(
        self,
        schedule: Schedule,
        windows: tuple[int, ...],
        boundaries: tuple[int, ...],
        layout: Layout,
        *,
        single: bool,
    ) -> StageCosts | None:
        """Return stages with these first sections and windows; None if they do not fit in memory."""
        where = (float(layout.slowdown[0, 0]), layout.rings_at_once) if layout.placement is None else id(layout)
        key = (boundaries, where, single, schedule, windows)
        costs = self._stages.get(key)
        if costs is None:
            live: tuple[int, ...] = ()
            if self.grouped and self.memory_bytes is not None:
                usable = self.sections_at(boundaries).memory(single=single).usable_bytes(self.memory_bytes)
                live = self._live(schedule, windows, boundaries, usable, single=single)
            alike = (boundaries, where, single, schedule == "gpipe", live)
            if alike not in self._stages:
                self._stages[alike] = stage_costs(
                    self.sections_at(boundaries), boundaries, windows, schedule, layout, single=single, live=live
                )
            costs = self._stages[key] = self._stages[alike].with_windows(schedule, windows)
        return costs if self.memory_bytes is None or costs.fits(self.memory_bytes) else None

    def _live(
        self, schedule: Schedule, windows: tuple[int, ...], boundaries: tuple[int, ...], usable: int, *, single: bool
    ) -> tuple[int, ...]:
        """Return the number of sections that each stage recomputes together to fit in ``usable`` bytes; 0: all."""
        again = np.array(recomputes(schedule, len(boundaries), self.sections.recompute), np.bool_)
        memory, where = (
            self.sections_at(boundaries).memory(single=single),
            spans(boundaries, self.sections.num_sections),
        )
        return tuple(memory.fitting_sizes(*where, np.array(windows, np.int64), again, usable).tolist())

    def holds_even(self, rule: Rule, depth: int, most: int) -> bool:
        """Return whether P stages fit if they are cut as evenly as possible."""
        return self._holds(rule, self._most_even(rule.schedule, depth), most)

    def without_memory_limit(self) -> Setting:
        """Return this setting with unlimited device memory."""
        if self.memory_bytes is None:
            return self
        if self._unlimited is None:
            self._unlimited = copy(self)
            self._unlimited.memory_bytes, self._unlimited._cuts, self._unlimited._tight = None, {}, {}
            self._unlimited._rooms, self._unlimited._alike = {}, {}
            self._unlimited._within = {}
            self._unlimited._stages = {} if self.grouped else self._stages
        return self._unlimited

    def frugal(self, most: int) -> tuple[Rule, ...]:
        """Return for each schedule the rule whose windows need least memory."""
        return tuple(Rule(schedule, most if schedule == "gpipe" else 1) for schedule in self.schedules)

    def _most_even(self, schedule: Schedule, depth: int) -> tuple[int, ...]:
        again = schedule == "gpipe" and self.sections.recompute
        if (again, depth) not in self._even:
            self._even[again, depth] = self._free_table(schedule).boundaries(depth)
        return self._even[again, depth]

    def _free_table(self, schedule: Schedule) -> PartitionTable:
        """Return the most even cuts without a memory limit."""
        again = schedule == "gpipe" and self.sections.recompute
        if again not in self._free:
            self._free[again] = partition_table(self.sections, "gpipe" if again else "varuna", num_micro_batches=1)
        return self._free[again]

    def _holds(self, rule: Rule, boundaries: tuple[int, ...], most: int) -> bool:
        if self.memory_bytes is None:
            return True
        depth, key = len(boundaries), (rule.schedule == "gpipe", self.single(most), boundaries)
        if key not in self._room:
            memory = self.sections_at(boundaries).memory(single=self.single(most))
            begin, end = spans(boundaries, self.sections.num_sections)
            again = np.array(recomputes(rule.schedule, depth, self.sections.recompute), np.bool_)
            usable = memory.usable_bytes(self.memory_bytes)
            found = memory.most_windows(begin, end, again, usable)
            if self.grouped and not again[-1]:  # groups take longer, so another cut may be better
                found[-1:] = memory.most_windows(begin[-1:], end[-1:], False, usable, grouped=False)
            self._room[key] = tuple(found.tolist())
        return all(map(le, stage_windows(rule.schedule, depth, most, rule.slope), self._room[key]))

    def rooms(self, single: bool) -> Ints:
        """Return the largest window of a stage, by its first section and its end: int64[K, K + 1]; 0: it never fits."""
        if single not in self._rooms:
            num_sections, memory = self.sections.num_sections, self.sections.memory(single=single)
            begin, end = np.triu_indices(num_sections)
            rooms = np.zeros((num_sections, num_sections + 1), np.int64)
            rooms[begin, end + 1] = NEVER
            if self.memory_bytes is not None:
                usable = memory.usable_bytes(self.memory_bytes)
                rooms[begin, end + 1] = memory.most_windows(begin, end + 1, self.sections.recompute, usable)
            self._rooms[single] = rooms
        return self._rooms[single]

    def _widest_alike(self, single: bool) -> Ints:
        if single not in self._alike:
            self._alike[single] = widest_alike(self.rooms(single))
        return self._alike[single]

    def _tight_cut(self, rule: Rule, depth: int, most: int) -> tuple[int, ...] | None:
        if rule.schedule == "gpipe" and not self.has_room(rule, depth, most):
            return None
        table = self._tight_table(rule, most)
        return table.boundaries(depth) if table.fits(depth) else None

    def _tight_table(self, rule: Rule, most: int) -> PartitionTable:
        """Return the most even cuts that fit in memory."""
        rule = rule._replace(schedule="varuna") if rule.schedule == "1f1b" else rule  # their windows are the same
        key = (rule, min(most, rule.slope * (self.sections.num_sections - 1) + 1), self.single(most))
        if rule.schedule == "gpipe":  # the cut depends only on the window, which is the same for all stages
            key = (Rule("gpipe", 1), -(-most // rule.slope), self.single(most))
        if key not in self._tight:
            self._tight[key] = partition_table(
                self.sections,
                key[0].schedule,
                num_micro_batches=key[1],
                slope=key[0].slope,
                memory_bytes=self.memory_bytes,
                single=key[2],
            )
        return self._tight[key]


def widest_alike(rooms: Ints) -> Ints:
    """Return the largest window that all of P stages can have in some cut, by P: int64[K + 1]; 0: no cut fits."""
    behind, widest = np.append(np.zeros(len(rooms), np.int64), NEVER), [0]
    for _ in range(len(rooms)):
        behind = np.append(np.minimum(rooms, behind).max(axis=1), 0)
        widest.append(int(behind[0]))
    return np.array(widest, np.int64)


def _largest(parts: dict[str, int]) -> str:
    part = max(parts, key=parts.__getitem__)
    return f"{parts[part] / 2**30:.3g} of {sum(parts.values()) / 2**30:.3g} GiB are {part}"
