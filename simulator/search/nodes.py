"""Unequal pipelines on nodes of several GPUs.

The search for GPUs on nodes of their own proposes mixes: once with the links between nodes, and once as if all links
were those inside a node. Mixes of pipelines that each lie inside one node are added. Each proposed mix is placed on the
nodes and simulated there: stages on one node use its inner links, GPUs that compute beside each other are slower, and
rings share the node's link. Pipelines of one depth that are placed differently are different kinds, each with its own
share of micro-batches.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations, product

from morph.contract.plan import Schedule
from morph.contract.profile import Profile
from simulator.costs.answer import Simulation, describe_kinds
from simulator.costs.finish import Ended
from simulator.costs.outcome import ShapeOutcome
from simulator.costs.stage_costs import StageCosts, stage_costs
from simulator.inputs.conditions import Conditions
from simulator.inputs.layout import Layout, placed
from simulator.inputs.node_types import of_pool_type
from simulator.inputs.placement import Placement, place_pipelines
from simulator.inputs.request import PlanRequest
from simulator.search.mixes import Chosen, Mixes, Search
from simulator.search.pipelines import Pipelines, Stages
from simulator.search.pools import Pools
from simulator.search.sweep import Sweep

Rows = tuple[tuple[int, ...], ...]
_SIZES = 2
_LOOKED_AT, _TINY_LOOKED_AT, _TINY = 10, 64, 8
_ORDERS = 24
_DOUBT = 1.02
"""A mix is considered if it is estimated to take less than this many times the best time."""


class Placed(Pipelines):
    """Pipelines of one kind, placed on nodes: all have equally many micro-batches and end together.

    They use the cuts and windows of the same pipelines ``alone``, on GPUs that are nodes of their own. ``layout`` is
    that of all pipelines of the kind.
    """

    def __init__(self, alone: Pipelines, sweep: Sweep, layout: Layout) -> None:
        super().__init__(sweep, alone.schedule, alone.node_type)
        self.alone, self.layout = alone, layout
        self._placed: dict[int, StageCosts] = {}

    def costs(self, depth: int, num_micro_batches: int, stages: Stages) -> StageCosts | None:
        """Return the costs, on these nodes, of the stages chosen for GPUs that are nodes of their own."""
        found = self.alone.costs(depth, num_micro_batches, stages)
        if found is None:
            return None
        if id(found) not in self._placed:
            sections = next(
                setting.sections
                for setting in self.settings
                if (setting.sections.recompute, setting.grouped) == (found.sections.recompute, found.sections.grouped)
            )
            windows, live = found.times.window.tolist(), found.live.tolist()
            self._placed[id(found)] = stage_costs(
                sections, found.boundaries, windows, found.schedule, self.layout, single=False, live=live
            )
        return self._placed[id(found)]

    def ended(self, depth: int, number: int, most: int, stages: Stages) -> Ended | None:
        """Return the latest end of each stage over all pipelines of the kind."""
        costs = self.costs(depth, most, stages)
        if costs is None:
            return None
        key = id(costs), number, False
        if key not in self._ended:
            counts = (number,) * self.layout.inside.shape[1]
            each = self.sweep.shape_simulator.ended(costs, counts)
            last, to_come = each.last_backward_ns.max(axis=1), each.to_come_ns.min(axis=1)
            self._ended[key] = Ended(costs, last[:, None], to_come[:, None], each.redone_ns)
        return self._ended[key]


def unequal_on_nodes(
    profile: Profile,
    request: PlanRequest,
    nodes: Sequence[tuple[int, ...]],
    names: Sequence[str],
    equal: Sequence[ShapeOutcome],
) -> Simulation | None:
    """Return the fastest unequal pipelines on nodes of several GPUs; None if equal pipelines are as fast.

    ``nodes``: GPUs of each node, by type. ``equal``: the best equal pipelines of each type, best first.
    """
    search = _OnNodes(profile, request, nodes, names)
    return search.best(equal)


class _OnNodes:
    def __init__(
        self, profile: Profile, request: PlanRequest, nodes: Sequence[tuple[int, ...]], names: Sequence[str]
    ) -> None:
        self.nodes, self.names = tuple(nodes), tuple(names)
        self.all_nodes = tuple(size for sizes in nodes for size in sizes)
        self.gpus = tuple(map(sum, nodes))
        lone = replace(request, num_gpus_per_node=None)
        profiles = [of_pool_type(profile, name) if name else profile for name in names]
        self.conditions: Conditions = request.conditions(self.all_nodes)
        self.on_nodes = [Sweep(each, lone, self.conditions) for each in profiles]
        near = [_with_near_links(each) for each in profiles]
        self.near, self.far = (
            Pools(profile, lone, names, [Sweep(each, lone, lone.conditions(None)) for each in of_types])
            for of_types in (near, profiles)
        )
        self.request, self.schedule = request, request.schedule
        self.is_tiny = sum(self.gpus) <= _TINY

    def best(self, equal: Sequence[ShapeOutcome]) -> Simulation | None:
        """See :func:`unequal_on_nodes`."""
        best, below = None, equal[0].mini_batch_ns * self.request.worth
        for size, schedule in self._promising(equal, below):
            near, far = self.near.mixes(size, schedule), self.far.mixes(size, schedule)
            for chosen in self._chosen(near, far, below):
                for rows in self._ways(chosen):
                    found = self._played(far, rows, below)
                    if found is not None:
                        best, below = found, found.expected.mini_batch_s * 1e9
        return best

    def _promising(self, equal: Sequence[ShapeOutcome], below_ns: float) -> list[tuple[int, Schedule]]:
        """Return micro-batch sizes and schedules: those of equal pipelines, and those with the least bounds."""
        default: Schedule = self.schedule or "varuna"
        found: dict[tuple[int, Schedule], None] = {}
        for each in equal:
            size = each.costs.sections.micro_batch_size
            found |= dict.fromkeys([(size, default), (size, each.costs.schedule)])
        least = {size: Search(self.near.mixes(size, default), self.gpus).least_ns() for size in self.near.sizes()}
        sizes = [size for size in sorted(least, key=least.__getitem__)[:_SIZES] if least[size] < below_ns]
        return list(found | dict.fromkeys((size, default) for size in sizes))

    def _chosen(self, near: Mixes, far: Mixes, below_ns: float) -> Iterator[Chosen]:
        """Yield mixes that may take less time, the most promising first."""
        search = Search(near, self.gpus)
        found = dict.fromkeys(
            [*search.promising(below_ns), *Search(far, self.gpus).promising(math.inf), *self._whole()]
        )
        known = [set(depths.tolist()) for depths in search.depths]
        times = {
            chosen: search.time_ns(chosen)
            for chosen in found
            if all(depth in known[kind] for (kind, depth), _ in chosen)
            and 2 <= sum(number for _, number in chosen) <= near.most_replicas
        }
        hopeful = [chosen for chosen in sorted(times, key=times.__getitem__) if times[chosen] < below_ns * _DOUBT]
        yield from hopeful[: _TINY_LOOKED_AT if self.is_tiny else _LOOKED_AT]

    def _whole(self) -> Iterator[Chosen]:
        """Yield mixes of pipelines of one depth inside single nodes, with or without one more on each node's rest."""
        of_types = []
        for kind, sizes in enumerate(self.nodes):
            ways: list[Counter[tuple[int, int]]] = []
            for depth, with_rest in product(range(1, max(sizes, default=0) + 1), (False, True)):
                counts = Counter[tuple[int, int]]()
                for size in sizes:
                    number, rest = divmod(size, depth)
                    counts[kind, depth] += number
                    counts[kind, rest] += with_rest and rest > 0
                ways.append(+counts)
            of_types.append(list({tuple(sorted(way.items())): None for way in ways}) or [()])
        for each in product(*of_types):
            yield tuple(group for way in each for group in way)

    def _ways(self, chosen: Chosen) -> Iterator[tuple[Rows, ...]]:
        """Yield the nodes of all pipelines, by type, without repeating equivalent placements."""
        of_types = []
        first = 0
        for kind, sizes in enumerate(self.nodes):
            found: dict[tuple[object, ...], Rows] = {}
            groups = [((depth,) * number) for (other, depth), number in chosen if other == kind]
            for order, in_pairs in product(self._orders(groups), (False, True)):
                rows = tuple(
                    tuple(first + node for node in row) for row in place_pipelines(order, sizes, in_pairs=in_pairs)
                )
                found.setdefault(tuple(sorted((len(row), len(set(row))) for row in rows)), rows)
            of_types.append(list(found.values()))
            first += len(sizes)
        yield from product(*of_types)

    def _orders(self, groups: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Return orders in which pipelines of one type may be placed."""
        if self.is_tiny:
            every = permutations([depth for group in groups for depth in group])
            return list(dict.fromkeys(every))[:_ORDERS]
        kinds = list(permutations(groups))[:_ORDERS]
        return [tuple(depth for group in order for depth in group) for order in kinds]

    def _played(self, far: Mixes, rows: tuple[Rows, ...], below_ns: float) -> Simulation | None:
        """Return the simulation of pipelines on these nodes with the best micro-batches; None if it is not faster."""
        kinds = self._kinds(rows)
        if kinds is None:
            return None
        places = [Placement(self.all_nodes, of_kind) for _, of_kind in kinds]
        together_with = places if len(places) > 1 else ()
        types = []
        for (kind, _), place in zip(kinds, places, strict=True):
            size = far.types[kind].sweep.settings[0].sections.micro_batch_size
            sweep = next(
                each
                for each in self.on_nodes[kind].by_micro_batch_size()
                if each.settings[0].sections.micro_batch_size == size
            )
            layout = placed(sweep.profile.contention, place, together_with)
            types.append(Placed(far.types[kind], sweep, layout))
        mixes = Mixes(types, far.most_replicas)
        chosen = tuple(((k, len(of_kind[0])), len(of_kind)) for k, (_, of_kind) in enumerate(kinds))
        best = mixes.exact(chosen, below_ns, thorough=self.is_tiny)
        if best is None or best.mini_batch_ns >= below_ns * _DOUBT:
            return None
        found = describe_kinds(mixes.described(best))
        return found if found.expected.mini_batch_s * 1e9 < below_ns else None

    def _kinds(self, rows: tuple[Rows, ...]) -> list[tuple[int, Rows]] | None:
        """Return the pipelines by kind: of one type and depth, each inside an equally full node or over several nodes.

        Return None if messages of different kinds would share a node's link, because each kind is simulated alone.
        """
        busy = Counter(node for of_type in rows for row in of_type for node in row)
        kinds: dict[tuple[int, int, int], list[tuple[int, ...]]] = {}
        crossed: dict[int, set[tuple[int, int]]] = {}
        for kind, of_type in enumerate(rows):
            for row in of_type:
                inside = len(set(row)) == 1
                kinds.setdefault((kind, len(row), busy[row[0]] if inside else 0), []).append(row)
                for node in () if inside else row:
                    crossed.setdefault(node, set()).add((kind, len(row)))
        if self.conditions.share_links and any(len(of_node) > 1 for of_node in crossed.values()):
            return None
        return [(kind, tuple(of_kind)) for (kind, _, _), of_kind in sorted(kinds.items())]


def _with_near_links(profile: Profile) -> Profile:
    """Return the profile with the times of messages inside a node for all messages between stages."""
    near = {"activation": profile.intra_node.activation, "gradient": profile.intra_node.gradient}
    return profile.model_copy(update={"inter_node": profile.inter_node.model_copy(update=near)})
