"""Which P x D, and which stages, for so many GPUs (Varuna, section 4.4)."""

from __future__ import annotations

from dataclasses import dataclass

from morph.contract.errors import PlanError
from morph.contract.plan import Plan, Schedule
from morph.contract.profile import Profile
from simulator.costs import SectionCosts, StageCosts, stage_costs
from simulator.micro_batch import choose_micro_batch_size, num_micro_batches
from simulator.mini_batch import Finish, Simulation, bound_ns, deal, describe, fastest_window, rings_at_once
from simulator.orders import WINDOW_SLOPES, stage_windows
from simulator.partition import PartitionTable, partition_table

NUM_RUNNERS_UP = 5


@dataclass(frozen=True)
class PlanChoice:
    """The answer for one number of GPUs.

    ``best_simulation`` has the explanation, ladder and timeline of ``best``. ``num_shapes`` counts the shapes
    looked at; those whose lower bound was beaten already were not simulated.
    """

    best: Plan
    runners_up: tuple[Plan, ...]
    best_simulation: Simulation
    num_gpus: int
    num_shapes: int


@dataclass(frozen=True)
class _Candidate:
    costs: StageCosts
    after: Finish
    counts: tuple[int, ...]

    @property
    def rank(self) -> tuple[int, int, int]:
        """Faster first; ties: fewer workers, then the shallower pipeline."""
        depth = self.costs.times.num_stages
        return self.after.mini_batch_ns, depth * len(self.counts), depth


def plan(
    profile: Profile,
    *,
    num_gpus: int,
    memory_bytes: int | None = None,
    schedule: Schedule = "varuna",
    micro_batch_size: int | None = None,
    compute_slots: int | None = None,
    pipeline_depth: int | None = None,
    num_replicas: int | None = None,
    num_runners_up: int = NUM_RUNNERS_UP,
    recompute: bool = True,
) -> PlanChoice:
    """Find the shape with the most examples per second.

    Every P from the smallest that fits in memory to min(K, G) is looked at, each with D = min(G // P, N).

    Args:
        profile: What calibration measured.
        num_gpus: G.
        memory_bytes: Of one device; None: no limit.
        schedule: "varuna", "gpipe" or "1f1b".
        micro_batch_size: m; None: fixed by the job, else chosen. It does not depend on G.
        compute_slots: Tasks that can run at once on all workers together; None: one device per worker.
        pipeline_depth: Only this P.
        num_replicas: Only this D.
        num_runners_up: How many of the next best shapes to return.
        recompute: False: no stage runs the forward again; each keeps the activations in flight.

    Raises:
        PlanError: naming the argument and what would do, for example the least number of GPUs.
    """
    sweep = _Sweep(profile, schedule, memory_bytes, micro_batch_size, compute_slots, recompute=recompute)
    depths = sweep.depths(num_gpus, pipeline_depth, num_replicas)
    shapes = [(depth, num_replicas or min(num_gpus // depth, sweep.total)) for depth in depths]
    ranked = sweep.best(shapes, 1 + num_runners_up)
    simulations = [describe(one.costs, one.after, one.counts, schedule, compute_slots) for one in ranked]
    return PlanChoice(
        best=simulations[0].plan,
        runners_up=tuple(simulation.plan for simulation in simulations[1:]),
        best_simulation=simulations[0],
        num_gpus=num_gpus,
        num_shapes=len(shapes),
    )


def plan_table(
    profile: Profile,
    max_gpus: int,
    *,
    memory_bytes: int | None = None,
    schedule: Schedule = "varuna",
    micro_batch_size: int | None = None,
    compute_slots: int | None = None,
    recompute: bool = True,
) -> dict[int, Plan]:
    """The best plan for every number of GPUs from 1 to ``max_gpus``; a number with which nothing fits is absent.

    Each entry is what :func:`plan` answers for that number; all of them have the same m.

    Raises:
        PlanError: ``max_gpus`` below 1, or a micro-batch size that cannot be.
    """
    if max_gpus < 1:
        raise PlanError("is too small", field="max_gpus", value=max_gpus, allowed="1 or more")
    sweep = _Sweep(profile, schedule, memory_bytes, micro_batch_size, compute_slots, recompute=recompute)
    described: dict[tuple[int, int], Plan] = {}
    plans: dict[int, Plan] = {}
    for num_gpus in range(1, max_gpus + 1):
        shapes = [(depth, min(num_gpus // depth, sweep.total)) for depth in sweep.fitting if depth <= num_gpus]
        if not shapes:
            continue
        one = sweep.best(shapes, 1)[0]
        shape = (one.costs.times.num_stages, len(one.counts))
        if shape not in described:
            described[shape] = describe(one.costs, one.after, one.counts, schedule, compute_slots).plan
        plans[num_gpus] = described[shape]
    return plans


class _Sweep:
    """Shapes of one profile at one m, each simulated at most once."""

    def __init__(
        self,
        profile: Profile,
        schedule: Schedule,
        memory_bytes: int | None,
        micro_batch_size: int | None,
        compute_slots: int | None,
        *,
        recompute: bool,
    ) -> None:
        if memory_bytes is not None and memory_bytes < 1:
            raise PlanError("is too small", field="memory_bytes", value=memory_bytes, allowed="1 or more")
        if compute_slots is not None and compute_slots < 1:
            raise PlanError("is too small", field="compute_slots", value=compute_slots, allowed="1 or more")
        m = choose_micro_batch_size(profile, schedule, memory_bytes, micro_batch_size, recompute=recompute)
        self.total = num_micro_batches(profile, m)
        self.schedule, self.memory_bytes, self.compute_slots = schedule, memory_bytes, compute_slots
        self.sections = SectionCosts(profile, m, recompute=recompute)
        self.slopes = WINDOW_SLOPES if schedule == "varuna" else (1,)
        self.tables: dict[int, PartitionTable] = {
            slope: partition_table(
                self.sections, schedule, num_micro_batches=self.total, slope=slope, memory_bytes=memory_bytes
            )
            for slope in self.slopes
        }
        table = self.tables[self.slopes[0]]
        self.fitting = tuple(depth for depth in range(1, self.sections.num_sections + 1) if table.fits(depth))
        self._stages: dict[tuple[int, int, int], StageCosts] = {}
        self._candidates: dict[tuple[int, int], _Candidate] = {}
        self._bounds: dict[tuple[int, int], int] = {}

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

    def best(self, shapes: list[tuple[int, int]], count: int) -> list[_Candidate]:
        """The ``count`` best of these (P, D), best first; simulates only what the bounds leave open."""
        found: list[_Candidate] = []
        for shape in sorted(shapes, key=lambda shape: (self._bound_ns(shape), shape)):
            if len(found) >= count and self._bound_ns(shape) > found[count - 1].after.mini_batch_ns:
                break
            found.append(self._candidate(shape))
            found.sort(key=lambda candidate: candidate.rank)
        return found[:count]

    def _stage_costs(self, depth: int, most: int, slope: int) -> StageCosts:
        key = (depth, min(most, slope * (depth - 1) + 1), slope)
        if key not in self._stages:
            windows = stage_windows(self.schedule, depth, most, slope)
            boundaries = self.tables[slope].boundaries(depth)
            in_flight = rings_at_once(depth, self.compute_slots)
            self._stages[key] = stage_costs(self.sections, boundaries, windows, self.schedule, in_flight)
        return self._stages[key]

    def _slopes_that_fit(self, depth: int) -> list[int]:
        return [slope for slope in self.slopes if self.tables[slope].fits(depth)]

    def _bound_ns(self, shape: tuple[int, int]) -> int:
        if shape not in self._bounds:
            counts = deal(self.total, shape[1])
            slopes = self._slopes_that_fit(shape[0])
            if self.memory_bytes is None:
                slopes = slopes[-1:]  # the same stages under wider windows: never a higher bound
            self._bounds[shape] = min(
                bound_ns(self._stage_costs(shape[0], counts[0], slope), counts, self.compute_slots) for slope in slopes
            )
        return self._bounds[shape]

    def _candidate(self, shape: tuple[int, int]) -> _Candidate:
        if shape not in self._candidates:
            counts = deal(self.total, shape[1])
            growing = [self._stage_costs(shape[0], counts[0], slope) for slope in self._slopes_that_fit(shape[0])]
            costs, after = fastest_window(growing, counts, self.schedule, self.compute_slots)
            self._candidates[shape] = _Candidate(costs, after, counts)
        return self._candidates[shape]

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
