"""How far plans for a few GPUs are from the best of all, by trying every multiset of pipelines.

    python -m benchmarks best_of_all --cases 100
    python -m benchmarks best_of_all --kind "two types, limits" --cases 300

A pipeline is on one type of GPU, or begins on one and ends on another, or is anywhere on nodes of several GPUs. It may
have any cut, windows of any slope, and any recomputation that fits in memory, each with any share of the mini-batch.
The brute force shares no code with the search. For each kind of random case the table says how many plans are the best
of all, and how much slower (or dearer) the others are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations, product
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.harness import head, option, row
from morph.contract.errors import PlanError
from morph.contract.plan import Schedule
from morph.contract.profile import Profile
from simulator import PlanChoice, PlanRequest, plan, synthetic_profile
from simulator.costs.joined_sections import JoinedSections
from simulator.costs.memory import NEVER, spans
from simulator.costs.outcome import Kind, ShapeSimulator, together
from simulator.costs.stage_costs import SectionCosts, StageCosts, stage_costs
from simulator.engine.schedules import recomputes, stage_windows
from simulator.inputs.layout import Layout, placed
from simulator.inputs.node_types import of_pool_type
from simulator.inputs.placement import Placement
from simulator.inputs.synthetic import with_type
from simulator.search.micro_batch import num_micro_batches
from simulator.search.setting import SCHEDULES

Cost = Callable[[float, Sequence[int]], float]
"""Returns what is to be least, given the time (ns) of a mini-batch and the GPUs in use of each type or node."""
Case = tuple[Profile, PlanRequest, dict[str, int]]


@dataclass(frozen=True)
class Pipeline:
    """One pipeline: its GPUs of each type or node, the end of its last backward (ns), and where its stages are."""

    kind: Kind
    gpus: tuple[int, ...]
    ended_ns: int
    where: tuple[int, ...]

    @property
    def count(self) -> int:
        """Its micro-batches."""
        return self.kind.counts[0]


class Bruteforce:
    """All plans of a job on some types of GPU, or on the nodes of the request, which are of one type."""

    def __init__(self, profile: Profile, request: PlanRequest, pool: Mapping[str, int]) -> None:
        sizes = request.num_gpus_per_node
        assert sizes is None or isinstance(sizes, tuple), "nodes are listed"
        self.nodes: tuple[int, ...] = sizes or ()
        self.profiles = [request.applied_to(of_pool_type(profile, name)) for name in pool]
        self.profiles *= max(1, len(self.nodes))
        self.request, self.gpus = request, self.nodes or tuple(pool.values())
        self.simulator = ShapeSimulator(request.conditions(sizes))
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

    def _least_of(self, m: int, schedule: Schedule, total: int, below: float, cost: Cost) -> float:
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
        found = cost(together(self._beside(chosen))[0].mini_batch_ns, used)
        if found < below:
            self.best = tuple(chosen)
        return min(found, below)

    def _beside(self, chosen: Sequence[Pipeline]) -> list[Kind]:
        """Return these pipelines; on nodes, with what they take from each other."""
        if not self.nodes or len(chosen) == 1:
            return [each.kind for each in chosen]
        every, found = [Placement(self.nodes, (each.where,)) for each in chosen], []
        for each, place in zip(chosen, every, strict=True):
            costs, layout = each.kind.costs, placed(self.profiles[0].contention, place, every)
            windows, live = costs.times.window.tolist(), costs.live.tolist()
            there = stage_costs(
                costs.sections, costs.boundaries, windows, costs.schedule, layout, single=False, live=live
            )
            found.append(Kind(self.simulator, there, each.kind.counts))
        return found

    def _pipelines(self, m: int, schedule: Schedule, counts: Sequence[int], *, single: bool) -> Iterator[Pipeline]:
        """Yield every pipeline, without those whose every stage ends no sooner than with other windows."""
        again = (True, False) if self.request.recompute is None else (self.request.recompute,)
        ways = [(flag, grouped) for flag, grouped in product(again, (False, True)) if flag or not grouped]
        for where, (recompute, grouped) in product(self._where(), ways):
            gpus = tuple(where.count(place) for place in range(len(self.gpus)))
            types, layout = list(where), None
            if self.nodes:
                types, layout = [0] * len(where), placed(self.profiles[0].contention, Placement(self.nodes, (where,)))
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
                        costs = self._fitting(sections, limit, cut, windows, schedule, layout, single=single)
                        if costs is None:
                            continue
                        last_ns = self.simulator.ended(costs, (count,)).last_backward_ns
                        if not any((known <= last_ns).all() for known, _ in best):
                            best.append((last_ns, costs))
                    for last_ns, costs in best:
                        yield Pipeline(Kind(self.simulator, costs, (count,)), gpus, int(last_ns.max()), where)

    def _where(self) -> Iterator[tuple[int, ...]]:
        """Yield the type or node of each stage: of one type, of one type and then another, or of any nodes."""
        deepest = self.profiles[0].num_sections
        if self.nodes:
            for depth in range(1, min(deepest, sum(self.nodes)) + 1):
                every = product(range(len(self.nodes)), repeat=depth)
                yield from (
                    where for where in every if all(where.count(n) <= size for n, size in enumerate(self.nodes))
                )
            return
        for i, number in enumerate(self.gpus):
            yield from ((i,) * depth for depth in range(1, min(number, deepest) + 1))
        for i, j in permutations(range(len(self.gpus)), 2):
            for a, b in product(range(1, self.gpus[i] + 1), range(1, self.gpus[j] + 1)):
                if a + b <= deepest:
                    yield (i,) * a + (j,) * b

    def _fitting(
        self,
        sections: SectionCosts,
        limit: int | None,
        cut: tuple[int, ...],
        windows: tuple[int, ...],
        schedule: Schedule,
        layout: Layout | None,
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
        costs = stage_costs(sections, cut, windows, schedule, layout, single=single, live=live)
        return costs if limit is None or costs.fits(limit) else None


def with_memory(profile: Profile, own: int | None, other: int | None) -> Profile:
    """Return the profile with these limits on its own and on the other type."""

    def limited(given: Any, limit: int | None) -> Any:
        environment = given.environment.model_copy(update={"device_memory_bytes": limit})
        return given.model_copy(update={"environment": environment})

    changed: Profile = limited(profile, own)
    return changed.model_copy(update={"node_types": (limited(profile.node_types[0], other),)})


def needed_bytes(profile: Profile, begin: int, end: int, window: int, *, single: bool, recompute: bool) -> int:
    memory = SectionCosts(profile, 1, recompute=recompute).memory(single=single)
    stage = np.array([begin]), np.array([end]), np.array([window])
    return int(memory.whole_bytes(memory.device_bytes(*stage, np.array([recompute])))[0])


def random_case(seed: int) -> Case:
    """Draw a job and up to four GPUs of two types; most have too little memory for some pipelines."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 5))
    profile = synthetic_profile(
        num_sections=count,
        forward_s=rng.uniform(0.002, 0.01, count).tolist(),
        batch_size=int(rng.choice([3, 4, 6, 8])),
        micro_batch_sizes=(1,),
        overhead_s=float(rng.choice([0, 0.002])),
        latency_s=float(rng.choice([0, 0.001, 0.004])),
        bandwidth_bytes_per_s=float(rng.choice([1e7, 1e8, 1e9])),
        parameter_bytes=int(rng.choice([10_000, 100_000, 1_000_000])),
        activation_bytes_per_sample=int(rng.choice([10_000, 300_000, 1_000_000])),
        tied=bool(rng.integers(2)),
    )
    limits: list[int | None] = [None, None]
    if rng.integers(4):
        whole = needed_bytes(profile, 0, count, 1, single=True, recompute=True)
        limits = [int(whole * rng.uniform(0.4, 1.4)) for _ in range(2)]
    profile = with_memory(with_type(profile, "t4", float(rng.choice([1.05, 1.3, 2, 3]))), *limits)
    own = int(rng.integers(1, 4))
    pool = {"": own, "t4": int(rng.integers(1, 5 - own))}
    request = PlanRequest(
        schedule=("varuna", "1f1b", "gpipe")[rng.integers(3)], recompute=(None, True, False)[rng.integers(3)]
    )
    return profile, request, pool


KINDS = ("one type", "one type, limits", "two types", "two types, limits", "fewest dollars", "within a budget", "nodes")


def case_of(kind: str, seed: int) -> Case:
    """Draw a case of this kind."""
    profile, request, pool = random_case(seed)
    rng = np.random.default_rng((KINDS.index(kind), seed))
    if kind in ("one type", "two types"):
        profile = with_memory(profile, None, None)
    if kind.startswith("one type"):
        pool = {"": int(rng.integers(2, 6))}
    if kind == "nodes":
        sizes = tuple(int(size) for size in rng.choice([1, 2, 3], 2))
        inner = synthetic_profile(latency_s=0.0001, bandwidth_bytes_per_s=1e10).intra_node
        job = profile.job.model_copy(update={"batch_size": 4})
        profile = with_memory(profile, None, None).model_copy(update={"intra_node": inner, "job": job})
        return profile, replace(request, num_gpus_per_node=sizes, share_links=False), {"": sum(sizes)}
    if kind in ("fewest dollars", "within a budget"):
        price = {name: float(rng.uniform(0.1, 1)) for name in pool}
        budget = float(rng.uniform(0.3, 1) * sum(price[name] * number for name, number in pool.items()))
        objective: Any = "usd_per_example" if kind == "fewest dollars" else "examples_per_s"
        limit = budget if kind == "within a budget" else None
        request = replace(request, objective=objective, usd_per_gpu_hour=price, budget_usd_per_h=limit)
    return profile, request, pool


def cost_of(request: PlanRequest, pool: Mapping[str, int]) -> Cost:
    """Return what the plan of a request is to have least of: nanoseconds, or USD per hour times nanoseconds."""
    price, budget = request.usd_per_gpu_hour, request.budget_usd_per_h or np.inf
    if not isinstance(price, Mapping):
        return lambda time_ns, _: time_ns
    usd = [dict[Any, float](price.items())[name] for name in pool]

    def cost(time_ns: float, gpus: Sequence[int]) -> float:
        usd_per_h = float(np.dot(gpus, usd))
        if usd_per_h > budget * (1 + 1e-9):
            return math.inf
        return time_ns * usd_per_h if request.objective == "usd_per_example" else time_ns

    return cost


def found_plan(case: Case) -> PlanChoice | None:
    """Return the plan that the search finds; None if it finds none."""
    profile, request, pool = case
    given: dict[str, Any] = {"pool": pool} if len(pool) > 1 else {"num_gpus": sum(pool.values())}
    if request.num_gpus_per_node is not None:
        given = {}
    try:
        return plan(profile, replace(request, unequal=True), num_runners_up=0, **given)
    except PlanError:
        return None


def found_cost(case: Case) -> float:
    """Return the cost of the best plan that the search finds; inf if it finds none."""
    _, request, pool = case
    if (found := found_plan(case)) is None:
        return math.inf
    used = [found.best.pool[name] for name in pool]
    return cost_of(request, pool)(found.best.expected.mini_batch_s * 1e9, used)


def gap_of(case: Case) -> tuple[float, tuple[Pipeline, ...]]:
    """Return the cost of the search's best plan over the least of all, and the best pipelines if that is more than 1.

    The gap is inf if the search wrongly finds none.
    """
    profile, request, pool = case
    cost, found = cost_of(request, pool), found_cost(case)
    every = Bruteforce(profile, request, pool)
    least = every.least(below=found * (1 + 1e-9), cost=cost)
    return (found / least if least < math.inf else 1.0), every.best


def main(
    cases: Annotated[int, option("random cases of each kind")] = 40,
    kind: Annotated[str, option("only this kind of case")] = "",
    first: Annotated[int, option("the seed of the first case")] = 0,
    listed: Annotated[bool, typer.Option("--list", help="also name the seeds of plans that are not the best")] = False,
) -> None:
    """Print the table."""
    head("plans over the best of all | cases | best of all | within 1 % | worst")
    for each in KINDS if not kind else (kind,):
        gaps = {}
        for seed in range(first, first + cases):
            profile, request, pool = case_of(each, seed)
            gaps[seed] = gap_of((profile, replace(request, tolerance=0.0), pool))[0]
        best, near = (sum(gap <= limit for gap in gaps.values()) / cases for limit in (1 + 1e-8, 1.01))
        row(each, cases, f"{best:.1%}", f"{near:.1%}", f"{max(gaps.values()) - 1:.2%}")
        if listed:
            print({seed: round(gap, 5) for seed, gap in gaps.items() if gap > 1 + 1e-8})
