"""The controller's state: frozen, and JSON in and out."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from manager.controller.state.actions import Action, Finish
from manager.controller.state.config import ControllerConfig
from manager.controller.state.learned import Correction, StageRatios
from manager.controller.state.provisioning import Provisioning
from manager.controller.state.reasons import Reason
from manager.controller.state.saves import Saving
from manager.controller.state.steps import StepProgress
from manager.controller.state.workers import Failing, WorkerState
from morph.contract.base import Value
from morph.contract.decided import Decided
from morph.contract.messages import EvaluationSize, PreCopyMove, ReshapeOrder, Slot, UnitId, Version, WorkerId
from morph.contract.plan import Plan


class Phase(StrEnum):
    """Phases of a job, each with what always holds in it.

    ``STARTING``: no generation was formed yet; no worker has an order.
    ``WAITING``: no plan fits the ready workers; no worker has an order; survivors keep what they hold.
    ``HOLDING``: a plan fits, and a node with which a faster one fits is about to be ready, or workers may follow one
    that their VM has lost; no worker has an order; ends at ``hold_until_s`` at the latest.
    ``RESTING``: generation after generation came to nothing, or a checkpoint could not be loaded and a whole one is
    looked for; no worker has an order but to write what it holds; ends at ``rest_until_s`` once these are answered.
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

    The decided version changes only when every member prepared it, or when state is lost and it returns to a
    checkpoint's. What holds of a state by itself, in each phase, is the table in ``validate``.
    """

    STARTING = "starting"
    WAITING = "waiting"
    HOLDING = "holding"
    RESTING = "resting"
    RESHAPING = "reshaping"
    TRAINING = "training"
    COMMITTING = "committing"
    SEALING = "sealing"
    ABORTING = "aborting"
    ENDED = "ended"


class PreCopy(Value):
    """A planned change whose units are sent ahead, while the present generation goes on training.

    The change is ``slots`` of ``plan``. ``moves`` are the units that a receiver lacks there, each with a member that
    holds it and sends it; ``following``, by receiver, those that it has and keeps at the decided version.
    ``failed``: receivers that some units will not reach. Nobody ever waits for any of it but a boundary that puts the
    change off: ``until_s`` at the latest. ``limit_s``: for which a stream may be silent.
    """

    number: int
    plan: Plan
    slots: tuple[Slot, ...]
    moves: tuple[PreCopyMove, ...]
    following: dict[WorkerId, frozenset[UnitId]] = Field(default_factory=dict)
    failed: frozenset[WorkerId] = frozenset()
    until_s: float
    limit_s: float

    @property
    def parties(self) -> tuple[WorkerId, ...]:
        """Who sends or receives, each once."""
        return tuple(dict.fromkeys(worker for move in self.moves for worker in (move.sender, move.receiver)))

    @property
    def num_following(self) -> int:
        """Units that have arrived, of all receivers."""
        return sum(len(units) for units in self.following.values())

    @property
    def settled(self) -> bool:
        """Whether every unit has arrived, or will not."""
        return all(
            move.receiver in self.failed or move.unit in self.following.get(move.receiver, ()) for move in self.moves
        )


class Waits(Value):
    """Since when, and until when at the latest, something is waited for, and how often in vain."""

    first_feasible_s: float | None = Field(default=None, description="when a plan first fitted, before the first shape")
    waiting_since_s: float | None = Field(default=None, description="for VMs, before the start or with too few")
    hold_until_s: float | None = None
    torn: dict[str, float] = Field(
        default_factory=dict, description="VMs that lost a worker: until when its other workers may follow"
    )
    join_since_s: float | None = Field(default=None, description="since when a better shape could be formed")
    num_fruitless: int = Field(default=0, description="generations dissolved since the last decided step")
    resting_since_s: float | None = Field(default=None, description="of the first rest since the last decided step")
    rest_until_s: float | None = None


class Measured(Value):
    """What the run has taught, in place of what was taken for granted. Means are of the kind that forgets."""

    setup_s: float | None = Field(default=None, description="mean of setups")
    morph_began_s: float | None = None
    morph_s: float | None = Field(default=None, description="mean of planned changes")
    state_bytes_per_s: float | None = Field(default=None, description="mean, of units from peers to one worker")
    stage_ratios: tuple[StageRatios, ...] = Field(default=(), description="of compute times to the profile's")
    correction: Correction | None = Field(default=None, description="of the profile, as it was told last")
    planned_with: tuple[float, ...] = Field(default=(), description="``config.factors`` now")


class ControllerState(Value):
    """Everything that ``decide`` knows. ``version`` is the decided version; ``workers`` are in order of appearance.

    What belongs to one concern stands in a slice of it.
    """

    config: ControllerConfig
    phase: Phase = Phase.STARTING
    version: Version
    generation: int = 0
    decided: Decided | None = Field(default=None, description="of the last step; None: ``version`` was restored")
    reshape: ReshapeOrder | None = Field(default=None, description="that formed the present generation")
    member_units: dict[WorkerId, frozenset[UnitId]] = Field(default_factory=dict, description="by present member")
    workers: dict[WorkerId, WorkerState] = Field(default_factory=dict)
    num_appeared: int = 0
    step: StepProgress = StepProgress()
    saving: Saving = Saving()
    waits: Waits = Waits()
    provisioning: Provisioning = Provisioning()
    measured: Measured = Measured()
    ahead: PreCopy | None = Field(default=None, description="sent ahead now; gone with the generation, or a party")
    num_ahead: int = 0
    evaluation: EvaluationSize | None = Field(default=None, description="of the job, as its workers say")
    failing: Failing | None = Field(default=None, description="the last error inside a worker")
    stop_reason: str | None = None
    finish: Finish | None = None
    recent: tuple[str, ...] = Field(default=(), description="the last events, for the error of an impossible one")

    @property
    def ready_workers(self) -> tuple[WorkerId, ...]:
        """The workers that are set up, whether they may be given a slot or not, in order of appearance."""
        return tuple([worker for worker, entry in self.workers.items() if entry.ready_s is not None])

    @property
    def busy_workers(self) -> tuple[WorkerId, ...]:
        """The workers with an outstanding order, in order of appearance."""
        return tuple(worker for worker in self.workers if worker in self.step.awaited) if self.step.awaited else ()

    @property
    def plan(self) -> Plan | None:
        """The present shape; None while none is formed."""
        return self.reshape.plan if self.reshape else None

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Who drives what in it."""
        return self.reshape.slots if self.reshape else ()


def initial_state(config: ControllerConfig) -> ControllerState:
    """Return the state before the first event."""
    saving = Saving(checkpoint=config.initial_checkpoint, checkpoint_base=config.initial_version)
    return ControllerState(config=config, version=config.initial_version, saving=saving)


def mean_of(before: float | None, sample_s: float) -> float | None:
    """Take a measured duration into a mean that forgets; a clock that stepped back measured nothing."""
    if sample_s < 0:
        return before
    return sample_s if before is None else 0.7 * before + 0.3 * sample_s


class Decision(Value):
    """What ``decide`` returns. ``wake_at_s``: send a ``Tick`` then, at the latest; None: none is needed."""

    state: ControllerState
    actions: tuple[Action, ...] = ()
    reason: Reason
    wake_at_s: float | None = None
