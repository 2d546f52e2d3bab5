"""Where the workers of one shape run, and how much they slow each other down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from morph.contract.profile import Contention
from simulator.inputs.conditions import Conditions
from simulator.inputs.placement import Placement, place, placements


def slowdown(measured: Sequence[Contention], num_busy: int) -> float:
    """Return the time of a task with ``num_busy - 1`` others on its node, relative to its time alone.

    In the steady state of a pipeline all its workers compute, so ``num_busy`` is the number of workers on the node, or
    of its cores if those are fewer. Linear between measured numbers (alone: 1) and constant beyond the largest; never
    below 1, and 1 without measurements.
    """
    numbers = [1, *(entry.num_busy for entry in measured)]
    factors = [1.0, *(entry.factor for entry in measured)]
    order = np.argsort(numbers, kind="stable")
    return float(np.interp(num_busy, np.array(numbers)[order], np.array(factors)[order]))


@dataclass(frozen=True)
class Layout:
    """The layout of P x D workers: arrays [P, D].

    ``slowdown``: how many times slower a worker's tasks are because of others on its node. ``inside``: whether the
    worker's next stage is on the same node. ``node``: the number of its node. ``rings_at_once``: all-reduces that share
    one node's link. A layout without nodes has arrays [P, 1], as all replicas are equal.
    """

    placement: Placement | None
    slowdown: npt.NDArray[np.float64]
    inside: npt.NDArray[np.bool_]
    rings_at_once: int
    hinders: bool
    has_neighbours: bool

    @cached_property
    def alike(self) -> bool:
        """Whether all replicas have the same times."""
        return bool((self.slowdown == self.slowdown[:, :1]).all() and (self.inside == self.inside[:, :1]).all())

    def node(self, num_replicas: int) -> npt.NDArray[np.int64]:
        """Return node numbers: int64[P, D]."""
        if self.placement is not None:
            return self.placement.array()
        num_stages = len(self.slowdown)
        return np.arange(num_stages * num_replicas).reshape(num_stages, num_replicas)


@lru_cache(maxsize=1024)
def lone_workers(num_stages: int, rings_at_once: int = 1, factor: float = 1.0) -> Layout:
    """Return a layout with a node for each worker (or one shared machine, on which all are slower by ``factor``)."""
    return Layout(
        placement=None,
        slowdown=np.full((num_stages, 1), factor),
        inside=np.zeros((num_stages, 1), np.bool_),
        rings_at_once=rings_at_once,
        hinders=factor != 1.0,
        has_neighbours=False,
    )


def lay_out(measured: tuple[Contention, ...], num_stages: int, num_replicas: int, conditions: Conditions) -> Layout:
    """Place the workers of one shape, on all nodes; see :func:`layouts`."""
    if conditions.compute_slots is None and conditions.node_sizes is not None:
        return placed(measured, place(num_stages, num_replicas, conditions.node_sizes))
    return layouts(measured, num_stages, num_replicas, conditions)[0]


def layouts(
    measured: tuple[Contention, ...], num_stages: int, num_replicas: int, conditions: Conditions
) -> list[Layout]:
    """Return the possible layouts of one shape; PlanError if there are more workers than GPUs.

    With ``compute_slots`` all workers share one machine: one ring per stage runs at once, and as many tasks as slots.
    """
    if conditions.compute_slots is not None:
        factor = slowdown(measured, min(num_stages * num_replicas, conditions.compute_slots))
        return [lone_workers(num_stages, num_stages, factor)]
    if conditions.node_sizes is None:
        return [lone_workers(num_stages)]
    candidates = placements(num_stages, num_replicas, conditions.node_sizes)
    return [placed(measured, placement) for placement in candidates]


def placed(measured: tuple[Contention, ...], placement: Placement, beside: Sequence[Placement] = ()) -> Layout:
    """Return the layout for a placement of workers; ``beside``: pipelines of all kinds, where there are several."""
    node = placement.array()
    inside = np.zeros(node.shape, np.bool_)
    inside[:-1] = node[1:] == node[:-1]
    busy = sum((Counter(each.used) for each in beside or (placement,)), Counter[int]())
    factors = {used: slowdown(measured, used) for used in set(busy.values())}
    slower = np.ones(len(placement.node_sizes))
    for number, used in busy.items():
        slower[number] = factors[used]
    return Layout(
        placement=placement,
        slowdown=slower[node],
        inside=inside,
        rings_at_once=_rings_at_once(beside) if beside else placement.rings_at_once,
        hinders=any(factor != 1.0 for factor in factors.values()),
        has_neighbours=bool(inside.any()),
    )


def _rings_at_once(kinds: Sequence[Placement]) -> int:
    """Most all-reduces that share one node's link, of pipelines of several kinds: its stages, each of each kind once.

    Equal stages on one node reduce together; of unequal ones no two are sure to.
    """
    held = Counter[int]()
    for placement in kinds:
        held.update(number for stage in placement.array() for number in set(stage.tolist()))
    return max(held.values()) if len(held) > 1 else 1
