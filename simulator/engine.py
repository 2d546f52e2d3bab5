"""Plays the micro-batches of one mini-batch through a pipeline, event by event, in integer nanoseconds.

The rules that a free stage applies (Varuna, section 3.2), in this order:

1. Recomputed j: nothing but the backward of j may run next, so wait for its gradient (rule 2).
2. The gradient of the next backward j is there: recompute j if needed, then its backward (rule 3).
3. A forward whose activation is there, while fewer than ``window`` micro-batches are in flight.
4. The downstream stage has begun its backward of j, so the arrival t of j's gradient is known:
   recompute j now if that ends at t or later (rule 1); with nothing to run before, wake up at t - R.
5. Wait.

At one instant every task that ends is ended first; then stages decide, the last stage first, and within a
stage the lowest replica first. Hence the same input gives the same events. With ``compute_slots`` at most
that many tasks run at once over all stages and replicas, in order of the instant at which they were ready.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from morph.contract.errors import PlanError
from morph.contract.plan import Schedule
from simulator.engine_loop import STAGE, play
from simulator.orders import fixed_orders

Ints = npt.NDArray[np.int64]
_NO_ORDERS = np.zeros((1, 1, 0), np.uint8)


@dataclass(frozen=True)
class StageTimes:
    """What the engine needs of P stages: int64 arrays of length P, in ns, at least 1 for tasks.

    ``activation_ns[s]`` is the latency from s to s+1 and ``gradient_ns[s]`` from s+1 to s; both have length
    P with an unused last entry. ``window[s]`` >= 1.
    """

    forward_ns: Ints
    recompute_ns: Ints
    backward_ns: Ints
    activation_ns: Ints
    gradient_ns: Ints
    window: Ints
    recompute: npt.NDArray[np.bool_]

    @property
    def num_stages(self) -> int:
        """P."""
        return len(self.forward_ns)

    @cached_property
    def packed(self) -> npt.NDArray[np.void]:
        """The same as one structured array, as the compiled loop wants it."""
        stages = np.zeros(self.num_stages, STAGE)
        stages["forward"], stages["recompute"], stages["backward"] = (
            self.forward_ns,
            self.recompute_ns,
            self.backward_ns,
        )
        stages["activation"], stages["gradient"] = self.activation_ns, self.gradient_ns
        stages["window"], stages["again"] = self.window, self.recompute
        return stages


@dataclass(frozen=True)
class Played:
    """How one mini-batch went.

    ``last_backward_ns[s, d]`` is when stage s of replica d has done its last backward. ``orders[d][s]`` is
    the order string over F, R, B, empty unless asked for. ``start_ns[d][s]`` holds the start of each task of
    that order (int64), empty unless asked for.
    """

    last_backward_ns: Ints
    orders: tuple[tuple[str, ...], ...] = ()
    start_ns: tuple[tuple[Ints, ...], ...] = ()

    @property
    def makespan_ns(self) -> int:
        """When the last backward of all has ended."""
        return int(self.last_backward_ns.max())


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
    """Play one mini-batch.

    Args:
        times: Of the P stages.
        counts: How many micro-batches each of the D replicas runs, at least 1 each.
        schedule: "varuna" plays the rules above; "gpipe" and "1f1b" play their fixed orders.
        compute_slots: Tasks that can run at once over all replicas; None: each worker has its own device.
        keep_orders: Also return the order of each stage.
        keep_times: Also return the start of each task (implies ``keep_orders``).
        skip_periods: Jump over repeating periods. Exact: the state is compared relative to clock and index.

    Raises:
        PlanError: a fixed order that waits for itself.
    """
    if compute_slots is None and len(counts) > 1:
        return _each_size_once(times, counts, schedule, keep_orders, keep_times, skip_periods)
    keep_orders = keep_orders or keep_times
    fixed = _NO_ORDERS
    if schedule != "varuna":
        fixed = fixed_orders(schedule, counts, [bool(flag) for flag in times.recompute])
    num_lanes = times.num_stages * len(counts)
    slots = num_lanes if compute_slots is None else compute_slots
    skip = skip_periods and schedule == "varuna" and not keep_times and slots >= num_lanes and len(counts) == 1
    finished, ended_ns, letters, lengths, starts, jump = play(
        np.array(counts, np.int64),
        times.packed,
        fixed,
        slots,
        skip,
        keep_orders,
        keep_times,
    )
    if not finished:
        raise PlanError("the task orders wait for each other for ever", field="schedule", value=schedule)
    return Played(
        last_backward_ns=ended_ns,
        orders=_order_strings(letters, lengths, jump) if keep_orders else (),
        start_ns=_starts(starts, lengths) if keep_times else (),
    )


def _each_size_once(
    times: StageTimes,
    counts: tuple[int, ...],
    schedule: Schedule,
    keep_orders: bool,
    keep_times: bool,
    skip_periods: bool,
) -> Played:
    """Replicas that share no device do not influence each other: play each number of micro-batches once."""
    by_count = {
        count: run_pipeline(
            times,
            (count,),
            schedule=schedule,
            keep_orders=keep_orders,
            keep_times=keep_times,
            skip_periods=skip_periods,
        )
        for count in sorted(set(counts))
    }
    return Played(
        last_backward_ns=np.concatenate([by_count[count].last_backward_ns for count in counts], axis=1),
        orders=tuple(orders for count in counts for orders in by_count[count].orders),
        start_ns=tuple(starts for count in counts for starts in by_count[count].start_ns),
    )


def _order_strings(
    letters: npt.NDArray[np.uint8], lengths: Ints, jump: npt.NDArray[np.int64]
) -> tuple[tuple[str, ...], ...]:
    """Turn the letters of each lane into strings and put the skipped periods back in.

    ``jump[s]`` is (first letter of the period, one past it, how often it was skipped).
    """
    num_stages, num_replicas = lengths.shape
    orders = []
    for replica in range(num_replicas):
        strings = []
        for stage in range(num_stages):
            text = letters[stage, replica, : lengths[stage, replica]].tobytes().decode("ascii")
            begin, end, repeats = (int(value) for value in jump[stage])
            strings.append(text[:end] + text[begin:end] * repeats + text[end:] if repeats else text)
        orders.append(tuple(strings))
    return tuple(orders)


def _starts(starts: Ints, lengths: Ints) -> tuple[tuple[Ints, ...], ...]:
    num_stages, num_replicas = lengths.shape
    return tuple(
        tuple(starts[stage, replica, : lengths[stage, replica]].copy() for stage in range(num_stages))
        for replica in range(num_replicas)
    )
