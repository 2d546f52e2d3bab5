"""Redundant computation (Bamboo, section 5): what it takes while nothing is lost, and the pause when a worker is.

Each worker holds the next stage's layers too, the last one the first's. Of what that stage computes it computes

- ``lflb``: nothing, until that worker is lost;
- ``eflb``: forwards (FRC) in every mini-batch, in its waits where they fit (:mod:`simulator.engine.redundant_loop`);
  what they leave for a backward goes to host memory, beside the next one: an FRC takes at least as long as that;
- ``efeb``: backwards (BRC) too, for which gradients are sent to two workers, and which recompute where stages do.

**Pause.** When a worker is lost at an instant t, its predecessor has to have, of every micro-batch whose backward was
done, the gradients, and of those in flight what their backwards need:

    pause(t) = sum over j with F_j done of f, where it was not run redundantly by then and a stage keeps activations
             + sum over j with B_j done of max(b, transfer), where it was not run redundantly by then

f and b: forward and backward of a micro-batch; where stages recompute, b has the forward in it and f is nothing: an FRC
leaves no more than the stage's input, which the predecessor has made itself, so that it shortens no pause. transfer: of
the gradient from the stage behind, and with ``eflb`` of activations back from host memory. All pipelines wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from morph.contract.errors import PlanError
from simulator.costs import memory as redundant_memory
from simulator.costs.stage_costs import StageCosts
from simulator.costs.worker_times import swap_ns, worker_times
from simulator.engine.execution import ShapeTimes
from simulator.engine.times import Ints, Played
from simulator.inputs.conditions import Conditions


def mean_pause_ns(
    costs: StageCosts, counts: Sequence[int], conditions: Conditions, played: Played, whole_ns: int
) -> float:
    """Mean over workers and over t in a mini-batch of ``whole_ns``, which was ``played`` with its times.

    Raises:
        PlanError: without redundant computation, or with one stage.
    """
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
    """For how long in all what was done is nowhere else: until it is redone, or until the end."""
    until = np.full(len(done_ns), whole_ns) if redone_ns is None else np.minimum(redone_ns, whole_ns)
    return int(np.maximum(0, until - done_ns).sum())


def total_redundant_ns(times: ShapeTimes, counts: Sequence[int]) -> Iterator[int]:
    """Of each replica, what all its redundant tasks take."""
    for kind in (times.redundant_forward_ns, times.redundant_backward_ns):
        if kind is None:
            continue
        for replica, count in enumerate(counts):
            lengths = kind[:, replica if kind.shape[1] > 1 else 0, :count]
            yield int(lengths.sum()) * (count if lengths.shape[1] == 1 else 1)


def redundant_host_bytes(costs: StageCosts, num_micro_batches: int) -> Ints:
    """In each stage's host memory, of so many micro-batches: int64[P]."""
    return redundant_memory.redundant_host_bytes(costs.memory, *costs.spans, costs.times.recompute, num_micro_batches)


def note(costs: StageCosts, conditions: Conditions) -> str:
    """A sentence on forwards that are run for nothing; empty where there are none."""
    if conditions.redundant_computation != "eflb" or not costs.times.recompute.any():
        return ""
    return (
        "Of stages that recompute, redundant forwards leave only inputs, which their workers have anyway: they shorten "
        "no pause, and lflb does without them."
    )
