"""Fixed task orders (GPipe, 1F1B) and in-flight windows, as data.

GPipe (Huang et al., as in Varuna's figure 4): all forwards, then recompute and backward of each micro-batch
in turn. Varuna's figure spares GPipe's last stage the recompute of its last micro-batch; here every
micro-batch of every GPipe stage is recomputed, since a stage either recomputes or does not.
1F1B (PipeDream-flush): P - s - 1 forwards to warm up, then one forward, one backward in turn. Where the windows are
wider it warms up with as many forwards as they have room for (eager 1F1B: Zhuang et al., "On Optimizing the
Communication of Model Parallelism", 2023). Its last stage never recomputes, as in Varuna.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from morph.contract.plan import Schedule


@lru_cache(maxsize=2**16)
def stage_windows(schedule: Schedule, num_stages: int, num_micro_batches: int, slope: int) -> tuple[int, ...]:
    """Return how many micro-batches each stage may have in flight.

    Varuna: slope * (P - 1 - s) + 1, capped at the replica's ``num_micro_batches`` (a larger slope, rather than a
    constant extra, hides latency). 1F1B: the same; plain 1F1B has slope 1. GPipe: all micro-batches; where memory is
    too small, in ``slope`` rounds, each flushed before the next.
    """
    if schedule == "gpipe":
        return (-(-num_micro_batches // slope),) * num_stages
    return tuple(min(num_micro_batches, slope * (num_stages - 1 - stage) + 1) for stage in range(num_stages))


def recomputes(schedule: Schedule, num_stages: int, wanted: bool = True) -> tuple[bool, ...]:
    """Return which stages recompute: all (except the last one, unless GPipe), or none."""
    return (wanted,) * (num_stages - 1) + (wanted and schedule == "gpipe",)


def fixed_orders(
    schedule: Schedule, counts: Sequence[int], recompute: list[bool], windows: Sequence[int]
) -> npt.NDArray[np.uint8]:
    """Return orders as ASCII letters [P, D, longest], padded with 0; ``windows``: per stage, equal under GPipe."""
    num_stages = len(recompute)
    orders = np.zeros((num_stages, len(counts), 3 * max(counts)), np.uint8)
    for stage, again in enumerate(recompute):
        for replica, count in enumerate(counts):
            text = fixed_order(schedule, stage, num_stages, count, again, windows[0 if schedule == "gpipe" else stage])
            orders[stage, replica, : len(text)] = np.frombuffer(text.encode("ascii"), np.uint8)
    return orders


@lru_cache(maxsize=4096)
def fixed_order(
    schedule: Schedule, stage: int, num_stages: int, count: int, recompute: bool, window: int | None = None
) -> str:
    """Return the order string of one stage that runs ``count`` micro-batches under "gpipe" or "1f1b", with ``window``:
    a round of GPipe (None: all), or in flight under 1F1B (None: as in plain 1F1B).
    """
    back = "RB" if recompute else "B"
    if schedule == "gpipe":
        rounds, rest = divmod(count, window or count)
        return ("F" * (window or count) + back * (window or count)) * rounds + "F" * rest + back * rest
    warm_up = min(num_stages - stage if window is None else window, count) - 1
    return "F" * warm_up + ("F" + back) * (count - warm_up) + back * warm_up
