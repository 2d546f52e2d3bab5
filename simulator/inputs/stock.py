"""The GPUs that a plan may use: their types and zones, the nodes that they are in, and what they cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from morph.contract import ranges
from morph.contract.errors import PlanError
from morph.contract.plan import Plan
from morph.contract.pool import Pool, type_and_zone
from morph.words import counted
from simulator.inputs.placement import node_sizes
from simulator.inputs.request import PlanRequest


@dataclass(frozen=True)
class Stock:
    """GPUs by type and zone, each in a node of its own or in nodes of several.

    ``names``: type and zone of the GPUs of each place, as in a :class:`Pool`, and ``gpus`` their numbers. ``nodes``:
    GPUs of each node, by place and in the order in which they were given; None: every GPU is its own node. A *choice*
    of nodes has a number for each kind of node, in the order of ``kinds``.
    """

    names: tuple[str, ...]
    gpus: tuple[int, ...]
    nodes: tuple[tuple[int, ...], ...] | None = None

    @classmethod
    def of(cls, request: PlanRequest, num_gpus: int | None, pool: Pool | Mapping[str, int] | None) -> Stock:
        """Return the GPUs of a request; PlanError: there are none, or the nodes hold another number."""
        sizes, field = request.num_gpus_per_node, "num_gpus_per_node"
        if pool is None:
            if num_gpus is not None:
                ranges.GPUS.check("num_gpus", num_gpus)
            elif not isinstance(sizes, Sequence):
                raise PlanError("is missing", field="num_gpus", allowed="a number, a list of nodes, or a pool")
            if sizes is None:
                return cls(("",), (num_gpus or 0,))
            nodes = node_sizes(num_gpus or 0, sizes)
            if num_gpus not in (None, sum(nodes)):
                allowed = f"{sum(nodes)}, or none"
                raise PlanError(f"the nodes have {sum(nodes)} GPUs", field="num_gpus", value=num_gpus, allowed=allowed)
            return cls(("",), (sum(nodes),), (nodes,))
        pool = pool if isinstance(pool, Pool) else Pool.of(pool)
        if not pool:
            raise PlanError("has no GPUs", field="pool", value=str(pool), allowed=Pool.EXAMPLE)
        stock = cls(pool.types, tuple(count for _, count in pool))
        if sizes is None:
            return stock
        if isinstance(sizes, Sequence) or (isinstance(sizes, Mapping) and set(sizes) != set(pool.types)):
            allowed = f"one number for all types, or numbers for {', '.join(pool.types)}"
            raise PlanError("is not possible for this pool", field=field, value=sizes, allowed=allowed)
        of_types = []
        for name, count in pool:
            size = sizes[name] if isinstance(sizes, Mapping) else sizes
            if isinstance(size, Sequence) and sum(size) != count:
                problem = f"has nodes of {name or 'one type'} that do not add up to the pool"
                raise PlanError(problem, field=field, value=size, allowed=f"nodes of {count} GPUs together")
            of_types.append(node_sizes(count, size))
        return replace(stock, nodes=tuple(of_types))

    @property
    def pool(self) -> Pool:
        """The number of GPUs of each type and zone."""
        return Pool.of(dict(zip(self.names, self.gpus, strict=True)))

    @property
    def kinds(self) -> dict[tuple[int, int], int]:
        """The number of nodes of each kind: of one place and size."""
        if self.nodes is None:
            return {(place, 1): number for place, number in enumerate(self.gpus)}
        return {
            (place, size): number
            for place, sizes in enumerate(self.nodes)
            for size, number in sorted(Counter(sizes).items(), reverse=True)
        }

    def part(self, choice: Sequence[int]) -> Stock:
        """Return only the nodes of a choice."""
        if self.nodes is None:
            return replace(self, gpus=tuple(choice))
        left, nodes = dict(zip(self.kinds, choice, strict=True)), []
        for place, sizes in enumerate(self.nodes):
            bought = []
            for size in sizes:
                if left[place, size]:
                    left[place, size] -= 1
                    bought.append(size)
            nodes.append(tuple(bought))
        return Stock(self.names, tuple(map(sum, nodes)), tuple(nodes))

    def within(self, zones: Collection[str]) -> Stock:
        """Return only the nodes in some of the zones."""
        there = [type_and_zone(name)[1] in zones for name in self.names]
        return self.part([number * there[place] for (place, _), number in self.kinds.items()])

    def usd_per_node(self, request: PlanRequest) -> list[float]:
        """Return dollars per hour of a node of each kind; PlanError: a type or size of node has no price."""
        price, kinds = request.usd_per_gpu_hour, self.kinds
        found = [usd_per_gpu_h(request, self.names[place], size) for place, size in kinds]
        if any(usd not in ranges.USD_PER_HOUR_AT_MOST for usd in found):
            problem = "does not give a price for every type and size"
            allowed = f"dollars per GPU-hour ({ranges.USD_PER_HOUR_AT_MOST})"
            if not isinstance(price, Mapping):
                problem = "is not a price"
            if isinstance(price, Mapping) and all(isinstance(key, int) for key in price):
                allowed += f" for nodes of {', '.join(map(str, sorted({size for _, size in kinds})))} GPUs"
            elif any(self.names):
                allowed += f" of each of {', '.join(self.names)}"
            raise PlanError(problem, field="usd_per_gpu_hour", value=price, allowed=allowed)
        return [usd * size for usd, (_, size) in zip(found, kinds, strict=True)]

    def described(self, choice: Sequence[int]) -> str:
        """Return the nodes of a choice in words."""
        if self.nodes is None:
            pool = self.part(choice).pool
            return str(pool) if any(pool.types) else counted(pool.num_gpus, "GPU")
        named = {(self.names[place], size): number for (place, size), number in zip(self.kinds, choice, strict=True)}
        return nodes_text(named)


def usd_per_gpu_h(request: PlanRequest, name: str, size: int) -> float:
    """Return the price of one GPU of this type, in a node of this size; nan: unknown."""
    price = request.usd_per_gpu_hour
    known: dict[Any, Any] = dict(price.items()) if isinstance(price, Mapping) else {name: price}
    return cast("float", known.get(name, known.get(type_and_zone(name)[0], known.get(size, math.nan))))


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


def usd_per_h_in_use(request: PlanRequest, best: Plan) -> float | None:
    """Return the price per hour of the GPUs, or of the nodes of several GPUs, that a plan uses; None: unknown."""
    if request.usd_per_gpu_hour is None:
        return None
    usd = sum(usd_per_gpu_h(request, name, size) * size * number for (name, size), number in nodes_in_use(best).items())
    return None if math.isnan(usd) else usd
