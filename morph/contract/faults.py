"""Scheduled faults of a worker, for tests and demonstrations."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from morph.contract.base import Value


class Fault(Value):
    """A scheduled fault, for tests: SIGKILL or an error of torch, at the ``nth`` arrival (from 0) at a phase."""

    worker: str
    phase: Literal[
        "forward",
        "backward",
        "reduce",
        "before_commit",
        "after_commit",
        "applied",
        "reshape",
        "transfer",
        "checkpoint",
        "send_ahead",
        "receive_ahead",
        "share_gradients",
        "share_sums",
    ]
    step: Annotated[int, Field(ge=0)]
    nth: Annotated[int, Field(ge=0)] = 0
    kind: Literal["kill", "out_of_memory", "lost_device"] = "kill"


class SlowSpell(Value):
    """A scheduled fail-stutter, for tests and demonstrations: a worker takes ``factor`` times as long to compute.

    It begins with step ``first_step`` and ends before step ``end_step``; None: it does not end. A probe counts as part
    of the last step that was decided before it was sent.
    """

    worker: str
    factor: float = Field(ge=1, allow_inf_nan=False)
    first_step: int = Field(default=0, ge=0)
    end_step: int | None = Field(default=None, ge=0)
