"""Chooses what to buy: GPUs or nodes with fewest dollars per example, or the fastest within a budget.

A *choice* is a number of nodes of each type, zone and size; GPUs that are nodes of their own are nodes of one GPU. The
choices that are estimated to be best are planned, and each plan costs what the nodes that it uses cost: nodes of
several GPUs are bought whole, including GPUs that stay idle.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from morph.contract.errors import PlanError
from simulator.costs.answer import Simulation
from simulator.engine.times import Floats, Ints
from simulator.inputs.request import PlanRequest
from simulator.inputs.stock import Stock, usd_per_h_in_use
from simulator.search.choice import PlanChoice, zone_usd_per_h
from simulator.search.knapsack import LENGTHS, SLOWER, cheap_choices
from simulator.search.mixes import Found, Mixes
from simulator.search.pools import Pools
from simulator.search.proof import may_take, proof
from simulator.search.requested_objective import objective_for

_HOUR_NS = 3.6e12
_CHOICES = 16
"""The largest number of choices of GPUs or nodes that are planned."""
_PART_IDLE = 1.05
"""Mixes are planned if with all of their GPUs they take at most this many times as long as the cheapest, because
pipelines may use fewer GPUs."""
_MOST_CHOICES = 200_000
"""The largest number of choices of GPUs or nodes that are compared."""
_ABOUT = 1 + 1e-9
"""A price may be above the budget by this factor, for rounding."""
_COMPARED = 64
"""At most this many choices of nodes of several GPUs are compared by pipelines planned on their nodes."""


def cheapest_equal(pools: Pools, gpus: Sequence[int], prices: Sequence[float], count: int) -> list[Found]:
    """Return the ``count`` cheapest equal pipelines, each on one type, best first."""
    found: list[Found] = []
    for place, (sweep, number, price) in enumerate(zip(pools.sweeps, gpus, prices, strict=True)):
        depths = sweep.depths(number) if number else ()
        shapes = [
            (depth, replicas) for depth in depths for replicas in sweep.replicas(min(number // depth, sweep.total))
        ]
        aim = objective_for(pools.request, sweep, number, price)
        below = math.inf  # the cost of the last of the cheapest so far
        if len(found) == count:
            below = _cost(pools, found[-1], prices) / _HOUR_NS / sweep.profile.job.batch_size
        cheaper = [pools.of_outcome(place, outcome) for outcome in sweep.best(shapes, count, aim, below)]
        found = sorted([*found, *cheaper], key=lambda each: _cost(pools, each, prices))[:count]
    return found


def _cheap_subsets(mixes: Mixes, gpus: tuple[int, ...], usd_per_h: Sequence[float]) -> list[tuple[int, ...]]:
    """Return numbers of GPUs of each type whose plans may cost the least per example, the cheapest first."""
    search = mixes.search(gpus)
    solved = search.solve(frozenset())
    if solved is None:
        return []

    def enough(time_ns: float) -> tuple[int, ...] | None:
        subset = cheapest_enough(search.done(time_ns), mixes.total, usd_per_h)
        return None if subset is None or sum(subset) < 2 else subset

    return [subset for _, subset in cheap_choices(solved[0], enough, usd_per_h)]


def cheapest_enough(done: Sequence[Ints], total: int, usd_per_h: Sequence[float]) -> tuple[int, ...] | None:
    """Return the cheapest numbers of GPUs of each type that finish ``total`` micro-batches; None if none do.

    Types are added one by one. After each, a choice is dropped if another does as much for the same price or less.
    ``done``: for each type, the micro-batches that 0, 1, ... GPUs finish. ``usd_per_h``: price of a GPU of each type.
    """
    most, usd, counts = np.zeros(1, np.int64), np.zeros(1), np.zeros((1, 0), np.int64)
    for each, price in zip(done, usd_per_h, strict=True):
        gaining = np.flatnonzero(np.diff(each, prepend=-1) > 0)  # other numbers cost more and finish no more
        first, place = np.divmod(np.arange(len(most) * len(gaining)), len(gaining))
        number = gaining[place]
        most, usd = np.minimum(total, most[first] + each[number]), usd[first] + price * number
        order = np.lexsort((-most, usd))
        before = np.maximum.accumulate(np.concatenate([[-1], most[order][:-1]]))
        order = order[most[order] > before]
        most, usd = most[order], usd[order]
        counts = np.column_stack([counts[first[order]], number[order]])
    return tuple(counts[-1].tolist()) if most[-1] >= total else None


def maximal_within(numbers: Sequence[int], usd_per_h: Sequence[float], most_usd: float) -> Ints:
    """Return every choice of GPUs or nodes to which the budget cannot add one: [number of choices, number of kinds].

    If there are very many choices, only some are returned, spread out evenly. ``numbers`` are available of each kind.
    """
    numbers = [max(0, int(min(number, most_usd // usd))) for number, usd in zip(numbers, usd_per_h, strict=True)]
    prices, found = np.array(usd_per_h), _every(numbers[:-1])
    found = np.column_stack([found, np.zeros(len(found), np.int64)])
    left = most_usd - found @ prices
    found, left = found[left >= 0], left[left >= 0]
    for kind in reversed(range(len(numbers))):
        more = np.minimum(numbers[kind] - found[:, kind], left // prices[kind]).astype(np.int64)
        found[:, kind] += more
        left -= more * prices[kind]
    maximal: Ints = np.unique(found[found.any(axis=1)], axis=0)
    return maximal


def _every(numbers: Sequence[int]) -> Ints:
    """Return every choice of up to these numbers of each kind, or some, spread out evenly: [choices, kinds]."""
    each = max(2, int(_MOST_CHOICES ** (1 / max(1, len(numbers)))))
    if math.prod(number + 1 for number in numbers) <= _MOST_CHOICES:
        each = max(numbers, default=0) + 1
    found = np.zeros((1, 0), np.int64)
    for number in numbers:
        values = np.unique(np.linspace(0, number, min(each, number + 1)).astype(np.int64))
        found = np.column_stack([np.repeat(found, len(values), axis=0), np.tile(values, len(found))])
        found = found[np.unique(np.linspace(0, len(found) - 1, min(len(found), _MOST_CHOICES)).astype(np.int64))]
    return found


def cheapest(pools: Pools, gpus: Sequence[int], equal: Sequence[Found], usd_per_h: Sequence[float]) -> list[Found]:
    """Return the mix that costs the least per example, if one surpasses equal pipelines.

    Unused GPUs cost nothing. Mixes also use micro-batch sizes of ``equal``, the cheapest equal pipelines, best first.
    Raises PlanError if the job does not fit.
    """

    def cost(found: Found) -> float:
        return _cost(pools, found, usd_per_h)

    best, below = None, cost(equal[0]) * pools.request.worth if equal else math.inf
    for size, schedule in pools.promising(tuple(gpus), equal, math.inf):
        mixes = pools.mixes(size, schedule)
        for subset in _cheap_subsets(mixes, tuple(gpus), usd_per_h):
            for mix in mixes.best(subset, below / float(np.dot(subset, usd_per_h)) * _PART_IDLE):
                if cost(found := pools.of_mix(mix, mixes)) < below:
                    best, below = found, cost(found)
    crossing = _cheapest_crossing(pools, tuple(gpus), best or (equal[0] if equal else None), usd_per_h)
    if crossing is not None and cost(crossing) < below * (pools.request.worth if best else 1):
        return [crossing]
    if best is None and not equal:
        raise pools.too_small(gpus)
    return [best] if best else []


def _cost(pools: Pools, found: Found, usd_per_h: Sequence[float]) -> float:
    """Return the price of a mini-batch (USD/h times ns): of the GPUs in use, and of the data between zones."""
    return found.mini_batch_ns * float(np.dot(found.workers, usd_per_h)) + pools.zone_usd(found) * _HOUR_NS


def _cheapest_crossing(
    pools: Pools, gpus: tuple[int, ...], best: Found | None, usd_per_h: Sequence[float]
) -> Found | None:
    """Return the cheapest mix with pipelines over two types that costs less than the best answer; None: none does."""
    found, below = None, math.inf
    if best is not None:
        below = _cost(pools, best, usd_per_h) * pools.request.worth
    schedule = pools.request.schedule or "varuna"
    for size in pools.crossing_sizes(gpus, best) if sum(number > 0 for number in gpus) > 1 else ():
        for least, subset in pools.two_types_of(size, schedule).cheap(gpus, usd_per_h):
            below_ns = below / float(np.dot(subset, usd_per_h)) * _PART_IDLE
            crossing = pools.crossing(subset, None, [size], below_ns) if least < below else None
            if crossing is not None:
                usd = _cost(pools, crossing, usd_per_h)
                found, below = (crossing, usd) if usd < below else (found, below)
    return found


class Purchases:
    """Choices of nodes of a stock. Raises PlanError if a type or a size of node has no price.

    ``answer`` returns the best plans on some nodes, whatever they cost: by the request's objective, or the fastest
    where nodes have several GPUs, because these are paid whole.
    """

    def __init__(self, pools: Pools, request: PlanRequest, stock: Stock, answer: Callable[[Stock], PlanChoice]) -> None:
        self.pools, self.request, self.stock, self._answer = pools, request, stock, answer
        self.is_cheap = request.objective == "usd_per_example"
        self.pays_whole = self.is_cheap and stock.nodes is not None
        """Whether whole nodes are paid, so that the fastest plan must be found for every choice and then priced."""
        self.most_usd = (request.budget_usd_per_h or math.inf) * _ABOUT
        self._rates: dict[tuple[int, tuple[int, ...]], float] = {}
        stock.usd_per_node(request)

    def best(self, count: int) -> PlanChoice:
        """Return the best plans on nodes that are worth buying, within the budget if there is one.

        Raises PlanError if no plan fits, or none within the budget; the message names a budget that is enough.
        """
        planned = [] if self.stock.nodes else [self._answer(self.stock)]
        if not planned or self._usd_per_h(planned[0].best_simulation) > self.most_usd:
            planned += self._bought()
        planned = planned or [self._answer(self.stock)]  # estimates may have missed all choices on which it fits
        costs, firsts = list[tuple[float, float, PlanChoice, int]](), list[tuple[float, float, PlanChoice, int]]()
        for found in planned:
            paid = [
                (self._cost(simulation), usd_per_h, found, place)
                for place, simulation in enumerate(found.simulations)
                if (usd_per_h := self._usd_per_h(simulation)) <= self.most_usd
            ]
            costs += paid
            firsts += paid if self.pays_whole else paid[:1]  # an answer's first is the simplest of its best plans
        if not costs:
            raise self._too_small_budget()
        ranked: dict[tuple[str, str], tuple[float, float, PlanChoice, int]] = {}
        for each in (min(firsts, key=lambda cost: cost[:2]), *sorted(costs, key=lambda cost: cost[:2])):
            plan = each[2].simulations[each[3]].plan
            ranked.setdefault((plan.shape, str(plan.pool)), each)
        kept, batch_size = list(ranked.values())[:count], self.pools.sweeps[0].profile.job.batch_size
        return kept[0][2].reordered(
            self.request,
            (found.simulations[place] for _, _, found, place in kept),
            (cost / 3600 / batch_size if self.is_cheap else batch_size / cost for cost, _, _, _ in kept),
            objective=self.request.objective,
            num_gpus=sum(self.stock.gpus),
            num_shapes=sum(found.num_shapes for found in planned),
            least_s=self._proof(kept[0][0]),
        )

    def _proof(self, best_s: float) -> Callable[[], float] | None:
        """Return the bound of all plans within the budget; None: no bound applies, or there are too many choices."""
        if self.is_cheap:
            return None
        kinds = self.stock.kinds
        choices = maximal_within(list(kinds.values()), self.stock.usd_per_node(self.request), self.most_usd)
        if len(choices) > _COMPARED:
            return None
        return proof(self.pools, [self.stock.part(choice) for choice in choices.tolist()], best_s)

    def _usd_per_h(self, simulation: Simulation) -> float:
        return (usd_per_h_in_use(self.request, simulation.plan) or 0.0) + zone_usd_per_h(self.request, simulation)

    def _cost(self, simulation: Simulation) -> float:
        """Return the seconds of a mini-batch, or its price (USD/h times seconds)."""
        return simulation.expected.mini_batch_s * (self._usd_per_h(simulation) if self.is_cheap else 1)

    def _bought(self) -> list[PlanChoice]:
        """Return the plans on the most promising choices within the budget; some cost more with the data they send."""
        found = self._planned(self.stock, self.most_usd)
        dear = [each.zone_usd_per_h for each in found if self._usd_per_h(each.best_simulation) > self.most_usd]
        if dear:  # try fewer GPUs, to pay for the data too, and GPUs of one zone
            found += self._planned(self.stock, self.most_usd - max(dear))
            for zone in self.stock.pool.zones:
                found += self._planned(self.stock.within([zone]), self.most_usd)
        return found

    def _planned(self, stock: Stock, most_usd: float) -> list[PlanChoice]:
        found, least = [], math.inf
        for part in self.promising(stock, most_usd):
            usd_per_h = float(np.dot(list(part.kinds.values()), part.usd_per_node(self.request)))
            most_s = least / (usd_per_h if self.is_cheap else 1)  # if it leaves no node unused: others are for that
            if part.nodes is not None and not may_take(self.pools, part, most_s):
                continue
            with contextlib.suppress(PlanError):  # the job, or a requested shape, does not fit on this few GPUs
                found.append(self._answer(part))
                paid = [each for each in found[-1].simulations if self._usd_per_h(each) <= self.most_usd]
                least = min([least, *map(self._cost, paid)])
        return found

    def promising(self, stock: Stock, most_usd: float) -> list[Stock]:
        """Return the most promising nodes within a budget, best first."""
        numbers, usd_per_node = list(stock.kinds.values()), stock.usd_per_node(self.request)
        choices = _every(numbers) if self.pays_whole else maximal_within(numbers, usd_per_node, most_usd)
        num_gpus = choices @ np.array([size for _, size in stock.kinds])
        needed = (self.request.pipeline_depth or 1) * (self.request.num_replicas or 1)
        choices = choices[(choices @ np.array(usd_per_node) <= most_usd) & (num_gpus >= needed)]

        def nearest(times_s: Floats, most: int) -> tuple[Ints, Floats]:
            usd_per_h = choices @ np.array(usd_per_node)
            costs = times_s * usd_per_h if self.is_cheap else times_s
            order = np.lexsort((choices.sum(axis=1), usd_per_h, costs))
            order = order[np.isfinite(costs[order])][:most]
            if not len(order):  # the job fits on no type alone
                order = np.linspace(0, len(choices) - 1, min(len(choices), most)).astype(np.int64)
            return choices[order], times_s[order]

        most = _CHOICES if stock.nodes is None else _COMPARED
        if len(choices) > most:
            choices = nearest(self._times_alone_s(stock, choices, most), most)[0]
        if stock.nodes is None:
            return [stock.part(choice) for choice in choices.tolist()]
        choices, times_s = nearest(self._times_s(stock, choices), most)
        kept: list[int] = []
        for place, choice in enumerate(choices):
            if not any((choices[k] <= choice).all() and times_s[k] <= times_s[place] for k in kept):
                kept.append(place)  # other choices add nodes to a kept one without being faster
        return [stock.part(choices[place].tolist()) for place in kept[:_CHOICES]]

    def _times_alone_s(self, stock: Stock, choices: Ints, enough: int) -> Floats:
        """Return a mini-batch's time on each choice, as if each GPU were a node of its own; inf where it is unknown.

        Times are found in ascending order; unless prices matter, the search stops once ``enough`` choices have a time.
        """
        found, kinds = np.full(len(choices), math.inf), stock.kinds
        gpus = np.zeros((len(choices), len(stock.gpus)), np.int64)
        for number, (place, size) in zip(choices.T, kinds, strict=True):
            gpus[:, place] += size * number
        for micro_batch_size, schedule in self.pools.promising(stock.gpus, (), math.inf)[:1]:
            mixes = self.pools.mixes(micro_batch_size, schedule)
            search = mixes.search(stock.gpus)
            solved = search.solve(frozenset())
            for time_ns in () if solved is None else np.geomspace(solved[0], solved[0] * 16 * SLOWER, 8 * LENGTHS):
                done = np.sum([each[gpus[:, place]] for place, each in enumerate(search.done(time_ns))], axis=0)
                new = (done >= mixes.total) & (found == math.inf)
                found[new] = time_ns / 1e9 * mixes.total / done[new]
                if np.isfinite(found).sum() >= (len(found) if self.is_cheap else enough):
                    break
        return found

    def _times_s(self, stock: Stock, choices: Ints) -> Floats:
        """Return a mini-batch's time on each choice if the types share it among equal pipelines that run as planned."""
        nodes = [stock.part(choice).nodes or () for choice in choices.tolist()]
        rates = [sum(self._rate(place, sizes) for place, sizes in enumerate(each)) for each in nodes]
        with np.errstate(divide="ignore"):
            found: Floats = 1 / np.array(rates)
        return found

    def _rate(self, place: int, sizes: tuple[int, ...]) -> float:
        """Return an upper bound of the mini-batches per second of equal pipelines on these nodes; 0: none fit."""
        if (place, sizes) not in self._rates:
            depth, replicas, num_gpus = self.request.pipeline_depth, self.request.num_replicas, sum(sizes)
            sweep = self.pools.sweeps[place]
            depths = sweep.depths(num_gpus, depth, replicas) if num_gpus else ()
            shapes = [(each, replicas or min(num_gpus // each, sweep.total)) for each in depths]
            if shapes:
                sweep = sweep.under(replace(sweep.shape_simulator.conditions, node_sizes=sizes))
            bound_s = sweep.bounds_s(shapes, math.inf, planned=True, fewer=replicas is None)
            self._rates[place, sizes] = 1 / bound_s
        return self._rates[place, sizes]

    def _too_small_budget(self) -> PlanError:
        """Return an error that names a budget that is enough."""
        prices = self.stock.usd_per_node(self.request)
        usd_per_h, choice = min((float(np.dot(each, prices)), each) for each in self._that_fit())
        return PlanError(
            "is too small for this job",
            field="budget_usd_per_h",
            value=self.request.budget_usd_per_h,
            allowed=f"{usd_per_h:.4g} for {self.stock.described(choice)}",
        )

    def _that_fit(self) -> list[list[int]]:
        """Return choices on which the job fits: on one type, or in a pipeline over two."""
        found, stock, request = list[list[int]](), self.stock, self.request
        sizes = np.array([size for _, size in stock.kinds])
        for place, (sweep, number) in enumerate(zip(self.pools.sweeps, stock.gpus, strict=True)):
            fits = (n for n in range(1, number + 1) if sweep.depths(n, request.pipeline_depth, request.num_replicas))
            choices = _every([nodes * (there == place) for (there, _), nodes in stock.kinds.items()])
            found += choices[choices @ sizes >= next(fits, math.inf)].tolist()
        schedule = request.schedule or "varuna"
        for size in self.pools.sizes() if stock.nodes is None else ():
            for needed in self.pools.two_types_of(size, schedule).fitting(stock.gpus):
                if all(need <= number for need, number in zip(needed, stock.gpus, strict=True)):
                    found.append(list(needed))
        return found
