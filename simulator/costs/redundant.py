"""Redundant computation (Bamboo, section 5): its cost while no worker is lost, and the pause when one is.

Each worker also holds the next stage's layers (the last worker those of the first stage), and computes for that stage

- ``lflb``: nothing until its worker is lost;
- ``eflb``: forwards (FRC) in every mini-batch, in its waits where they fit (:mod:`simulator.engine.redundant_loop`);
  their activations are copied to host memory during the next FRC, which takes at least as long as the copy;
- ``efeb``: also backwards (BRC), for which gradients are sent to two workers, and which recompute where stages do.

**Pause.** When a worker is lost at an instant t, its predecessor needs the gradients of every micro-batch whose
backward was done, and for those in flight the inputs of their backwards:

    pause(t) = sum over j with F_j done of f, where it was not run redundantly by then and a stage keeps activations
             + sum over j with B_j done of max(b, transfer), where it was not run redundantly by then

f and b: forward and backward of a micro-batch. Where stages recompute, b includes the forward and f is 0: an FRC stores
only the stage's input, which the predecessor has computed itself, so it shortens no pause. transfer: time to send the
gradient from the following stage, and with ``eflb`` to copy activations back from host memory. All pipelines wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from morph.contract.errors import PlanError
from simulator.costs.memory import next_host_bytes
from simulator.costs.stage_costs import StageCosts
from simulator.costs.worker_times import swap_ns, worker_times
from simulator.engine.execution import ShapeTimes
from simulator.engine.times import Ints, Played
from simulator.inputs.conditions import Conditions


def mean_pause_ns(
    costs: StageCosts, counts: Sequence[int], conditions: Conditions, played: Played, whole_ns: int
) -> float:
    """Return the mean pause over workers and t in a mini-batch of ``whole_ns``; PlanError: not redundant, or P = 1."""
    name, num_stages = conditions.redundant_computation, costs.times.num_stages
    if name == "off" or num_stages == 1:
        allowed = "lflb, eflb or efeb, and two stages or more"
        raise PlanError(
            "nobody takes over for a lost worker", field="redundant_computation", value=name, allowed=allowed
        )
    times = worker_times(costs, counts, conditions)
    wire, swap = costs.times.wires_ns[1], np.roll(swap_ns(costs) + np.zeros(num_stages), 1)
    total = 0.0
    for replica, stages in enumerate(played.start_ns):
        for lost, starts in enumerate(stages):
            letters = np.frombuffer(played.orders[replica][lost].encode("ascii"), np.uint8)
            forward, backward = (int(of[lost, replica, 0]) for of in (times.forward_ns, times.backward_ns))
            again = bool(costs.times.recompute[lost])
            whether = [None, None]
            if played.redundant_ns:
                spans = played.redundant_ns[replica][(lost - 1) % num_stages]
                whether[: len(spans)] = [of_kind[:, 1] for of_kind in spans]
            redone_f, redone_b = whether
            transfer = max(int(wire[lost]), int(swap[lost]) if name == "eflb" else 0)
            if not again:
                total += forward * _exposed_ns(starts[letters == ord("F")] + forward, redone_f, whole_ns)
            takes = max(backward + again * int(times.recompute_ns[lost, replica, 0]), transfer)
            total += takes * _exposed_ns(starts[letters == ord("B")] + backward, redone_b, whole_ns)
    return total / whole_ns / (num_stages * len(counts))


def _exposed_ns(done_ns: Ints, redone_ns: Ints | None, whole_ns: int) -> int:
    """Return the total time during which results exist only once: until they are recomputed, or until the end."""
    until = np.full(len(done_ns), whole_ns) if redone_ns is None else np.minimum(redone_ns, whole_ns)
    return int(np.maximum(0, until - done_ns).sum())


def total_redundant_ns(times: ShapeTimes, counts: Sequence[int]) -> Iterator[int]:
    """Yield the total time of the redundant tasks of each replica."""
    for kind in (times.redundant_forward_ns, times.redundant_backward_ns):
        if kind is None:
            continue
        for replica, count in enumerate(counts):
            lengths = kind[:, replica if kind.shape[1] > 1 else 0, :count]
            yield int(lengths.sum()) * (count if lengths.shape[1] == 1 else 1)


def redundant_host_bytes(costs: StageCosts, num_micro_batches: int) -> Ints:
    """Return the bytes in each stage's host memory for so many micro-batches: int64[P]."""
    return next_host_bytes(costs.memory, *costs.spans, costs.times.recompute, num_micro_batches)


def note(costs: StageCosts, conditions: Conditions) -> str:
    """Return a sentence on redundant forwards without use; empty where there are none."""
    if conditions.redundant_computation != "eflb" or not costs.times.recompute.any():
        return ""
    return (
        "Of stages that recompute, redundant forwards leave only inputs, which their workers have anyway: they shorten "
        "no pause, and lflb does without them."
    )
