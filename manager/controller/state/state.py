"""The controller's state: frozen, and JSON in and out."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import ConfigDict, Field

from manager.controller.state.actions import Action, Finish, Reason, RequestId
from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import NodeFacts
from manager.controller.state.nodes import NodeState
from manager.controller.state.profile_correction import Correction, StageRatios
from manager.controller.state.saves import Saving
from morph.contract.base import Value
from morph.contract.decided import Decided, LossScale, LossTrend
from morph.contract.evaluation import EvaluationSize, EvaluationTotals, FinishedMetrics, Judged
from morph.contract.messages import (
    Evaluation,
    FailureCause,
    PreCopyMove,
    ReshapeOrder,
    Slot,
    UnitId,
    Version,
    WorkerId,
)
from morph.contract.plan import Plan
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

    model_config = ConfigDict(allow_inf_nan=True)

    overflowed: bool
    unit_norms_sq: dict[UnitId, float]
    non_finite: bool
    followed: bool = False
    weights: dict[int, float] = Field(
        default_factory=dict, description="of losses, by micro-batch; empty: none has one"
    )
    losses: dict[int, float] = Field(
        default_factory=dict, description="by micro-batch; infinite: not finite. Empty where none are judged"
    )


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
    shares: tuple[Evaluation, ...] = Field(default=(), description="of an evaluation, in answers to the present order")
    finished: FinishedMetrics | None = Field(default=None, description="in an answer to the present order")


class NodeRequest(Value):
    """VMs that were requested and are not up.

    ``count``: not granted yet; ``granted``: booting (name -> since when); ``waiting``: those of them that do not boot
    yet, for they are in their market's queue; ``facts``: what kind these are; ``appeared``: who was up before its grant
    was heard of; ``node_type``: what was asked for.
    """

    count: int
    node_type: str = ""
    requested_s: float
    num_sent: int = 1
    granted: dict[WorkerId, float] = Field(default_factory=dict)
    facts: dict[WorkerId, NodeFacts] = Field(default_factory=dict)
    appeared: frozenset[WorkerId] = frozenset()
    waiting: frozenset[WorkerId] = Field(default=frozenset(), exclude_if=lambda given: not given)

    @property
    def booting(self) -> dict[WorkerId, float]:
        """Those that were granted and do not wait, with since when."""
        return {node: since_s for node, since_s in self.granted.items() if node not in self.waiting}


class KeptNotice(Value):
    """A notice of a VM that may be one of those that are requested: its agent can be faster than the grant."""

    notice: str
    taken_s: float


class Flaps(Value):
    """How often a machine came back lately."""

    num: int
    last_s: float


class FailedSetups(Value):
    """Workers in a row that could not be set up, in the same way; until one is.

    ``way``: what their failures have in common; ``num`` of them on ``hosts``, since ``since_s``; else of the last one.
    """

    way: str
    num: int
    hosts: frozenset[str]
    since_s: float
    last_s: float
    sentence: str
    traceback: str = ""
    cause: FailureCause = "run"


class Refusals(Value):
    """Of a type of GPU: how many in a row, and until when it is not asked for."""

    num: int
    until_s: float


class Provisioning(Value):
    """Requests for VMs, how they fared, and notices of VMs."""

    requests: dict[RequestId, NodeRequest] = Field(default_factory=dict)
    num_requests: int = 0
    num_refused: int = Field(default=0, description="refusals since the last grant")
    refused: dict[str, Refusals] = Field(default_factory=dict, description="by type, where there are several")
    num_setups_lost: int = Field(default=0, description="VMs in a row that came to nothing before one got ready")
    setup_lost_s: float | None = Field(default=None, description="when the last of these was")
    num_absent: int = Field(default=0, description="times in a row that granted VMs did not appear at all")
    failed_setups: FailedSetups | None = None
    gives_up: Literal["setups", "limit"] | None = Field(
        default=None, description="the run ends, or rests, for nothing comes of its VMs: why"
    )
    next_request_s: float | None = Field(default=None, description="no further request before that")
    kept_notices: dict[WorkerId, KeptNotice] = Field(
        default_factory=dict, description="of nodes that are not known: of open requests, or of VMs that came"
    )
    leaving: frozenset[WorkerId] = Field(
        default=frozenset(), description="who drains by a notice that is to be acknowledged"
    )
    flaps: dict[str, Flaps] = Field(default_factory=dict, description="by machine")
    nodes_wake_s: float | None = Field(default=None, description="no wait for a node runs out before that")


class Yardstick(Value):
    """What a healthy worker took (seconds) for a micro-batch's forward and backward on these sections.

    ``usual``: how all workers compared with the profile then, where that was known. ``by_sums``: it is a mean over many
    micro-batches, for it was by those that the worker was found slow.
    """

    first_section: int
    end_section: int
    node_type: str = ""
    healthy_s: float
    usual: float | None = None
    by_sums: bool = False


class Pace(Value):
    """How fast a worker computes.

    ``samples_s``: micro-batches of the window that is being filled; ``median_s``: of the last full one, and
    ``error_s`` its standard error; ``past_s``: medians of the last windows in this generation, and ``past_means_s``
    their means. ``streak``: windows in a row in which it was slow, or, negative, well. ``slowdown``: 1 is as fast as
    expected. ``yardstick``: what it was held against when it was last judged.
    """

    samples_s: tuple[float, ...] = ()
    median_s: float | None = None
    error_s: float = 0.0
    past_s: tuple[float, ...] = ()
    past_means_s: tuple[float, ...] = ()
    yardstick: Yardstick | None = None
    streak: int = 0
    slowdown: float = 1.0


class Probation(Value):
    """Of a slow worker that was left out. ``requested_s``: when the probe was sent that is not answered yet."""

    num_requested: int = 0
    num_passed: int = 0
    num_failed: int = 0
    due_s: float
    requested_s: float | None = None


class WorkerState(Value):
    """One VM and its worker. ``holds``: units whose state at the decided version it certainly has.

    ``ready_s``: when it was set up, None before that. ``eligible_s``: it is not taken in earlier, for its machine
    came and went too often. ``drain_until_s``: while draining, when its notice counts as void.
    """

    appeared_s: float
    node: NodeState = NodeState.WARMING
    host: str = ""
    facts: NodeFacts = NodeFacts()
    ready_s: float | None = None
    eligible_s: float | None = None
    notice: str | None = None
    drain_until_s: float | None = None
    pace: Pace = Pace()
    probation: Probation | None = None
    holds: frozenset[UnitId] = frozenset()

    @property
    def ready(self) -> bool:
        """Whether it is set up, and so can be given an order."""
        return self.ready_s is not None


class Failing(Value):
    """An error inside a worker, until the step at which it came is decided.

    ``final``: it came again, or nothing would mend it: what is held is saved, and the run ends.
    """

    version: Version
    generation: int
    worker: WorkerId
    sentence: str
    traceback: str = ""
    cause: FailureCause = "run"
    final: bool = False


class Leap(Value):
    """A bad step was given up with those before it: version ``to`` has the state of an earlier one.

    ``num_bad``: bad steps since that one.
    """

    to: Version
    num_bad: int


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
    """A planned change whose units are pre-copied, while the present generation goes on training.

    The change is ``slots`` of ``plan``. ``moves`` are the units that a receiver lacks there, each with a member that
    holds it and sends it; ``synced``, by receiver, those that it has and keeps at the decided version.
    ``failed``: receivers that some units will not reach. Nobody ever waits for any of it but a boundary that puts the
    change off: ``until_s`` at the latest. ``limit_s``: for which a stream may be silent.
    """

    number: int
    plan: Plan
    slots: tuple[Slot, ...]
    moves: tuple[PreCopyMove, ...]
    synced: dict[WorkerId, frozenset[UnitId]] = Field(default_factory=dict)
    failed: frozenset[WorkerId] = frozenset()
    until_s: float
    limit_s: float

    @property
    def parties(self) -> tuple[WorkerId, ...]:
        """Who sends or receives, each once."""
        return tuple(dict.fromkeys(worker for move in self.moves for worker in (move.sender, move.receiver)))

    @property
    def num_synced(self) -> int:
        """Units that have arrived, of all receivers."""
        return sum(len(units) for units in self.synced.values())

    @property
    def settled(self) -> bool:
        """Whether every unit has arrived, or will not."""
        return all(
            move.receiver in self.failed or move.unit in self.synced.get(move.receiver, ()) for move in self.moves
        )


class Waits(Value):
    """Since when, and until when at the latest, something is waited for, and how often in vain."""

    first_feasible_s: float | None = Field(default=None, description="when a plan first fitted, before the first shape")
    waiting_since_s: float | None = Field(default=None, description="for VMs, before the start or with too few")
    hold_until_s: float | None = None
    partly_lost: dict[str, float] = Field(
        default_factory=dict, description="VMs that lost a worker: until when its other workers may follow"
    )
    join_since_s: float | None = Field(default=None, description="since when a better shape could be formed")
    num_fruitless: int = Field(default=0, description="generations dissolved since the last decided step")
    resting_since_s: float | None = Field(default=None, description="of the first rest since the last decided step")
    rest_until_s: float | None = None
    idle_vm_s: float = Field(
        default=0.0, description="of VMs that were paid for since the last decided step, untrained"
    )
    idle_at_s: float | None = Field(default=None, description="until when that is counted; None: a shape trains")


class Measured(Value):
    """What the run has taught, in place of what was taken for granted. Means are of the kind that forgets."""

    setup_s: float | None = Field(default=None, description="mean of setups")
    morph_began_s: float | None = None
    morph_s: float | None = Field(default=None, description="mean of planned changes")
    state_bytes_per_s: float | None = Field(default=None, description="mean, of units from peers to one worker")
    stage_ratios: tuple[StageRatios, ...] = Field(default=(), description="of compute times to the profile's")
    correction: Correction | None = Field(default=None, description="of the profile, as it was told last")
    planned_with: tuple[float, ...] = Field(default=(), description="``config.factors`` now")
    types_planned_with: dict[str, tuple[float, ...]] = Field(default={}, description="``config.type_factors`` now")


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
    pre_copy: PreCopy | None = Field(default=None, description="pre-copied now; gone with the generation, or a party")
    num_pre_copies: int = 0
    evaluation: EvaluationSize | None = Field(default=None, description="of the job, as its workers say")
    unfinished: EvaluationTotals | None = Field(
        default=None, description="an evaluation of which the next order has the job's own metrics computed"
    )
    judged: Judged = Field(default=Judged(), description="what evaluations have said so far")
    failing: Failing | None = Field(default=None, description="the last error inside a worker")
    losses: LossTrend = Field(default=LossTrend(), description="what those of the steps to this version were like")
    leaps: dict[Version, Leap] = Field(default_factory=dict, description="by the version whose state is taken again")
    unnamed: tuple[int, ...] = Field(default=(), description="bad steps whose samples no worker has named yet")
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

    @property
    def is_last(self) -> bool:
        """Whether no step follows the decided version: it is the run's last, a stop was requested, or it ends early."""
        ends_early = self.evaluation is not None and self.judged.is_over(self.evaluation.best)
        return self.version >= self.config.num_steps or self.stop_reason is not None or ends_early


def initial_state(config: ControllerConfig) -> ControllerState:
    """Return the state before the first event."""
    checkpoint = config.initial_checkpoint
    known = {} if checkpoint is None else {"newest": (checkpoint.version,), "marked": checkpoint.marked}
    saving = Saving.model_validate({"checkpoint": checkpoint, "checkpoint_base": config.initial_version, **known})
    judged = Judged() if checkpoint is None else checkpoint.judged
    losses = LossTrend() if checkpoint is None else checkpoint.losses
    return ControllerState(config=config, version=config.initial_version, saving=saving, judged=judged, losses=losses)


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
