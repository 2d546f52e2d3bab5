"""The cost of a memory limit, in words."""

from __future__ import annotations

from collections.abc import Sequence

from morph.words import counted
from simulator.costs.outcome import ShapeOutcome
from simulator.search.objectives import Objective, Shape
from simulator.search.sweep import Sweep

WORTH_SAYING = 0.01
"""The gain, as a share of the time, from which a sentence mentions it."""


def memory_sentence(sweep: Sweep, shapes: Sequence[Shape], best: ShapeOutcome, objective: Objective) -> str:
    """Return what more memory per device would allow, or "" if nothing is limited or less than 1 % would be gained.

    The shapes are searched again without a limit, together with shallower ones.
    """
    if sweep.memory_bytes is None:
        return ""
    free = sweep.without_memory_limit()
    gpus = max(depth * replicas for depth, replicas in shapes)
    fitting = sweep.depths(gpus)
    shallower = [(depth, gpus // depth) for depth in free.depths(gpus) if depth not in fitting]
    possible = [*shapes, *((depth, min(replicas, free.total)) for depth, replicas in shallower)]
    now = objective.cost(best.shape, best.mini_batch_ns / 1e9)
    found = free.best(possible, 1, objective, below=(1 - WORTH_SAYING) * now)
    if not found:
        return ""
    better = found[0]
    then = objective.cost(better.shape, better.mini_batch_ns / 1e9)
    needed = int(better.costs.memory_bytes.max()) / 2**30
    gain = f"with {needed:.3g} GiB per device {better.shape[0]} x {better.shape[1]}"
    limit = f"Memory limits it ({sweep.memory_bytes / 2**30:.3g} GiB per device): "
    if better.shape[0] in fitting and not sweep.fits(better.shape):
        why = f"{counted(better.shape[1], 'replica')} of this depth do not fit"
    elif better.shape[0] not in fitting:
        why = f"pipelines as shallow as {better.shape[0]} do not fit"
    elif better.shape == best.shape and best.costs.live.any():
        why = "activations of whole stages, or windows as steep as the links want, do not fit"
    elif better.shape == best.shape:
        why = "windows as steep as the links want do not fit"
    else:
        why = "the windows that this shape would need do not fit"
    return f"{limit}{why}; {gain} would take {1 - then / now:.0%} less per example."
