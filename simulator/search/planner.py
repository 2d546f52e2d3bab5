"""Finds the best shape P x D, and its stages, for a number of GPUs or a pool (Varuna, section 4.4)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from morph.contract import ranges
from morph.contract.errors import PlanError
from morph.contract.plan import Plan
from morph.contract.pool import Pool
from morph.contract.profile import Profile
from morph.words import counted, time_text
from simulator.costs.answer import Simulation, describe
from simulator.costs.outcome import ShapeOutcome
from simulator.inputs.placement import node_sizes
from simulator.inputs.request import PlanRequest
from simulator.inputs.stock import Stock, usd_per_h_in_use
from simulator.search.choice import PlanChoice, zone_usd_per_h
from simulator.search.memory_limit import WORTH_SAYING, memory_sentence
from simulator.search.mini_batch import simulate
from simulator.search.mixes import Found
from simulator.search.nodes import OnNodes
from simulator.search.objectives import Shape
from simulator.search.pools import Pools, allows_unequal
from simulator.search.proof import proof
from simulator.search.purchases import Purchases, cheapest, cheapest_equal
from simulator.search.requested_objective import objective_for
from simulator.search.sweep import Sweep

if TYPE_CHECKING:
    import pandas as pd


NUM_RUNNERS_UP = 5
_ZONES = 3
"""Plans are made for every choice of at most this many zones. Of more zones, only all and each alone are planned."""


def plan(
    profile: Profile,
    request: PlanRequest = PlanRequest(),  # noqa: B008 (frozen)
    *,
    num_gpus: int | None = None,
    pool: Pool | Mapping[str, int] | None = None,
    num_runners_up: int = NUM_RUNNERS_UP,
    **more: Any,
) -> PlanChoice:
    """Find the best shape for a number of GPUs, or for a pool of several types of them.

    Args:
        num_gpus: May be left out if ``num_gpus_per_node`` lists the nodes.
        pool: The number of GPUs of each type, instead of ``num_gpus``. A type is one of the profile's ``node_types``,
            or the profile's own (see :func:`simulator.inputs.node_types.of_pool_type`).
        more: Fields of a request, which replace those of ``request``.

    Raises:
        PlanError: no plan fits, or an argument is wrong; the message says what is allowed or how much is enough.
    """
    request = replace(request, **more)
    ranges.RUNNERS_UP.check("num_runners_up", num_runners_up)
    stock, count = Stock.of(request, num_gpus, pool), 1 + num_runners_up
    if pool is not None:
        request = replace(request, unequal=True)
        _check_pool(request, stock.pool, on_nodes=True)
    is_whole = stock.nodes is not None and request.objective == "usd_per_example"  # whole nodes are paid
    free = replace(request, budget_usd_per_h=None, objective="examples_per_s" if is_whole else request.objective)
    pools = Pools(profile, free, stock.names)
    if request.budget_usd_per_h is None and not is_whole:
        return _plan_zones(pools, stock, count)
    return Purchases(pools, request, stock, lambda part: _plan_zones(pools, part, count)).best(count)


def _plan_zones(pools: Pools, stock: Stock, count: int) -> PlanChoice:
    """Return the best plan on these GPUs, or on those in only some of their zones if that is better."""
    request, zones, choices = pools.request, stock.pool.zones, [stock]
    if len(zones) > 1 and (request.zone_usd_per_gb or request.applied_to(pools.profile).between_zones is not None):
        numbers = range(len(zones) - 1, 0, -1) if len(zones) <= _ZONES else (1,)
        choices += [stock.within(some) for number in numbers for some in combinations(zones, number)]
    found, refused = list[PlanChoice](), list[PlanError]()
    for choice in choices:
        try:
            found.append(_plan_on(pools, choice, count))
        except PlanError as error:
            refused.append(error)
    if not found:
        raise refused[0]
    sign = -1 if request.objective == "usd_per_example" else 1
    best = max(found, key=lambda choice: sign * choice.values[0])
    least_s = next((each.least_s for each in found if each.num_gpus == sum(stock.gpus)), None)  # of GPUs in all zones
    return replace(best, num_gpus=sum(stock.gpus), least_s=least_s)


def _plan_on(pools: Pools, stock: Stock, count: int) -> PlanChoice:
    """Return the best plan on GPUs of one or several types."""
    request, here, gpus = pools.request, pools.on_nodes(stock.nodes), stock.gpus
    prices = stock.usd_per_node(request) if request.objective == "usd_per_example" else []
    simulations, values = list[Simulation](), list[float]()
    if len(gpus) == 1:
        equal, simulations, values, num_shapes = _of_one_type(here, gpus[0], prices, count)
    elif prices:
        equal = cheapest_equal(here, gpus, prices, count)
    elif stock.nodes is not None:
        equal = here.equal(gpus, count)
    else:
        equal = pools.best(gpus, count)
    mixes, unequal = list[Found](), None
    if stock.nodes is not None and allows_unequal(request, on_nodes=True):
        if not equal:
            raise here.too_small(gpus)
        best_of_type = {each.node_types: each for each in reversed(equal)}.values()
        unequal = OnNodes(here).best(sorted(best_of_type, key=lambda each: each.mini_batch_ns))
    elif prices and allows_unequal(request):
        mixes = cheapest(pools, gpus, equal, prices)
    elif len(gpus) == 1 and allows_unequal(request):
        mixes = pools.unequal(gpus, equal[:1])[:1]
    simulations = simulations or [here.described(each) for each in equal]
    simulations = [*([unequal] if unequal else map(here.described, mixes)), *simulations][:count]
    if request.objective != "progress":
        values = [_value(request, each) for each in simulations]
    num_shapes = num_shapes if len(gpus) == 1 else len(equal) + len(mixes)
    least_s = proof(pools, [stock], simulations[0].expected.mini_batch_s)
    choice = PlanChoice((), (), request.objective, sum(gpus), num_shapes, least_s=least_s)
    return choice.reordered(request, simulations, values)


def _of_one_type(
    pools: Pools, num_gpus: int, prices: Sequence[float], count: int
) -> tuple[list[Found], list[Simulation], list[float], int]:
    """Return the best equal pipelines on one type, best first, with their simulations, the objective's values, and the
    number of shapes that were considered.
    """
    request, sweep = pools.request, pools.sweeps[0]
    objective = objective_for(request, sweep, num_gpus, *prices)
    fastest = request.objective == "examples_per_s" and request.num_replicas is None
    shapes = _shapes(sweep, num_gpus, request.pipeline_depth, request.num_replicas, smaller=not fastest)
    if fastest:
        ranked = sweep.fastest(num_gpus, [depth for depth, _ in shapes], count)
    else:
        ranked = sweep.best(shapes, count, None if request.objective == "examples_per_s" else objective)
    found = [pools.of_outcome(0, outcome) for outcome in ranked]
    simulations = [pools.described(each) for each in found]
    simulations[0] = simulations[0].with_note(memory_sentence(sweep, shapes, ranked[0], objective))
    values = [objective.value(outcome.shape, outcome.mini_batch_ns / 1e9) for outcome in ranked]
    if not values[0]:
        message, allowed = "is so high that no shape makes progress", "fewer, or a shorter pause_s or replacement_s"
        raise PlanError(message, field="revocations_per_hour", value=request.revocations_per_hour, allowed=allowed)
    return found, simulations, values, sum(replicas for _, replicas in shapes) if fastest else len(shapes)


def _value(request: PlanRequest, simulation: Simulation) -> float:
    """Return examples per second, or dollars per example."""
    if request.objective == "examples_per_s":
        return simulation.expected.examples_per_s
    usd_per_h = (usd_per_h_in_use(request, simulation.plan) or 0.0) + zone_usd_per_h(request, simulation)
    return usd_per_h / 3600 / simulation.expected.examples_per_s


def advice(profile: Profile, request: PlanRequest, simulation: Simulation) -> str:
    """Return a sentence that names a faster shape of as many workers, and its gain; "" if there is none, or if slow
    workers or redundant computation are requested, which belong to the simulated shape.
    """
    if request.slow or request.redundant_computation != "off":
        return ""
    shape = simulation.plan
    fixed: dict[str, Any] = {"micro_batch_size": shape.micro_batch_size, "schedule": shape.schedule}
    fixed |= {"recompute": request.recompute is not False, "objective": "examples_per_s"}
    free = replace(request, pipeline_depth=None, num_replicas=None, **fixed)
    workers = counted(shape.num_workers, "worker")
    try:
        best = plan(profile, free, num_gpus=shape.num_workers, num_runners_up=0).best
        other = simulate(profile, free, num_stages=best.pipeline_depth, num_replicas=best.num_replicas)
    except PlanError:
        return ""  # no shape of this many workers fits in memory
    less = 1 - other.expected.mini_batch_s / simulation.expected.mini_batch_s
    if less < WORTH_SAYING:
        return f"The planner finds no faster shape for {workers}."
    took = time_text(other.expected.mini_batch_s)
    return f"With {workers}, -P {best.pipeline_depth} -D {best.num_replicas} would take {took}, {less:.0%} less."


def plan_table(
    profile: Profile,
    max_gpus: int,
    request: PlanRequest = PlanRequest(),  # noqa: B008 (frozen)
    *,
    min_gpus: int = 1,
    most_replicas: int | None = None,
    **more: Any,
) -> dict[int, Plan]:
    """Return the plan with most examples per second for every number of GPUs from ``min_gpus`` to ``max_gpus``.

    Numbers of GPUs on which no plan fits are left out. All plans have the same m, because m may not change in a run:
    the m with most examples per second on average over the numbers. No plan has a D above ``most_replicas``. ``more``:
    fields of a request, which replace those of ``request``. PlanError: the range is empty, or m is impossible.
    """
    request = replace(request, **more)
    ranges.GPUS.check("max_gpus", max_gpus)
    ranges.check_counts(min_gpus=min_gpus, pipeline_depth=request.pipeline_depth, most_replicas=most_replicas)
    if not 1 <= min_gpus <= max_gpus:
        raise PlanError("is out of range", field="min_gpus", value=min_gpus, allowed=f"1 to {max_gpus}")
    sweep = Sweep(profile, request, request.conditions(None))
    numbers = range(min_gpus, max_gpus + 1)
    tables = [_Table(each, numbers, request, most_replicas) for each in sweep.by_micro_batch_size()]
    table = _best_table(tables)
    if not table.outcomes or not allows_unequal(request):
        return table.plans
    pools = Pools(profile, request, ("",), (table.sweep,), most_replicas)
    size = table.sweep.settings[0].sections.micro_batch_size
    found = {number: each for (number,), each in pools.table((max_gpus,), size, [table.outcomes])}
    unequal = {number: pools.described(each).plan for number, each in found.items() if each.mix is not None}
    return {number: unequal.get(number, plan) for number, plan in table.plans.items()}


def _best_table(tables: Sequence[_Table]) -> _Table:
    """Return the table with most examples per second on average, filled."""
    if len(tables) == 1:
        dict(tables[0].found())
        return tables[0]
    steps = [table.bounds() for table in tables]
    heap = [(-next(step), place) for place, step in enumerate(steps)]
    heapq.heapify(heap)
    while (bound := next(steps[heap[0][1]], None)) is not None:  # refine the most promising table
        heapq.heapreplace(heap, (-bound, heap[0][1]))
    return tables[heap[0][1]]


def pool_plan_table(
    profile: Profile,
    most: Pool | Mapping[str, int],
    request: PlanRequest = PlanRequest(),  # noqa: B008 (frozen)
    *,
    most_replicas: int | None = None,
    **more: Any,
) -> dict[Pool, Plan]:
    """Return, for every pool of GPUs up to ``most``, the plan of any pipelines with most examples per second.

    Pools on which no plan fits are left out. All plans have the same m: the m with the highest sum of examples per
    second over the types, each with all of its GPUs. ``more``: fields of a request, which replace those of ``request``.
    Raises PlanError if a pool has no GPUs, the profile has no such type, or the request does not allow a pool.
    """
    request, pool = replace(request, **more), most if isinstance(most, Pool) else Pool.of(most)
    _check_pool(request, pool, on_nodes=False)
    counts = [pool[name] for name in pool.types]
    pools = Pools(profile, request, pool.types, most_replicas=most_replicas)

    def rate(size: int) -> float:
        every = zip(pools.of_size(size), counts, strict=True)
        found = [_fastest(sweep, number, most_replicas) for sweep, number in every]
        return sum(1 / outcome.mini_batch_ns for outcome in found if outcome is not None)

    size = max(pools.sizes(), key=rate) if len(pools.sizes()) > 1 else pools.sizes()[0]
    tables = [
        _Table(sweep, range(1, number + 1), request, most_replicas)
        for sweep, number in zip(pools.of_size(size), counts, strict=True)
    ]
    for table in tables:
        dict(table.found())
    plans: dict[int, Plan] = {}
    answers = {}
    for gpus, found in pools.table(counts, size, [table.outcomes for table in tables]):
        key = id(found.mix or found.outcome)
        if key not in plans:
            plans[key] = pools.described(found).plan
        answers[Pool.of(dict(zip(pool.types, gpus, strict=True)))] = plans[key]
    return answers


def _fastest(sweep: Sweep, num_gpus: int, most_replicas: int | None) -> ShapeOutcome | None:
    depths = sweep.depths(num_gpus, most_replicas=most_replicas)
    return sweep.fastest(num_gpus, depths, 1, most_replicas)[0] if depths else None


def _check_pool(request: PlanRequest, pool: Pool, *, on_nodes: bool) -> None:
    if not pool:
        raise PlanError("has no GPUs", field="pool", value=str(pool), allowed=Pool.EXAMPLE)
    if request.objective == "progress" or not allows_unequal(replace(request, unequal=True), on_nodes=on_nodes):
        raise PlanError(
            "is answered by examples per second or dollar",
            field="pool",
            value=str(pool),
            allowed=f"a pool without {'' if on_nodes else 'nodes, '}shapes, shared cores, slow workers or jitter",
        )


def pipeline_times(
    profile: Profile,
    max_gpus: int,
    micro_batch_size: int,
    request: PlanRequest = PlanRequest(),  # noqa: B008 (frozen)
) -> dict[int, tuple[tuple[int, float], ...]]:
    """Return a mini-batch's time for pipelines of each depth that fits: (micro-batches of one replica, seconds).

    The numbers of replicas are 1, 2, 3, 4, 6, 8, ... up to one more than the GPUs allow. Between two of them, apart
    from reductions, the time is concave in the micro-batches, so that linear interpolation does not overestimate it.
    """
    on_one = replace(request, micro_batch_size=micro_batch_size, num_gpus_per_node=None)
    sweep = Sweep(profile, on_one, on_one.conditions(None))
    found: dict[int, tuple[tuple[int, float], ...]] = {}
    for depth in sweep.depths(max_gpus, request.pipeline_depth):
        most = min(max_gpus // depth + 1, sweep.total)
        outcomes = [
            (-(-sweep.total // replicas), _on_nodes(sweep, request, depth * replicas).best([(depth, replicas)], 1))
            for replicas in sorted({1, most, *(each for k in range(1, 24) for each in (2**k, 3 * 2 ** (k - 1)))})
            if replicas <= most and sweep.fits((depth, replicas))
        ]
        found[depth] = tuple((share, best[0].mini_batch_ns / 1e9) for share, best in outcomes if best)
    return found


def _on_nodes(sweep: Sweep, request: PlanRequest, num_gpus: int) -> Sweep:
    """Return the sweep on the fewest nodes that have this many GPUs; the sweep itself if each GPU is its own node."""
    if request.num_gpus_per_node is None:
        return sweep
    sizes = node_sizes(num_gpus, request.num_gpus_per_node)
    return sweep.under(replace(sweep.shape_simulator.conditions, node_sizes=sizes))


class _Table:
    """Finds the best plan of equal pipelines with one m for each number of GPUs."""

    def __init__(self, sweep: Sweep, numbers: range, request: PlanRequest, most_replicas: int | None) -> None:
        self.sweep, self.plans, self.outcomes = sweep, dict[int, Plan](), dict[int, ShapeOutcome]()
        self._batch_size, self._most = sweep.profile.job.batch_size, min(sweep.total, most_replicas or sweep.total)
        self._alone = request.num_gpus_per_node is not None  # a shape's placement depends on the nodes
        self._searches: list[tuple[int, Sweep, list[Shape]]] = []
        for num_gpus in numbers:
            sweep = _on_nodes(sweep, request, num_gpus)
            depths = sweep.depths(num_gpus, request.pipeline_depth, most_replicas=self._most)
            if not depths:
                continue
            shapes = [(depth, min(num_gpus // depth, self._most)) for depth in depths]
            if self._searches and not self._alone:  # only the shapes that use all GPUs are new
                shapes = [shape for shape in shapes if shape[0] * shape[1] == num_gpus]
            self._searches.append((num_gpus, sweep, shapes))

    def bounds(self) -> Iterator[float]:
        """Yield ever closer bounds of the examples per second, summed over the numbers of GPUs; the last is exact."""
        rates: dict[int, float] = {}
        for planned in (False, True):
            least_s = math.inf
            for place, (num_gpus, sweep, shapes) in enumerate(self._searches):
                first = place == 0 or self._alone
                least_s = sweep.bounds_s(shapes, math.inf if first else least_s, planned=planned, fewer=first)
                rates[num_gpus] = self._batch_size / least_s
                if planned:
                    yield sum(rates.values())
            yield sum(rates.values())
        for num_gpus, plan in self.found():
            rates[num_gpus] = plan.expected.examples_per_s
            yield sum(rates.values())

    def found(self) -> Iterator[tuple[int, Plan]]:
        """Yield the plans one after the other."""
        described: dict[Shape, Plan] = {}
        fastest: ShapeOutcome | None = None
        for num_gpus, sweep, shapes in self._searches:
            if fastest is None or self._alone:
                described, fastest = {}, sweep.fastest(num_gpus, [depth for depth, _ in shapes], 1, self._most)[0]
            else:
                best = sweep.best([fastest.shape, *shapes], 1)[0]
                fastest = min(fastest, best, key=lambda each: each.mini_batch_ns)
            if fastest.shape not in described:
                described[fastest.shape] = describe(fastest, sweep.shape_simulator).plan
            self.plans[num_gpus], self.outcomes[num_gpus] = described[fastest.shape], fastest
            yield num_gpus, self.plans[num_gpus]


def _shapes(
    sweep: Sweep, num_gpus: int, pipeline_depth: int | None, num_replicas: int | None, *, smaller: bool
) -> list[Shape]:
    """Return the (P, D) to consider: with ``smaller`` every D that may be best, else only the largest."""
    shapes = []
    for depth in sweep.checked_depths(num_gpus, pipeline_depth, num_replicas):
        most = num_replicas or min(num_gpus // depth, sweep.total)
        counts = sweep.replicas(most) if smaller and num_replicas is None else [most]
        shapes += [(depth, count) for count in counts]
    return shapes


def plan_frame(
    profile: Profile,
    max_gpus: int,
    request: PlanRequest = PlanRequest(),  # noqa: B008 (frozen)
    *,
    min_gpus: int = 1,
    **more: Any,
) -> pd.DataFrame:
    """Return :func:`plan_table` as a pandas table: the plan with most examples per second for every number of GPUs.

    The columns are ``simulator.search.frames.COLUMNS``, and with a price also ``usd_per_h`` and
    ``usd_per_1000_examples``, which count idle GPUs, too.
    """
    from simulator.search.frames import plans_frame  # pandas is slow to import

    request = replace(request, **more)
    plans = plan_table(profile, max_gpus, request, min_gpus=min_gpus)
    if request.usd_per_gpu_hour is None:
        return plans_frame(plans.items())
    node_size = request.num_gpus_per_node or 1
    assert isinstance(node_size, int), "nodes of unlike sizes have no price for a range of GPUs"
    (usd_per_h,) = Stock(("",), (node_size,), ((node_size,),)).usd_per_node(request)
    return plans_frame(plans.items(), usd_per_h / node_size)
