"""From a profile to the costs of a stage, in integer nanoseconds and bytes; symbols as in Varuna's Table 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from morph.contract.errors import PlanError
from morph.contract.plan import Schedule
from morph.contract.profile import LinkProfile, Profile
from simulator.costs.memory import StageMemory, redundant_parts, running_sums, spans
from simulator.costs.reductions import Reductions, reduced_units, reductions
from simulator.engine.schedules import recomputes
from simulator.engine.times import Floats, Ints, StageTimes
from simulator.inputs.jitter import MeanJitter
from simulator.inputs.layout import Layout, lone_workers
from simulator.inputs.request import MemoryRules
from simulator.inputs.transfer import AllReduce, Curve, OneAllReduce, send_curve, whole_ns

_MOST_MICRO_BATCHES = 2**20
_MOST_TASKS = 3 * 10**7
"""The most tasks of a kind in all simulated mini-batches: 100 sections of 300,000 micro-batches."""
_MOST_NS = 2**54
_MOST_BYTES = 2**59
_LINK_TIMES = ("activation", "gradient", "activation_wire", "gradient_wire")


class LinkCosts:
    """Times (ns) of a lone message across the cut behind each of the K sections, over one kind of link; that of the
    smallest measured size counts as latency, the rest is spent on the wire.
    """

    def __init__(self, link: LinkProfile, sent_bytes: Floats) -> None:
        self.activation_ns, self.activation_wire_ns = _split(send_curve(link.activation), sent_bytes)
        self.gradient_ns, self.gradient_wire_ns = _split(send_curve(link.gradient), sent_bytes)


class SectionCosts:
    """A profile at one micro-batch size m; arrays over the K sections, with prefix sums of length K + 1.

    Without ``recompute`` each stage keeps the activations of every micro-batch in flight. ``grouped``: a stage that
    does not fit, the last one too, recomputes its sections in groups. ``rules``: what a run holds besides the needs of
    a step. Raises PlanError if m was not measured.
    """

    def __init__(
        self,
        profile: Profile,
        micro_batch_size: int,
        *,
        recompute: bool = True,
        rules: MemoryRules = MemoryRules(),  # noqa: B008 (frozen)
        grouped: bool = False,
    ) -> None:
        m = micro_batch_size
        if m not in profile.micro_batch_sizes:
            allowed = ", ".join(map(str, profile.micro_batch_sizes))
            raise PlanError("was not measured", field="micro_batch_size", value=m, allowed=allowed)
        sections = profile.sections
        self.profile = profile
        self.micro_batch_size = m
        self.recompute, self.grouped = recompute, grouped
        self.num_sections = len(sections)
        self.forward_sum_ns = running_sums(_ns([section.forward[m].median_s for section in sections]))
        self.backward_sum_ns = running_sums(_ns([section.backward[m].median_s for section in sections]))
        self.optimizer_sum_ns = running_sums(_ns([section.optimizer_step.median_s for section in sections]))
        self.commit_ns = int(_ns([profile.commit.median_s])[0])
        self.sent_bytes: Floats = np.array([m * section.output_bytes_per_sample for section in sections], np.float64)
        self.inter_node = LinkCosts(profile.inter_node, self.sent_bytes)
        self.intra_node = LinkCosts(profile.intra_node, self.sent_bytes)
        zones = profile.between_zones
        self.between_zones = None if zones is None else LinkCosts(zones, self.sent_bytes)
        self.rules = rules
        self._memory: dict[tuple[bool, bool, bool], StageMemory] = {}
        units = reduced_units(profile)
        own = np.zeros(len(sections))
        for unit in units:
            if len(unit.sections) == 1:
                own[unit.sections[0]] += unit.reduced_bytes
        self.own_reduced_sum_bytes = np.concatenate([np.zeros(1), np.cumsum(own)])
        self.shared_units = tuple(unit for unit in units if len(unit.sections) > 1)
        self._check_sums()
        self._all_reduces: dict[int, OneAllReduce] = {}
        self._mean_jitters: dict[tuple[int, int], MeanJitter] = {}

    def _check_sums(self) -> None:
        """Refuse numbers that would overflow, or take hours; a PlanError names the batch size, which drives them."""
        total = self.profile.job.batch_size // self.micro_batch_size
        links = (self.inter_node, self.intra_node)
        messages_ns = sum(
            int(np.maximum(*(getattr(link, f"{kind}_ns") for link in links)).sum()) for kind in _LINK_TIMES[:2]
        )
        work_ns = 2 * int(self.forward_sum_ns[-1]) + int(self.backward_sum_ns[-1]) + messages_ns
        memory = self.memory(single=True)
        kept_bytes = int(memory.stored.sum()) + int(memory.activations[-1])
        for what, each, most in (
            ("micro-batches", 1, _MOST_MICRO_BATCHES),
            ("micro-batches times sections", self.num_sections, _MOST_TASKS),
            ("nanoseconds one after the other", work_ns, _MOST_NS),
            ("bytes of activations", kept_bytes, _MOST_BYTES),
        ):
            if total * each > most:
                raise PlanError(
                    f"a mini-batch of {total} micro-batches of {self.micro_batch_size} has {total * each} {what}",
                    field="batch_size",
                    value=self.profile.job.batch_size,
                    allowed=f"at most {max(0, most // each) * self.micro_batch_size} with this micro-batch size",
                )

    def memory(self, *, single: bool, follows: bool = False, sums: bool = False) -> StageMemory:
        """Return the memory of stages, with one replica or several.

        ``follows``: followed state counts in any case. ``sums``: kept sums, and copies of others', count in any case.
        """
        key = single, follows, sums
        if key not in self._memory:
            rules = replace(
                self.rules,
                follows=follows or self.rules.follows,
                keeps_sums=sums or self.rules.keeps_sums,
                copies_sums=sums or self.rules.copies_sums,
            )
            self._memory[key] = StageMemory(
                self.profile, self.micro_batch_size, rules, single=single, grouped=self.grouped
            )
        return self._memory[key]

    def all_reduce(self, in_flight: int) -> OneAllReduce:
        """Return AR(D) when this many all-reduces share one machine's network."""
        if in_flight not in self._all_reduces:
            self._all_reduces[in_flight] = AllReduce(self.profile, in_flight)
        return self._all_reduces[in_flight]

    def mean_jitter(self, seed: int, num_draws: int) -> MeanJitter:
        """Return the mean of this many draws."""
        if (seed, num_draws) not in self._mean_jitters:
            total = self.profile.job.batch_size // self.micro_batch_size
            most = _MOST_TASKS // (total * self.num_sections)
            if num_draws > most:
                raise PlanError(
                    f"are too many for {total} micro-batches of {self.num_sections} sections",
                    field="num_draws",
                    value=num_draws,
                    allowed=f"at most {most}",
                )
            self._mean_jitters[seed, num_draws] = MeanJitter(
                self.profile, self.micro_batch_size, total, seed, num_draws
            )
        return self._mean_jitters[seed, num_draws]


@dataclass(frozen=True)
class StageCosts:
    """P stages of one shape: arrays over the stages; see :func:`stage_costs`.

    ``times`` are those of the slowest worker and link of each stage, by which the orders are planned; ``alone`` those
    of undisturbed workers, over the fastest link that a replica has there. ``single``: there is only one replica.
    ``live``: int64[P], the number of sections that each stage recomputes together, 0: all
    (``StagePlan.live_sections``). ``soonest``, for bounds: gradients count as complete as early as with any groups.
    """

    schedule: Schedule
    times: StageTimes
    alone: StageTimes
    boundaries: tuple[int, ...]
    optimizer_ns: Ints
    single: bool
    reduced: Reductions
    sections: SectionCosts
    layout: Layout
    live: Ints
    soonest: bool = False

    def with_windows(self, schedule: Schedule, windows: Sequence[int]) -> StageCosts:
        """Return the same stages with other windows, and with a schedule under which the same stages recompute."""
        window = np.asarray(windows, np.int64)
        times = replace(self.times, window=window)
        return replace(
            self,
            schedule=schedule,
            times=times,
            alone=times if self.alone is self.times else replace(self.alone, window=window),
        )

    @property
    def memory(self) -> StageMemory:
        """The memory model of these stages."""
        return self.sections.memory(single=self.single)

    @cached_property
    def memory_bytes(self) -> Ints:
        """Bytes on each stage's device, including allocator and context: int64[P]."""
        more = sum(self.redundant_parts.values())
        return self.memory.peak_bytes(*self.spans, self.times.window, self.times.recompute, self.live, more)

    @cached_property
    def redundant_parts(self) -> dict[str, Ints]:
        """The parts of ``memory_bytes`` for redundant computation: int64[P] each."""
        return redundant_parts(self.memory, *self.spans, self.times.window, self.times.recompute)

    @property
    def followed_bytes(self) -> int:
        """Bytes on the fullest stage's device if each stage's state is also kept by another worker."""
        return self._fullest(self.sections.memory(single=self.single, follows=True))

    @property
    def bytes_with_sums(self) -> tuple[int, int]:
        """Bytes on the fullest stage's device and in host memory, with an abandoned step's sums and followed state."""
        memory = self.sections.memory(single=self.single, follows=self.single, sums=True)
        return self._fullest(memory), int(memory.host_bytes(*self.spans).max())

    def _fullest(self, memory: StageMemory) -> int:
        return int(memory.peak_bytes(*self.spans, self.times.window, self.times.recompute, self.live).max())

    @cached_property
    def host_bytes(self) -> Ints:
        """Bytes of host memory of each stage, 0 where it is the device's: int64[P]."""
        return self.memory.host_bytes(*self.spans)

    @property
    def spans(self) -> tuple[Ints, Ints]:
        """First sections and ends of the stages: int64[P] each."""
        return spans(self.boundaries, self.sections.num_sections)

    def memory_parts(self, stage: int) -> tuple[str, dict[str, int]]:
        """Return the moment of a stage's peak and its parts (bytes), largest first, whose sum is ``memory_bytes``."""
        begin, end = (where[stage : stage + 1] for where in self.spans)
        here = slice(stage, stage + 1)
        window, again, live = self.times.window[here], self.times.recompute[here], self.live[here]
        parts_of = self.memory.moments(begin, end, window, again, live)
        moments = {moment: _sorted_parts(parts) for moment, parts in parts_of.items()}
        fullest = max(moments, key=lambda moment: sum(moments[moment].values()))
        parts = moments[fullest] | _sorted_parts({name: of[stage] for name, of in self.redundant_parts.items()})
        more = int(self.memory_bytes[stage]) - sum(parts.values())
        return fullest, parts | ({"allocator and context": more} if more else {})

    def host_parts(self, stage: int) -> dict[str, int]:
        """Return the parts (bytes) of a stage's host memory, largest first; none where it is the device's."""
        begin, end = (where[stage : stage + 1] for where in self.spans)
        return _sorted_parts(self.memory.host_parts(begin, end))

    @cached_property
    def peak_bytes(self) -> int:
        """Bytes on the fullest stage's device."""
        return int(self.memory_bytes.max())

    def fits(self, memory_bytes: int) -> bool:
        """Whether every stage fits on a device with so many bytes of memory, and in host memory."""
        return self.memory.within(self.memory_bytes, self.spans[0], memory_bytes) and self._fits_host

    @cached_property
    def _fits_host(self) -> bool:
        return self.memory.fits_host(*self.spans)

    @cached_property
    def to_come_ns(self) -> Ints:
        """The part of the slowest worker's backward that follows each section's: int64[K]."""
        slowest = self.layout.slowdown.max(axis=1)[self.reduced.stage] if self.layout.hinders else None
        sums, again = self.sections.backward_sum_ns, self.sections.forward_sum_ns
        first, start = self.reduced.first, self.group_start
        to_come = sums[:-1] - sums[first]
        return scaled(to_come + again[start] - again[first] if self.in_groups else to_come, slowest)

    @property
    def in_groups(self) -> bool:
        """Whether any stage recomputes its sections in groups, or is assumed to."""
        return self.soonest or bool(self.live.any())

    @cached_property
    def group_start(self) -> Ints:
        """The first section of each section's recompute group: int64[K]."""
        first, sections = self.reduced.first, np.arange(self.sections.num_sections)
        if self.soonest:
            return sections
        if not self.in_groups:
            return first
        size = self.live[self.reduced.stage]
        end = self.spans[1][self.reduced.stage]
        behind = (end - 1 - sections) // np.maximum(1, size) + 1
        starts: Ints = np.where(size > 0, np.maximum(first, end - behind * size), first)
        return starts

    @property
    def last_group(self) -> Ints:
        """The first section that task R recomputes; B recomputes earlier groups: int64[P]."""
        return _last_group(*self.spans, self.live)


def stage_costs(
    costs: SectionCosts,
    boundaries: Sequence[int],
    windows: Sequence[int],
    schedule: Schedule,
    layout: Layout | None = None,
    *,
    single: bool = True,
    live: Sequence[int] = (),
) -> StageCosts:
    """Return the costs of the stages that ``boundaries`` (first section of each stage) and ``windows`` describe.

    ``layout``: None: each worker on a node of its own. ``live``: number of sections that each stage recomputes
    together; 0: as the schedule says; empty: 0 for all.
    """
    num_stages = len(boundaries)
    layout = lone_workers(num_stages) if layout is None else layout
    (begin, end), window = spans(boundaries, costs.num_sections), np.asarray(windows, np.int64)
    again = np.array(recomputes(schedule, num_stages, costs.recompute), np.bool_)
    groups = np.array(live or [0] * num_stages, np.int64)
    again, groups = again | (groups > 0), groups * (groups < end - begin)
    last = _last_group(begin, end, groups) if any(live) else begin
    forward = np.maximum(1, costs.forward_sum_ns[end] - costs.forward_sum_ns[begin])
    rerun = costs.forward_sum_ns[last] - costs.forward_sum_ns[begin]
    backward = np.maximum(1, costs.backward_sum_ns[end] - costs.backward_sum_ns[begin] + rerun)

    def stage_times(slowdown: Floats | None, *, worst: bool) -> StageTimes:
        links = {f"{name}_ns": link_times(costs, f"{name}_ns", end - 1, layout, worst) for name in _LINK_TIMES}
        return StageTimes(
            forward_ns=scaled(forward, slowdown),
            recompute_ns=scaled(np.maximum(1, forward - rerun), slowdown),
            backward_ns=scaled(backward, slowdown),
            window=window,
            recompute=again,
            **links,
        )

    slowest = layout.slowdown.max(axis=1) if layout.hinders else None
    times = stage_times(slowest, worst=True)
    return StageCosts(
        schedule=schedule,
        times=times,
        alone=stage_times(None, worst=False) if layout.hinders or layout.has_neighbours else times,
        boundaries=tuple(begin.tolist()),
        optimizer_ns=scaled(costs.optimizer_sum_ns[end] - costs.optimizer_sum_ns[begin], slowest),
        single=single,
        reduced=reductions(
            costs.own_reduced_sum_bytes, costs.shared_units, begin, costs.all_reduce(layout.rings_at_once)
        ),
        sections=costs,
        layout=layout,
        live=groups,
    )


def _last_group(begin: Ints, end: Ints, live: Ints) -> Ints:
    last: Ints = np.where(live > 0, np.maximum(begin, end - live), begin)
    return last


def link_times(costs: SectionCosts, name: str, cuts: Ints, layout: Layout, worst: bool) -> Ints:
    """Return times over the links that replicas have at these cuts: the worst or the best of both kinds of links."""
    between: Ints = getattr(costs.inter_node, name)[cuts]
    if not layout.has_neighbours:
        return between
    within: Ints = getattr(costs.intra_node, name)[cuts]
    either = np.maximum(between, within) if worst else np.minimum(between, within)
    always, ever = layout.inside.all(axis=1), layout.inside.any(axis=1)
    return np.where(always, within, np.where(ever, either, between))


def _sorted_parts(parts: Mapping[str, Ints]) -> dict[str, int]:
    sizes = {part: int(np.max(size)) for part, size in parts.items()}
    return {part: size for part, size in sorted(sizes.items(), key=lambda part: -part[1]) if size}


def scaled(times_ns: Ints, factor: Floats | None) -> Ints:
    """Return the times of workers that are slower by these factors."""
    return times_ns if factor is None else np.rint(times_ns * factor).astype(np.int64)


def _split(curve: Curve, sizes_bytes: Floats) -> tuple[Ints, Ints]:
    """Return the time of a message, and the part of it that is spent on the wire."""
    total = whole_ns(curve(sizes_bytes), "a message")
    latency = round(float(curve(np.zeros(1))[0]))
    return total, np.maximum(0, total - latency)


def _ns(times_s: Sequence[float]) -> Ints:
    return np.array([round(time_s * 1e9) for time_s in times_s], np.int64)
