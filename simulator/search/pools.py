"""The best plan for GPUs of one or several types: equal pipelines on one of them, unequal ones, or ones over two types.

Equal pipelines on one type are asked of its :class:`Sweep`. Mixes are then looked for with the micro-batch sizes that
suit those, and replace them where they take 0.1 % less. A mix of all GPUs is not always the best: those of fewer GPUs
that might be as fast are looked at too, so that no GPU makes a plan slower. Mixes with pipelines that are on two types
(:mod:`simulator.search.two_types`) replace others where they take 0.1 % less, too.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from morph.contract.errors import PlanError
from morph.contract.plan import Schedule
from morph.contract.pool import Pool
from morph.contract.profile import Profile
from simulator.costs.answer import SimulatedKind, Simulation, describe_kinds
from simulator.costs.outcome import Outcome
from simulator.engine.times import Ints
from simulator.inputs.conditions import of_pool_type
from simulator.inputs.request import PlanRequest
from simulator.search.mixes import Mix, Mixes, Search
from simulator.search.pipelines import Pipelines
from simulator.search.sweep import Sweep
from simulator.search.two_types import TwoTypes

WORTH = 0.999
"""Unequal pipelines replace equal ones if they take at most this fraction of their time."""
_SIZES, _MANY = 4, 64
"""How many micro-batch sizes are looked at, those of the least bounds first; one, with more than ``_MANY`` GPUs."""
_NEAR = 1.01
"""Sizes are looked at whose mixes are estimated to take at most this many times as long as the best size's."""
_HOPEFUL = 1.01
"""An estimate may be too high by this factor."""
_CHOICES = 16
"""Choices of GPUs that are planned for a budget."""
_SLOWER, _LENGTHS, _CHEAP = 16.0, 24, 6
"""Cheaper mini-batches may be up to ``_SLOWER`` times as long; ``_LENGTHS`` lengths between are tried, and the
``_CHEAP`` cheapest choices of GPUs are planned."""
_TINY, _CROSSING_SIZES, _CROSSED, _BUSY = 8, 2, 128, 0.98
"""For pipelines over two types, ``_CROSSING_SIZES`` micro-batch sizes are tried on at most ``_TINY`` GPUs, one on more.
With more than ``_CROSSED`` GPUs no such pipelines are tried if the best plan uses at least ``_BUSY`` of the GPUs."""
_PART_IDLE = 1.05
"""For dollars, GPUs are looked at that would take at most this many times as long as costs least, were all of them
used: pipelines may use fewer."""
_SUBSETS = {True: 16, False: 2}
"""How many smaller choices of GPUs are tried: with at most ``_MANY`` GPUs (True), and with more."""


@dataclass(frozen=True)
class Found:
    """One answer: equal pipelines, of a type or over two (``node_types``: of each stage, or one for all), or a mix."""

    mini_batch_ns: int
    workers: tuple[int, ...]
    node_types: tuple[str, ...] = ("",)
    outcome: Outcome | None = None
    mix: Mix | None = None
    mixes: Mixes | None = None

    @property
    def micro_batch_size(self) -> int:
        """The m of all pipelines."""
        if self.outcome is not None:
            return self.outcome.costs.sections.micro_batch_size
        assert self.mixes is not None, "a mix of nothing"
        return self.mixes.types[0].settings[0].sections.micro_batch_size

    @property
    def num_kinds(self) -> int:
        """Kinds of pipelines."""
        return 1 if self.mix is None else len(self.mix.shares)


def allows_unequal(request: PlanRequest, *, on_nodes: bool = False) -> bool:
    """Whether pipelines may be unequal: each worker has a device of its own, and no shape is given.

    ``on_nodes``: even if nodes have several devices (:mod:`simulator.search.nodes`).
    """
    sizes = None if on_nodes else request.num_gpus_per_node
    given = (sizes, request.compute_slots, request.jitter_seed, request.slow or None)
    shape = (request.pipeline_depth, request.num_replicas)
    return request.unequal and request.objective != "progress" and all(each is None for each in (*given, *shape))


def _cheap_subsets(mixes: Mixes, gpus: tuple[int, ...], usd_per_h: Sequence[float]) -> list[tuple[int, ...]]:
    """GPUs of these that may make examples for fewest dollars: of mini-batches of several lengths the cheapest."""
    search = mixes.search(gpus)
    solved = search.solve(frozenset())
    if solved is None:
        return []
    found: dict[tuple[int, ...], float] = {}
    for time_ns in np.geomspace(solved[0], solved[0] * _SLOWER, _LENGTHS).tolist():
        subset = cheapest_enough(search.done(time_ns), mixes.total, usd_per_h)
        if subset is not None and sum(subset) > 1:
            usd = time_ns * float(np.dot(subset, usd_per_h))
            found[subset] = min(usd, found.get(subset, math.inf))
    return sorted(found, key=found.__getitem__)[:_CHEAP]


def cheapest_enough(done: Sequence[Ints], total: int, usd_per_h: Sequence[float]) -> tuple[int, ...] | None:
    """The cheapest numbers of GPUs of each type that do so many micro-batches; None where all do fewer.

    Types are added one by one. After each, a choice is dropped if another one does as much for the same price or less.

    Args:
        done: Of each type, what 0, 1, ... GPUs do.
        total: Micro-batches.
        usd_per_h: Price of a GPU of each type.
    """
    most, usd, counts = np.zeros(1, np.int64), np.zeros(1), np.zeros((1, 0), np.int64)
    for each, price in zip(done, usd_per_h, strict=True):
        gaining = np.flatnonzero(np.diff(each, prepend=-1) > 0)  # other numbers cost more and do no more
        first, place = np.divmod(np.arange(len(most) * len(gaining)), len(gaining))
        number = gaining[place]
        most, usd = np.minimum(total, most[first] + each[number]), usd[first] + price * number
        order = np.lexsort((-most, usd))
        before = np.maximum.accumulate(np.concatenate([[-1], most[order][:-1]]))
        order = order[most[order] > before]
        most, usd = most[order], usd[order]
        counts = np.column_stack([counts[first[order]], number[order]])
    return tuple(counts[-1].tolist()) if most[-1] >= total else None


def maximal_within(gpus: Sequence[int], usd_per_h: Sequence[float], most_usd: float) -> Ints:
    """Return every choice of GPUs to which the budget cannot add one: [number of choices, number of types].

    Args:
        gpus: How many of each type there are.
        usd_per_h: Price of a GPU of each type.
        most_usd: Price of all chosen GPUs together, at most.
    """
    *others, last = gpus
    chosen = np.array(list(product(*(range(number + 1) for number in others))), np.int64)
    left = most_usd - chosen @ np.array(usd_per_h[:-1])
    chosen, left = chosen[left >= 0], left[left >= 0]
    of_last = np.minimum(last, left // usd_per_h[-1]).astype(np.int64)
    found = np.column_stack([chosen, of_last]).astype(np.int64)
    left -= of_last * usd_per_h[-1]
    full = (found == np.array(gpus)) | (left[:, None] < np.array(usd_per_h))
    maximal: Ints = found[full.all(axis=1) & found.any(axis=1)]
    return maximal


class Pools:
    """Answers for numbers of GPUs of some types.

    Args:
        profile: What calibration measured.
        request: How to look for plans.
        names: Of the types; see :func:`of_pool_type`.
        sweeps: Of the types, if there are any already.
        most_replicas: D at most.
    """

    def __init__(
        self,
        profile: Profile,
        request: PlanRequest,
        names: Sequence[str],
        sweeps: Sequence[Sweep] = (),
        most_replicas: int | None = None,
    ) -> None:
        self.names, self.request, self.most_replicas = tuple(names), request, most_replicas
        self.sweeps = tuple(sweeps) or tuple(
            Sweep(of_pool_type(profile, name), request, request.conditions(None)) for name in names
        )
        self._by_size = [
            {sweep.settings[0].sections.micro_batch_size: sweep for sweep in each.by_micro_batch_size()}
            for each in self.sweeps
        ]
        self._mixes: dict[tuple[int, Schedule], Mixes] = {}
        self._two_types: dict[tuple[int, Schedule], TwoTypes] = {}

    def equal(self, gpus: Sequence[int], count: int = 1, below_ns: float = math.inf) -> list[Found]:
        """The fastest equal pipelines on each type alone, best first; none that take longer than ``below_ns``.

        Raises:
            PlanError: the job fits on none of them; not raised with a ``below_ns``, which shows that it fits somehow.
        """
        found = []
        for place, (sweep, number) in enumerate(zip(self.sweeps, gpus, strict=True)):
            depths: Sequence[int] = range(1, min(number, sweep.num_sections) + 1)
            if below_ns == math.inf:
                depths = sweep.depths(number, most_replicas=self.most_replicas) if number else ()
            if depths:
                outcomes = sweep.fastest(number, depths, count, self.most_replicas, below_ns / 1e9)
                found += [self.of_outcome(place, outcome) for outcome in outcomes]
        if not found and below_ns == math.inf:
            raise self._too_small(gpus)
        return sorted(found, key=lambda each: (each.mini_batch_ns, sum(each.workers)))

    def best(self, gpus: Sequence[int], count: int = 1) -> list[Found]:
        """The fastest answers, best first: a mix of all types, unless equal pipelines of one are about as fast.

        Raises:
            PlanError: the job fits on none of them.
        """
        found, refused = list[Found](), None
        try:
            found = self._of_one_type_each(gpus, count)
        except PlanError as error:
            refused = error
        crossing = self.crossing(tuple(gpus), found[0] if found else None)
        if refused is not None and crossing is None:
            raise refused
        return ([crossing] if crossing else []) + found[: count - 1 if crossing else count]

    def crossing(
        self, gpus: tuple[int, ...], best: Found | None, sizes: Sequence[int] = (), below_ns: float = math.inf
    ) -> Found | None:
        """The fastest mix with pipelines over two types that surpasses the best one without; None: there is none.

        ``sizes``: micro-batch sizes, in place of those that seem best; ``below_ns``: it takes less than so much.
        """
        if sum(number > 0 for number in gpus) < 2:
            return None
        if best is not None:
            below_ns = min(below_ns, best.mini_batch_ns * WORTH)
        if best is not None and sum(gpus) > _CROSSED and sum(best.workers) >= _BUSY * sum(gpus):
            return None  # not enough to gain for how long so many GPUs take to look at
        schedule = self.request.schedule or "varuna"
        answer: Found | None = None
        for size in sizes or self._crossing_sizes(gpus, best, schedule):
            two_types = self._two_types_of(size, schedule)
            found = two_types.best(gpus, below_ns, quick=bool(sizes))
            if found is not None:
                below_ns, mixes = found.mini_batch_ns, None if found.mix is None else two_types.joint
                answer = Found(found.mini_batch_ns, found.workers, found.node_types, found.outcome, found.mix, mixes)
        return answer

    def _crossing_sizes(self, gpus: tuple[int, ...], best: Found | None, schedule: Schedule) -> list[int]:
        """Micro-batch sizes for pipelines over two types: that of the best answer, or those that seem best."""
        if best is not None and sum(gpus) > _TINY:
            return [best.micro_batch_size] if best.micro_batch_size in self.sizes() else []
        times_ns = {size: self._two_types_of(size, schedule).least_ns(gpus) for size in self.sizes()}
        return sorted((size for size in times_ns if times_ns[size] < math.inf), key=times_ns.__getitem__)[
            :_CROSSING_SIZES
        ]

    def _two_types_of(self, micro_batch_size: int, schedule: Schedule) -> TwoTypes:
        key = micro_batch_size, schedule
        if key not in self._two_types:
            self._two_types[key] = TwoTypes(self.mixes(*key), self.of_size(micro_batch_size))
        return self._two_types[key]

    def _of_one_type_each(self, gpus: Sequence[int], count: int) -> list[Found]:
        mixes = self.unequal(gpus)
        below_ns = mixes[0].mini_batch_ns / WORTH if mixes else math.inf
        equal = self.equal(gpus, count, below_ns)
        if equal:
            mixes = self.unequal(gpus, equal) or mixes
        is_worth = mixes and not (equal and equal[0].mini_batch_ns * WORTH <= mixes[0].mini_batch_ns)
        return (mixes + equal if is_worth else equal + mixes)[:count]

    def of_outcome(self, place: int, outcome: Outcome) -> Found:
        """Equal pipelines of a type as an answer."""
        workers = [0] * len(self.names)
        workers[place] = outcome.shape[0] * outcome.shape[1]
        return Found(outcome.mini_batch_ns, tuple(workers), (self.names[place],), outcome)

    def unequal(self, gpus: Sequence[int], equal: Sequence[Found] = ()) -> list[Found]:
        """The fastest mixes on these GPUs, or fewer, best first, that surpass the best equal pipelines."""
        best: list[Found] = []
        below = equal[0].mini_batch_ns * WORTH if equal else math.inf
        for size, schedule in self._promising(tuple(gpus), equal, below):
            mixes = self.mixes(size, schedule)
            for subset in self._subsets(mixes, tuple(gpus), below):
                found = [mix for mix in mixes.best(subset, below) if mix.mini_batch_ns < below]
                if found:
                    best = [*(self._of_mix(mix, mixes) for mix in found), *best]
                    below = float(best[0].mini_batch_ns)
        return best

    def _promising(self, gpus: tuple[int, ...], equal: Sequence[Found], below_ns: float) -> list[tuple[int, Schedule]]:
        """Micro-batch sizes and schedules for mixes: those of equal pipelines, and the most promising others.

        A size is known first by a bound, then by one within memory, then by a sketch, then by what mixes of it are
        estimated to take.
        """
        found: dict[tuple[int, Schedule], None] = {}
        for each in equal:
            assert each.outcome is not None, "equal pipelines were simulated"
            costs = each.outcome.costs
            schedules: tuple[Schedule, ...] = (costs.schedule,) if self.request.schedule else ("varuna", costs.schedule)
            found |= dict.fromkeys((costs.sections.micro_batch_size, schedule) for schedule in schedules)
        schedule, num_sizes = self.request.schedule or "varuna", _SIZES if sum(gpus) <= _MANY else 1
        heap = [(Search(self.mixes(size, schedule), gpus, limited=False).least_ns(), 0, size) for size in self.sizes()]
        heapq.heapify(heap)
        taken: list[float] = []
        while heap and len(taken) < num_sizes:
            time_ns, known, size = heapq.heappop(heap)
            if time_ns >= min(below_ns * _HOPEFUL, taken[0] * _NEAR if taken else math.inf):
                break
            search = self.mixes(size, schedule).search(gpus)
            if known == 0:
                heapq.heappush(heap, (search.least_ns(), 1, size))
            elif known == 1:
                heapq.heappush(heap, (search.sketch_ns(), 2, size))
            elif known == 2:
                solved = search.solve(frozenset())
                heapq.heappush(heap, (math.inf if solved is None else solved[0], 3, size))
            else:
                taken.append(time_ns)
                found[size, schedule] = None
        return list(found)

    def cheapest(self, gpus: Sequence[int], equal: Sequence[Found], usd_per_h: Sequence[float]) -> Found | None:
        """The mix with fewest dollars per example that surpasses equal pipelines; None: there is none.

        Args:
            gpus: Of each type, at most; what is not used is not paid.
            equal: The cheapest equal pipelines, best first, on whose micro-batch size mixes go.
            usd_per_h: Price of a GPU of each type.

        Raises:
            PlanError: the job fits on none of them.
        """

        def cost(found: Found) -> float:
            return found.mini_batch_ns * float(np.dot(found.workers, usd_per_h))

        best, below = None, cost(equal[0]) * WORTH if equal else math.inf
        for size, schedule in self._promising(tuple(gpus), equal, math.inf):
            mixes = self.mixes(size, schedule)
            for subset in _cheap_subsets(mixes, tuple(gpus), usd_per_h):
                for mix in mixes.best(subset, below / float(np.dot(subset, usd_per_h)) * _PART_IDLE):
                    if cost(found := self._of_mix(mix, mixes)) < below:
                        best, below = found, cost(found)
        crossing = self._cheapest_crossing(tuple(gpus), best or (equal[0] if equal else None), usd_per_h)
        if crossing is not None and cost(crossing) < below * (WORTH if best else 1):
            return crossing
        if best is None and not equal:
            raise self._too_small(gpus)
        return best

    def affordable(self, gpus: Sequence[int], usd_per_h: Sequence[float], most_usd: float) -> list[tuple[int, ...]]:
        """Return GPUs of each type that a budget pays for: all maximal choices if there are few, else promising ones.

        Those are promising that do most micro-batches in the time in which any do enough, as far as mixes are
        estimated.

        Args:
            gpus: How many of each type there are.
            usd_per_h: Price of a GPU of each type.
            most_usd: Price of all chosen GPUs together, at most.
        """
        choices = maximal_within(gpus, usd_per_h, most_usd)
        if len(choices) > _CHOICES:
            best = np.linspace(0, len(choices) - 1, _CHOICES).astype(np.int64)
            for size, schedule in self._promising(tuple(gpus), (), math.inf)[:1]:  # none if no type alone is enough
                mixes = self.mixes(size, schedule)
                search = mixes.search(tuple(gpus))
                solved = search.solve(frozenset())
                for time_ns in (
                    () if solved is None else np.geomspace(solved[0], solved[0] * 16 * _SLOWER, 8 * _LENGTHS)
                ):
                    done = sum(each[choices[:, place]] for place, each in enumerate(search.done(time_ns)))
                    if np.max(done) >= mixes.total:
                        best = np.argsort(-done, kind="stable")[:_CHOICES]
                        break
            choices = choices[best]
        return [tuple(each) for each in choices.tolist()]

    def cheapest_that_fits(self, gpus: Sequence[int], usd_per_h: Sequence[float]) -> tuple[float, tuple[int, ...]]:
        """Return the least price per hour for which the job fits on some of these GPUs, and how many of each type."""
        enough = []
        for place, (sweep, number) in enumerate(zip(self.sweeps, gpus, strict=True)):
            fewest = sweep.fewest_gpus()
            if fewest is not None and fewest <= number:
                enough.append(tuple(fewest * (each == place) for each in range(len(gpus))))
        schedule = self.request.schedule or "varuna"
        for size in self.sizes():
            for needed in self._two_types_of(size, schedule).fitting(gpus):
                if all(need <= number for need, number in zip(needed, gpus, strict=True)):
                    enough.append(needed)
        return min((float(np.dot(needed, usd_per_h)), needed) for needed in enough)

    def _cheapest_crossing(self, gpus: tuple[int, ...], best: Found | None, usd_per_h: Sequence[float]) -> Found | None:
        """The cheapest mix with pipelines over two types, of those that may cost less than the best answer."""
        found, below = None, math.inf
        if best is not None:
            below = best.mini_batch_ns * float(np.dot(best.workers, usd_per_h)) * WORTH
        schedule = self.request.schedule or "varuna"
        for size in self._crossing_sizes(gpus, best, schedule) if sum(number > 0 for number in gpus) > 1 else ():
            for least, subset in self._two_types_of(size, schedule).cheap(gpus, usd_per_h):
                below_ns = below / float(np.dot(subset, usd_per_h)) * _PART_IDLE
                crossing = self.crossing(subset, None, [size], below_ns) if least < below else None
                if crossing is not None:
                    usd = crossing.mini_batch_ns * float(np.dot(crossing.workers, usd_per_h))
                    found, below = (crossing, usd) if usd < below else (found, below)
        return found

    def table(
        self, most: Sequence[int], micro_batch_size: int, equal: Sequence[Mapping[int, Outcome]]
    ) -> Iterator[tuple[tuple[int, ...], Found]]:
        """The best answer for every number of GPUs of each type up to ``most``; none where the job does not fit.

        Args:
            most: GPUs of each type.
            micro_batch_size: Of all answers.
            equal: Of each type, by number of GPUs, the fastest equal pipelines, where any fit.
        """
        mixes = self.mixes(micro_batch_size, self.request.schedule or "varuna")
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
                below = min([best.mini_batch_ns * WORTH, *(each.mini_batch_ns for each in known)])
                for mix in mixes.best(gpus, below)[:1] if sum(gpus) > 1 else ():
                    if mix.mini_batch_ns < below:
                        known.append(self._of_mix(mix, mixes))
            fastest = min([*known, *alone], key=lambda each: each.mini_batch_ns, default=None)
            crossing = self.crossing(gpus, fastest, [micro_batch_size])
            known += [crossing] if crossing else []
            if known:
                least[gpus] = min(known, key=lambda each: each.mini_batch_ns)
            if best is not None and not (known and least[gpus].mini_batch_ns < best.mini_batch_ns * WORTH):
                yield gpus, best
            elif known:
                yield gpus, least[gpus]

    def _of_mix(self, mix: Mix, mixes: Mixes) -> Found:
        workers = tuple(mix.workers.get(place, 0) for place in range(len(self.names)))
        return Found(mix.mini_batch_ns, workers, mix=mix, mixes=mixes)

    def sizes(self) -> list[int]:
        """Micro-batch sizes that all types have."""
        return sorted(set.intersection(*map(set, self._by_size)))

    def of_size(self, micro_batch_size: int) -> list[Sweep]:
        """The sweep of each type with one micro-batch size."""
        return [sizes[micro_batch_size] for sizes in self._by_size]

    def mixes(self, micro_batch_size: int, schedule: Schedule) -> Mixes:
        """Of one micro-batch size and schedule."""
        key = micro_batch_size, schedule
        if key not in self._mixes:
            types = [
                Pipelines(sizes[micro_batch_size], schedule, name)
                for sizes, name in zip(self._by_size, self.names, strict=True)
            ]
            self._mixes[key] = Mixes(types, self.most_replicas)
        return self._mixes[key]

    def _subsets(self, mixes: Mixes, gpus: tuple[int, ...], below_ns: float) -> Iterator[tuple[int, ...]]:
        """All of these GPUs, then fewer that may be enough for so short a mini-batch."""
        yield gpus
        count = _SUBSETS[sum(gpus) <= _MANY]
        least = np.array([max(0, number - count) for number in gpus])
        done = [each[fewest:] for each, fewest in zip(mixes.search(gpus).done(below_ns), least.tolist(), strict=True)]
        sums = sum(np.ix_(*done)) if len(done) > 1 else done[0]
        enough = least + np.argwhere(np.asarray(sums) >= mixes.total)
        order = np.argsort(-enough.sum(axis=1), kind="stable")
        for place in order[1 : 1 + count].tolist():
            yield tuple(enough[place].tolist())

    def described(self, found: Found) -> Simulation:
        """The whole answer."""
        if found.outcome is not None:
            simulator = self.sweeps[self.names.index(found.node_types[0])].shape_simulator
            return describe_kinds([SimulatedKind(found.outcome, simulator, found.node_types)])
        assert found.mix is not None, "neither equal nor a mix"
        assert found.mixes is not None, "a mix of nothing"
        return describe_kinds(found.mixes.described(found.mix))

    def _too_small(self, gpus: Sequence[int]) -> PlanError:
        """Say which of the types would do with how many GPUs, and what takes most."""
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
        crosses, schedule = self.request.num_gpus_per_node is None, self.request.schedule or "varuna"
        both = [self._two_types_of(size, schedule).fewest(gpus) for size in self.sizes() if crosses]
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
