"""Simulates the micro-batches of one mini-batch in a pipeline, in integer nanoseconds.

The rules that an idle stage applies, in this order; "Varuna 2" is rule 2 in section 3.2 of that paper:

1. If j was recomputed, only the backward of j may run next: wait for its gradient (Varuna 2).
2. If the gradient of the next backward j has arrived, recompute j if needed, then run its backward (Varuna 3).
3. If a forward's activation has arrived, and fewer than ``window`` micro-batches are in flight, run that forward.
4. If the downstream stage has begun its backward of j, so that the arrival t of j's gradient is known: recompute j now
   if that ends at t or later (Varuna 1); otherwise, if nothing can run before, wake up at t - R (R: its duration).
5. Wait.

At each time all ends of tasks are processed first; then stages decide, the last stage first, so that the same input
gives the same orders. Messages of one direction between two stages leave one after the other. A plan contains these
orders and an executor runs them; :mod:`simulator.engine.execution` simulates that, also on shared cores.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from morph.contract.errors import PlanError
from morph.contract.plan import Schedule
from simulator.engine.execution import execute_orders, lane_times
from simulator.engine.local_loop import play
from simulator.engine.schedules import fixed_orders
from simulator.engine.times import Ints, Played, StageTimes

__all__ = ["Ints", "Played", "StageTimes", "run_pipeline"]

_NO_ORDERS = np.zeros((1, 1, 0), np.uint8)


def run_pipeline(
    times: StageTimes,
    counts: tuple[int, ...],
    *,
    schedule: Schedule = "varuna",
    compute_slots: int | None = None,
    keep_orders: bool = False,
    keep_times: bool = False,
    skip_periods: bool = True,
) -> Played:
    """Simulate one mini-batch. Raises PlanError if a fixed order deadlocks.

    "varuna" applies the rules above; "gpipe" and "1f1b" have fixed orders. ``compute_slots``: the number of tasks
    that can run at once over all replicas; None: each worker has its own device. With fewer slots than workers, the
    orders planned for own devices are executed. ``keep_times``: also return the start of each task (implies
    ``keep_orders``).
    """
    if compute_slots is not None and compute_slots < times.num_stages * len(counts):
        orders = run_pipeline(times, counts, schedule=schedule, keep_orders=True).orders
        lanes = lane_times(times, len(counts))
        strict = schedule != "varuna"
        return execute_orders(
            lanes, orders, times.window, strict=strict, compute_slots=compute_slots, keep_times=keep_times
        )
    keep_orders = keep_orders or keep_times
    different = sorted(set(counts))
    fixed = _NO_ORDERS
    if schedule != "varuna":
        fixed = fixed_orders(schedule, different, times.recompute.tolist(), times.window.tolist())
        fixed = np.ascontiguousarray(fixed.swapaxes(0, 1))
    skip = skip_periods and not keep_times
    numbers = np.array(different, np.int64)
    finished, ended, letters, lengths, starts, jump = play(times.packed, numbers, fixed, skip, keep_orders, keep_times)
    if not finished:
        raise PlanError("the task orders wait for each other forever", field="schedule", value=schedule)
    stages, at = range(times.num_stages), [different.index(count) for count in counts]
    order_of, starts_of = dict[int, tuple[str, ...]](), dict[int, tuple[Ints, ...]]()
    for n in range(len(different)):
        if keep_orders:
            order_of[n] = tuple(_order_string(letters[n, s, : lengths[n, s]], jump[n, s]) for s in stages)
        if keep_times:
            starts_of[n] = tuple(starts[n, s, : lengths[n, s]].copy() for s in stages)
    return Played(
        last_backward_ns=ended[at].T,
        orders=tuple(order_of[n] for n in at) if keep_orders else (),
        start_ns=tuple(starts_of[n] for n in at) if keep_times else (),
    )


def _order_string(letters: npt.NDArray[np.uint8], jump: Ints) -> str:
    """Return an order with skipped periods put back; ``jump``: a period's first letter, one past it, times skipped."""
    text = letters.tobytes().decode("ascii")
    begin, end, repeats = (int(value) for value in jump)
    return text[:end] + text[begin:end] * repeats + text[end:] if repeats else text
