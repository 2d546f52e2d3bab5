"""The controller's state: frozen, and serialised as JSON."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import ConfigDict, Field

from manager.controller.state.actions import Action, Finish, Reason, RequestId
from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import NodeFacts
from manager.controller.state.nodes import NodeState
from manager.controller.state.profile_correction import Correction, Forecasts, StageRatios
from manager.controller.state.saves import Saving
from morph.contract.base import Value
from morph.contract.decided import Decided, LossScale, LossTrend
from morph.contract.evaluation import EvaluationSize, EvaluationTotals, FinishedMetrics, Judged
from morph.contract.job_facts import Epochs
from morph.contract.messages import Evaluation, FailureCause, PreCopyMove, ReshapeOrder, Slot, UnitId, Version, WorkerId
from morph.contract.plan import Plan
from morph.contract.salvage import PartialSum


class OutstandingOrder(Value):
    """The order that the workers in ``StepProgress.awaited`` have not answered yet; ``version``: of a step.

    Workers must answer within ``limit_s`` seconds, and after an abort within ``give_up_s``.
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
    """One member's report on the present attempt at the present step."""

    model_config = ConfigDict(allow_inf_nan=True)

    overflowed: bool
    unit_norms_sq: dict[UnitId, float]
    non_finite: bool
    followed: bool = False
    weights: dict[int, float] = Field(
        default_factory=dict, description="weights of losses, by micro-batch; empty: no loss has one"
    )
    losses: dict[int, float] = Field(
        default_factory=dict, description="by micro-batch; infinite: it is not finite; empty: losses are not judged"
    )


class StepProgress(Value):
    """The present attempt at the present step, and the outstanding order."""

    attempt: int = 0
    loss_scale: LossScale | None = Field(default=None, description="loss scale of the present step, if the job has one")
    order: OutstandingOrder | None = None
    awaited: frozenset[WorkerId] = Field(
        default=frozenset(), description="workers that have ``order`` and have not answered"
    )
    reports: dict[WorkerId, StepReport] = Field(default_factory=dict)
    kept: dict[WorkerId, tuple[PartialSum, ...]] = Field(
        default_factory=dict,
        description="partial sums of the decided version's step, which was given up, while no step is run",
    )
    shares: tuple[Evaluation, ...] = Field(
        default=(), description="parts of an evaluation, from answers to the present order"
    )
    finished: FinishedMetrics | None = Field(default=None, description="from an answer to the present order")


class NodeRequest(Value):
    """VMs of ``node_type`` that were requested and are not up: ``count`` are not granted yet.

    ``granted``: name -> when; ``waiting``: granted ones in their market's queue; ``appeared``: workers before their
    grant.
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
        """Granted workers that are not in a queue, with the time of their grant."""
        return {worker: since_s for worker, since_s in self.granted.items() if worker not in self.waiting}


class KeptNotice(Value):
    """A notice for an unknown VM, which may belong to an open request: a VM's agent can be faster than its grant."""

    notice: str
    taken_s: float


class Flaps(Value):
    """How often a machine came back recently."""

    num: int
    last_s: float


class FailedSetups(Value):
    """Consecutive setups that failed in the same ``way``: ``num`` on ``hosts`` since ``since_s``; and the last one."""

    way: str
    num: int
    hosts: frozenset[str]
    since_s: float
    last_s: float
    sentence: str
    traceback: str = ""
    cause: FailureCause = "run"


class FailedBoots(Value):
    """VMs in a row on which no worker can be started, in the same ``way``, by their own account."""

    way: str
    vms: frozenset[str]


class Refusals(Value):
    """Refusals of a type of GPU: how many in a row, and until when it is not requested."""

    num: int
    until_s: float


class Provisioning(Value):
    """Requests for VMs, how they fared, and notices of VMs."""

    requests: dict[RequestId, NodeRequest] = Field(default_factory=dict)
    num_requests: int = 0
    num_refused: int = Field(default=0, description="refusals since the last grant")
    refused: dict[str, Refusals] = Field(
        default_factory=dict, description="refusals by type, where there are several types"
    )
    num_setups_lost: int = Field(default=0, description="VMs in a row that were lost before they were ready")
    setup_lost_s: float | None = Field(default=None, description="when the last of these VMs was lost")
    num_absent: int = Field(default=0, description="times in a row that granted VMs did not appear at all")
    requests_over: str = Field(
        default="", description="why no VM is requested any more, which only the user can mend; empty: they are"
    )
    failed_setups: FailedSetups | None = None
    failed_boots: FailedBoots | None = None
    gives_up: Literal["setups", "limit"] | None = Field(
        default=None, description="why the run ends, or rests, because its VMs achieve nothing"
    )
    next_request_s: float | None = Field(default=None, description="no further request before this time")
    kept_notices: dict[WorkerId, KeptNotice] = Field(
        default_factory=dict, description="notices of unknown nodes, of open requests or of known VMs"
    )
    leaving: frozenset[WorkerId] = Field(
        default=frozenset(), description="draining workers whose notices must be acknowledged"
    )
    flaps: dict[str, Flaps] = Field(default_factory=dict, description="by machine")
    nodes_wake_s: float | None = Field(default=None, description="no wait for a node ends before this time")


class Yardstick(Value):
    """A healthy worker's time (seconds) for a micro-batch's forward and backward on these sections."""

    first_section: int
    end_section: int
    node_type: str = ""
    healthy_s: float
    usual: float | None = None
    by_sums: bool = False


class Pace(Value):
    """How fast a worker computes.

    ``samples_s``: times of micro-batches in the window that is being filled, and ``queued_s`` the parts of these in
    which other threads had the cores; ``queued``: the last full window's queued time as a share of its other time. If
    all members lack cores, queued time does not count in the following, and ``waited_s`` is its mean.

    ``median_s``: the median of the last full window, and ``error_s`` its standard error; ``past_s``: medians of the
    last windows in this generation, and ``past_means_s`` their means. ``streak``: the number of windows in a row in
    which it was slow, or, if negative, well. ``slowdown``: 1 is as fast as expected. ``yardstick``: the time with which
    it was compared when it was last judged.
    """

    samples_s: tuple[float, ...] = ()
    queued_s: tuple[float, ...] = ()
    queued: float = 0.0
    waited_s: float = 0.0
    median_s: float | None = None
    error_s: float = 0.0
    past_s: tuple[float, ...] = ()
    past_means_s: tuple[float, ...] = ()
    yardstick: Yardstick | None = None
    streak: int = 0
    slowdown: float = 1.0


class Probation(Value):
    """Probation of a slow worker that was left out. ``requested_s``: when the unanswered probe was sent."""

    num_requested: int = 0
    num_passed: int = 0
    num_failed: int = 0
    due_s: float
    requested_s: float | None = None


class WorkerState(Value):
    """One VM and its worker, which certainly ``holds`` these units at the decided version.

    ``eligible_s``: not used before, because its machine came and went; ``drain_until_s``: then its notice is void.
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
        """Whether the worker is set up, so that it can be given an order."""
        return self.ready_s is not None


class Failing(Value):
    """An error inside a worker until its step is decided; ``final``: no retry mends it, so the run saves and ends."""

    version: Version
    generation: int
    worker: WorkerId
    sentence: str
    traceback: str = ""
    cause: FailureCause = "run"
    final: bool = False


class Leap(Value):
    """Steps up to a bad one were undone: ``to`` has an earlier version's state. ``num_bad``: bad steps since that."""

    to: Version
    num_bad: int


class Phase(StrEnum):
    """Phases of a job, each with what always holds in it.

    ``STARTING``: no generation was formed yet; no worker has an order. ``WAITING``: no plan fits the ready workers; no
    worker has an order; survivors keep what they hold. ``HOLDING``: a plan fits, but a worker that allows a faster one
    is almost ready, or a VM that lost a worker may lose its other workers; no worker has an order; ends at
    ``hold_until_s`` at the latest. ``RESTING``: several generations in a row decided no step, or a checkpoint could not
    be loaded and an undamaged one is sought; workers have no orders except to write what they hold; ends at
    ``rest_until_s`` once these are answered. ``RESHAPING``: every member (and every worker that only serves its units)
    has answered ``Reshaped`` or has the reshape order of this generation outstanding, at least one of them the latter.
    ``TRAINING``: every member has answered ``Prepared`` or has the step order of (generation, version, attempt)
    outstanding, at least one of them the latter; no other worker has an order. ``COMMITTING``: members have answered
    ``Committed`` or have the commit order outstanding; a commit or a unit of the last checkpoint is missing.
    ``SEALING``: everything except the last manifest is committed and written; no worker has an order. ``ABORTING``: the
    generation is being dissolved; an abort was sent for every outstanding order, and at least one order is left.
    ``ENDED``: a ``Finish`` was issued; events change nothing.

    The decided version changes only when every member prepared it, or when state is lost and the run returns to the
    version of a checkpoint. The invariants of a state, by phase, are the table in ``validate``.
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

    @property
    def words(self) -> str:
        """The phase in words that need no explanation."""
        return _IN_WORDS.get(self, self.value)


_IN_WORDS = {
    Phase.WAITING: "waiting for VMs",
    Phase.HOLDING: "waiting for a worker",
    Phase.RESTING: "waiting before another attempt",
    Phase.RESHAPING: "forming the shape",
    Phase.COMMITTING: "saving",
    Phase.SEALING: "saving",
    Phase.ABORTING: "leaving the shape",
}


class PreCopy(Value):
    """A planned change to ``slots`` of ``plan``, whose units are pre-copied while the present generation trains on.

    ``moves``: units that receivers lack; ``synced``: by receiver, those kept there at the decided version; ``failed``:
    receivers that some units will not reach. Only the boundary that postponed the change waits, until ``until_s``.
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
        """The workers that send or receive, each once."""
        return tuple(dict.fromkeys(worker for move in self.moves for worker in (move.sender, move.receiver)))

    @property
    def num_synced(self) -> int:
        """The number of units that have arrived, over all receivers."""
        return sum(len(units) for units in self.synced.values())

    @property
    def settled(self) -> bool:
        """Whether every unit has arrived, or will not."""
        return all(
            move.receiver in self.failed or move.unit in self.synced.get(move.receiver, ()) for move in self.moves
        )


class Waits(Value):
    """The beginnings and bounds of waits, and counts of failed attempts."""

    first_feasible_s: float | None = Field(default=None, description="when a plan first fitted, before the first shape")
    waiting_since_s: float | None = Field(default=None, description="since when the run waits for VMs")
    hold_until_s: float | None = None
    partly_lost: dict[str, float] = Field(
        default_factory=dict, description="VMs that lost a worker: until when they may lose their other workers"
    )
    join_since_s: float | None = Field(default=None, description="since when a better shape could be formed")
    num_fruitless: int = Field(default=0, description="generations dissolved since the last decided step")
    resting_since_s: float | None = Field(
        default=None, description="start of the first rest since the last decided step"
    )
    rest_until_s: float | None = None
    idle_vm_s: float = Field(default=0.0, description="VM time paid for without training since the last decided step")
    idle_at_s: float | None = Field(
        default=None, description="until when idle VM time is counted; None: a shape trains"
    )


class Measured(Value):
    """Measurements of this run, which replace assumptions. Means are exponential."""

    setup_s: float | None = Field(default=None, description="mean duration of setups")
    morph_began_s: float | None = None
    morph_s: float | None = Field(default=None, description="mean duration of planned changes")
    state_bytes_per_s: float | None = Field(default=None, description="mean speed of units from peers to one worker")
    stage_ratios: tuple[StageRatios, ...] = Field(default=(), description="ratios of compute times to the profile's")
    correction: Correction | None = Field(default=None, description="correction of the profile, as last reported")
    forecasts: Forecasts = Field(default=Forecasts(), description="how well corrections forecast new stages")
    planned_with: tuple[float, ...] = Field(default=(), description="``config.factors`` now")
    types_planned_with: dict[str, tuple[float, ...]] = Field(default={}, description="``config.type_factors`` now")


class ControllerState(Value):
    """Everything that ``decide`` knows, in slices. ``version``: the decided one; ``workers``: by appearance."""

    config: ControllerConfig
    phase: Phase = Phase.STARTING
    version: Version
    generation: int = 0
    decided: Decided | None = Field(default=None, description="facts of the last step; None: ``version`` was restored")
    reshape: ReshapeOrder | None = Field(default=None, description="the order that formed the present generation")
    member_units: dict[WorkerId, frozenset[UnitId]] = Field(
        default_factory=dict, description="units of each present member"
    )
    workers: dict[WorkerId, WorkerState] = Field(default_factory=dict)
    num_appeared: int = 0
    step: StepProgress = StepProgress()
    saving: Saving = Saving()
    waits: Waits = Waits()
    provisioning: Provisioning = Provisioning()
    measured: Measured = Measured()
    pre_copy: PreCopy | None = Field(
        default=None, description="the present pre-copy; dropped with a party or its generation"
    )
    num_pre_copies: int = 0
    evaluation: EvaluationSize | None = Field(
        default=None, description="size of the job's evaluation, as its workers say"
    )
    epochs: Epochs | None = Field(
        default=None, description="how the job's epochs divide into steps; None: all steps are whole"
    )
    unfinished: EvaluationTotals | None = Field(
        default=None, description="an evaluation whose own metrics the next order has computed"
    )
    judged: Judged = Field(default=Judged(), description="results of evaluations so far")
    failing: Failing | None = Field(default=None, description="the last error inside a worker")
    losses: LossTrend = Field(default=LossTrend(), description="history of the losses up to this version")
    leaps: dict[Version, Leap] = Field(default_factory=dict, description="by the version whose state is used again")
    unnamed: tuple[int, ...] = Field(default=(), description="bad steps whose samples no worker has reported yet")
    stop_reason: str | None = None
    finish: Finish | None = None
    recent: tuple[str, ...] = Field(default=(), description="the last events, for the error of an impossible one")

    @property
    def ready_workers(self) -> tuple[WorkerId, ...]:
        """The workers that are set up, usable or not, in order of appearance."""
        return tuple([worker for worker, entry in self.workers.items() if entry.ready_s is not None])

    @property
    def busy_workers(self) -> tuple[WorkerId, ...]:
        """The workers with an outstanding order, in order of appearance."""
        return tuple(worker for worker in self.workers if worker in self.step.awaited) if self.step.awaited else ()

    @property
    def plan(self) -> Plan | None:
        """The present shape; None while none is formed."""
        return self.reshape.plan if self.reshape else None

    def num_micro_batches(self, plan: Plan) -> int:
        """Return the number of micro-batches of the step that follows the decided version."""
        if self.epochs is None:
            return plan.num_micro_batches
        return self.epochs.num_micro_batches(self.version, plan.micro_batch_size)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots of the present shape; empty while none is formed."""
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
    """Add a measured duration to an exponential mean; negative durations (a clock stepped back) are ignored."""
    if sample_s < 0:
        return before
    return sample_s if before is None else 0.7 * before + 0.3 * sample_s


class Decision(Value):
    """The result of ``decide``. ``wake_at_s``: send a ``Tick`` then at the latest; None: no tick is needed."""

    state: ControllerState
    actions: tuple[Action, ...] = ()
    reason: Reason
    wake_at_s: float | None = None
