"""The present step, or what else members were ordered: who has answered what."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from morph.contract.base import Value
from morph.contract.decided import LossScale
from morph.contract.messages import UnitId, Version, WorkerId
from morph.contract.salvage import PartialSum


class OutstandingOrder(Value):
    """The order that ``StepProgress.awaited`` have not answered yet. ``version`` is the step of a step order.

    It is to be answered within ``limit_s``, and once it was aborted within ``give_up_s`` (seconds).
    """

    kind: Literal["reshape", "step", "commit"]
    generation: int
    version: Version
    attempt: int = 0
    sent_s: float
    limit_s: float
    abort_sent_s: float | None = None
    give_up_s: float = 0.0


class StepReport(Value):
    """What one member reported of the present attempt of the present step."""

    overflowed: bool
    unit_norms_sq: dict[UnitId, float]
    non_finite: bool
    followed: bool = False


class StepProgress(Value):
    """The present attempt of the present step, and the order that is outstanding."""

    attempt: int = 0
    loss_scale: LossScale | None = Field(default=None, description="of the present step, if the job has one")
    order: OutstandingOrder | None = None
    awaited: frozenset[WorkerId] = Field(default=frozenset(), description="who has ``order`` and has not answered")
    reports: dict[WorkerId, StepReport] = Field(default_factory=dict)
    kept: dict[WorkerId, tuple[PartialSum, ...]] = Field(
        default_factory=dict, description="of the decided version's step, which was given up, while none is run"
    )
