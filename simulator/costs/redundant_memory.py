"""What redundant computation holds of the next stage, the last stage of the first (Bamboo, sections 5.1 and 5.2).

On the device: its parameters and optimizer state. Redundant forwards alone (``eflb``) leave their activations to host
memory, with one micro-batch's being computed and another's on its way; with backwards (``efeb``) they stay for the
micro-batches that the next stage has in flight, and there are sums of gradients. Where stages recompute, a redundant
forward leaves nothing: of it only the stage's input would be stored, which its predecessor has made itself.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from simulator.costs.held_bytes import Ints
from simulator.costs.memory import Parts, StageMemory
from simulator.engine.redundant_loop import LAG

_BUFFERS = 2
Flags = npt.NDArray[np.bool_]


def next_activations(memory: StageMemory, begin: Ints, end: Ints, recompute: Flags) -> Ints:
    """Of one micro-batch, what the next stage keeps from its forward to its backward beside its input: int64[P]."""
    held = np.where(recompute, 0, memory.activations[end] - memory.activations[begin])
    return np.roll(held, -1)


def redundant_parts(memory: StageMemory, begin: Ints, end: Ints, window: Ints, recompute: Flags) -> Parts:
    """On each stage's device: int64[P] each; nothing with one stage only."""
    name = memory.rules.redundant_computation
    if name == "off" or len(begin) == 1:
        return {}
    parts = {"redundant layers": np.roll(memory.device_state(begin, end), -1)}
    activations = next_activations(memory, begin, end, recompute)
    if name == "eflb":
        parts["redundant activations"] = _BUFFERS * activations
    elif name == "efeb":
        parts["redundant activations"] = (np.roll(window, -1) + LAG) * activations
        parts["redundant sums"] = np.roll(memory.sums(begin, end), -1)
    return parts


def redundant_host_bytes(memory: StageMemory, begin: Ints, end: Ints, recompute: Flags, num_micro_batches: int) -> Ints:
    """In host memory, until the mini-batch is over: int64[P].

    Of each micro-batch what it gave to the next stage and to the one before, from which lost gradients are computed
    again, and with ``eflb`` the next stage's activations.
    """
    name = memory.rules.redundant_computation
    if name not in ("lflb", "eflb") or len(begin) == 1:
        return np.zeros(len(begin), np.int64)
    kept = np.roll(memory.crossing(begin), -1) + memory.crossing(begin)
    if name == "eflb":
        kept = kept + next_activations(memory, begin, end, recompute)
    found: Ints = num_micro_batches * kept
    return found
