"""Lower bounds on the time of one replica's pipeline.

t_s = F_s + R_s + B_s; a, g = activation and gradient latency; head_s = sum over j < s of (F_j + a_j);
q_s = F_s + B_s + sum over j > s of (F_j + B_j) + sum over j >= s of (a_j + g_j), the round trip of one
micro-batch; n micro-batches; window w_s; AR_j the exposed part of the all-reduces of stage j (E in
:mod:`simulator.costs.reductions`):

    LB = max over s of { head_s + max( n t_s, (floor((n - 1)/w_s) + 1) q_s ) + tail_s },
    tail_s = max over j <= s of [ sum from j to s - 1 of (B + g) + AR_j ]

and, where messages occupy their wire for u_s (activations behind stage s) and v_s (its gradients), which leave one
after the other,

    LB >= max over s of { head_s + q_s + (n - 1) max(u_s, v_s) + tail_s }

Where times differ between micro-batches, n t_s is the sum over all of them, the round trips are those of micro-batches
0, w_s, 2 w_s, ..., head_s is that of the first, tail_s and the q_s of the wires use the minimum of each time, and AR_j
follows the last backward. The bound is a maximum of sums of times, so with means over several draws it bounds the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.costs.stage_costs import StageCosts
from simulator.costs.worker_times import to_come_ns, worker_times
from simulator.engine.times import Ints, StageTimes
from simulator.inputs.conditions import Conditions
from simulator.inputs.jitter import MeanJitter


@dataclass(frozen=True)
class Pipe:
    """Times of one replica's P stages, in ns: int64[P, 1] if equal for all micro-batches, else [P, N].

    ``recompute_ns`` is 0 where the stage does not recompute; messages include their time on the wire. ``exposed_ns``
    [P] is the least time from each stage's last backward until its gradients are reduced.
    """

    forward_ns: Ints
    recompute_ns: Ints
    backward_ns: Ints
    activation_ns: Ints
    gradient_ns: Ints
    activation_wire_ns: Ints
    gradient_wire_ns: Ints
    exposed_ns: Ints

    @property
    def work_ns(self) -> Ints:
        """t_s of each micro-batch."""
        work: Ints = self.forward_ns + self.recompute_ns + self.backward_ns
        return work

    def less_one_ns(self) -> Pipe:
        """Return all times less one nanosecond: lower bounds of means that were rounded."""
        return Pipe(
            forward_ns=self.forward_ns - 1,
            recompute_ns=np.maximum(0, self.recompute_ns - 1),
            backward_ns=self.backward_ns - 1,
            activation_ns=np.maximum(self.activation_wire_ns[:, None], self.activation_ns - 1),
            gradient_ns=np.maximum(self.gradient_wire_ns[:, None], self.gradient_ns - 1),
            activation_wire_ns=self.activation_wire_ns,
            gradient_wire_ns=self.gradient_wire_ns,
            exposed_ns=np.maximum(0, self.exposed_ns - 1),
        )


def pipe_of(times: StageTimes, exposed_ns: Ints) -> Pipe:
    """Return the pipe of stages whose times are equal in all replicas."""
    activation_wire, gradient_wire = times.wires_ns
    return Pipe(
        forward_ns=times.forward_ns[:, None],
        recompute_ns=(times.recompute_ns * times.recompute)[:, None],
        backward_ns=times.backward_ns[:, None],
        activation_ns=times.activation_ns[:, None],
        gradient_ns=times.gradient_ns[:, None],
        activation_wire_ns=activation_wire,
        gradient_wire_ns=gradient_wire,
        exposed_ns=exposed_ns,
    )


def pipes_of(
    costs: StageCosts, counts: Sequence[int], conditions: Conditions, jitter: MeanJitter | None = None
) -> list[tuple[Pipe, int, int]]:
    """Return, for each kind of replica under these conditions, its times, micro-batches and number of replicas."""
    num_replicas, reduced = len(counts), costs.reduced
    to_come = to_come_ns(costs, counts, conditions, jitter)
    if jitter is None and not conditions.slow and conditions.overlaps and costs.layout.alike:
        pipe = pipe_of(costs.times, reduced.exposed_ns(num_replicas, to_come[:, 0]))
        return [(pipe, count, counts.count(count)) for count in sorted(set(counts))]
    lanes = worker_times(costs, counts, conditions, jitter)
    alike: dict[object, list[int]] = {}
    for replica in range(num_replicas):
        alike.setdefault((counts[replica], *lanes.likeness([replica])) if jitter is None else replica, []).append(
            replica
        )
    pipes = []
    for replica, *others in alike.values():
        count = counts[replica]
        wires = lanes.activation_wire_ns[:, replica], lanes.gradient_wire_ns[:, replica]
        pipe = Pipe(
            forward_ns=lanes.forward_ns[:, replica, :count],
            recompute_ns=lanes.recompute_ns[:, replica, :count] * lanes.recompute[:, None],
            backward_ns=lanes.backward_ns[:, replica, :count],
            activation_ns=lanes.activation_ns[:, replica, :count] + wires[0][:, None],
            gradient_ns=lanes.gradient_ns[:, replica, :count] + wires[1][:, None],
            activation_wire_ns=wires[0],
            gradient_wire_ns=wires[1],
            exposed_ns=reduced.exposed_ns(num_replicas, to_come[:, replica]),
        )
        pipes.append((pipe, count, 1 + len(others)))
    return pipes


def total_ns(times: Ints, num_micro_batches: int, every: Ints | None = None) -> Ints:
    """Sum [P, 1] or [P, N] times over micro-batches 0, w, 2 w, ... of the first n; w = 1, or ``every`` per stage."""
    if times.shape[1] == 1:
        return times[:, 0] * (num_micro_batches if every is None else (num_micro_batches - 1) // every + 1)
    steps = [1] * len(times) if every is None else every.tolist()
    return np.array([int(row[:num_micro_batches:step].sum()) for row, step in zip(times, steps, strict=True)], np.int64)


def lower_bound_ns(
    pipe: Pipe,
    windows: Ints,
    num_micro_batches: int,
    *,
    reduction: bool = True,
    latency: bool = True,
    window: bool = True,
    bandwidth: bool = True,
) -> int:
    """Return LB of one replica's pipeline and its all-reduces; arguments leave out parts of it."""
    n, scale = num_micro_batches, int(latency)
    activation, gradient = pipe.activation_ns[:-1] * scale, pipe.gradient_ns[:-1] * scale
    forward, backward = pipe.forward_ns, pipe.backward_ns
    nothing = np.zeros(1, np.int64)

    def before(tasks: Ints, messages: Ints) -> Ints:
        """Return for each stage the sum over the stages before it, for one micro-batch."""
        return np.concatenate([nothing, np.cumsum(tasks[:-1] + messages)])

    def round_trips(tasks: Ints, messages: Ints) -> Ints:
        tasks = np.cumsum(tasks[::-1], axis=0)[::-1].copy()
        tasks[:-1] += np.cumsum(messages[::-1], axis=0)[::-1]
        return tasks

    head = before(forward[:, 0], activation[:, 0])
    back = before(backward.min(axis=1), gradient.min(axis=1))
    tail = back + np.maximum.accumulate(pipe.exposed_ns * reduction - back)
    trips = round_trips(forward + backward, activation + gradient)
    chain = total_ns(trips, n, windows) if window else trips[:, 0]
    bound = int((head + np.maximum(total_ns(pipe.work_ns, n), chain) + tail).max())
    if not (bandwidth and latency) or len(head) == 1:
        return bound
    on_wire = np.maximum(pipe.activation_wire_ns, pipe.gradient_wire_ns)[:-1]
    if trips.shape[1] > 1:
        tasks = (forward.min(axis=1) + backward.min(axis=1))[:, None]
        trips = round_trips(tasks, (activation.min(axis=1) + gradient.min(axis=1))[:, None])
    return max(bound, int(((head + trips[:, 0] + tail)[:-1] + (n - 1) * on_wire).max()))
