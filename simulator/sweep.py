"""Every shape of one profile at one m, each simulated at most once and only as far as its rank needs."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from copy import copy

from morph.contract.errors import PlanError
from morph.contract.plan import Schedule
from morph.contract.profile import Profile
from simulator.answer import bound_ns, deal
from simulator.conditions import Conditions
from simulator.costs import SectionCosts, StageCosts, stage_costs
from simulator.finish import Finish
from simulator.layout import Layout, lay_out
from simulator.micro_batch import choose_micro_batch_size, num_micro_batches
from simulator.objectives import Fastest, Objective, Shape
from simulator.orders import WINDOW_SLOPES, stage_windows
from simulator.outcome import Outcome, Rehearsal
from simulator.partition import PartitionTable, partition_table

_FEWER, _BOUND, _PLANNED, _KNOWN = -1, 0, 1, 2


class Sweep:
    """Shapes of one profile at one m.

    Args:
        profile: What calibration measured.
        schedule: "varuna", "gpipe" or "1f1b".
        memory_bytes: Of one device; None: as the profile says, no limit where it does not.
        micro_batch_size: m; None: fixed by the job, else chosen.
        conditions: Where and how the shapes run.
        recompute: Whether stages run the forward again.

    Raises:
        PlanError: no memory, or an m that cannot be.
    """

    def __init__(
        self,
        profile: Profile,
        schedule: Schedule,
        memory_bytes: int | None,
        micro_batch_size: int | None,
        conditions: Conditions,
        *,
        recompute: bool,
    ) -> None:
        if memory_bytes is not None and memory_bytes < 1:
            raise PlanError("is too small", field="memory_bytes", value=memory_bytes, allowed="1 or more")
        if memory_bytes is None:
            memory_bytes = profile.environment.device_memory_bytes
        m = choose_micro_batch_size(profile, schedule, memory_bytes, micro_batch_size, recompute=recompute)
        self.total = num_micro_batches(profile, m)
        self.memory_bytes, self.rehearsal = memory_bytes, Rehearsal(schedule, conditions)
        self.sections = SectionCosts(profile, m, recompute=recompute)
        self.slopes = WINDOW_SLOPES if schedule == "varuna" else (1,)
        self._tabulate()
        self._forget()

    def under(self, conditions: Conditions) -> Sweep:
        """The same sweep under other conditions."""
        other = copy(self)
        other.rehearsal = Rehearsal(self.rehearsal.schedule, conditions)
        other._forget()
        return other

    def without_memory_limit(self) -> Sweep:
        """The same sweep on devices with as much memory as it takes."""
        other = copy(self)
        other.memory_bytes = None
        other._tabulate()
        other._forget()
        return other

    def _tabulate(self) -> None:
        schedule, limit = self.rehearsal.schedule, self.memory_bytes
        self.tables: dict[int, PartitionTable] = {
            slope: partition_table(
                self.sections, schedule, num_micro_batches=self.total, slope=slope, memory_bytes=limit
            )
            for slope in self.slopes
        }
        table = self.tables[self.slopes[0]]
        self.fitting = tuple(depth for depth in range(1, self.sections.num_sections + 1) if table.fits(depth))

    def _forget(self) -> None:
        self._stages: dict[tuple[object, ...], StageCosts] = {}
        self._layouts: dict[Shape, Layout] = {}
        self._bounds: dict[Shape, int] = {}
        self._planned: dict[Shape, tuple[StageCosts, Finish]] = {}
        self._outcomes: dict[Shape, Outcome] = {}

    def depths(self, num_gpus: int, wanted: int | None, num_replicas: int | None) -> tuple[int, ...]:
        """Every P to look at; raises PlanError when there is none."""
        most = self.sections.num_sections
        if num_gpus < 1:
            raise PlanError("at least one GPU is needed", field="num_gpus", value=num_gpus, allowed="1 or more")
        if num_replicas is not None and not 1 <= num_replicas <= min(num_gpus, self.total):
            allowed = f"1 to {min(num_gpus, self.total)} ({num_gpus} GPUs, {self.total} micro-batches in a mini-batch)"
            raise PlanError("is not possible", field="num_replicas", value=num_replicas, allowed=allowed)
        largest = min(most, num_gpus // (num_replicas or 1))
        if wanted is not None and not 1 <= wanted <= largest:
            allowed = f"1 to {largest} ({most} sections, {num_gpus} GPUs, {num_replicas or 1} replicas)"
            raise PlanError("is not possible", field="pipeline_depth", value=wanted, allowed=allowed)
        depths = tuple(d for d in self.fitting if d <= largest and wanted in (None, d))
        if not depths:
            raise self._too_little_memory(num_gpus, largest if wanted is None else wanted, num_replicas or 1)
        return depths

    def fastest(
        self, num_gpus: int, depths: Iterable[int], count: int, most_replicas: int | None = None
    ) -> list[Outcome]:
        """The ``count`` fastest on so many GPUs, best first, each P with the D that suits it best, and no other.

        Fewer replicas are looked at only while a mini-batch without any all-reduce might be as fast.
        """
        most = min(self.total, most_replicas or self.total)
        return self._ranked([(depth, min(num_gpus // depth, most)) for depth in depths], count, None, fewer=True)

    def best(self, shapes: Iterable[Shape], count: int, objective: Objective | None = None) -> list[Outcome]:
        """The ``count`` best of these (P, D), best first; ties go to fewer workers, then to the shallower pipeline.

        A shape is known first by its lower bound, then as planned, last under the conditions in which it will run.
        Always the most promising one is taken further, until enough of the most promising are known for good.
        """
        return self._ranked(shapes, count, objective, fewer=False)

    def _ranked(
        self, shapes: Iterable[Shape], count: int, objective: Objective | None, *, fewer: bool
    ) -> list[Outcome]:
        aim = objective or Fastest(self.sections.profile.job.batch_size)
        found: list[Outcome] = []
        heap: list[tuple[float, int, int, Shape]] = []

        def push(shape: Shape, time_ns: int, known: int) -> None:
            heapq.heappush(heap, (aim.cost(shape, time_ns / 1e9), known, shape[0] * shape[1], shape))

        for shape in shapes:
            if fewer:
                push(shape, self._bound_ns(shape, reducing=False), _FEWER)
            else:
                push(shape, self._bound_ns(shape), _BOUND)
        while heap and len(found) < count:
            _, known, _, shape = heapq.heappop(heap)
            if fewer and any(shape[0] == outcome.shape[0] for outcome in found):
                continue
            if known == _FEWER:
                push(shape, self._bound_ns(shape), _BOUND)
                if (next_shape := self._with_fewer(shape)) is not None:
                    push(next_shape, self._bound_ns(next_shape, reducing=False), _FEWER)
            elif known == _BOUND:
                push(shape, self._planned_ns(shape), _PLANNED)
            elif known == _PLANNED:
                push(shape, self.outcome(shape).mini_batch_ns, _KNOWN)
            else:
                found.append(self.outcome(shape))
        return found

    def outcome(self, shape: Shape) -> Outcome:
        """One shape with its best window, under the conditions."""
        if shape not in self._outcomes:
            counts = deal(self.total, shape[1])
            if shape in self._planned:
                costs, planned = self._planned[shape]
                self._outcomes[shape] = self.rehearsal.full(costs, counts, planned)
            else:
                self._outcomes[shape] = self.rehearsal.best_window(self._candidates(shape), counts)
        return self._outcomes[shape]

    def layout(self, shape: Shape) -> Layout:
        """Where the workers of a shape run."""
        if shape not in self._layouts:
            self._layouts[shape] = lay_out(self.sections.profile.contention, *shape, self.rehearsal.conditions)
        return self._layouts[shape]

    def _slopes_that_fit(self, depth: int) -> tuple[int, ...]:
        """Window slopes with which a pipeline of this depth fits in memory."""
        return tuple(slope for slope in self.slopes if self.tables[slope].fits(depth))

    def _candidates(self, shape: Shape) -> list[StageCosts]:
        """The stages of a shape with each window that fits."""
        most = deal(self.total, shape[1])[0]
        return [self._stage_costs(shape, most, slope) for slope in self._slopes_that_fit(shape[0])]

    def _stage_costs(self, shape: Shape, most: int, slope: int) -> StageCosts:
        depth, layout = shape[0], self.layout(shape)
        where = float(layout.slowdown[0, 0]) if layout.placement is None else shape
        key = (depth, min(most, slope * (depth - 1) + 1), slope, where)
        if key not in self._stages:
            schedule = self.rehearsal.schedule
            windows = stage_windows(schedule, depth, most, slope)
            boundaries = self.tables[slope].boundaries(depth)
            self._stages[key] = stage_costs(self.sections, boundaries, windows, schedule, layout)
        return self._stages[key]

    def _with_fewer(self, shape: Shape) -> Shape | None:
        """The next (P, D) below this one that may be as fast; None when there is none.

        Where nothing makes workers differ, of all D whose busiest replica has as many micro-batches the smallest is
        the fastest, for it reduces fastest: 6 micro-batches take 3 replicas as long as 4.
        """
        depth, replicas = shape
        if replicas == 1:
            return None
        if self.rehearsal.conditions.uneven:
            return depth, replicas - 1
        same = self._fewest_as_busy(replicas)
        return depth, same if same < replicas else self._fewest_as_busy(replicas - 1)

    def _fewest_as_busy(self, replicas: int) -> int:
        return math.ceil(self.total / math.ceil(self.total / replicas))

    def _bound_ns(self, shape: Shape, *, reducing: bool = True) -> int:
        if not reducing:
            return self._least_ns(shape, reducing=False)
        if shape not in self._bounds:
            self._bounds[shape] = self._least_ns(shape, reducing=True)
        return self._bounds[shape]

    def _least_ns(self, shape: Shape, *, reducing: bool) -> int:
        slopes, counts = self._slopes_that_fit(shape[0]), deal(self.total, shape[1])
        if self.memory_bytes is None:
            slopes = slopes[-1:]  # the same stages under wider windows: never a higher bound
        where = shape if reducing else (shape[0], 1)  # one pipeline alone is hindered by nobody else's
        candidates = [self._stage_costs(where, counts[0], slope) for slope in slopes]
        return min(bound_ns(costs, counts, self.rehearsal.conditions, reducing=reducing) for costs in candidates)

    def _planned_ns(self, shape: Shape) -> int:
        """As planned; where windows are judged under the conditions, no more is known than the bound."""
        if self.rehearsal.conditions.uneven:
            return self._bound_ns(shape)
        if shape not in self._planned:
            counts = deal(self.total, shape[1])
            self._planned[shape] = self.rehearsal.planned_window(self._candidates(shape), counts)
        return self._planned[shape][1].mini_batch_ns

    def _too_little_memory(self, num_gpus: int, largest: int, num_replicas: int) -> PlanError:
        table = self.tables[self.slopes[0]]
        least_bytes = int(table.least_bytes[1 : largest + 1].min())
        enough = [depth for depth in self.fitting if depth > largest]
        how = f"at least {least_bytes} bytes per device"
        if enough:
            how += f", or at least {enough[0] * num_replicas} GPUs"
        return PlanError(
            f"the job does not fit in the memory of {num_gpus} devices",
            field="memory_bytes",
            value=self.memory_bytes,
            allowed=how,
        )
