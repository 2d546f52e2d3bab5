"""The controller's state: frozen, and JSON in and out."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from manager.controller.actions import Action
from manager.controller.config import ControllerConfig
from manager.controller.reasons import Reason
from morph.contract.base import Value
from morph.contract.checkpoint import Manifest
from morph.contract.decided import Decided, LossScale
from morph.contract.messages import Slot, UnitId, UnitWritten, Version, WorkerId
from morph.contract.plan import Plan


class Phase(StrEnum):
    """Phases of a job, each with what always holds in it.

    ``STARTING``: no generation was formed yet; no worker has an order.
    ``WAITING``: no plan fits the ready workers; no worker has an order; survivors keep what they hold.
    ``RESHAPING``: every member (and every worker that only serves its units) has answered ``Reshaped`` or has
    the reshape order of this generation outstanding, at least one of them the latter.
    ``TRAINING``: every member has answered ``Prepared`` or has the step order of (generation, version, attempt)
    outstanding, at least one of them the latter; nobody else has an order.
    ``COMMITTING``: members have answered ``Committed`` or have the commit order outstanding; a commit or a unit
    of the last checkpoint is missing.
    ``SEALING``: everything is committed and written but the last manifest; no worker has an order.
    ``ABORTING``: the generation is being dissolved; every outstanding order was told to abort, and at least one
    is left.
    ``ENDED``: a ``Finish`` was issued; events change nothing.

    In every phase: a worker has at most one outstanding order, of the present generation; the decided version
    changes only when every member prepared it, or when state is lost and it returns to a checkpoint's.
    """

    STARTING = "starting"
    WAITING = "waiting"
    RESHAPING = "reshaping"
    TRAINING = "training"
    COMMITTING = "committing"
    SEALING = "sealing"
    ABORTING = "aborting"
    ENDED = "ended"


class OutstandingOrder(Value):
    """An order that a worker has not answered yet. ``version`` is the step of a step order."""

    kind: Literal["reshape", "step", "commit"]
    generation: int
    version: Version
    attempt: int = 0
    sent_s: float
    abort_sent_s: float | None = None


class WorkerState(Value):
    """One living worker. ``holds``: units whose state at the decided version it certainly has.

    ``overflowed``, ``unit_norms_sq`` and ``non_finite`` are what it reported of the present step.
    """

    appeared_s: float
    ready: bool = False
    order: OutstandingOrder | None = None
    overflowed: bool = False
    unit_norms_sq: dict[UnitId, float] = Field(default_factory=dict)
    non_finite: bool = False
    holds: frozenset[UnitId] = frozenset()


class PendingCheckpoint(Value):
    """A checkpoint on its way to storage: who writes which unit, and what is there already.

    ``stale``: a writer was lost or its generation dissolved, so it may never be completed and another may begin.
    """

    version: Version
    writers: dict[UnitId, WorkerId]
    written: dict[UnitId, UnitWritten] = Field(default_factory=dict)
    started_s: float
    stale: bool = False

    @property
    def complete(self) -> bool:
        """Every unit is on storage."""
        return len(self.written) == len(self.writers)


class ControllerState(Value):
    """Everything that ``decide`` knows. ``version`` is the decided version; ``workers`` are in order of appearance."""

    config: ControllerConfig
    phase: Phase = Phase.STARTING
    version: Version
    generation: int = 0
    attempt: int = 0
    decided: Decided | None = Field(default=None, description="of the last step; None: ``version`` was restored")
    loss_scale: LossScale | None = Field(default=None, description="of the present step, if the job has one")
    plan: Plan | None = None
    slots: tuple[Slot, ...] = ()
    workers: dict[WorkerId, WorkerState] = Field(default_factory=dict)
    num_appeared: int = 0
    first_feasible_s: float | None = None
    num_fruitless: int = Field(default=0, description="generations dissolved since the last decided step")
    checkpoint: Manifest | None = Field(default=None, description="newest complete checkpoint")
    pending: PendingCheckpoint | None = None
    sealing: tuple[Manifest, ...] = Field(default=(), description="manifests being written")
    sealing_since_s: float | None = None
    checkpoint_base: Version = Field(default=0, description="the next checkpoint is counted from this version")
    stop_reason: str | None = None
    recent: tuple[str, ...] = Field(default=(), description="the last events, for the error of an impossible one")


def initial_state(config: ControllerConfig) -> ControllerState:
    """Return the state before the first event."""
    return ControllerState(
        config=config,
        version=config.initial_version,
        checkpoint=config.initial_checkpoint,
        checkpoint_base=config.initial_version,
    )


class Decision(Value):
    """What ``decide`` returns. ``wake_at_s``: send a ``Tick`` then, at the latest; None: none is needed."""

    state: ControllerState
    actions: tuple[Action, ...] = ()
    reason: Reason
    wake_at_s: float | None = None
