"""Chooses what to buy: GPUs or nodes with fewest dollars per example, or the fastest within a budget.

GPUs that are nodes of their own are bought one by one. Nodes of several GPUs are bought whole, including GPUs that stay
idle: a *choice* is a number of nodes of each type and size. Bounds for equal pipelines on the nodes of a choice are
computed quickly and show which choices are promising. For each promising choice the fastest plan on just these nodes is
found; its price is that of the nodes that it uses.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from morph.contract import ranges
from morph.contract.errors import PlanError
from morph.contract.plan import Plan
from morph.contract.pool import Pool, type_and_zone
from morph.contract.profile import Profile
from morph.words import counted
from simulator.costs.answer import Simulation
from simulator.costs.zone_traffic import bytes_between_zones, usd_between_zones
from simulator.engine.times import Ints
from simulator.inputs.node_types import of_pool_type
from simulator.inputs.placement import node_sizes
from simulator.inputs.request import PlanRequest
from simulator.search.choice import PlanChoice
from simulator.search.mixes import Found, Mixes
from simulator.search.objectives import Cheapest, Shape, usd_per_h_of
from simulator.search.pools import Pools
from simulator.search.sweep import Sweep

Floats = npt.NDArray[np.float64]
_HOUR_NS = 3.6e12
_CHOICES = 16
"""The largest number of choices of GPUs or nodes that are planned."""
_SLOWER, _LENGTHS, _CHEAP = 16.0, 24, 6
"""Cheaper mini-batches may be up to ``_SLOWER`` times as long; ``_LENGTHS`` lengths between are tried, and the
``_CHEAP`` cheapest choices of GPUs are planned."""
_PART_IDLE = 1.05
"""Mixes are planned if with all of their GPUs they take at most this many times as long as the cheapest, because
pipelines may use fewer GPUs."""
_MOST_CHOICES = 200_000
"""The largest number of choices of GPUs or nodes that are compared."""
_ABOUT = 1 + 1e-9
"""A price may be above the budget by this factor, for rounding."""
_COMPARED, _POINTS = 64, 12
"""At most ``_COMPARED`` choices of nodes are compared by pipelines planned on their nodes. More choices are first
compared by the rates of nodes of one size, for ``_POINTS`` numbers of GPUs."""
_GAIN = 0.75
"""A choice of nodes is not planned if even with this fraction of the estimated time it would not be the best."""


def prices_of(request: PlanRequest, names: Sequence[str]) -> list[float]:
    """Return dollars per GPU-hour of each type; PlanError: a type has no price."""
    price, field = request.usd_per_gpu_hour, "usd_per_gpu_hour"
    by_type = dict[Any, float](price.items()) if isinstance(price, Mapping) else dict.fromkeys(names, price)
    found = [float(by_type.get(name) or by_type.get(type_and_zone(name)[0]) or math.nan) for name in names]
    if any(each not in ranges.USD_PER_HOUR for each in found):
        allowed = f"dollars per GPU-hour of each of {', '.join(names)}" if any(names) else "dollars per GPU-hour"
        raise PlanError("is not a price of each type", field=field, value=price, allowed=allowed)
    return found


def usd_per_h_in_use(request: PlanRequest, best: Plan) -> float | None:
    """Return the price per hour of the GPUs, or of the nodes of several GPUs, that a plan uses; None: unknown."""
    if request.usd_per_gpu_hour is None:
        return None
    used = nodes_in_use(best)
    prices = {each: _usd_per_gpu_h(request, *each) for each in used}
    known = {each: usd for each, usd in prices.items() if usd is not None}
    return sum(usd * each[1] * used[each] for each, usd in known.items()) if known == prices else None


def nodes_in_use(plan: Plan) -> Counter[tuple[str, int]]:
    """Return how many nodes of each type and size a plan uses. Without nodes each GPU counts as one."""
    if not plan.placement:
        return Counter({(name, 1): number for name, number in plan.pool})
    nodes = {
        node: plan.stages[stage].node_type
        for replica, row in enumerate(plan.placement)
        for node, stage in zip(row, plan.stages_of(replica), strict=True)
    }
    return Counter((node_type, plan.node_sizes[node]) for node, node_type in nodes.items())


def nodes_text(nodes: Mapping[tuple[str, int], int]) -> str:
    """Return numbers of nodes of each type and size in words."""
    return " and ".join(
        f"{counted(number, 'node')} of {f'{size} {name}' if name else counted(size, 'GPU')}"
        for (name, size), number in sorted(nodes.items(), key=lambda each: (each[0][0], -each[0][1]))
        if number
    )


def _usd_per_gpu_h(request: PlanRequest, name: str, size: int) -> float | None:
    """Return the price of one GPU of this type, in a node of this size; None: unknown."""
    price = request.usd_per_gpu_hour
    if not isinstance(price, Mapping):
        return price
    known: dict[Any, float] = dict(price.items())
    return known.get(name, known.get(type_and_zone(name)[0], known.get(size)))


def zone_usd_per_h(request: PlanRequest, simulation: Simulation) -> float:
    """Return the price, USD per hour, of the data sent from one zone to another."""
    price = request.zone_usd_per_gb
    return usd_between_zones(simulation.kinds, price) * 3600 / simulation.expected.mini_batch_s if price else 0.0


def _usd_per_h(price: float, shape: Shape) -> float:
    return price * shape[0] * shape[1]


def cheapest_equal(pools: Pools, gpus: Sequence[int], prices: Sequence[float], count: int) -> list[Found]:
    """Return the ``count`` cheapest equal pipelines, each on one type, best first."""

    def cost(found: Found) -> float:
        usd_per_h: float = sum(map(operator.mul, found.workers, prices))
        return found.mini_batch_ns * usd_per_h

    found: list[Found] = []
    for place, (sweep, number, price) in enumerate(zip(pools.sweeps, gpus, prices, strict=True)):
        depths = sweep.depths(number) if number else ()
        shapes = [
            (depth, replicas) for depth in depths for replicas in sweep.replicas(min(number // depth, sweep.total))
        ]
        aim = Cheapest(sweep.profile.job.batch_size, partial(_usd_per_h, price))
        below = math.inf  # the cost of the last of the cheapest so far
        if len(found) == count:
            below = cost(found[-1]) / 3600 / 1e9 / sweep.profile.job.batch_size
        cheaper = [pools.of_outcome(place, outcome) for outcome in sweep.best(shapes, count, aim, below)]
        found = sorted([*found, *cheaper], key=cost)[:count]
    return found


def within_budget(
    pools: Pools, gpus: Sequence[int], request: PlanRequest, answer: Callable[[Sequence[int]], PlanChoice]
) -> PlanChoice:
    """Return the best plan of GPUs that together cost no more than the budget.

    ``answer`` returns the best plan on GPUs of each type, without the budget. Raises PlanError if no plan fits, or none
    within the budget; the message names a budget that is enough.
    """
    budget, prices = request.budget_usd_per_h or 0.0, prices_of(request, pools.names)
    best, sign = answer(gpus), 1 if request.objective == "examples_per_s" else -1
    most_usd = budget * _ABOUT

    def answers(gpus: Sequence[int], most_usd: float) -> list[PlanChoice]:
        found = []
        for numbers in affordable(pools, gpus, prices, most_usd):
            with contextlib.suppress(PlanError):  # the job does not fit on this few GPUs
                found.append(answer(numbers))
        return found

    if _usd_per_h_of(best) > most_usd:
        found = answers(gpus, most_usd)
        dear = [each.zone_usd_per_h for each in found if _usd_per_h_of(each) > most_usd]
        if dear:  # try fewer GPUs, to pay for the data too, and GPUs of one zone
            found += answers(gpus, most_usd - max(dear))
            zones = [type_and_zone(name)[1] for name in pools.names]
            for zone in dict.fromkeys(zones):
                found += answers([number * (of == zone) for number, of in zip(gpus, zones, strict=True)], most_usd)
        found = [each for each in found if _usd_per_h_of(each) <= most_usd]
        if not found:
            usd_per_h, enough = cheapest_that_fits(pools, gpus, prices)
            on = Pool.of(dict(zip(pools.names, enough, strict=True))) if any(pools.names) else ""
            raise _too_small_budget(budget, usd_per_h, str(on) or counted(enough[0], "GPU"))
        best = max(found, key=lambda choice: sign * choice.values[0])
        best = replace(best, least_s=None)  # that of the GPUs of one choice
    return replace(best, num_gpus=sum(gpus))


def _usd_per_h_of(choice: PlanChoice) -> float:
    return (choice.usd_per_h or 0.0) + choice.zone_usd_per_h


def _too_small_budget(budget: float, usd_per_h: float, on: str) -> PlanError:
    allowed = f"{usd_per_h:.4g} for {on}"
    return PlanError("is too small for this job", field="budget_usd_per_h", value=budget, allowed=allowed)


def _cheap_subsets(mixes: Mixes, gpus: tuple[int, ...], usd_per_h: Sequence[float]) -> list[tuple[int, ...]]:
    """Return GPUs that may have the fewest dollars per example: the cheapest for mini-batches of several lengths."""
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


def cheapest(pools: Pools, gpus: Sequence[int], equal: Sequence[Found], usd_per_h: Sequence[float]) -> Found | None:
    """Return the mix with fewest dollars per example that surpasses equal pipelines; None if there is none.

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
        return crossing
    if best is None and not equal:
        raise pools.too_small(gpus)
    return best


def _cost(pools: Pools, found: Found, usd_per_h: Sequence[float]) -> float:
    """Return the price of a mini-batch (USD/h times ns): of the GPUs in use, and of the data between zones."""
    return found.mini_batch_ns * float(np.dot(found.workers, usd_per_h)) + pools.zone_usd(found) * _HOUR_NS


def affordable(pools: Pools, gpus: Sequence[int], usd_per_h: Sequence[float], most_usd: float) -> list[tuple[int, ...]]:
    """Return GPUs of each type within a budget: all maximal choices if there are few, else those estimated to finish
    most micro-batches in the time in which any choice finishes all.
    """
    choices = maximal_within(gpus, usd_per_h, most_usd)
    if len(choices) > _CHOICES:
        best = np.linspace(0, len(choices) - 1, _CHOICES).astype(np.int64)
        for size, schedule in pools.promising(tuple(gpus), (), math.inf)[:1]:  # none if the job fits on no type alone
            mixes = pools.mixes(size, schedule)
            search = mixes.search(tuple(gpus))
            solved = search.solve(frozenset())
            for time_ns in () if solved is None else np.geomspace(solved[0], solved[0] * 16 * _SLOWER, 8 * _LENGTHS):
                done = sum(each[choices[:, place]] for place, each in enumerate(search.done(time_ns)))
                if np.max(done) >= mixes.total:
                    best = np.argsort(-done, kind="stable")[:_CHOICES]
                    break
        choices = choices[best]
    return [tuple(each) for each in choices.tolist()]


def cheapest_that_fits(pools: Pools, gpus: Sequence[int], usd_per_h: Sequence[float]) -> tuple[float, tuple[int, ...]]:
    """Return the lowest price per hour of GPUs on which the job fits, and the number of GPUs of each type."""
    enough = []
    for place, (sweep, number) in enumerate(zip(pools.sweeps, gpus, strict=True)):
        fewest = sweep.fewest_gpus()
        if fewest is not None and fewest <= number:
            enough.append(tuple(fewest * (each == place) for each in range(len(gpus))))
    schedule = pools.request.schedule or "varuna"
    for size in pools.sizes():
        for needed in pools.two_types_of(size, schedule).fitting(gpus):
            if all(need <= number for need, number in zip(needed, gpus, strict=True)):
                enough.append(needed)
    return min((float(np.dot(needed, usd_per_h)), needed) for needed in enough)


def _cheapest_crossing(
    pools: Pools, gpus: tuple[int, ...], best: Found | None, usd_per_h: Sequence[float]
) -> Found | None:
    """Return the cheapest mix with pipelines over two types that costs less than the best answer; None: none does."""
    found, below = None, math.inf
    if best is not None:
        below = _cost(pools, best, usd_per_h) * pools.request.worth
    schedule = pools.request.schedule or "varuna"
    for size in pools.crossing_sizes(gpus, best, schedule) if sum(number > 0 for number in gpus) > 1 else ():
        for least, subset in pools.two_types_of(size, schedule).cheap(gpus, usd_per_h):
            below_ns = below / float(np.dot(subset, usd_per_h)) * _PART_IDLE
            crossing = pools.crossing(subset, None, [size], below_ns) if least < below else None
            if crossing is not None:
                usd = _cost(pools, crossing, usd_per_h)
                found, below = (crossing, usd) if usd < below else (found, below)
    return found


@dataclass(frozen=True)
class Offer:
    """Nodes of one type and size (GPUs) that can be bought; ``kind``: the type's place; ``usd_per_h`` of one node."""

    kind: int
    size: int
    number: int
    usd_per_h: float


class NodePurchases:
    """Choices of nodes of several GPUs. Raises PlanError if a type or a size has no price.

    ``names`` of the types are empty for the profile's own. ``nodes``: GPUs of each node, by type.
    """

    def __init__(
        self, profile: Profile, request: PlanRequest, names: Sequence[str], nodes: Sequence[tuple[int, ...]]
    ) -> None:
        self.request, self.names, self.nodes = request, tuple(names), tuple(nodes)
        price = request.usd_per_gpu_hour
        if isinstance(price, Mapping) and all(isinstance(key, int) for key in price):
            usd_per_h_of(price, Counter(size for sizes in nodes for size in sizes))  # refuses a size without a price
        else:
            prices_of(request, names)
        self.offers = [
            Offer(kind, size, number, size * (_usd_per_gpu_h(request, names[kind], size) or 0.0))
            for kind, sizes in enumerate(nodes)
            for size, number in sorted(Counter(sizes).items(), reverse=True)
        ]
        free = replace(request, num_gpus_per_node=None, budget_usd_per_h=None)
        self.sweeps = [
            Sweep(of_pool_type(profile, name) if name else profile, free, free.conditions(None)) for name in names
        ]
        self._rates: dict[tuple[int, tuple[int, ...]], float] = {}

    def best(self, fastest: Callable[[list[tuple[int, ...]]], PlanChoice], count: int) -> PlanChoice:
        """Return the best plans on nodes that are worth buying, within the budget if there is one.

        Raises PlanError if no plan fits, or none within the budget; the message names a budget that is enough.
        """
        batch_size, is_cheap = self.sweeps[0].profile.job.batch_size, self.request.objective == "usd_per_example"
        costs: list[tuple[float, float, PlanChoice, int]] = []
        num_shapes, least, refused = 0, math.inf, None
        for choice, estimated in self._promising():
            if estimated * _GAIN >= least:
                continue
            try:
                found = fastest(self._nodes_of(choice))
            except PlanError as error:  # a requested shape does not fit on this few nodes
                refused = error
                continue
            num_shapes += found.num_shapes
            for place, simulation in enumerate(found.simulations):
                time_s = simulation.expected.mini_batch_s
                usd_per_h = usd_per_h_in_use(self.request, simulation.plan) or 0.0
                usd_per_h += zone_usd_per_h(self.request, simulation)
                if usd_per_h > (self.request.budget_usd_per_h or math.inf) * _ABOUT:
                    continue
                costs.append((time_s * usd_per_h if is_cheap else time_s, usd_per_h, found, place))
                least = min(least, costs[-1][0])
        if not costs:
            raise refused or self._refused(fastest)
        ranked: dict[tuple[str, str], tuple[float, float, PlanChoice, int]] = {}
        for each in sorted(costs, key=lambda cost: cost[:2]):
            plan = each[2].simulations[each[3]].plan
            ranked.setdefault((plan.shape, str(plan.pool)), each)
        kept = list(ranked.values())[:count]
        best = kept[0][2].simulations[kept[0][3]]
        return replace(
            kept[0][2],
            simulations=tuple(found.simulations[place] for _, _, found, place in kept),
            values=tuple(cost / 3600 / batch_size if is_cheap else batch_size / cost for cost, _, _, _ in kept),
            objective=self.request.objective,
            num_gpus=sum(map(sum, self.nodes)),
            num_shapes=num_shapes,
            usd_per_h=usd_per_h_in_use(self.request, best.plan),
            zone_bytes=bytes_between_zones(best.kinds),
            zone_usd_per_h=zone_usd_per_h(self.request, best),
            least_s=None,  # that of the nodes of one choice
        )

    def _promising(self) -> list[tuple[list[int], float]]:
        """Return numbers of nodes of each offer, the most promising first, each with its estimated seconds or cost."""
        numbers, usd_per_node = [each.number for each in self.offers], [each.usd_per_h for each in self.offers]
        most_usd = (self.request.budget_usd_per_h or math.inf) * _ABOUT
        is_cheap = self.request.objective == "usd_per_example"
        choices = _every(numbers) if is_cheap else maximal_within(numbers, usd_per_node, most_usd)
        choices = choices[(choices @ np.array(usd_per_node) <= most_usd) & choices.any(axis=1)]
        for estimate in (self._rough_times_s, self._times_s):
            if estimate == self._rough_times_s and len(choices) <= _COMPARED:
                continue
            times_s, usd_per_h = estimate(choices), choices @ np.array(usd_per_node)
            costs = times_s * usd_per_h if is_cheap else times_s
            order = np.lexsort((choices.sum(axis=1), usd_per_h, costs))
            order = order[np.isfinite(costs[order])][:_COMPARED]
            choices, times_s, costs = choices[order], times_s[order], costs[order]
        kept: list[int] = []
        for place, choice in enumerate(choices):
            if not any((choices[k] <= choice).all() and times_s[k] <= times_s[place] for k in kept):
                kept.append(place)  # other choices add nodes to a kept one without being faster
        return [(choices[place].tolist(), float(costs[place])) for place in kept[:_CHOICES]]

    def _nodes_of(self, choice: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the GPUs of each node of a choice, by type, in the order in which the nodes were given."""
        left = {(each.kind, each.size): number for each, number in zip(self.offers, choice, strict=True)}
        found = []
        for kind, sizes in enumerate(self.nodes):
            bought = []
            for size in sizes:
                if left[kind, size]:
                    left[kind, size] -= 1
                    bought.append(size)
            found.append(tuple(bought))
        return found

    def _times_s(self, choices: Ints) -> Floats:
        """Return a mini-batch's time on each choice if the types share it among equal pipelines that run as planned."""
        rates = [
            sum(self._rate(kind, sizes) for kind, sizes in enumerate(self._nodes_of(choice)))
            for choice in choices.tolist()
        ]
        return _inverse(np.array(rates))

    def _rough_times_s(self, choices: Ints) -> Floats:
        """Return these times as if each node's rate were its share of that of as many GPUs in nodes of its size."""
        sizes, kinds = np.array([each.size for each in self.offers]), np.array([each.kind for each in self.offers])
        gpus, rates = choices * sizes, np.zeros(len(choices))
        for kind, given in enumerate(self.nodes):
            of_kind = gpus[:, kinds == kind].sum(axis=1)
            numbers = np.unique(np.linspace(0, sum(given), _POINTS + 1).astype(np.int64))
            for place in np.flatnonzero(kinds == kind).tolist():
                alike = [node_sizes(int(number), int(sizes[place])) for number in numbers]
                curve = np.maximum.accumulate([self._rate(kind, each) for each in alike])
                rates += gpus[:, place] / np.maximum(1, of_kind) * np.interp(of_kind, numbers, curve)
        return _inverse(rates)

    def _rate(self, kind: int, sizes: tuple[int, ...]) -> float:
        """Return an upper bound of the mini-batches per second of equal pipelines on these nodes; 0: none fit."""
        if (kind, sizes) not in self._rates:
            depth, replicas, num_gpus = self.request.pipeline_depth, self.request.num_replicas, sum(sizes)
            sweep = self.sweeps[kind]
            depths = sweep.depths(num_gpus, depth, replicas) if num_gpus else ()
            shapes = [(each, replicas or min(num_gpus // each, sweep.total)) for each in depths]
            if shapes:
                sweep = sweep.under(replace(sweep.shape_simulator.conditions, node_sizes=sizes))
            bound_s = sweep.bounds_s(shapes, math.inf, planned=True, fewer=replicas is None)
            self._rates[kind, sizes] = 1 / bound_s
        return self._rates[kind, sizes]

    def _refused(self, fastest: Callable[[list[tuple[int, ...]]], PlanChoice]) -> PlanError:
        """Return an error that says which nodes are enough, or what prevents any plan."""
        try:
            fastest([tuple(sizes) for sizes in self.nodes])
        except PlanError as error:
            return error
        budget = self.request.budget_usd_per_h
        assert budget is not None, "a plan fits on all nodes, but no choice of nodes was promising"
        usd_per_h, enough = min(
            (sum(each.usd_per_h * number for each, number in zip(self.offers, choice, strict=True)), choice)
            for choice in self._that_fit()
        )
        named = [(self.names[each.kind], each.size) for each in self.offers]
        return _too_small_budget(budget, usd_per_h, nodes_text(dict(zip(named, enough, strict=True))))

    def _that_fit(self) -> list[list[int]]:
        """Return choices of nodes of one type with enough GPUs for the job."""
        found = []
        for kind, sweep in enumerate(self.sweeps):
            total = sum(self.nodes[kind])
            fits = (
                number
                for number in range(1, total + 1)
                if sweep.depths(number, self.request.pipeline_depth, self.request.num_replicas)
            )
            fewest = next(fits, math.inf)
            choices = _every([each.number * (each.kind == kind) for each in self.offers])
            gpus = choices @ np.array([each.size for each in self.offers])
            found += choices[gpus >= fewest].tolist()
        return found


def _inverse(rates: Floats) -> Floats:
    with np.errstate(divide="ignore"):
        found: Floats = 1 / rates
    return found
