"""Orders from the manager to workers, and the workers' answers.

A *version* counts the optimizer steps contained in a state: version v means steps 0..v-1 were applied. Step t starts
from version t. The manager's journal decides commits: once every member has reported ``Prepared(step=t)``, version t+1
is decided, and each worker applies it when the next order (a step, a reshape or a commit) names that version.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from morph.contract.base import Shown, Value
from morph.contract.cluster import LinkSetting, RingSetting
from morph.contract.decided import Decided, LossScale
from morph.contract.emulation import EmulatedDevice
from morph.contract.evaluation import Array, EvaluationSize, EvaluationTotals, FinishedMetrics
from morph.contract.faults import Fault, SlowSpell
from morph.contract.job_facts import Epochs, JobFacts
from morph.contract.plan import Plan
from morph.contract.rules import CheckpointRules
from morph.contract.salvage import Follow, KeptSums, Salvage
from morph.contract.timeline import ComputeTimes, MicroBatchTimes, StepTimeline

DEFAULT_LIMIT_S = 120.0
"""Default bound, in seconds, of a wait for others in an order."""

MOST_CUT_BYTES = 8 * 1024 * 1024
"""Most bytes of a compressed cut that workers get with the job's code; a cut of 72 layers takes 160 kB."""

WorkerId = str
UnitId = str
Version = Annotated[int, Field(ge=0)]
WEIGHT = "/weight"
"""Suffix of a metric's name, and the whole name for the loss: the weight of the total (``morph.Loss``)."""
SUM = "/sum"
"""Suffix of the name of a metric that is a sum (``morph.Sum``)."""
SAMPLES = "/samples"
"""Suffix of the name of a value for each sample (``morph.PerSample``)."""
MARKS = (WEIGHT, SUM, SAMPLES)
FailureCause = Literal["device", "memory", "job", "checkpoint", "run"]


class JobCode(Value):
    """The files of the job that a run began with, as a zip: every worker of the run loads the job from these."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    job_path: str = Field(description="file.py:name inside it")
    folder: str = Field(description="their folder on the manager's machine")
    sha256: str = Field(description="digest of the archive")
    archive: bytes = Field(repr=False)
    unpack: bool = Field(default=False, description="the worker does not see that folder, and unpacks its own copy")


class HandedCut(Value):
    """A job's model as the manager cut it, so that workers need not export it."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    sha256: str = Field(description="digest of the content")
    content: bytes = Field(repr=False, max_length=MOST_CUT_BYTES)


class WorkerSetup(Value):
    """Everything that a new worker needs before it can get a stage."""

    model_config = ConfigDict(hide_input_in_errors=True)  # the run's secret is one of the fields

    worker: WorkerId
    job_path: str = Field(description="path/to/file.py:name")
    fingerprint: str = Field(description="fingerprint of the cut model, from the profile")
    num_sections: int = Field(ge=1)
    micro_batch_size: int = Field(ge=1)
    checkpoint_url: str = Field(description="fsspec URL or path of the run's checkpoint directory")
    lease: str = Field(
        default="", description="name of the run's lease of its storage; empty: only this run can use it"
    )
    store_host: str
    store_port: int = Field(ge=0, le=65535, description="port of the store; 0: none, the worker trains alone")
    listen_host: str = Field(description="address on which this worker accepts its peers")
    secret: str = Field(default="", repr=False, description="secret of the run; empty if a worker has no peers")
    device: Literal["cpu", "cuda"] = "cpu"
    device_slots: tuple[str, ...] = Field(
        default=(), description="for local VMs on CUDA: folder of files named after devices; each worker locks one"
    )
    rings: RingSetting = "gloo"
    links: LinkSetting = "staged"
    num_threads: int = Field(default=1, ge=1)
    heartbeat_wait_s: float = Field(default=1.0, gt=0, description="time between two heartbeats")
    checkpoints: CheckpointRules = CheckpointRules()
    faults: tuple[Fault, ...] = ()
    slow_spells: tuple[SlowSpell, ...] = ()
    emulation: EmulatedDevice | None = Field(default=None, description="emulated device: take its times, load no job")
    code: JobCode | None = Field(default=None, description="the job's code; absent: the file at ``job_path``")
    cut: HandedCut | None = Field(default=None, description="the cut model; absent: the worker cuts the model itself")
    variables: dict[str, str] = Field(default={}, repr=False, description="environment variables that the user named")
    known_by: JobFacts = Field(default=JobFacts(), description="facts that the loaded job must match")


class Slot(Value):
    """The place of a worker: its stage and replica."""

    worker: WorkerId
    stage: int = Field(ge=0)
    replica: int = Field(ge=0)


class StateSource(Value):
    """The source from which one worker gets the state of one parameter unit in a reshape.

    ``keep``: the worker holds it already; ``peer``: from the living worker ``peer``; ``ahead``: pre-copied by the
    living worker ``peer``, which then sends the last steps' gradients; ``checkpoint``: from the checkpoint of version
    ``ReshapeOrder.version``; if a ``peer`` is named, that worker reads and sends the state, because this one cannot
    read the storage; ``initial``: made from the job's seed.
    """

    worker: WorkerId
    unit: UnitId
    kind: Literal["keep", "peer", "ahead", "checkpoint", "initial"]
    peer: WorkerId | None = None


class ReshapeOrder(Value):
    """Form generation ``generation`` with these slots, and bring every unit to ``version``.

    A receiver that has prepared step ``version - 1`` applies it first, and drops gradients of other steps. Until the
    first step or commit order of this generation comes, it keeps every unit that it holds at ``version`` or has
    received completely, so a reshape that fails loses nothing. A receiver without a slot is named as a ``peer`` in
    ``sources``: it serves those units, joins no group, keeps its units and also answers. ``decided`` is the decision
    about step ``version - 1``; absent after a return to a checkpoint. ``ahead``: the number of the ``PreCopyOrder`` to
    which sources of kind "ahead" belong; other pre-copied state is dropped. ``salvage``: the kept partial sums of the
    abandoned step from ``version``; other partial sums are dropped. ``keep_sums``: a worker keeps its partial sums if a
    step is abandoned; otherwise it drops at once those that it has. ``follows``: workers that have a follower;
    ``follow_in_host``: the follower keeps the state in host memory, and on its device only while it is updated.
    ``copy_sums_every``: after each time this many of its micro-batches, a worker's partial sums go to its follower; 0:
    never. ``limit_s``: bound of any wait for others in this generation; the manager gives up the order earlier.
    """

    generation: int = Field(ge=1)
    version: Version
    decided: Decided | None = None
    plan: Plan
    slots: tuple[Slot, ...] = Field(min_length=1)
    sources: tuple[StateSource, ...]
    ahead: int | None = None
    salvage: Salvage | None = None
    keep_sums: bool = False
    follows: tuple[Follow, ...] = ()
    follow_in_host: bool = False
    copy_sums_every: int = Field(default=0, ge=0)
    limit_s: float = Field(default=DEFAULT_LIMIT_S, gt=0)

    @cached_property
    def lacked(self) -> dict[WorkerId, list[StateSource]]:
        """The sources of the state that workers do not hold."""
        sources_of: dict[WorkerId, list[StateSource]] = {}
        for source in self.sources:
            if source.kind != "keep":
                sources_of.setdefault(source.worker, []).append(source)
        return sources_of

    def salvage_in(self, order: StepOrder) -> Salvage | None:
        """Return the partial sums from which a step continues, if any: only the first attempt at this version."""
        return self.salvage if order.step == self.version and order.attempt == 0 else None


class PreCopyMove(Value):
    """A unit whose state ``sender`` sends to ``receiver`` while training continues."""

    unit: UnitId
    sender: WorkerId
    receiver: WorkerId


class PreCopyOrder(Value):
    """Pre-copy units before a planned change, on the control lane, in parallel to other orders; no worker waits for it.

    A sender sends each unit's state once, at a version at which it begins a step, and from then on the reduced
    gradients of every decided step with the decision about it; the receiver applies them. The next reshape ends the
    pre-copy. ``moves`` are the moves in which the worker takes part; without any, it drops pre-copied state. An order
    with a smaller number than the last one is ignored; one with the same number makes the worker report again.
    """

    number: int = Field(ge=1)
    num_micro_batches: int = Field(ge=1)
    moves: tuple[PreCopyMove, ...] = ()
    limit_s: float = Field(default=DEFAULT_LIMIT_S, gt=0, description="longest silence of a stream")


class PreCopyReport(Value):
    """The progress of a ``PreCopyOrder`` on one worker; each report is complete, and sent after a change.

    ``following``: units that this worker has received and keeps at the decided version. ``error``: the worker has given
    up the order; no report follows.
    """

    number: int = Field(ge=1)
    following: tuple[UnitId, ...] = ()
    received_bytes: int = Field(default=0, ge=0)
    error: Shown | None = None


class StepOrder(Value):
    """Apply ``step`` as committed version first (if not yet applied), then run step ``step``.

    ``checkpoint_units``: units that this worker copies at version ``step`` and writes in the background, after its
    remaining units of the versions ``earlier_checkpoints``; it drops other versions. ``attempt`` grows when the same
    step is run again in the same generation after an overflow. ``decided`` is the decision about step ``step - 1``,
    ``loss_scale`` the scale of this step. ``record_timeline``: the answer includes a timeline of the step.
    ``evaluated``: an evaluation for which this worker computes the job's metrics.
    """

    generation: int = Field(ge=1)
    step: int = Field(ge=0)
    attempt: int = Field(default=0, ge=0)
    decided: Decided | None = None
    loss_scale: LossScale | None = None
    checkpoint_units: tuple[UnitId, ...] = ()
    earlier_checkpoints: tuple[Version, ...] = Field(default=(), exclude_if=lambda given: not given)
    record_timeline: bool = False
    evaluated: EvaluationTotals | None = Field(default=None, exclude_if=lambda given: given is None)
    num_micro_batches: int | None = Field(
        default=None,
        ge=1,
        exclude_if=lambda given: given is None,
        description="micro-batches of a short step, over all replicas; None: as many as the plan has",
    )
    bears_non_finite: bool = Field(
        default=False,
        exclude_if=lambda given: not given,
        description="a gradient that is not finite is reported without a failure, as with a loss scale",
    )
    samples_of: int | None = Field(
        default=None,
        exclude_if=lambda given: given is None,
        description="an earlier step, whose samples the answer names",
    )


class CommitOrder(Value):
    """Apply the decided version without running another step; used at the end and before a pause.

    ``held``: apply it to the state that the worker holds, because the generation was never formed and has no other
    worker. ``evaluated``: as in ``StepOrder``; this version is not evaluated again.
    """

    generation: int = Field(ge=1)
    version: Version
    decided: Decided | None = None
    checkpoint_units: tuple[UnitId, ...] = ()
    earlier_checkpoints: tuple[Version, ...] = Field(default=(), exclude_if=lambda given: not given)
    held: bool = False
    evaluated: EvaluationTotals | None = Field(default=None, exclude_if=lambda given: given is None)


class ProbeOrder(Value):
    """Time a micro-batch's forward and backward on some sections, while the worker has no place in the shape.

    ``healthy_s``: the time of a healthy worker. ``step``: the last decided step. ``by_sums``: the mean counts, because
    the worker pauses now and then; otherwise the median counts. ``waited_s``: all workers lack cores, and
    this is the time that counts for each instead of its own wait for them; it is included in ``healthy_s``.
    """

    probe: int = Field(ge=1)
    step: int = Field(ge=0)
    first_section: int = Field(ge=0)
    end_section: int = Field(ge=1)
    healthy_s: float = Field(gt=0)
    by_sums: bool = Field(default=False, exclude_if=lambda given: not given)
    waited_s: float | None = Field(default=None, ge=0, exclude_if=lambda given: given is None)


class WorkerReady(Value):
    """Answer to the setup. ``evaluation``: absent if the job has none."""

    kind: Literal["ready"] = "ready"
    worker: WorkerId
    pid: int
    setup_s: float = Field(ge=0)
    evaluation: EvaluationSize | None = None
    epochs: Epochs | None = Field(
        default=None,
        exclude_if=lambda given: given is None,
        description="how the job's epochs divide into steps; None: all steps are whole",
    )


class Reshaped(Value):
    """Answer to a reshape."""

    kind: Literal["reshaped"] = "reshaped"
    worker: WorkerId
    generation: int
    groups_s: float = Field(ge=0, description="re-forming the process groups")
    state_s: float = Field(ge=0, description="moving and loading state")
    received_bytes: int = Field(ge=0)
    loss_scale: LossScale | None = Field(
        default=None, description="loop state of its units at the order's version; None: the worker or the job has none"
    )


class MicroBatchLoss(Value):
    """Loss and metrics of one micro-batch: means over its samples, or totals; only last stages report them.

    If ``metrics`` also has the weight of a value, that value is a total. ``share``: the samples of this micro-batch
    over m, given if the micro-batches of the step or evaluation differ in size; means over samples are then multiplied
    by it, so that their sum over the sum of shares is the mean. With a loss scale, a loss may be infinite or NaN: its
    step is then skipped.
    """

    model_config = ConfigDict(allow_inf_nan=True)

    micro_batch: int
    loss: float
    metrics: dict[str, float] = Field(default_factory=dict)
    samples: dict[str, Array] = Field(
        default_factory=dict,
        exclude_if=lambda given: not given,
        description="values of an evaluation for each sample",
    )
    share: float | None = Field(default=None, gt=0, exclude_if=lambda given: given is None)

    def weight_of(self, name: str = "") -> float | None:
        """Return the weight of a metric, or of the loss; None: it is a mean over as many samples as others."""
        return self.metrics.get(name + WEIGHT, self.share)


def weights_of(losses: Iterable[MicroBatchLoss]) -> dict[int, float]:
    """Return the weights of losses by micro-batch; empty if losses are means over equally many samples."""
    weights = {entry.micro_batch: entry.weight_of() for entry in losses}
    return {micro_batch: weight for micro_batch, weight in weights.items() if weight is not None}


class Evaluation(Value):
    """The share of one last stage in an evaluation; ``finishes``: metrics of the whole follow in a later answer."""

    version: Version
    num_micro_batches: int = Field(ge=1, description="micro-batches of all replicas")
    losses: tuple[MicroBatchLoss, ...] = ()
    finishes: bool = Field(default=False, exclude_if=lambda given: not given)


class NamedSamples(Value):
    """The numbers of the samples of a step, in the order of the step."""

    step: int
    samples: tuple[int, ...]


class Prepared(Value):
    """Every gradient of this worker's units is reduced and held; nothing is applied yet.

    ``overflowed`` (exact accumulation): a gradient did not fit its fixed-point scale; the step must be run again, with
    scales that fit. ``unit_norms_sq``: squared 2-norm of the mean gradient of each unit that this worker holds, in
    float64 and a fixed order, so that all holders report equal bits; empty unless the job asks for the norm.
    ``non_finite``: a gradient is NaN or infinite, and the job's loss scale allows skipping the step. ``followed``: the
    follower of this worker's units has their state and these gradients. ``learning_rates``: lowest and highest of the
    parameter groups of its units in this step; None: their optimizers have no learning rate.
    """

    kind: Literal["prepared"] = "prepared"
    worker: WorkerId
    generation: int
    step: int
    attempt: int = 0
    overflowed: bool = False
    unit_norms_sq: dict[UnitId, float] = Field(default_factory=dict)
    non_finite: bool = False
    followed: bool = False
    losses: tuple[MicroBatchLoss, ...] = ()
    learning_rates: tuple[float, float] | None = None
    evaluation: Evaluation | None = None
    finished: FinishedMetrics | None = Field(default=None, exclude_if=lambda given: given is None)
    named: NamedSamples | None = Field(default=None, exclude_if=lambda given: given is None)
    times: ComputeTimes
    timeline: StepTimeline | None = None


class Committed(Value):
    """Answer to a commit order."""

    kind: Literal["committed"] = "committed"
    worker: WorkerId
    generation: int
    version: int
    evaluation: Evaluation | None = None
    finished: FinishedMetrics | None = Field(default=None, exclude_if=lambda given: given is None)


class Aborted(Value):
    """The order was given up, because the generation was aborted or, by ``peer_lost``, this worker lost a peer."""

    kind: Literal["aborted"] = "aborted"
    worker: WorkerId
    generation: int
    peer_lost: bool
    detail: Shown = ""
    kept: KeptSums | None = None


class Failed(Value):
    """The order failed and changed nothing.

    ``cause``: ``device``: the device, and with it the worker, is lost; ``memory``: memory of the device or the host ran
    out; ``job``: the user's code failed, but may work elsewhere or in another attempt; ``checkpoint``: the checkpoint
    cannot be read or is damaged; ``run``: no retry would help. ``traceback``: the frames of the user's code; empty if
    there are none.
    """

    kind: Literal["failed"] = "failed"
    worker: WorkerId
    generation: int
    error: Shown
    detail: Shown = ""
    cause: FailureCause = "run"
    traceback: Shown = ""


class UnitWritten(Value):
    """One unit of a checkpoint is safely in storage."""

    worker: WorkerId
    version: int
    unit: UnitId
    file: str = Field(description="name inside the checkpoint's directory")
    size_bytes: int = Field(ge=0)
    sha256: str
    xxh3_128: str | None = None
    stall_s: float = Field(default=0.0, ge=0, description="time for which writing it kept training from the device")


class Probed(Value):
    """Answer to a probe: the median time over the healthy time, or None, as if an order came first."""

    kind: Literal["probed"] = "probed"
    worker: WorkerId
    probe: int
    slowdown: float | None = Field(default=None, gt=0)
    error: Shown | None = None


class Heartbeat(Value):
    """Answer to a heartbeat poll: proof of life, and the times of micro-batches since the last one."""

    worker: WorkerId
    times: MicroBatchTimes | None = None
    written: tuple[UnitWritten, ...] = ()
    checkpoint_error: Shown | None = None
    error_version: Version | None = Field(default=None, description="version of the checkpoint")
    ahead: PreCopyReport | None = None
    notes: tuple[Shown, ...] = Field(default=(), description="sentences about its data workers, for the user")


Answer = Annotated[WorkerReady | Reshaped | Prepared | Committed | Aborted | Failed, Field(discriminator="kind")]
