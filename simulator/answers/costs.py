"""From a profile to what one stage costs: integer nanoseconds and bytes.

Symbols as in Varuna's Table 2: F_i(m), B_i(m), Act_i, Grad_i, AR_i(D) of section (cut-point) i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from morph.contract.errors import PlanError
from morph.contract.plan import Schedule
from morph.contract.profile import LinkProfile, Profile
from simulator.given.jitter import MeanLuck
from simulator.given.layout import Layout, lone_workers
from simulator.given.transfer import AllReduce, Curve, send_curve, whole_ns
from simulator.playing.schedules import recomputes
from simulator.playing.times import Ints, StageTimes

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
_MOST_MICRO_BATCHES = 2**20
_MOST_TASKS = 3 * 10**7
"""Of a kind, in one mini-batch or in all drawn ones: 100 sections of 300,000 micro-batches."""
_MOST_NS = 2**54
_MOST_BYTES = 2**61
_LINK_TIMES = ("activation", "gradient", "activation_wire", "gradient_wire")


@dataclass(frozen=True)
class ReducedUnit:
    """A parameter unit's gradient as it is reduced."""

    sections: tuple[int, ...]
    reduced_bytes: int


class LinkCosts:
    """What crosses the cut behind each of the K sections, over one kind of link: a lone message, in ns.

    Of its time, what is beyond that of the smallest size measured is spent on the wire; the rest is latency.
    """

    def __init__(self, link: LinkProfile, sent_bytes: Floats) -> None:
        self.activation_ns, self.activation_wire_ns = _split(send_curve(link.activation), sent_bytes)
        self.gradient_ns, self.gradient_wire_ns = _split(send_curve(link.gradient), sent_bytes)


class SectionCosts:
    """A profile at one micro-batch size m; arrays over the K sections, with prefix sums of length K + 1.

    ``peak_sum_bytes[k]`` is what a backward that is at section k takes beyond what is held between tasks, if the stage
    began with section 0: the measured peak of k and the activations of those before.

    Args:
        profile: The measurements.
        micro_batch_size: m; must have been measured.
        recompute: Whether stages run the forward again before the backward, as the schedule has it; else none does,
            and each keeps the activations of every micro-batch in flight.

    Raises:
        PlanError: m was not measured.
    """

    def __init__(self, profile: Profile, micro_batch_size: int, *, recompute: bool = True) -> None:
        m = micro_batch_size
        if m not in profile.micro_batch_sizes:
            allowed = ", ".join(map(str, profile.micro_batch_sizes))
            raise PlanError("was not measured", field="micro_batch_size", value=m, allowed=allowed)
        sections = profile.sections
        self.profile = profile
        self.micro_batch_size = m
        self.recompute = recompute
        self.num_sections = len(sections)
        self.forward_sum_ns = _sums(_ns([section.forward[m].median_s for section in sections]))
        self.backward_sum_ns = _sums(_ns([section.backward[m].median_s for section in sections]))
        self.optimizer_sum_ns = _sums(_ns([section.optimizer_step.median_s for section in sections]))
        self.commit_ns = int(_ns([profile.commit.median_s])[0])
        self.sent_bytes: Floats = np.array([m * section.output_bytes_per_sample for section in sections], np.float64)
        self.inter_node = LinkCosts(profile.inter_node, self.sent_bytes)
        self.intra_node = LinkCosts(profile.intra_node, self.sent_bytes)
        self.held_sum_bytes = _sums([s.parameter_bytes + s.optimizer_bytes + s.gradient_bytes for s in sections])
        self.input_bytes: Ints = np.array([m * section.input_bytes_per_sample for section in sections], np.int64)
        activations = [m * section.activation_bytes_per_sample for section in sections]
        self.activation_sum_bytes = _sums(activations)
        peaks = [max(s.peak_bytes.get(m, 0), kept) for s, kept in zip(sections, activations, strict=True)]
        self.peak_sum_bytes: Ints = self.activation_sum_bytes[:-1] + np.array(peaks, np.int64)
        units = _reduced_units(profile)
        own = np.zeros(len(sections))
        for unit in units:
            if len(unit.sections) == 1:
                own[unit.sections[0]] += unit.reduced_bytes
        self.own_reduced_sum_bytes = np.concatenate([np.zeros(1), np.cumsum(own)])
        self.shared_units = tuple(unit for unit in units if len(unit.sections) > 1)
        self._check_sums()
        self._all_reduces: dict[int, AllReduce] = {}
        self._luck: dict[tuple[int, int], MeanLuck] = {}

    def _check_sums(self) -> None:
        """Refuse what would overflow, or keep the simulator busy for hours, however sensible each number is by itself.

        Raises:
            PlanError: naming the batch, which all of it grows with.
        """
        total = self.profile.job.batch_size // self.micro_batch_size
        links = (self.inter_node, self.intra_node)
        messages_ns = sum(
            int(np.maximum(*(getattr(link, f"{kind}_ns") for link in links)).sum()) for kind in _LINK_TIMES[:2]
        )
        work_ns = 2 * int(self.forward_sum_ns[-1]) + int(self.backward_sum_ns[-1]) + messages_ns
        kept_bytes = int(self.input_bytes.sum()) + int(self.activation_sum_bytes[-1])
        for what, each, most in (
            ("micro-batches", 1, _MOST_MICRO_BATCHES),
            ("micro-batches times sections", self.num_sections, _MOST_TASKS),
            ("nanoseconds one after the other", work_ns, _MOST_NS),
            ("bytes of activations", kept_bytes, _MOST_BYTES - int(self.held_sum_bytes[-1])),
        ):
            if total * each > most:
                raise PlanError(
                    f"a mini-batch of {total} micro-batches of {self.micro_batch_size} has {total * each} {what}",
                    field="batch_size",
                    value=self.profile.job.batch_size,
                    allowed=f"at most {max(0, most // each) * self.micro_batch_size} with this micro-batch size",
                )

    def all_reduce(self, in_flight: int) -> AllReduce:
        """AR(D) when this many all-reduces share one machine's network."""
        if in_flight not in self._all_reduces:
            self._all_reduces[in_flight] = AllReduce(self.profile, in_flight)
        return self._all_reduces[in_flight]

    def mean_luck(self, seed: int, num_draws: int) -> MeanLuck:
        """The mean of this many draws."""
        if (seed, num_draws) not in self._luck:
            total = self.profile.job.batch_size // self.micro_batch_size
            most = _MOST_TASKS // (total * self.num_sections)
            if num_draws > most:
                raise PlanError(
                    f"are too many for {total} micro-batches of {self.num_sections} sections",
                    field="num_draws",
                    value=num_draws,
                    allowed=f"at most {most}",
                )
            self._luck[seed, num_draws] = MeanLuck(self.profile, self.micro_batch_size, total, seed, num_draws)
        return self._luck[seed, num_draws]


@dataclass(frozen=True)
class StageCosts:
    """P stages of one shape: arrays over the stages; see :func:`stage_costs`.

    ``times`` are those of the slowest worker and link of each stage, by which the orders are planned; ``alone``
    those of undisturbed workers, over the fastest link that a replica has there.
    """

    schedule: Schedule
    times: StageTimes
    alone: StageTimes
    boundaries: tuple[int, ...]
    optimizer_ns: Ints
    memory_bytes: Ints
    private_bytes: Floats
    tied: tuple[tuple[tuple[int, ...], float], ...]
    sections: SectionCosts
    layout: Layout
    _reduces: dict[int, Ints] = field(default_factory=dict)
    _tied_reduces: dict[int, tuple[tuple[tuple[int, ...], int], ...]] = field(default_factory=dict)

    def with_windows(self, schedule: Schedule, windows: Sequence[int]) -> StageCosts:
        """The same stages under other windows, and a schedule under which the same ones recompute."""
        window = np.asarray(windows, np.int64)
        times = replace(self.times, window=window)
        return replace(
            self,
            schedule=schedule,
            times=times,
            alone=times if self.alone is self.times else replace(self.alone, window=window),
            memory_bytes=stage_memory_bytes(self.sections, self.boundaries, window, self.times.recompute),
        )

    @cached_property
    def peak_bytes(self) -> int:
        """Memory of the fullest stage."""
        return int(self.memory_bytes.max())

    @property
    def all_reduce(self) -> AllReduce:
        """AR(D) of these rings."""
        return self.sections.all_reduce(self.layout.rings_at_once)

    def private_reduce_ns(self, num_replicas: int) -> Ints:
        """AR of what only one stage holds, over a ring of D; not to be written to."""
        if num_replicas not in self._reduces:
            found = self.all_reduce.times_ns(num_replicas, self.private_bytes)
            found.setflags(write=False)
            self._reduces[num_replicas] = found
        return self._reduces[num_replicas]

    def reduce_ns(self, num_replicas: int) -> Ints:
        """AR of each stage, for what it holds alone and with others."""
        total = self.private_reduce_ns(num_replicas).copy()
        for stages, duration in self.tied_reduce_ns(num_replicas):
            total[list(stages)] += duration
        return total

    def tied_reduce_ns(self, num_replicas: int) -> tuple[tuple[tuple[int, ...], int], ...]:
        """(stages, AR) of what several stages hold, over a ring of D for each of the stages."""
        if num_replicas not in self._tied_reduces:
            reduce = self.all_reduce.times_ns
            self._tied_reduces[num_replicas] = tuple(
                (stages, int(reduce(num_replicas * len(stages), np.array([size]))[0])) for stages, size in self.tied
            )
        return self._tied_reduces[num_replicas]


def stage_costs(
    costs: SectionCosts,
    boundaries: Sequence[int],
    windows: Sequence[int],
    schedule: Schedule,
    layout: Layout | None = None,
) -> StageCosts:
    """Cost of the stages that ``boundaries`` (first section of each stage) and ``windows`` describe.

    Args:
        costs: The sections at one m.
        boundaries: First section of each stage.
        windows: Of each stage.
        schedule: Decides which stages recompute.
        layout: Where the workers run; None: each on a node of its own.
    """
    num_stages = len(boundaries)
    layout = lone_workers(num_stages) if layout is None else layout
    begin = np.asarray(boundaries, np.int64)
    end = np.append(begin[1:], costs.num_sections)
    again = np.array(recomputes(schedule, num_stages, costs.recompute), np.bool_)
    window = np.asarray(windows, np.int64)
    forward = np.maximum(1, costs.forward_sum_ns[end] - costs.forward_sum_ns[begin])
    backward = np.maximum(1, costs.backward_sum_ns[end] - costs.backward_sum_ns[begin])
    optimizer = costs.optimizer_sum_ns[end] - costs.optimizer_sum_ns[begin]
    private, tied = _rings(costs, begin, end)

    def stage_times(slowdown: Floats | None, *, worst: bool) -> StageTimes:
        links = {f"{name}_ns": link_times(costs, f"{name}_ns", end - 1, layout, worst) for name in _LINK_TIMES}
        return StageTimes(
            forward_ns=scaled(forward, slowdown),
            recompute_ns=scaled(forward, slowdown),
            backward_ns=scaled(backward, slowdown),
            window=window,
            recompute=again,
            **links,
        )

    slowest = layout.slowdown.max(axis=1) if layout.hinders else None
    times = stage_times(slowest, worst=True)
    plain = not (layout.hinders or layout.has_neighbours)
    return StageCosts(
        schedule=schedule,
        times=times,
        alone=times if plain else stage_times(None, worst=False),
        boundaries=tuple(begin.tolist()),
        optimizer_ns=scaled(optimizer, slowest),
        memory_bytes=stage_memory_bytes(costs, begin, window, again),
        private_bytes=private,
        tied=tied,
        sections=costs,
        layout=layout,
    )


def stage_memory_bytes(
    costs: SectionCosts,
    boundaries: Sequence[int] | Ints,
    windows: Sequence[int] | Ints,
    recompute: Sequence[bool] | Bools,
) -> Ints:
    """Memory of each stage: int64[P].

    Parameters, optimizer state and accumulated gradients of its sections; ``window`` stored stage inputs; without
    recompute the activations of ``window - 1`` micro-batches; and what one more micro-batch takes at most. Its backward
    goes from the last section to the first: at each the section's measured peak, and the activations of those before
    it. A tied unit counts for each section that uses it.

    Args:
        costs: The sections at one m.
        boundaries: First section of each stage.
        windows: Of each stage.
        recompute: Whether it recomputes.
    """
    begin, window = np.asarray(boundaries, np.int64), np.asarray(windows, np.int64)
    end = np.append(begin[1:], costs.num_sections)
    before = costs.activation_sum_bytes[begin]
    kept = np.where(recompute, 0, window - 1) * (costs.activation_sum_bytes[end] - before)
    held = costs.held_sum_bytes[end] - costs.held_sum_bytes[begin]
    total: Ints = held + window * costs.input_bytes[begin] + kept
    return total + np.maximum.reduceat(costs.peak_sum_bytes, begin) - before


def most_windows(
    costs: SectionCosts, boundaries: Sequence[int], recompute: Sequence[bool], memory_bytes: int
) -> tuple[int, ...]:
    """For each stage the largest window that fits in memory; below 1 if none does."""
    begin = np.asarray(boundaries, np.int64)
    one, two = (stage_memory_bytes(costs, begin, np.full_like(begin, window), recompute) for window in (1, 2))
    room, each = memory_bytes - one, two - one
    most: Ints = np.where(each > 0, 1 + room // np.maximum(1, each), np.where(room < 0, 0, _MOST_TASKS))
    return tuple(most.tolist())


def link_times(costs: SectionCosts, name: str, cuts: Ints, layout: Layout, worst: bool) -> Ints:
    """Times over the links that the replicas have at these cuts: the worst or the best of both kinds."""
    between: Ints = getattr(costs.inter_node, name)[cuts]
    if not layout.has_neighbours:
        return between
    within: Ints = getattr(costs.intra_node, name)[cuts]
    either = np.maximum(between, within) if worst else np.minimum(between, within)
    always, ever = layout.inside.all(axis=1), layout.inside.any(axis=1)
    return np.where(always, within, np.where(ever, either, between))


def scaled(times_ns: Ints, factor: Floats | None) -> Ints:
    """Times of workers that are slower by these factors."""
    return times_ns if factor is None else np.rint(times_ns * factor).astype(np.int64)


def _split(curve: Curve, sizes_bytes: Floats) -> tuple[Ints, Ints]:
    """Time of a message, and what of it is spent on the wire."""
    total = whole_ns(curve(sizes_bytes), "a message")
    latency = round(float(curve(np.zeros(1))[0]))
    return total, np.maximum(0, total - latency)


def _rings(
    costs: SectionCosts, begin: Ints, end: Ints
) -> tuple[npt.NDArray[np.float64], tuple[tuple[tuple[int, ...], float], ...]]:
    """Bytes that each stage reduces on its own, and (stages, bytes) for each set of stages that share a unit."""
    private = costs.own_reduced_sum_bytes[end] - costs.own_reduced_sum_bytes[begin]
    tied: dict[tuple[int, ...], float] = {}
    for unit in costs.shared_units:
        stages = tuple(int(stage) for stage in np.unique(np.searchsorted(begin, unit.sections, side="right") - 1))
        if len(stages) == 1:
            private[stages[0]] += unit.reduced_bytes
        else:
            tied[stages] = tied.get(stages, 0.0) + unit.reduced_bytes
    return private, tuple(sorted(tied.items()))


def _reduced_units(profile: Profile) -> tuple[ReducedUnit, ...]:
    """Bytes reduced = number of parameters times ``accumulator_bytes_per_parameter``.

    A unit's number of parameters is its share of ``job.num_parameters`` (float32 if that is unknown).
    """
    held = [(unit.sections, unit.parameter_bytes) for unit in profile.units]
    held = held or [((section.index,), section.parameter_bytes) for section in profile.sections]
    total_bytes = sum(size for _, size in held)
    per_byte = profile.job.num_parameters / total_bytes if total_bytes and profile.job.num_parameters else 0.25
    scale = per_byte * profile.accumulator_bytes_per_parameter
    return tuple(ReducedUnit(sections, round(size * scale)) for sections, size in held)


def _ns(times_s: Sequence[float]) -> Ints:
    return np.array([round(time_s * 1e9) for time_s in times_s], np.int64)


def _sums(values: Sequence[int] | Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(values, np.int64))])
