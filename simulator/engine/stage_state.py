"""State of each stage in the compiled loops of one pipeline."""

from __future__ import annotations

import numpy as np

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
