"""Searches the shapes of one profile, and simulates each at most once per setting and only as far as its rank needs."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice, product
from typing import NamedTuple

import numpy as np

from morph.contract import ranges
from morph.contract.errors import PlanError
from morph.contract.profile import Profile
from simulator.costs.answer import deal
from simulator.costs.memory import NEVER
from simulator.costs.outcome import ShapeOutcome, ShapeSimulator
from simulator.engine.times import Flags
from simulator.inputs.conditions import Conditions
from simulator.inputs.layout import Layout, layouts
from simulator.inputs.request import PlanRequest
from simulator.search.micro_batch import possible_micro_batch_sizes
from simulator.search.objectives import Fastest, Objective, Shape
from simulator.search.setting import SCHEDULES, Setting
from simulator.search.windows import TOLERATED, Trial

_ROUGH, _EVEN, _REDUCED, _BOUND, _PLANNED, _KNOWN = range(6)
"""How closely the time of a case is known, in the order in which :meth:`Sweep.best` refines it."""
_SLACK = 0.99
"""A shape hardly ever takes less than this fraction of its planned time; shared cores and links make it slower."""


class Case(NamedTuple):
    """A shape, the number of its setting, and the number of its layout."""

    shape: Shape
    setting: int
    place: int = 0


class Sweep:
    """Shapes of one profile, within the limits of the request (schedule, memory, m, recompute)."""

    def __init__(self, profile: Profile, request: PlanRequest, conditions: Conditions) -> None:
        if request.redundant_computation != "off":
            raise PlanError(
                "is simulated for one shape at a time",
                field="redundant_computation",
                value=request.redundant_computation,
                allowed="off here; simulate() takes the others",
            )
        self._request, profile, memory_bytes = request, request.applied_to(profile), request.memory_bytes
        if memory_bytes is None:
            memory_bytes = profile.environment.device_memory_bytes
        else:
            ranges.MEMORY_BYTES.check("memory_bytes", memory_bytes)
        self.profile, self.memory_bytes, self.shape_simulator = profile, memory_bytes, ShapeSimulator(conditions)
        schedules = SCHEDULES if request.schedule is None else (request.schedule,)
        again = (True, False) if request.recompute is None else (request.recompute,)
        sizes, rules = possible_micro_batch_sizes(profile, request.micro_batch_size), request.memory_rules
        settings: list[Setting] = []
        grouped: dict[int, Setting] = {}
        refused: PlanError | None = None
        for m in sizes:
            try:
                settings += [Setting(profile, m, flag, schedules, memory_bytes, rules) for flag in again]
                if memory_bytes is not None and again[0]:
                    grouped[m] = Setting(profile, m, True, schedules, memory_bytes, rules, grouped=True)
            except PlanError as error:  # too many micro-batches of this size; a larger size may be possible
                refused = error
        if refused is not None and not settings:
            raise refused
        self.settings = (*settings, *grouped.values())
        self._forget()

    def by_micro_batch_size(self) -> list[Sweep]:
        """Return one sweep for each m, in ascending order."""
        found = []
        for m in sorted({setting.sections.micro_batch_size for setting in self.settings}):
            other = copy(self)
            other.settings = tuple(each for each in self.settings if each.sections.micro_batch_size == m)
            other._forget()
            found.append(other)
        return found

    def without_groups(self) -> Sweep:
        """Return this sweep without recompute groups."""
        other = copy(self)
        other.settings = tuple(setting for setting in self.settings if not setting.grouped)
        other._forget()
        return other

    @property
    def total(self) -> int:
        """The largest number of micro-batches of a mini-batch."""
        return max(setting.num_micro_batches for setting in self.settings)

    @property
    def num_sections(self) -> int:
        """K."""
        return self.profile.num_sections

    def under(self, conditions: Conditions) -> Sweep:
        other = copy(self)
        other.shape_simulator = ShapeSimulator(conditions)
        other._forget()
        return other

    def without_memory_limit(self) -> Sweep:
        other = copy(self)
        other.memory_bytes = None
        other.settings = tuple(setting.without_memory_limit() for setting in self.settings if not setting.grouped)
        other._forget()
        return other

    def _forget(self) -> None:
        self._in_groups = {
            number: other
            for number, setting in enumerate(self.settings)
            for other, grouped in enumerate(self.settings)
            if setting.sections.recompute and grouped.grouped and not setting.grouped
            if setting.sections.micro_batch_size == grouped.sections.micro_batch_size
        }
        """Maps the number of a setting with recompute to the number of the same setting with recompute groups."""
        vars(self).pop("_fitting", None)
        self._whole = {other: number for number, other in self._in_groups.items()}
        self._layouts: dict[Shape, list[Layout]] = {}
        self._bounds: dict[Case, int] = {}
        self._trials: dict[Case, Trial] = {}
        self._outcomes: dict[Case, ShapeOutcome] = {}

    def fits(self, shape: Shape) -> bool:
        """Return whether a shape fits in memory in some setting."""
        return any(self._fits(number, shape) for number in range(len(self.settings)))

    def _fits(self, number: int, shape: Shape) -> bool:
        (depth, replicas), setting = shape, self.settings[number]
        return replicas <= setting.num_micro_batches and setting.fits(depth, -(-setting.num_micro_batches // replicas))

    def replicas(self, most: int) -> list[int]:
        """Return every D up to ``most`` that may be faster than all smaller ones, ascending; see ``_with_fewer``."""
        if self.shape_simulator.conditions.uneven:
            return list(range(1, most + 1))
        found = set()
        for total in {setting.num_micro_batches for setting in self.settings}:
            left = min(most, total)
            while left > 0:
                found.add(_fewest_as_busy(total, left))
                left = _fewest_as_busy(total, left) - 1
        return sorted(found)

    def depths(
        self,
        num_gpus: int,
        wanted: int | None = None,
        num_replicas: int | None = None,
        most_replicas: int | None = None,
    ) -> tuple[int, ...]:
        """Return every P that fits on this many GPUs with the given D, or with any D up to ``most_replicas``."""
        largest = min(self.num_sections, num_gpus // (num_replicas or 1))
        if self.memory_bytes is None:
            return tuple(range(1, largest + 1)) if wanted is None else (wanted,) * (wanted <= largest)
        most = most_replicas or self.total
        return tuple(
            depth
            for depth in range(1, largest + 1)
            if wanted in (None, depth)
            if (
                self.fits((depth, num_replicas))
                if num_replicas
                else self._fits_any(depth, min(num_gpus // depth, most))
            )
        )

    def _fits_any(self, depth: int, most: int) -> bool:
        """Return whether P stages fit with some D up to ``most``.

        With more replicas each has fewer micro-batches and takes no more memory, except that a lone replica reduces
        nothing.
        """
        alone, with_most, with_fewest = self._fitting
        if alone[depth] or (with_most[depth] and most > 1):
            return True
        return bool(with_fewest[depth]) and any(
            self._fits(number, (depth, min(most, setting.num_micro_batches))) or self._fits(number, (depth, 1))
            for number, setting in enumerate(self.settings)
        )

    @cached_property
    def _fitting(self) -> Flags:
        """Whether P stages fit, alone, or beside others with most and with fewest micro-batches: bool[3, K + 1]."""
        found = np.zeros((3, self.num_sections + 1), np.bool_)
        for setting in self.settings:
            total = setting.num_micro_batches
            for row, most in zip(found, (total, max(1, total - 1), 1), strict=True):
                row |= setting.fitting(most)
        return found

    def checked_depths(self, num_gpus: int, wanted: int | None, num_replicas: int | None) -> tuple[int, ...]:
        """Return ``depths`` on this many GPUs; PlanError: there are none, saying what is allowed or enough."""
        most = self.num_sections
        most_replicas = min(num_gpus, self.total)
        if num_replicas is not None and num_replicas not in ranges.Range(1, most_replicas, whole=True):
            allowed = f"1 to {most_replicas} ({num_gpus} GPUs, {self.total} micro-batches in a mini-batch)"
            raise PlanError("is not possible", field="num_replicas", value=num_replicas, allowed=allowed)
        largest = min(most, num_gpus // (num_replicas or 1))
        if wanted is not None and wanted not in ranges.Range(1, largest, whole=True):
            allowed = f"1 to {largest} ({most} sections, {num_gpus} GPUs, {num_replicas or 1} replicas)"
            raise PlanError("is not possible", field="pipeline_depth", value=wanted, allowed=allowed)
        depths = self.depths(num_gpus, wanted, num_replicas)
        if not depths:
            raise self._too_little_memory(num_gpus, wanted, num_replicas)
        return depths

    def fastest(
        self,
        num_gpus: int,
        depths: Iterable[int],
        count: int,
        most_replicas: int | None = None,
        below_s: float = math.inf,
    ) -> list[ShapeOutcome]:
        """Return the ``count`` fastest outcomes on this many GPUs, best first, each P only with its best D.

        Fewer replicas are considered only while their computation alone might be as fast. Outcomes that take longer
        than ``below_s`` seconds are left out.
        """
        most = min(self.total, most_replicas or self.total)
        shapes = [(depth, min(num_gpus // depth, most)) for depth in depths]
        return self._ranked(shapes, count, None, fewer=True, below=below_s)

    def best(
        self, shapes: Iterable[Shape], count: int, objective: Objective | None = None, below: float = math.inf
    ) -> list[ShapeOutcome]:
        """Return the ``count`` best of these (P, D), best first.

        Ties go to fewer workers, then to the shallower pipeline. Each shape in each setting is ranked by a bound for
        all cuts, then with a bound of its first stage's reduction, then by a bound of the most even cut, then by the
        planned time, and finally by the time under the conditions of the run. The most promising one is always refined
        next, until ``count`` final times are the least, or nothing else can cost less than ``below``.
        """
        return self._ranked(shapes, count, objective, fewer=False, below=below)

    def bounds_s(self, shapes: Sequence[Shape], enough_s: float, *, planned: bool, fewer: bool) -> float:
        """Return a lower bound (s) for all of these shapes, at most ``enough_s``: for any cut, or as ``planned``."""
        for cost_s, known, _ in self._taken(shapes, None, [], fewer=fewer):
            if not planned or known >= _PLANNED or cost_s >= enough_s:
                return min(cost_s, enough_s)
        return enough_s

    def _ranked(
        self,
        shapes: Iterable[Shape],
        count: int,
        objective: Objective | None,
        *,
        fewer: bool,
        below: float = math.inf,
    ) -> list[ShapeOutcome]:
        found: list[ShapeOutcome] = []
        for cost, known, case in self._taken(shapes, objective, found, fewer=fewer):
            if cost > below:
                break
            if known == _KNOWN:
                found.append(self._outcome(case))
                if len(found) == count:
                    break
        return found

    def _taken(  # noqa: C901 (a search whose bounds are looked at in turn)
        self, shapes: Iterable[Shape], objective: Objective | None, found: Sequence[ShapeOutcome], *, fewer: bool
    ) -> Iterator[tuple[float, int, Case]]:
        """Yield the most promising case, its cost and the kind of its bound, without the shapes of ``found``."""
        aim = objective or Fastest(self.profile.job.batch_size)
        heap: list[tuple[float, int, int, Case]] = []

        def push(case: Case, time_ns: float, known: int) -> None:
            depth, replicas = case.shape
            cost = aim.least_cost if known == _ROUGH else aim.cost
            heapq.heappush(heap, (cost(case.shape, time_ns / 1e9), known, depth * replicas, case))

        def push_shape(shape: Shape, number: int) -> None:
            setting = self.settings[number]
            if shape[1] <= setting.num_micro_batches:
                push(Case(shape, number), self._even_ns(setting, shape), _EVEN if objective is None else _ROUGH)

        for depth, replicas in shapes:
            for number, setting in enumerate(self.settings):
                if setting.grouped:
                    continue  # considered beside the same setting with whole stages
                push_shape((depth, min(replicas, setting.num_micro_batches) if fewer else replicas), number)
        while heap:
            cost, known, _, case = heapq.heappop(heap)
            shape, setting = case.shape, self.settings[case.setting]
            if any(shape[0] == outcome.shape[0] if fewer else shape == outcome.shape for outcome in found):
                continue
            yield cost, known, case
            if known == _ROUGH:
                push(case, self._even_ns(setting, shape), _EVEN)
            elif known == _EVEN:
                if fewer and (next_shape := self._with_fewer(shape, setting)) is not None:
                    push_shape(next_shape, case.setting)
                least = self._even_ns(setting, shape) + setting.first_reduce_ns(*shape)
                beside = (there for there in chain((case,), self._beside(case)) if self._fits(there.setting, shape))
                for there in islice(beside, 1):
                    push(there, least, _REDUCED)
            elif known == _REDUCED:
                for place in range(len(self.layouts(shape)) if objective is None else 1):
                    for there in (case, *self._beside(case)):
                        placed = there._replace(place=place)
                        push(placed, self._bound_ns(placed), _BOUND)
            elif known == _BOUND and self._may_gain(case):
                push(case, self._planned_ns(case), _PLANNED)
            elif known == _PLANNED:
                push(case, self._outcome(case).mini_batch_ns, _KNOWN)

    def _beside(self, case: Case) -> Iterator[Case]:
        """Yield the same shape with recompute groups, unless all stages of the case fit without them."""
        if case.setting in self._in_groups and not self._trial(case).roomy:
            yield case._replace(setting=self._in_groups[case.setting])

    def _may_gain(self, case: Case) -> bool:
        """Return whether recompute groups may make a shape more than 1 % faster; True for a case without groups."""
        whole, conditions = self._whole.get(case.setting), self.shape_simulator.conditions
        if (
            whole is None
            or not self._fits(whole, case.shape)
            or conditions.uneven
            or conditions.jitter_seed is not None
        ):
            return True
        planned_ns = self._trial(case._replace(setting=whole)).planned[1]
        return planned_ns * 100 > self._trial(case).closest_ns * TOLERATED

    def layouts(self, shape: Shape) -> list[Layout]:
        """Return the layouts that the workers of a shape can have, the one on all nodes first."""
        if shape not in self._layouts:
            self._layouts[shape] = layouts(self.profile.contention, *shape, self.shape_simulator.conditions)
        return self._layouts[shape]

    def _trial(self, case: Case) -> Trial:
        if case not in self._trials:
            setting = self.settings[case.setting]
            counts = deal(setting.num_micro_batches, case.shape[1])
            layout = self.layouts(case.shape)[case.place]
            self._trials[case] = Trial(setting, self.shape_simulator, layout, case.shape[0], counts)
        return self._trials[case]

    def _outcome(self, case: Case) -> ShapeOutcome:
        if case not in self._outcomes:
            self._outcomes[case] = self._trial(case).best()
        return self._outcomes[case]

    def _with_fewer(self, shape: Shape, setting: Setting) -> Shape | None:
        """Return the next (P, D) with a smaller D that may be as fast; None if there is none.

        If nothing makes workers differ, the smallest of all D with an equally busy busiest replica is the fastest,
        because it reduces fastest: 6 micro-batches take as long on 3 replicas as on 4.
        """
        depth, replicas = shape
        if replicas == 1:
            return None
        if self.shape_simulator.conditions.uneven:
            return depth, replicas - 1
        total = setting.num_micro_batches
        same = _fewest_as_busy(total, replicas)
        return depth, same if same < replicas else _fewest_as_busy(total, replicas - 1)

    def _even_ns(self, setting: Setting, shape: Shape) -> int:
        """Return a lower bound (ns) for all cuts; with jitter it is only the commit's time."""
        if self.shape_simulator.conditions.jitter_seed is not None:
            return setting.sections.commit_ns
        return setting.bound_ns(shape[0], -(-setting.num_micro_batches // shape[1]))

    def _bound_ns(self, case: Case) -> int:
        if case not in self._bounds:
            least = self._trial(case).least_ns()
            self._bounds[case] = max(self._even_ns(self.settings[case.setting], case.shape), least)
        return self._bounds[case]

    def _planned_ns(self, case: Case) -> float:
        """Return the planned time (ns), or the bound where windows are judged under the conditions of the run."""
        if self.shape_simulator.conditions.uneven:
            return self._bound_ns(case)
        return max(self._bound_ns(case), _SLACK * self._trial(case).likely_ns())

    def _too_little_memory(self, num_gpus: int, wanted: int | None, num_replicas: int | None) -> PlanError:
        """Return an error that says what takes most memory in the most frugal shape, and what would be enough."""
        every = range(1, self.num_sections + 1) if wanted is None else range(wanted, wanted + 1)
        depths = every[: num_gpus // (num_replicas or 1)]
        has, field, ways = f"{_gib(self.memory_bytes or 0)} each", "memory_bytes", list[str]()
        found = self._least_memory(num_gpus, depths, num_replicas)
        if found is not None:
            least, why = found
            ways.append(f"at least {_at_least(least)} per device")
        else:  # host memory alone forbids every cut
            host = self.profile.environment.host_memory_bytes or 0
            has, field = f"{has}, and {_gib(host)} of host memory for each", "host_memory_bytes"
            free = self._with_memory(self.memory_bytes, int(ranges.MEMORY_BYTES.high))
            found = free._least_memory(num_gpus, depths, num_replicas)
            assert found is not None, "host memory without end does not do"
            least = max(found[0], self.memory_bytes or 0)
            needed, why = self._least_host(least, num_gpus, depths, num_replicas)
            ways.append(f"at least {_at_least(needed)} of host memory for each device")
            if least != self.memory_bytes:
                ways[0] += f" together with at least {_at_least(least)} per device"
        enough = self._fewest_gpus(every, num_replicas)
        ways += [] if enough is None else [f"at least {enough} GPUs"]
        return PlanError(
            f"the job does not fit in the memory of {num_gpus} devices ({has}): {why}",
            field=field,
            allowed=", or ".join(ways),
        )

    def _possible(self, num_gpus: int, depths: range, num_replicas: int | None) -> Iterator[tuple[Setting, int, int]]:
        """Yield each setting with a P and the busiest replica's micro-batches, for the D that may need least memory."""
        for setting, depth in product(self.settings, depths):
            most = num_replicas or min(num_gpus // depth, setting.num_micro_batches)
            for replicas in {num_replicas or 1, most}:
                if replicas <= setting.num_micro_batches:
                    yield setting, depth, -(-setting.num_micro_batches // replicas)

    def _least_memory(self, num_gpus: int, depths: range, num_replicas: int | None) -> tuple[int, str] | None:
        """Return the least memory of a device that is enough, and what takes most of it; None if none is enough."""
        needed = {each: each[0].least_bytes(*each[1:]) for each in self._possible(num_gpus, depths, num_replicas)}
        setting, depth, most = min(needed, key=needed.__getitem__)
        least = needed[setting, depth, most]
        return (least, setting.fullest(depth, most)) if least < NEVER else None

    def _least_host(self, memory_bytes: int, num_gpus: int, depths: range, num_replicas: int | None) -> tuple[int, str]:
        """Return the least host memory per device that is enough with ``memory_bytes``, and what takes most of it."""
        possible = list(self._possible(num_gpus, depths, num_replicas))
        sizes = np.unique(np.concatenate([np.unique(each.host_sizes(most)) for each, _, most in possible]))
        low, high = 0, len(sizes) - 1
        while low < high:
            middle = (low + high) // 2
            other = self._with_memory(memory_bytes, max(1, int(sizes[middle])))
            fits = any(each.fits(depth, most) for each, depth, most in other._possible(num_gpus, depths, num_replicas))
            low, high = (low, middle) if fits else (middle + 1, high)
        setting, depth, most = min(possible, key=lambda each: each[0].least_host_bytes(*each[1:]))
        return int(sizes[low]), setting.fullest_host(depth, most)

    def fewest_gpus(self) -> int | None:
        """Return the fewest GPUs on which the job fits; None if it fits on none."""
        return self._fewest_gpus(range(1, self.num_sections + 1), None)

    def _fewest_gpus(self, depths: range, num_replicas: int | None) -> int | None:
        """Return the fewest GPUs on which some of these depths fits; None if none does."""
        fewest: int | None = None
        for depth in depths:
            most = self.total if fewest is None else min(self.total, (fewest - 1) // depth)

            def fits(replicas: int, depth: int = depth) -> bool:
                return self.fits((depth, replicas)) if num_replicas else self._fits_any(depth, replicas)

            counts = range(num_replicas or 1, min(num_replicas or most, most) + 1)
            if counts and fits(counts[-1]):
                fewest = depth * counts[bisect_left(counts, True, key=fits)]
        return fewest

    def _with_memory(self, memory_bytes: int | None, host_memory_bytes: int) -> Sweep:
        request = replace(self._request, memory_bytes=memory_bytes, host_memory_bytes=host_memory_bytes)
        return Sweep(self.profile, request, self.shape_simulator.conditions)


def _gib(size: int) -> str:
    return f"{size / 2**30:.4g} GiB"


def _at_least(size: int) -> str:
    """Return a number of bytes in GiB, rounded up to a value that an option in GiB allows."""
    unit = 10.0 ** (math.floor(math.log10(max(1, size) / 2**30)) - 3)
    text = next(
        text for more in range(3) if int(float(text := f"{(size / 2**30 // unit + more) * unit:.4g}") * 2**30) >= size
    )
    return f"{text} GiB ({size} bytes)"


def _fewest_as_busy(total: int, replicas: int) -> int:
    return math.ceil(total / math.ceil(total / replicas))
