"""The best of all plans for a few GPUs of some types, by trying every multiset of pipelines; it shares no search code.

A pipeline is on one type of node, or begins on one and ends on another. It may have any cut, windows of any slope, and
any recomputation that fits in memory, each with any share of the mini-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product

import numpy as np

from morph.contract.profile import Profile
from simulator import PlanRequest
from simulator.costs.joined_sections import JoinedSections
from simulator.costs.memory import NEVER, spans
from simulator.costs.outcome import Kind, ShapeSimulator, together
from simulator.costs.stage_costs import SectionCosts, StageCosts, stage_costs
from simulator.engine.schedules import recomputes, stage_windows
from simulator.inputs.conditions import of_pool_type
from simulator.search.micro_batch import num_micro_batches
from simulator.search.setting import SCHEDULES

Cost = Callable[[float, Sequence[int]], float]
"""Returns what is to be least, given the time (ns) of a mini-batch and the GPUs in use of each type."""


@dataclass(frozen=True)
class Pipeline:
    """One pipeline with its number of micro-batches, GPUs by type, and the end of its last backward (ns)."""

    kind: Kind
    gpus: tuple[int, ...]
    ended_ns: int

    @property
    def count(self) -> int:
        """Its micro-batches."""
        return self.kind.counts[0]


class Bruteforce:
    """All plans of a job on some types of node."""

    def __init__(self, profile: Profile, request: PlanRequest, pool: Mapping[str, int]) -> None:
        self.profiles = [request.applied_to(of_pool_type(profile, name)) for name in pool]
        self.request, self.gpus = request, tuple(pool.values())
        self.best: tuple[Pipeline, ...] = ()
        own = [each.environment.device_memory_bytes for each in self.profiles]
        self.limits = own if request.memory_bytes is None else [request.memory_bytes] * len(own)

    def least(self, below: float = math.inf, cost: Cost = lambda time_ns, _: time_ns) -> float:
        """Return the least cost of all plans, or ``below`` if none costs less."""
        sizes = self.request.micro_batch_size
        for m in self.profiles[0].micro_batch_sizes if sizes is None else (sizes,):
            total = num_micro_batches(self.profiles[0], m)
            for schedule in SCHEDULES if self.request.schedule is None else (self.request.schedule,):
                below = self._least_of(m, schedule, total, below, cost)
        return below

    def _least_of(self, m: int, schedule: str, total: int, below: float, cost: Cost) -> float:
        for lone in self._pipelines(m, schedule, [total], single=True):
            if cost(lone.ended_ns, lone.gpus) < below:
                below = self._better([lone], lone.gpus, below, cost)
        others = [
            each
            for each in self._pipelines(m, schedule, range(1, total), single=False)
            if cost(each.ended_ns, each.gpus) < below
        ]
        others.sort(key=lambda each: -each.count / sum(each.gpus))  # so that the densest of the rest comes first

        def extended(chosen: list[Pipeline], first: int, left: Sequence[int], todo: int, ended_ns: int) -> None:
            nonlocal below
            used = [has - rest for has, rest in zip(self.gpus, left, strict=True)]
            if not todo:
                below = self._better(chosen, used, below, cost)
                return
            for place in range(first, len(others)):
                each = others[place]
                if each.count * sum(left) < todo * sum(each.gpus):
                    break  # even such pipelines on all GPUs that are left would finish too little
                rest = [has - need for has, need in zip(left, each.gpus, strict=True)]
                if each.count > todo or min(rest) < 0:
                    continue
                late = max(ended_ns, each.ended_ns)
                if cost(late, [has - one for has, one in zip(self.gpus, rest, strict=True)]) < below:
                    extended([*chosen, each], place, rest, todo - each.count, late)

        extended([], 0, self.gpus, total, 0)
        return below

    def _better(self, chosen: Sequence[Pipeline], used: Sequence[int], below: float, cost: Cost) -> float:
        found = cost(together([each.kind for each in chosen])[0].mini_batch_ns, used)
        if found < below:
            self.best = tuple(chosen)
        return min(found, below)

    def _pipelines(self, m: int, schedule: str, counts: Sequence[int], *, single: bool) -> Iterator[Pipeline]:
        """Yield every pipeline, without those whose every stage ends no sooner than with other windows."""
        again = (True, False) if self.request.recompute is None else (self.request.recompute,)
        ways = [(flag, grouped) for flag, grouped in product(again, (False, True)) if flag or not grouped]
        simulator = ShapeSimulator(self.request.conditions(None))
        for ends, (recompute, grouped) in product(self._ends(), ways):
            types = [place for place, number in ends for _ in range(number)]
            gpus = tuple(types.count(place) for place in range(len(self.gpus)))
            num_sections = self.profiles[0].num_sections
            of_types = [
                SectionCosts(each, m, recompute=recompute, grouped=grouped, rules=self.request.memory_rules)
                for each in self.profiles
            ]
            for rest in combinations(range(1, num_sections), len(types) - 1):
                cut = (0, *rest)
                sections, limit = of_types[types[0]], self.limits[types[0]]
                if len(set(types)) > 1:
                    type_of = np.repeat(types, np.diff([*cut, num_sections]))
                    sections = JoinedSections(of_types, type_of, self.limits)
                    limit = max((each for each in self.limits if each is not None), default=None)
                for count in counts:
                    best: list[tuple[np.ndarray, StageCosts]] = []
                    for slope in range(1, count + 1):
                        windows = stage_windows(schedule, len(cut), count, slope)
                        costs = self._fitting(sections, limit, cut, windows, schedule, single=single)
                        if costs is None:
                            continue
                        last_ns = simulator.ended(costs, (count,)).last_backward_ns
                        if not any((known <= last_ns).all() for known, _ in best):
                            best.append((last_ns, costs))
                    for last_ns, costs in best:
                        yield Pipeline(Kind(simulator, costs, (count,)), gpus, int(last_ns.max()))

    def _ends(self) -> Iterator[tuple[tuple[int, int], ...]]:
        """Yield the types of consecutive stages and their numbers: of one type, or of one and then another."""
        deepest = self.profiles[0].num_sections
        for i, number in enumerate(self.gpus):
            yield from (((i, depth),) for depth in range(1, min(number, deepest) + 1))
        for i, j in permutations(range(len(self.gpus)), 2):
            for a, b in product(range(1, self.gpus[i] + 1), range(1, self.gpus[j] + 1)):
                if a + b <= deepest:
                    yield (i, a), (j, b)

    def _fitting(
        self,
        sections: SectionCosts,
        limit: int | None,
        cut: tuple[int, ...],
        windows: tuple[int, ...],
        schedule: str,
        *,
        single: bool,
    ) -> StageCosts | None:
        """Return these stages if they fit in memory; recompute groups are as large as memory allows."""
        live: tuple[int, ...] = ()
        if sections.grouped:
            memory, where = sections.memory(single=single), spans(cut, sections.num_sections)
            again = np.array(recomputes(schedule, len(cut), sections.recompute), np.bool_)
            usable = NEVER - 1 if limit is None else memory.usable_bytes(limit)
            live = tuple(memory.fitting_sizes(*where, np.array(windows, np.int64), again, usable).tolist())
            if not any(live):
                return None  # as without groups
        costs = stage_costs(sections, cut, windows, schedule, single=single, live=live)
        return costs if limit is None or costs.fits(limit) else None
