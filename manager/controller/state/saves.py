"""What saves take and how VMs fare, as it was seen: what the next save is timed by."""

from __future__ import annotations

from pydantic import Field

from morph.contract.base import Value
from morph.contract.checkpoint import SaveKind


class NextSave(Value):
    """When the next checkpoint begins, at the step boundary nearest to ``due_s``, and why then."""

    due_s: float
    interval_s: float = Field(description="between two of them, as things stand")
    kind: SaveKind
    why: str


class SaveTimes(Value):
    """Of this session. Times in seconds; None: not seen yet. What is measured again and again is a mean that forgets.

    ``saved_s``: when the state of the newest complete checkpoint was copied, or when training began or went back to it;
    ``since_s``: the same, or of the one under way.
    ``durable_s``: from that copy to a complete checkpoint. ``stall_s``: for which a save keeps the worker from training
    that has most to copy. ``num_refused``: saves in a row that storage did not take, after which ``retry_s`` is when
    the next one is tried. ``num_lost``, ``vm_s``: VMs that were lost, and how long these lived, together.
    """

    saved_s: float | None = None
    since_s: float | None = None
    ordered_s: float | None = Field(default=None, description="when the present step was ordered")
    step_s: float | None = None
    stall_s: float | None = None
    durable_s: float | None = None
    allocation_s: float | None = Field(default=None, description="from a request to a VM that is up")
    num_refused: int = 0
    retry_s: float | None = None
    num_lost: int = 0
    vm_s: float = 0.0
    insurance: NextSave | None = Field(default=None, description="that costs least, as it was worked out last")
    weighs: bool = Field(default=False, description="one is complete since followers were weighed")
