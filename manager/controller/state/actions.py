"""Actions that the controller asks its shell to carry out; orders are idempotent, so resending one changes nothing."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from manager.controller.state.profile_correction import Correction
from manager.controller.state.saves import NextSave
from morph.contract.base import Shown, Value
from morph.contract.checkpoint import Manifest
from morph.contract.evaluation import Best
from morph.contract.messages import (
    CommitOrder,
    FailureCause,
    PreCopyOrder,
    ProbeOrder,
    ReshapeOrder,
    StepOrder,
    Version,
    WorkerId,
)


class ReasonCode(StrEnum):
    """One code per kind of decision; a decision that does several things has the code of the last one."""

    NODE_REGISTERED = "node_registered"
    WORKER_READY = "worker_ready"
    NODES_REQUESTED = "nodes_requested"
    NODES_GRANTED = "nodes_granted"
    NODES_STARTED = "nodes_started"
    REQUEST_REFUSED = "request_refused"
    NODE_ABSENT = "node_absent"
    SETUP_FAILED = "setup_failed"
    NOTICE_KEPT = "notice_kept"
    NOTICE_TAKEN = "notice_taken"
    NOTICE_ACKNOWLEDGED = "notice_acknowledged"
    NODE_SPARED = "node_spared"
    START_WAIT = "start_wait"
    FORMED = "formed"
    SET_BACK = "set_back"
    TOO_FEW_WORKERS = "too_few_workers"
    HOLDING = "holding"
    RESTING = "resting"
    TIMES_NOTED = "times_noted"
    WORKER_SLOW = "worker_slow"
    WORKER_WELL = "worker_well"
    WORKER_PROBED = "worker_probed"
    MANAGER_RESUMED = "manager_resumed"
    PRE_COPY_NOTED = "ahead_noted"
    PRE_COPY_DROPPED = "ahead_dropped"
    AWAITING_ANSWERS = "awaiting_answers"
    STEP_STARTED = "step_started"
    STEP_DECIDED = "step_decided"
    OVERFLOW_RETRY = "overflow_retry"
    ABORTING = "aborting"
    OUTAGE_OVER = "outage_over"
    WORKER_REMOVED = "worker_removed"
    COMMIT_STARTED = "commit_started"
    COMMIT_WAIT = "commit_wait"
    UNITS_NOTED = "units_noted"
    CHECKPOINT_SEALED = "checkpoint_sealed"
    CHECKPOINT_COMPLETE = "checkpoint_complete"
    CHECKPOINT_ABANDONED = "checkpoint_abandoned"
    STOP_NOTED = "stop_noted"
    NOTHING_DUE = "nothing_due"
    IGNORED = "ignored"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


class Reason(Value):
    """A code for programs and a sentence for people."""

    code: ReasonCode
    sentence: Shown


RequestId = str


class StartWorker(Value):
    """Start the worker of a VM and set it up; it answers ``WorkerReady``."""

    kind: Literal["start_worker"] = "start_worker"
    worker: WorkerId


class SendReshape(Value):
    """Give a worker, or a peer that only serves its units to others, a reshape order; it answers ``Reshaped``."""

    kind: Literal["send_reshape"] = "send_reshape"
    worker: WorkerId
    order: ReshapeOrder


class SendStep(Value):
    """Give a worker a step order; it answers ``Prepared``."""

    kind: Literal["send_step"] = "send_step"
    worker: WorkerId
    order: StepOrder


class SendCommit(Value):
    """Give a worker a commit order; it answers ``Committed``."""

    kind: Literal["send_commit"] = "send_commit"
    worker: WorkerId
    order: CommitOrder


class SendPreCopy(Value):
    """Tell a worker, on its control lane, which units to pre-copy and to expect; ``PreCopyReported`` may follow."""

    kind: Literal["send_ahead"] = "send_ahead"
    worker: WorkerId
    order: PreCopyOrder


class Abort(Value):
    """Tell a worker, on its control lane, to give up its order of this generation; it then answers that order."""

    kind: Literal["abort"] = "abort"
    worker: WorkerId
    generation: int


class ProbeWorker(Value):
    """Tell a worker that was left out as slow to time the work that takes a healthy one ``healthy_s``."""

    kind: Literal["probe_worker"] = "probe_worker"
    worker: WorkerId
    probe: int
    step: Version
    first_section: int
    end_section: int
    healthy_s: float = Field(gt=0)
    by_sums: bool = False
    waited_s: float | None = None

    def order(self) -> ProbeOrder:
        """The order for the worker."""
        return ProbeOrder.model_validate(self.model_dump(exclude={"kind", "worker"}))


class RequestNodes(Value):
    """Ask the provider for VMs; a request that is repeated under its name gets no further ones.

    ``NodesGranted`` or ``RequestRefused`` follows, and ``NodeAppeared`` for each VM.
    """

    kind: Literal["request_nodes"] = "request_nodes"
    request: RequestId
    count: int = Field(ge=1)
    node_type: str = Field(default="", exclude_if=lambda given: not given)


class ReleaseNodes(Value):
    """Give back workers that are lost, given up or late; no event follows. A VM ends with the last of its workers."""

    kind: Literal["release_nodes"] = "release_nodes"
    nodes: tuple[WorkerId, ...]


class AcknowledgeNotice(Value):
    """Tell a VM that nothing of value is left on it, so that it lets its provider take it; no event follows."""

    kind: Literal["acknowledge_notice"] = "acknowledge_notice"
    worker: WorkerId
    notice: str = Field(description="the provider's name for the notice")


class WriteManifest(Value):
    """Write the manifest; ``ManifestWritten`` (or ``CheckpointFailed``) follows. Then old checkpoints are deleted."""

    kind: Literal["write_manifest"] = "write_manifest"
    manifest: Manifest
    spared: tuple[Version, ...] = Field(
        default=(), description="not deleted now, because they may be marked as the best"
    )


class MarkBest(Value):
    """Mark the checkpoint of this version as the best one, so that it is kept; the former best one loses its mark."""

    kind: Literal["mark_best"] = "mark_best"
    best: Best


class FindCheckpoint(Value):
    """Find the newest undamaged checkpoint, ``at_most`` this version, by reading every byte."""

    kind: Literal["find_checkpoint"] = "find_checkpoint"
    doubted: Version
    at_most: Version | None = Field(default=None, exclude_if=lambda given: given is None)


class EndWorker(Value):
    """End a worker that the controller has given up; no further event about it is expected."""

    kind: Literal["end_worker"] = "end_worker"
    worker: WorkerId


class NoteCorrection(Value):
    """Record a correction of the profile in the journal; there is nothing to carry out."""

    kind: Literal["note_correction"] = "note_correction"
    correction: Correction


class NoteNextSave(Value):
    """Record in the journal when the next checkpoint is due, and why; there is nothing to carry out."""

    kind: Literal["note_next_save"] = "note_next_save"
    next_save: NextSave


class NoteBadStep(Value):
    """Record in the journal that a step is bad, and what follows; there is nothing to carry out."""

    kind: Literal["note_bad_step"] = "note_bad_step"
    step: int
    sentence: str


class Finish(Value):
    """The run is over: end every worker.

    ``stopped``: on request, resumable; ``failed``: the sentence, and after an error inside a worker ``cause`` and
    ``traceback`` say why; ``rests``: VMs are given back, and the run is tried again later; ``at_limit``: a limit of the
    user.
    """

    kind: Literal["finish"] = "finish"
    outcome: Literal["finished", "stopped", "failed"]
    sentence: Shown
    traceback: Shown = ""
    cause: FailureCause | None = None
    rests: bool = False
    at_limit: bool = False


Action = (
    StartWorker
    | SendReshape
    | SendStep
    | SendCommit
    | SendPreCopy
    | Abort
    | ProbeWorker
    | RequestNodes
    | ReleaseNodes
    | AcknowledgeNotice
    | WriteManifest
    | MarkBest
    | FindCheckpoint
    | EndWorker
    | NoteCorrection
    | NoteNextSave
    | NoteBadStep
    | Finish
)
ACTION: TypeAdapter[Action] = TypeAdapter(Annotated[Action, Field(discriminator="kind")])
