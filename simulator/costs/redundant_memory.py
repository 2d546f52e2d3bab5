"""Memory of redundant computation for the next stage, or on the last stage for the first (Bamboo, 5.1 and 5.2).

On the device are that stage's parameters and optimizer state. With redundant forwards alone (``eflb``) activations go
to host memory, with one micro-batch being computed and another in transit; with backwards (``efeb``) activations of the
micro-batches in flight at the next stage stay, and there are sums of gradients. Where stages recompute, a redundant
forward stores nothing: the stage's input was computed by the worker itself.
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
    """Return the bytes per micro-batch that the next stage keeps for its backward, without its input: int64[P]."""
    held = np.where(recompute, 0, memory.activations[end] - memory.activations[begin])
    return np.roll(held, -1)


def redundant_parts(memory: StageMemory, begin: Ints, end: Ints, window: Ints, recompute: Flags) -> Parts:
    """Return the parts on each stage's device: int64[P] each; none with one stage only."""
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
    """Return the bytes kept in host memory until the mini-batch is over: int64[P].

    For each micro-batch these are the messages to both neighbours, from which lost gradients are recomputed, and with
    ``eflb`` the next stage's activations.
    """
    name = memory.rules.redundant_computation
    if name not in ("lflb", "eflb") or len(begin) == 1:
        return np.zeros(len(begin), np.int64)
    kept = np.roll(memory.crossing(begin), -1) + memory.crossing(begin)
    if name == "eflb":
        kept = kept + next_activations(memory, begin, end, recompute)
    found: Ints = num_micro_batches * kept
    return found
