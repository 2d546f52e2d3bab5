"""Finds the best plan for GPUs of one or several types: equal pipelines, unequal ones, or pipelines over two types.

A :class:`Sweep` finds the equal pipelines on each type. Mixes are then searched with the micro-batch sizes that suit
equal pipelines, and replace equal pipelines if they are faster by more than the request's tolerance. A mix of all GPUs
is not always the best: mixes of fewer GPUs that might be as fast are searched, too, so that an added GPU never makes a
plan slower. Mixes with pipelines over two types (:mod:`simulator.search.two_types`) also replace others if they are
that much faster. Of mixes that are about as fast, the one with fewest kinds of pipelines is chosen.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import permutations, product

import numpy as np

from morph.contract.errors import PlanError
from morph.contract.plan import Schedule
from morph.contract.pool import Pool
from morph.contract.profile import Profile
from simulator.costs.answer import SimulatedKind, Simulation, describe_kinds
from simulator.costs.outcome import ShapeOutcome
from simulator.costs.zone_traffic import usd_between_zones
from simulator.inputs.node_types import of_pool_type
from simulator.inputs.request import PlanRequest
from simulator.search.mix_search import Effort, Search
from simulator.search.mixes import Found, Mix, Mixes
from simulator.search.pipelines import Pipelines
from simulator.search.sweep import Sweep
from simulator.search.two_types import TwoTypes


def allows_unequal(request: PlanRequest, *, on_nodes: bool = False) -> bool:
    """Return whether pipelines may be unequal: each worker has a device of its own, and no shape is given.

    ``on_nodes``: also allow nodes with several devices (:mod:`simulator.search.nodes`).
    """
    sizes = None if on_nodes else request.num_gpus_per_node
    given = (sizes, request.compute_slots, request.jitter_seed, request.slow or None)
    shape = (request.pipeline_depth, request.num_replicas)
    return request.unequal and request.objective != "progress" and all(each is None for each in (*given, *shape))


def _with_near_links(profile: Profile) -> Profile:
    near = {"activation": profile.intra_node.activation, "gradient": profile.intra_node.gradient}
    return profile.model_copy(update={"inter_node": profile.inter_node.model_copy(update=near)})


class Pools:
    """Answers for GPUs of some types; ``names``: see :func:`of_pool_type`; ``sweeps``: those that exist already."""

    def __init__(
        self,
        profile: Profile,
        request: PlanRequest,
        names: Sequence[str],
        sweeps: Sequence[Sweep] = (),
        most_replicas: int | None = None,
    ) -> None:
        self.names, self.profile, self.request, self.most_replicas = tuple(names), profile, request, most_replicas
        self.alone: Pools = self
        self.nodes: tuple[tuple[int, ...], ...] | None = None
        self.sweeps = tuple(sweeps) or tuple(
            Sweep(of_pool_type(profile, name), request, request.conditions(None)) for name in names
        )
        self._by_size = [
            {sweep.settings[0].sections.micro_batch_size: sweep for sweep in each.by_micro_batch_size()}
            for each in self.sweeps
        ]
        self._mixes: dict[tuple[int, Schedule], Mixes] = {}
        self._two_types: dict[tuple[int, Schedule], TwoTypes] = {}

    def on_nodes(self, nodes: tuple[tuple[int, ...], ...] | None) -> Pools:
        """Return these pools with equal pipelines on nodes of several GPUs; ``nodes``: GPUs of each node, by type."""
        if nodes is None:
            return self
        other = copy(self)
        conditions = [self.request.conditions(sizes) for sizes in nodes]
        other.sweeps = tuple(sweep.under(each) for sweep, each in zip(self.sweeps, conditions, strict=True))
        other.nodes = nodes
        return other

    @cached_property
    def near(self) -> Pools:
        """These pools with the times of messages inside a node for all messages between stages."""
        profiles = [of_pool_type(self.profile, name) for name in self.names]
        sweeps = [Sweep(_with_near_links(each), self.request, self.request.conditions(None)) for each in profiles]
        return Pools(self.profile, self.request, self.names, sweeps)

    def equal(self, gpus: Sequence[int], count: int = 1, below_ns: float = math.inf) -> list[Found]:
        """Return the fastest equal pipelines on each type alone, best first, in at most ``below_ns``."""
        found = []
        for place, (sweep, number) in enumerate(zip(self.sweeps, gpus, strict=True)):
            depths: Sequence[int] = range(1, min(number, sweep.num_sections) + 1)
            if below_ns == math.inf:
                depths = sweep.depths(number, most_replicas=self.most_replicas) if number else ()
            if depths:
                outcomes = sweep.fastest(number, depths, count, self.most_replicas, below_ns / 1e9)
                found += [self.of_outcome(place, outcome) for outcome in outcomes]
        return sorted(found, key=lambda each: (each.mini_batch_ns, sum(each.workers)))

    def best(self, gpus: Sequence[int], count: int = 1) -> list[Found]:
        """Return the fastest answers, best first, equal pipelines if about as fast as mixes; PlanError if none fits."""
        found = self._of_one_type_each(gpus, count)
        crossing = self.crossing(tuple(gpus), found[0] if found else None)
        if not found and crossing is None:
            raise self.too_small(gpus)
        return ([crossing] if crossing else []) + found[: count - 1 if crossing else count]

    def crossing(
        self, gpus: tuple[int, ...], best: Found | None, sizes: Sequence[int] = (), below_ns: float = math.inf
    ) -> Found | None:
        """Return the fastest mix with pipelines over two types that surpasses ``best`` and takes under ``below_ns``,
        from the micro-batch sizes ``sizes`` if given, else those that seem best.
        """
        if sum(number > 0 for number in gpus) < 2:
            return None
        if best is not None:
            below_ns = min(below_ns, best.mini_batch_ns * self.request.worth)
        schedule = self.request.schedule or "varuna"
        answer: Found | None = None
        for size in sizes or self.crossing_sizes(gpus, best):
            found = self.two_types_of(size, schedule).best(gpus, below_ns, quick=bool(sizes))
            if found is not None:
                answer, below_ns = found, found.mini_batch_ns
        return answer

    def crossing_sizes(self, gpus: tuple[int, ...], best: Found | None) -> list[int]:
        """Return micro-batch sizes for pipelines over two types: that of the best answer, or all, best first, for few
        GPUs or where nothing else fits.
        """
        if best is not None and not Effort.for_gpus(gpus).is_thorough:
            return [size for size in self.sizes() if size == best.micro_batch_size]
        schedule = self.request.schedule or "varuna"
        return sorted(self.sizes(), key=lambda size: self.two_types_of(size, schedule).least_ns(gpus))

    def two_types_of(self, micro_batch_size: int, schedule: Schedule) -> TwoTypes:
        """Return the search for pipelines over two types, with one micro-batch size and schedule."""
        key = micro_batch_size, schedule
        if key not in self._two_types:
            self._two_types[key] = TwoTypes(self.mixes(*key), self.of_size(micro_batch_size))
        return self._two_types[key]

    def _of_one_type_each(self, gpus: Sequence[int], count: int) -> list[Found]:
        mixes = self.unequal(gpus)
        below_ns = mixes[0].mini_batch_ns / self.request.worth if mixes else math.inf
        equal = self.equal(gpus, count, below_ns)
        if equal:
            mixes = self.unequal(gpus, equal) or mixes
        is_worth = mixes and not (equal and equal[0].mini_batch_ns * self.request.worth <= mixes[0].mini_batch_ns)
        return (mixes + equal if is_worth else equal + mixes)[:count]

    def of_outcome(self, place: int, outcome: ShapeOutcome) -> Found:
        """Return equal pipelines on one type as an answer."""
        workers = [0] * len(self.names)
        workers[place] = outcome.shape[0] * outcome.shape[1]
        return Found(outcome.mini_batch_ns, tuple(workers), (self.names[place],), outcome)

    def unequal(self, gpus: Sequence[int], equal: Sequence[Found] = ()) -> list[Found]:
        """Return the fastest mixes on these GPUs or fewer, best first, that surpass the best equal pipelines."""
        best: list[Found] = []
        below = equal[0].mini_batch_ns * self.request.worth if equal else math.inf
        for size, schedule in self.promising(tuple(gpus), equal, below):
            mixes = self.mixes(size, schedule)
            for subset in self._subsets(mixes, tuple(gpus), below):
                found = [mix for mix in mixes.best(subset, below) if mix.mini_batch_ns < below]
                if found:
                    best = [*(self.of_mix(mix, mixes) for mix in found), *best]
                    below = float(best[0].mini_batch_ns)
        simplest = min(
            (each for each in best if each.mini_batch_ns * self.request.worth <= below),
            key=lambda each: (each.num_kinds, each.mini_batch_ns),
            default=None,
        )
        return [each for each in best if each is simplest] + [each for each in best if each is not simplest]

    def promising(self, gpus: tuple[int, ...], equal: Sequence[Found], below_ns: float) -> list[tuple[int, Schedule]]:
        """Return micro-batch sizes and schedules for mixes: those of equal pipelines, and the most promising others.

        A size is ranked by a bound, then by a bound within memory, and finally by the estimated time of its mixes.
        """
        found: dict[tuple[int, Schedule], None] = {}
        for each in equal:
            assert each.outcome is not None, "equal pipelines were simulated"
            costs = each.outcome.costs
            schedules: tuple[Schedule, ...] = (costs.schedule,) if self.request.schedule else ("varuna", costs.schedule)
            found |= dict.fromkeys((costs.sections.micro_batch_size, schedule) for schedule in schedules)
        schedule, effort = self.request.schedule or "varuna", Effort.for_gpus(gpus)
        types = [(size, self.mixes(size, schedule).types) for size in self.sizes()]
        heap = [(Search(there, gpus, limited=False).least_ns(), 0, size) for size, there in types]
        heapq.heapify(heap)
        taken: list[float] = []
        while heap and len(taken) < effort.sizes:
            time_ns, known, size = heapq.heappop(heap)
            if time_ns >= min([below_ns, *taken[:1]]) * effort.doubt:
                break
            search = self.mixes(size, schedule).search(gpus)
            if known == 0:
                heapq.heappush(heap, (search.least_ns(), 1, size))
            elif known == 1:
                solved = search.solve(frozenset())
                heapq.heappush(heap, (math.inf if solved is None else solved[0], 2, size))
            else:
                taken.append(time_ns)
                found[size, schedule] = None
        return list(found)

    def table(
        self, most: Sequence[int], micro_batch_size: int, equal: Sequence[Mapping[int, ShapeOutcome]]
    ) -> Iterator[tuple[tuple[int, ...], Found]]:
        """Yield the best answer for every number of GPUs of each type up to ``most`` on which the job fits.

        ``equal``: for each type, the fastest equal pipelines by number of GPUs, where they fit.
        """
        schedule = self.request.schedule or "varuna"
        mixes, two_types = self.mixes(micro_batch_size, schedule), self.two_types_of(micro_batch_size, schedule)
        deepest = mixes.num_sections - 1
        for i, j in permutations(range(len(most)), 2):  # bounds of all numbers at once
            two_types.splits_of(i, j, (min(most[i], deepest), min(most[j], deepest)))
        least: dict[tuple[int, ...], Found] = {}
        for gpus in product(*(range(number + 1) for number in most)):
            alone = [
                self.of_outcome(place, equal[place][number])
                for place, number in enumerate(gpus)
                if number in equal[place]
            ]
            fewer = [(*gpus[:place], number - 1, *gpus[place + 1 :]) for place, number in enumerate(gpus) if number]
            known = [least[each] for each in fewer if each in least]
            best = min(alone, key=lambda each: (each.mini_batch_ns, sum(each.workers)), default=None)
            if best is not None:
                below = min([best.mini_batch_ns * self.request.worth, *(each.mini_batch_ns for each in known)])
                for mix in mixes.best(gpus, below)[:1] if sum(gpus) > 1 else ():
                    if mix.mini_batch_ns < below:
                        known.append(self.of_mix(mix, mixes))
            fastest = min([*known, *alone], key=lambda each: each.mini_batch_ns, default=None)
            crossing = self.crossing(gpus, fastest, [micro_batch_size])
            known += [crossing] if crossing else []
            if known:
                least[gpus] = min(known, key=lambda each: each.mini_batch_ns)
            if best is not None and not (known and least[gpus].mini_batch_ns < best.mini_batch_ns * self.request.worth):
                yield gpus, best
            elif known:
                yield gpus, least[gpus]

    def zone_usd(self, found: Found) -> float:
        """Return the price (USD) of the data that one mini-batch of an answer sends from one zone to another."""
        price = self.request.zone_usd_per_gb
        return usd_between_zones(self._kinds(found), price) if price else 0.0

    def of_mix(self, mix: Mix, mixes: Mixes) -> Found:
        """Return a mix as an answer."""
        workers = tuple(mix.workers.get(place, 0) for place in range(len(self.names)))
        return Found(mix.mini_batch_ns, workers, mix=mix, mixes=mixes)

    def sizes(self) -> list[int]:
        """Return the micro-batch sizes that are possible on all types."""
        return sorted(set.intersection(*map(set, self._by_size)))

    def of_size(self, micro_batch_size: int) -> list[Sweep]:
        """Return the sweep of each type with one micro-batch size."""
        return [sizes[micro_batch_size] for sizes in self._by_size]

    def mixes(self, micro_batch_size: int, schedule: Schedule) -> Mixes:
        """Return the mixes with one micro-batch size and schedule."""
        key = micro_batch_size, schedule
        if key not in self._mixes:
            types = [
                Pipelines(sizes[micro_batch_size], schedule, name)
                for sizes, name in zip(self._by_size, self.names, strict=True)
            ]
            self._mixes[key] = Mixes(types, self.most_replicas)
        return self._mixes[key]

    def _subsets(self, mixes: Mixes, gpus: tuple[int, ...], below_ns: float) -> Iterator[tuple[int, ...]]:
        """Yield all of these GPUs, then fewer that may finish a mini-batch in less than ``below_ns``."""
        yield gpus
        count = Effort.for_gpus(gpus).subsets
        least = np.array([max(0, number - count) for number in gpus])
        done = [each[fewest:] for each, fewest in zip(mixes.search(gpus).done(below_ns), least.tolist(), strict=True)]
        sums = sum(np.ix_(*done)) if len(done) > 1 else done[0]
        enough = least + np.argwhere(np.asarray(sums) >= mixes.total)
        order = np.argsort(-enough.sum(axis=1), kind="stable")
        for place in order[1 : 1 + count].tolist():
            yield tuple(enough[place].tolist())

    def described(self, found: Found) -> Simulation:
        """Return an answer as a simulation."""
        return describe_kinds(self._kinds(found))

    def _kinds(self, found: Found) -> list[SimulatedKind]:
        if found.outcome is not None:
            simulator = self.sweeps[self.names.index(found.node_types[0])].shape_simulator
            return [SimulatedKind(found.outcome, simulator, found.node_types)]
        assert found.mix is not None, "neither equal nor a mix"
        assert found.mixes is not None, "a mix of nothing"
        return found.mixes.described(found.mix)

    def too_small(self, gpus: Sequence[int]) -> PlanError:
        """Return an error that says how many GPUs of which type are enough, and what takes most memory."""
        refused = []
        for name, sweep, number in zip(self.names, self.sweeps, gpus, strict=True):
            if number:
                try:
                    sweep.checked_depths(number, None, None)
                except PlanError as error:
                    refused.append((name, sweep.fewest_gpus(), error))
        if len(refused) == 1:
            return refused[0][2]
        ways = [f"{name}={fewest}" for name, fewest, _ in refused if fewest is not None]
        pool = Pool.of(dict(zip(self.names, gpus, strict=True)))
        crosses, schedule = self.nodes is None, self.request.schedule or "varuna"
        both = [self.two_types_of(size, schedule).fewest(gpus) for size in self.sizes() if crosses]
        if enough := min((each for each in both if each), key=sum, default=None):
            ways.append(str(Pool.of(dict(zip(self.names, enough, strict=True)))))
        why = "; ".join(
            f"on {name}, {str(error).split('; allowed')[0].rsplit(': ', 1)[-1]}" for name, _, error in refused
        )
        return PlanError(
            f"the job fits on no type of these GPUs alone{', nor in pipelines over two of them' * crosses} ({why})",
            field="pool",
            value=str(pool),
            allowed=", or ".join(ways) or "devices with more memory",
        )
