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
from itertools import permutations, product

from simulator.costs.answer import Simulation, describe_kinds
from simulator.costs.finish import Ended
from simulator.costs.stage_costs import StageCosts, stage_costs
from simulator.inputs.conditions import Conditions
from simulator.inputs.layout import Layout, placed
from simulator.inputs.placement import Placement, place_pipelines
from simulator.search.mix_search import Chosen, Effort
from simulator.search.mixes import Found, Mixes
from simulator.search.pipelines import Pipelines, Stages
from simulator.search.pools import Pools
from simulator.search.sweep import Sweep

Rows = tuple[tuple[int, ...], ...]
_ORDERS = 24
"""The most orders in which pipelines of one type are placed on nodes."""


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


class OnNodes:
    """The search for unequal pipelines on the nodes of ``pools``."""

    def __init__(self, pools: Pools) -> None:
        assert pools.nodes is not None, "GPUs that are nodes of their own"
        self.nodes, request = pools.nodes, pools.request
        self.all_nodes = tuple(size for sizes in self.nodes for size in sizes)
        self.gpus = tuple(map(sum, self.nodes))
        self.conditions: Conditions = request.conditions(self.all_nodes)
        self.near, self.far = pools.alone.near, pools.alone
        self.effort = Effort.for_gpus(self.gpus)

    def best(self, equal: Sequence[Found]) -> Simulation | None:
        """Return the fastest unequal pipelines; None if ``equal`` are as fast: each type's best, fastest first."""
        best, below = None, equal[0].mini_batch_ns * self.near.request.worth
        for size, schedule in self.near.promising(self.gpus, equal, below):
            near, far = self.near.mixes(size, schedule), self.far.mixes(size, schedule)
            for chosen in self._chosen(near, far, below):
                for rows in self._ways(chosen):
                    found = self._played(far, rows, below)
                    if found is not None:
                        best, below = found, found.expected.mini_batch_s * 1e9
        return best

    def _chosen(self, near: Mixes, far: Mixes, below_ns: float) -> Iterator[Chosen]:
        """Yield mixes that may take less time, the most promising first."""
        search, links = near.search(self.gpus), far.search(self.gpus)
        found = dict.fromkeys([*search.promising(below_ns), *links.promising(math.inf), *self._whole()])
        known = [set(depths.tolist()) for depths in search.depths]
        times = {
            chosen: search.time_ns(chosen)
            for chosen in found
            if all(depth in known[kind] for (kind, depth), _ in chosen)
            and 2 <= sum(number for _, number in chosen) <= near.most_replicas
        }
        hopeful = [
            chosen for chosen in sorted(times, key=times.__getitem__) if times[chosen] < below_ns * self.effort.doubt
        ]
        yield from hopeful[: self.effort.mixes]

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
        if self.effort.is_thorough:
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
            sweep = far.types[kind].sweep.under(self.conditions)
            layout = placed(sweep.profile.contention, place, together_with)
            types.append(Placed(far.types[kind], sweep, layout))
        mixes = Mixes(types, far.most_replicas)
        chosen = tuple(((k, len(of_kind[0])), len(of_kind)) for k, (_, of_kind) in enumerate(kinds))
        best = mixes.exact(chosen, below_ns, thorough=self.effort.is_thorough)
        if best is None or best.mini_batch_ns >= below_ns * self.effort.doubt:
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
