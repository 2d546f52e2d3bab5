"""Cuts K sections into P stages so that the slowest stage is as fast as can be: exact, for every P at once.

Dynamic programming over (stages left, first section). A stage costs F + R + B (no R where the schedule does
not recompute), and must fit in memory with the window of its place in the pipeline. Windows depend on the
distance to the last stage alone, so one table serves every P. Among partitions with the same bottleneck
the more even one (sum of squares) is preferred where the table can tell.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from morph.contract.plan import Schedule
from simulator.compiling import compiled
from simulator.costs import SectionCosts
from simulator.orders import recomputes, stage_windows

_NEVER = 2**62


@dataclass(frozen=True)
class PartitionTable:
    """The best partition for each P in 1..K.

    ``bottleneck_ns[P]`` is the slowest stage's time, or 2**62 where no partition fits in memory; entry 0 is
    unused. ``least_bytes[P]`` is the least memory per device with which some partition into P fits.
    """

    bottleneck_ns: npt.NDArray[np.int64]
    least_bytes: npt.NDArray[np.int64]
    _choice: npt.NDArray[np.int64]

    def fits(self, num_stages: int) -> bool:
        """Whether P stages fit."""
        return bool(self.bottleneck_ns[num_stages] < _NEVER)

    def boundaries(self, num_stages: int) -> tuple[int, ...]:
        """First section of each of the P stages."""
        first, starts = 0, []
        for left in range(num_stages, 0, -1):
            starts.append(first)
            first = int(self._choice[left, first])
        return tuple(starts)


def partition_table(
    costs: SectionCosts,
    schedule: Schedule,
    *,
    num_micro_batches: int,
    slope: int = 1,
    memory_bytes: int | None = None,
    max_stages: int | None = None,
) -> PartitionTable:
    """Best partitions for every P up to ``max_stages`` (K if None).

    Args:
        costs: The sections at one m.
        schedule: Decides windows and who recomputes.
        num_micro_batches: Cap on every window (the most that one replica can have in flight).
        slope: Of the windows, for "varuna".
        memory_bytes: Per device; None: no limit.
        max_stages: Largest P looked at.
    """
    deepest = min(costs.num_sections, max_stages or costs.num_sections)
    windows = np.array((0, *stage_windows(schedule, deepest, num_micro_batches, slope)[::-1]), np.int64)
    again = np.array((False, *recomputes(schedule, deepest, costs.recompute)[::-1]), np.bool_)
    limit = _NEVER if memory_bytes is None else memory_bytes
    arrays = (
        costs.forward_sum_ns,
        costs.backward_sum_ns,
        costs.held_sum_bytes,
        costs.input_bytes,
        costs.activation_sum_bytes,
    )
    bottleneck, choice = _tabulate(*arrays, windows, again, limit, False)
    least, _ = _tabulate(*arrays, windows, again, _NEVER, True)
    return PartitionTable(bottleneck_ns=bottleneck, least_bytes=least, _choice=choice)


@compiled
def _tabulate(forward, backward, held, stored, activations, windows, again, limit, by_memory):  # type: ignore[no-untyped-def]
    """Return (best[left] from section 0, choice[left, first] = end of the first stage)."""
    num_sections, deepest = len(stored), len(windows) - 1
    worst = np.full((deepest + 1, num_sections + 1), np.int64(_NEVER))
    squares = np.zeros((deepest + 1, num_sections + 1))
    choice = np.zeros((deepest + 1, num_sections + 1), np.int64)
    worst[0, num_sections] = 0
    for left in range(1, deepest + 1):
        window = windows[left]
        for first in range(num_sections - left, -1, -1):
            last_end = num_sections - left + 1
            for end in range(num_sections if left == 1 else first + 1, last_end + 1):
                memory = held[end] - held[first] + window * stored[first]
                kept = activations[end] - activations[first]
                memory += kept if again[left] else window * kept
                time = backward[end] - backward[first] + (2 if again[left] else 1) * (forward[end] - forward[first])
                cost = memory if by_memory else time
                if memory > limit or cost > worst[left, first]:
                    break
                rest = worst[left - 1, end]
                if rest == _NEVER:
                    continue
                bottleneck = max(cost, rest)
                total = squares[left - 1, end] + float(cost) * float(cost)
                better = bottleneck < worst[left, first]
                if better or (bottleneck == worst[left, first] and total < squares[left, first]):
                    worst[left, first], squares[left, first], choice[left, first] = bottleneck, total, end
    return worst[:, 0].copy(), choice
