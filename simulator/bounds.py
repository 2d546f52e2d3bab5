"""How fast one shape could be at best, and the ladder from pure work to the simulated time.

t_s = F_s + R_s + B_s; a, g = activation and gradient latency; head_s = sum over j < s of (F_j + a_j);
q_s = F_s + B_s + sum over j > s of (F_j + B_j) + sum over j >= s of (a_j + g_j), the round trip of one
micro-batch; n micro-batches; window w_s; AR_j the all-reduces of stage j:

    LB = max over s of { head_s + max( n t_s, (floor((n - 1)/w_s) + 1) q_s ) + tail_s },
    tail_s = max over j <= s of [ sum from j to s - 1 of (B + g) + AR_j ]

and, where messages occupy their wire for u_s (activations behind stage s) and v_s (its gradients), which leave one
after the other,

    LB >= max over s of { head_s + q_s + (n - 1) max(u_s, v_s) + tail_s }
"""

from __future__ import annotations

import numpy as np

from simulator.times import Ints, StageTimes


def stage_time_ns(times: StageTimes) -> Ints:
    """t_s: the work of one micro-batch on each stage."""
    work: Ints = times.forward_ns + times.recompute_ns * times.recompute + times.backward_ns
    return work


def lower_bound_ns(
    times: StageTimes,
    num_micro_batches: int,
    reduce_ns: Ints,
    *,
    latency: bool = True,
    window: bool = True,
    bandwidth: bool = True,
) -> int:
    """LB of one replica's pipeline and the all-reduces behind it; without latencies, windows or wires if so asked."""
    n = num_micro_batches
    scale = 1 if latency else 0
    activation, gradient = times.activation_ns * scale, times.gradient_ns * scale
    activation, gradient = activation[:-1], gradient[:-1]
    zero = np.zeros(1, np.int64)
    head = np.concatenate([zero, np.cumsum(times.forward_ns[:-1] + activation)])
    back = np.concatenate([zero, np.cumsum(times.backward_ns[:-1] + gradient)])
    tail = back + np.maximum.accumulate(reduce_ns - back)
    compute = np.cumsum((times.forward_ns + times.backward_ns)[::-1])[::-1]
    wire = np.concatenate([np.cumsum((activation + gradient)[::-1])[::-1], zero])
    rounds = (n - 1) // times.window + 1 if window else np.ones_like(times.window)
    bound = int((head + np.maximum(n * stage_time_ns(times), rounds * (compute + wire)) + tail).max())
    if not (bandwidth and latency) or len(head) == 1:
        return bound
    on_wire = np.maximum(*times.wires_ns)[:-1]
    return max(bound, int(((head + compute + wire + tail)[:-1] + (n - 1) * on_wire).max()))
