"""Cuts K sections into P stages so that the slowest stage is as fast as possible: exact, for every P at once.

Dynamic programming over (stages left, first section). A stage costs F + R + B (no R if the schedule does not recompute
and the stage needs no recompute groups), and must fit in memory with the window of its place in the pipeline. Windows
depend only on the distance to the last stage, so one table serves every P. Of the partitions with the same bottleneck
that the table compares, it keeps the more even one (the smaller sum of squares).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from morph.contract.plan import Schedule
from simulator.costs.memory import NEVER
from simulator.costs.stage_costs import SectionCosts
from simulator.engine.compilation import compiled, entry
from simulator.engine.schedules import recomputes, stage_windows
from simulator.engine.times import Floats, Ints


@dataclass(frozen=True)
class PartitionTable:
    """The best partitions into each P in 1..K, of all sections and of the sections from each one on.

    Arrays over [P, first section]: ``worst_ns``, the slowest stage's time, or 2**62 where no partition fits in memory;
    ``squares``, sums of squared times; ``choice``, the end of the first stage.
    """

    worst_ns: Ints
    squares: Floats
    choice: Ints

    @property
    def bottleneck_ns(self) -> Ints:
        """Return the slowest stage's time by P, or 2**62 where no partition fits in memory; entry 0 is unused."""
        bottleneck: Ints = self.worst_ns[:, 0]
        return bottleneck

    def fits(self, num_stages: int) -> bool:
        """Return whether P stages fit in memory."""
        return bool(self.bottleneck_ns[num_stages] < NEVER)

    def boundaries(self, num_stages: int) -> tuple[int, ...]:
        """Return the first section of each of the P stages."""
        first, starts = 0, []
        for left in range(num_stages, 0, -1):
            starts.append(first)
            first = int(self.choice[left, first])
        return tuple(starts)


def partition_table(
    costs: SectionCosts,
    schedule: Schedule,
    *,
    num_micro_batches: int,
    slope: int = 1,
    memory_bytes: int | None = None,
    single: bool = True,
    behind: tuple[PartitionTable, int] | None = None,
    deepest: int | None = None,
    by_memory: bool = False,
) -> PartitionTable:
    """Return the best partitions for every P, or up to ``deepest``.

    ``slope``: see :func:`simulator.engine.schedules.stage_windows`. ``behind``: the table of the last stages, for
    example on another type of node, and their number. ``by_memory``: the fullest stage counts, not the slowest.
    """
    memory = costs.memory(single=single)
    usable = None if memory_bytes is None else memory.usable_bytes(memory_bytes)
    deepest = min(costs.num_sections, deepest or costs.num_sections)
    windows = np.array((0, *stage_windows(schedule, deepest, num_micro_batches, slope)[::-1]), np.int64)
    again = np.array((False, *recomputes(schedule, deepest, costs.recompute)[::-1]), np.bool_)
    found, known = _empty(costs.num_sections), 0
    if behind is not None:
        table, known = behind
        found.worst_ns[known], found.squares[known] = table.worst_ns[known], table.squares[known]
        found.choice[: known + 1] = table.choice[: known + 1]
    _fill(
        known + 1,
        (found.worst_ns, found.squares, found.choice),
        (costs.forward_sum_ns, costs.backward_sum_ns),
        memory.tables if usable is None and not by_memory else memory.limited_tables,
        memory.stored,
        memory.activations,
        windows,
        again,
        NEVER - 1 if usable is None else usable,
        by_memory,
        memory.all_group_tables,
    )
    return found


def frugal_table(
    costs: SectionCosts, schedule: Schedule, *, num_micro_batches: int, slope: int = 1, single: bool = True
) -> PartitionTable:
    """Return the partitions whose fullest stage needs least memory; this table's ``bottleneck_ns`` are bytes."""
    return partition_table(
        costs, schedule, num_micro_batches=num_micro_batches, slope=slope, single=single, by_memory=True
    )


def least_bytes(
    costs: SectionCosts, schedule: Schedule, *, num_micro_batches: int, slope: int = 1, single: bool = True
) -> Ints:
    """Return the least memory per device with which some partition into P fits, by P: int64[K + 1]."""
    found = frugal_table(costs, schedule, num_micro_batches=num_micro_batches, slope=slope, single=single)
    least = found.bottleneck_ns
    return np.where(least < NEVER, costs.memory(single=single).whole_bytes(least), least)


def least_host_bytes(costs: SectionCosts, *, single: bool) -> Ints:
    """Return the least host memory per device with which some partition into P fits, by P: int64[K + 1]."""
    memory = costs.memory(single=single)
    begin, end = np.ogrid[0 : costs.num_sections, 0 : costs.num_sections + 1]
    table = memory.host_bytes(begin, np.maximum(begin, end))
    nothing, none = np.zeros(costs.num_sections + 1, np.int64), np.zeros(costs.num_sections + 1, np.bool_)
    sums = costs.forward_sum_ns, costs.backward_sum_ns
    no_groups = np.zeros((0, *table.shape), np.int64)
    found, tables = _empty(costs.num_sections), (table, table, table)
    rows = found.worst_ns, found.squares, found.choice
    _fill(1, rows, sums, tables, nothing[1:], nothing, nothing, none, NEVER - 1, True, (no_groups, no_groups))
    return found.bottleneck_ns


def bounds_ns(costs: SectionCosts, schedule: Schedule, num_micro_batches: int, link_ns: int) -> Ints:
    """Return a lower bound by P, which holds for all cuts into P stages and all windows: int64[K + 1].

    It is the part of the bound in :mod:`simulator.costs.bounds` that holds for every cut: the minimum over cuts of max
    over s of head_s + n t_s + tail_s, with ``link_ns`` for an activation and its gradient over each link. Prefix sums
    give head and tail.
    """
    again = costs.recompute
    work = costs.forward_sum_ns * (1 + again) + costs.backward_sum_ns
    last = work if schedule == "gpipe" or not again else costs.forward_sum_ns + costs.backward_sum_ns
    both = costs.forward_sum_ns + costs.backward_sum_ns
    bounds: Ints = _bound(num_micro_batches * work, num_micro_batches * last, both, link_ns)
    return bounds


@entry
@compiled
def _bound(work, last, both, link):  # type: ignore[no-untyped-def]
    """Compute the bounds by bisection, because a stage's own part falls as its first section moves back.

    ``last`` replaces ``work`` for the last stage.
    """
    num_sections = len(work) - 1
    bounds = np.zeros(num_sections + 1, np.int64)
    before = np.full(num_sections + 1, np.int64(0))
    now = np.zeros(num_sections + 1, np.int64)
    for depth in range(1, num_sections + 1):
        for end in range(num_sections, depth - 1, -1):
            for is_last in range(2 if end == num_sections else 1):
                sums = last if is_last else work
                low, high = depth - 1, end - 1
                if depth == 1:
                    high = 0
                while low < high:
                    middle = (low + high) // 2
                    if before[middle] >= sums[end] - sums[middle] + both[middle] + (depth - 1) * link:
                        high = middle
                    else:
                        low = middle + 1
                best = np.int64(NEVER)
                for begin in range(max(depth - 1, low - 1), low + 1):
                    here = sums[end] - sums[begin] + both[begin] + (depth - 1) * link
                    best = min(best, max(here, before[begin]))
                if is_last:
                    bounds[depth] = best
                else:
                    now[end] = best
        before, now = now, before
    return bounds


def _empty(num_sections: int) -> PartitionTable:
    shape = num_sections + 1, num_sections + 1
    found = PartitionTable(np.full(shape, NEVER), np.zeros(shape), np.zeros(shape, np.int64))
    found.worst_ns[0, num_sections] = 0
    return found


@entry
@compiled
def _fill(lowest, best, sums, tables, stored, activations, windows, again, limit, by_memory, groups):  # type: ignore[no-untyped-def] # noqa: PLR0913
    """Fill in the best bottlenecks of the sections from each one on, for ``lowest`` stages and more.

    ``choice[left, first]`` is the end of the first stage. A stage that does not fit is recomputed in groups, if any
    groups fit.
    """
    worst, squares, choice = best
    forward, backward = sums
    group_base, group_each = groups
    base_again, base_kept, floor = tables
    num_sections, num_sizes = len(stored), len(group_base)
    for left in range(lowest, len(windows)):
        window = windows[left]
        for first in range(num_sections - left, -1, -1):
            last_end = num_sections - left + 1
            least_end = num_sections if left == 1 else first + 1
            for end in range(least_end, last_end + 1):
                memory = (base_again if again[left] else base_kept)[first, end] + window * stored[first]
                if not again[left]:
                    memory += window * (activations[end] - activations[first])
                memory = max(memory, floor[first, end])
                twice = again[left]
                if num_sizes > 0 and (by_memory or memory > limit):
                    for size in range(num_sizes):
                        taken = max(
                            group_base[size, first, end] + window * group_each[size, first, end], floor[first, end]
                        )
                        if taken < memory:
                            memory, twice = taken, True
                time = backward[end] - backward[first] + (2 if twice else 1) * (forward[end] - forward[first])
                cost = memory if by_memory else time
                if memory > limit:
                    continue  # a larger stage may need less memory: a shared unit counts once, and a message disappears
                if cost > worst[left, first] and not by_memory:
                    break
                rest = worst[left - 1, end]
                if rest == NEVER:
                    continue
                bottleneck = max(cost, rest)
                total = squares[left - 1, end] + float(cost) * float(cost)
                better = bottleneck < worst[left, first]
                if better or (bottleneck == worst[left, first] and total < squares[left, first]):
                    worst[left, first], squares[left, first], choice[left, first] = bottleneck, total, end
