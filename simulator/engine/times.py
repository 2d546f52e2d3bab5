"""The engine's inputs and results, and the state of each stage in the compiled loops of one pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
F, R, B = 70, 82, 66
"""ASCII letters of the tasks."""
ACT, GRAD, EARLY = 0, 1, 2
"""Indices of a micro-batch's times: arrivals of its activation and gradient, and begin of an early recompute."""
STAGE = np.dtype(
    [
        (name, np.int64)
        for name in (
            "forward",
            "recompute",
            "backward",
            "window",
            "again",
            "activation",
            "act_wire",
            "gradient",
            "grad_wire",
            "recompute_before",
            "act_after",
            "grad_after",
            "early_after",
        )
    ]
)
"""One stage. ``recompute`` is 0 where there is none (``again`` = 0), ``recompute_before`` that of the stage before.
``activation`` and ``gradient``: of a lone message that leaves this stage, of which ``*_wire`` on the wire. ``*_after``:
from when a neighbour begins its next task to when its message is here, and an early recompute may begin."""
STAGE_PROGRESS = np.dtype(
    [(name, np.int64) for name in ("clock", "num_f", "num_b", "position", "act_free", "grad_free")]
)
"""How far a stage is. ``clock``: no task begins before; ``num_*``: begun; ``position``: letters of a fixed order begun;
``*_free``: when its last activation and gradient have left the wire."""


@dataclass(frozen=True)
class StageTimes:
    """The times of P stages: int64 arrays of length P, in ns, at least 1 for tasks.

    ``activation_ns[s]`` is the time of a lone message from s to s+1 and ``gradient_ns[s]`` from s+1 to s; both
    have length P with an unused last entry. ``window[s]`` >= 1. ``activation_wire_ns`` and ``gradient_wire_ns`` are the
    parts of these times that occupy the wire, for which the next message waits; None: 0.
    """

    forward_ns: Ints
    recompute_ns: Ints
    backward_ns: Ints
    activation_ns: Ints
    gradient_ns: Ints
    window: Ints
    recompute: Flags
    activation_wire_ns: Ints | None = None
    gradient_wire_ns: Ints | None = None

    @property
    def num_stages(self) -> int:
        return len(self.forward_ns)

    @cached_property
    def packed(self) -> npt.NDArray[np.void]:
        """Return the times as one structured array, for the compiled loop."""
        rules = np.zeros(self.num_stages, STAGE)
        activation_wire, gradient_wire = self.wires_ns
        rules["forward"], rules["backward"] = self.forward_ns, self.backward_ns
        rules["window"], rules["again"] = self.window, self.recompute
        rules["recompute"] = self.recompute_ns * self.recompute
        rules["activation"], rules["act_wire"] = self.activation_ns, activation_wire
        before, after = slice(None, -1), slice(1, None)
        rules["gradient"][after], rules["grad_wire"][after] = self.gradient_ns[before], gradient_wire[before]
        rules["recompute_before"][after] = rules["recompute"][before]
        rules["act_after"][after] = self.forward_ns[before] + self.activation_ns[before]
        to_gradient = self.backward_ns[after] + self.gradient_ns[before]
        to_early = np.where(
            self.recompute[before], np.maximum(0, to_gradient - rules["recompute"][before]), to_gradient
        )
        rules["grad_after"][before] = rules["recompute"][after] + to_gradient
        rules["early_after"][before] = rules["recompute"][after] + to_early
        return rules

    @property
    def wires_ns(self) -> tuple[Ints, Ints]:
        """``activation_wire_ns`` and ``gradient_wire_ns``, with zeros in place of None."""
        nothing = np.zeros(self.num_stages, np.int64)
        activation, gradient = self.activation_wire_ns, self.gradient_wire_ns
        return nothing if activation is None else activation, nothing if gradient is None else gradient


@dataclass(frozen=True)
class Played:
    """The result of playing one mini-batch.

    ``last_backward_ns[s, d]``: when stage s of replica d has ended its last backward. ``orders[d][s]``: the order
    string over F, R, B, empty unless requested. ``start_ns[d][s]``: the start of each task of that order (int64), empty
    unless requested. ``redone_ns[s, d]``: when its redundant tasks have ended, too; None without any.
    ``redundant_ns[d][s]``, requested with ``start_ns``: int64[kinds, n, 2], first begin and end of each redundant
    forward, and backward if any.
    """

    last_backward_ns: Ints
    orders: tuple[tuple[str, ...], ...] = ()
    start_ns: tuple[tuple[Ints, ...], ...] = ()
    redone_ns: Ints | None = None
    redundant_ns: tuple[tuple[Ints, ...], ...] = ()

    def of_replicas(self, replicas: list[int]) -> Played:
        """Return the result for these replicas, which may be repeated, without orders and times."""
        redone = None if self.redone_ns is None else self.redone_ns[:, replicas]
        return Played(self.last_backward_ns[:, replicas], redone_ns=redone)

    @property
    def makespan_ns(self) -> int:
        """When the last backward of all stages and replicas has ended."""
        return int(self.last_backward_ns.max())
