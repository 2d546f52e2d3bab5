"""The events of a job. The shell that observes an event stamps it with wall-clock seconds."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, TypeAdapter

from manager.controller.state.actions import RequestId
from morph.contract.base import Shown, Value
from morph.contract.checkpoint import Manifest
from morph.contract.messages import Answer, PreCopyReport, UnitWritten, Version, WorkerId

MANIFEST_WRITER = "manager"
"""The name under which the shell reports that a manifest could not be written."""


class Paid(Value):
    """The cost of a worker; the controller does not use it, but the run's accounting reads it from the journal."""

    usd_per_h: float | None = Field(default=None, ge=0, description="price of its VM; None: not known")
    num_nodes: int = Field(default=1, ge=1, description="nodes on the VM, which share its price")
    before_s: float = Field(default=0.0, ge=0, description="how long it has been paid for already")


class NodeFacts(Value):
    """The kind of a worker's VM, as its provider reports it; empty: not known. Statistics of VMs are kept by kind."""

    provider: str = Field(default="", description="azure; static: the user's own hosts; local: emulated by processes")
    size: str = ""
    region: str = ""
    zone: str = Field(default="", description="for a host: its address")
    node_type: str = Field(default="", description="type of its GPUs, as in plans; empty: the run has one type only")


class NodeAppeared(Value):
    """A VM is up under a new id, which becomes its worker's; the worker is not started yet.

    ``host`` names the machine if it can come back; ``paid`` and ``facts`` are for a worker without an earlier grant.
    """

    kind: Literal["node_appeared"] = "node_appeared"
    node: WorkerId
    host: str | None = None
    request: RequestId | None = None
    paid: Paid | None = None
    facts: NodeFacts | None = None


Cause = Literal["quota", "capacity", "error", "limit", "input"]
"""Why VMs do not come: no quota, no capacity, trouble of the provider, a limit of the user's, or the user's error."""


class NodesGranted(Value):
    """The provider grants a request, or, with fewer workers, a part of it; ``paid`` lacks VMs without a known price.

    ``waiting``: workers whose VMs wait in their market's queue and cost nothing until ``NodesStarted``.
    """

    kind: Literal["nodes_granted"] = "nodes_granted"
    request: RequestId
    nodes: tuple[WorkerId, ...] = Field(min_length=1)
    paid: dict[WorkerId, Paid] = Field(default_factory=dict)
    facts: dict[WorkerId, NodeFacts] = Field(default_factory=dict)
    waiting: tuple[WorkerId, ...] = Field(default=(), exclude_if=lambda given: not given)
    short: Cause | None = Field(default=None, exclude_if=lambda given: not given, description="why some did not come")
    detail: Shown = Field(
        default="", exclude_if=lambda given: not given, description="on ``short``, and on choices that cost more"
    )


class NodesStarted(Value):
    """VMs that waited in their market's queue boot from now on. ``paid`` lacks workers without a known price."""

    kind: Literal["nodes_started"] = "nodes_started"
    request: RequestId
    nodes: tuple[WorkerId, ...] = Field(min_length=1)
    paid: dict[WorkerId, Paid] = Field(default_factory=dict)
    facts: dict[WorkerId, NodeFacts] = Field(default_factory=dict)


class RequestRefused(Value):
    """A request is refused, and no VM of it came."""

    kind: Literal["request_refused"] = "request_refused"
    request: RequestId
    cause: Cause
    detail: Shown = ""
    retry_s: float | None = Field(default=None, ge=0, description="when the provider asks to repeat the request")


class NoticeGiven(Value):
    """The provider says that a VM will be taken. ``lead_s`` counts from the event, so that clocks are not compared."""

    kind: Literal["notice_given"] = "notice_given"
    worker: WorkerId
    lead_s: float = Field(ge=0)
    notice: Shown = Field(default="", description="its name at the provider; a repeated notice has the same name")


class NoticeWithdrawn(Value):
    """The provider withdraws a notice."""

    kind: Literal["notice_withdrawn"] = "notice_withdrawn"
    worker: WorkerId


class WorkerAnswered(Value):
    """A worker answered its setup or its outstanding order."""

    kind: Literal["worker_answered"] = "worker_answered"
    worker: WorkerId
    answer: Answer


class WorkerLost(Value):
    """A worker died or fell silent, with those ``beside`` it on its VM; ``unfit``: the VM itself cannot run one."""

    kind: Literal["worker_lost"] = "worker_lost"
    worker: WorkerId
    cause: Shown = Field(description="one sentence")
    beside: tuple[WorkerId, ...] = ()
    unfit: bool = False

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """All workers that were lost."""
        return (self.worker, *self.beside)


class WorkerTimes(Value):
    """Compute seconds (forward and backward, no recompute) of one worker's micro-batches since the last report."""

    worker: WorkerId
    generation: int
    compute_s: tuple[Annotated[float, Field(ge=0)], ...]
    device_s: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        default=(), description="the times as in calibration: processor time on a CPU; absent: equal to ``compute_s``"
    )
    queued_s: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        default=(), description="the part of ``compute_s`` in which other threads had the cores; absent: not known"
    )


class NobodyHeard(Value):
    """For ``lasted_s`` no worker could be heard, and now one is: the manager was suspended, or the network was down."""

    kind: Literal["nobody_heard"] = "nobody_heard"
    lasted_s: float = Field(ge=0)


class ComputeTimesSeen(Value):
    """Compute times from the heartbeats of all workers: one event per interval rather than one per heartbeat."""

    kind: Literal["compute_times_seen"] = "compute_times_seen"
    times: tuple[WorkerTimes, ...]


class WorkerProbed(Value):
    """A worker answers a probe; ``slowdown``: its time over a healthy worker's, None if it did not run the probe."""

    kind: Literal["worker_probed"] = "worker_probed"
    worker: WorkerId
    probe: int
    slowdown: float | None = Field(gt=0)


class ManagerResumed(Value):
    """A new manager took over from the journal, and reaches the ``living``; actions may have to be repeated."""

    kind: Literal["manager_resumed"] = "manager_resumed"
    living: tuple[WorkerId, ...]


class UnitsWritten(Value):
    """A worker's background writer finished these units."""

    kind: Literal["units_written"] = "units_written"
    worker: WorkerId
    written: tuple[UnitWritten, ...] = Field(min_length=1)


class CheckpointFailed(Value):
    """A worker's background writer gave up on a file, or on the manifest (``worker`` is ``MANIFEST_WRITER``)."""

    kind: Literal["checkpoint_failed"] = "checkpoint_failed"
    worker: WorkerId
    error: Shown
    version: Version | None = Field(default=None, description="None: not reported")


class PreCopyReported(Value):
    """A worker reports which pre-copied units it has received."""

    kind: Literal["ahead_reported"] = "ahead_reported"
    worker: WorkerId
    report: PreCopyReport


class ManifestWritten(Value):
    """The manifest of this version is safely in storage: the checkpoint is complete."""

    kind: Literal["manifest_written"] = "manifest_written"
    version: Version


class CheckpointFound(Value):
    """The newest undamaged checkpoint was found. ``passed_over``: sentences about newer ones, now set aside."""

    kind: Literal["checkpoint_found"] = "checkpoint_found"
    manifest: Manifest
    passed_over: tuple[str, ...] = ()


class CheckpointNotFound(Value):
    """Storage could not be read; or all checkpoints in question are ``damaged``, or there are ``none``."""

    kind: Literal["checkpoint_not_found"] = "checkpoint_not_found"
    error: Shown
    damaged: bool
    none: bool = Field(default=False, exclude_if=lambda given: not given)


class StopRequested(Value):
    """The user wants the run to end at the next step boundary, resumable."""

    kind: Literal["stop_requested"] = "stop_requested"
    reason: Shown


class Tick(Value):
    """Time passed; sent no later than at the ``wake_at_s`` of the last decision."""

    kind: Literal["tick"] = "tick"


Single = (
    NodeAppeared
    | NodesGranted
    | NodesStarted
    | RequestRefused
    | NoticeGiven
    | NoticeWithdrawn
    | WorkerAnswered
    | WorkerLost
    | NobodyHeard
    | ComputeTimesSeen
    | WorkerProbed
    | ManagerResumed
    | UnitsWritten
    | CheckpointFailed
    | ManifestWritten
    | CheckpointFound
    | CheckpointNotFound
    | PreCopyReported
    | StopRequested
    | Tick
)


class AnsweredAlike(Value):
    """Many workers gave the same answer to the outstanding order. ``answer``: that of each, except for its name."""

    kind: Literal["answered_alike"] = "answered_alike"
    workers: tuple[WorkerId, ...] = Field(min_length=1)
    answer: Answer


class Together(Value):
    """Several events that are handled one after the other in one decision."""

    kind: Literal["together"] = "together"
    events: tuple[Annotated[Single | AnsweredAlike, Field(discriminator="kind")], ...] = Field(min_length=1)


Event = Single | AnsweredAlike | Together
EVENT_TYPES: tuple[type[Single], ...] = get_args(Single)
EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])
