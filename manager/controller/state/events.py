"""What can happen to a job. Events are stamped with wall-clock seconds by the shell that saw them."""

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
    """What a node costs: nothing that the controller decides by, but the run's account has it from here."""

    usd_per_h: float | None = Field(default=None, ge=0, description="of its VM; None: not known")
    num_nodes: int = Field(default=1, ge=1, description="that the VM carries, and that share its price")
    before_s: float = Field(default=0.0, ge=0, description="how long it has been paid for already")


class NodeFacts(Value):
    """What kind of VM a node is on, as its provider says it; empty: not known. What a run learns of VMs goes by it."""

    provider: str = Field(default="", description="azure; static: the user's own hosts; local: played by processes")
    size: str = ""
    region: str = ""
    zone: str = Field(default="", description="of a host: its address")
    node_type: str = Field(default="", description="of its GPUs, as plans name it; empty: the run has one type only")


class NodeAppeared(Value):
    """A VM is up; its worker is not started yet. The id is new for each incarnation, and becomes the worker's.

    ``host`` names the machine if it can come back under another id; ``request`` the request that it answers. ``paid``
    and ``facts``: of one that appears before its grant, or has none, where they are known.
    """

    kind: Literal["node_appeared"] = "node_appeared"
    node: WorkerId
    host: str | None = None
    request: RequestId | None = None
    paid: Paid | None = None
    facts: NodeFacts | None = None


class NodesGranted(Value):
    """The provider grants a request, or, with fewer nodes than requested, a part of it and no more.

    A node that ``paid`` says nothing of is a VM without a price, paid from the grant on. ``waiting``: those whose VMs
    wait in their market's queue, for however long; they cost nothing until ``NodesStarted``.
    """

    kind: Literal["nodes_granted"] = "nodes_granted"
    request: RequestId
    nodes: tuple[WorkerId, ...] = Field(min_length=1)
    paid: dict[WorkerId, Paid] = Field(default_factory=dict)
    facts: dict[WorkerId, NodeFacts] = Field(default_factory=dict)
    waiting: tuple[WorkerId, ...] = Field(default=(), exclude_if=lambda given: not given)


class NodesStarted(Value):
    """VMs that waited in their market's queue boot from now on. A node that ``paid`` says nothing of has no price."""

    kind: Literal["nodes_started"] = "nodes_started"
    request: RequestId
    nodes: tuple[WorkerId, ...] = Field(min_length=1)
    paid: dict[WorkerId, Paid] = Field(default_factory=dict)
    facts: dict[WorkerId, NodeFacts] = Field(default_factory=dict)


class RequestRefused(Value):
    """A request is refused: no quota, no capacity, an error of the provider's, or a limit of the user's."""

    kind: Literal["request_refused"] = "request_refused"
    request: RequestId
    cause: Literal["quota", "capacity", "error", "limit"]
    detail: Shown = ""
    retry_s: float | None = Field(default=None, ge=0, description="the provider wants to be asked again after this")


class NoticeGiven(Value):
    """The provider says that a VM will be taken. ``lead_s`` counts from now, so that no two clocks are compared."""

    kind: Literal["notice_given"] = "notice_given"
    worker: WorkerId
    lead_s: float = Field(ge=0)
    notice: Shown = Field(default="", description="the provider's name for it; a notice that comes again has the same")


class NoticeWithdrawn(Value):
    """The provider takes a notice back."""

    kind: Literal["notice_withdrawn"] = "notice_withdrawn"
    worker: WorkerId


class WorkerAnswered(Value):
    """A worker answered its setup or its outstanding order."""

    kind: Literal["worker_answered"] = "worker_answered"
    worker: WorkerId
    answer: Answer


class WorkerLost(Value):
    """A worker died, its VM went away, or it fell silent; ``beside``: with it further workers of its VM.

    ``unfit``: the VM itself said that no worker can be started on it.
    """

    kind: Literal["worker_lost"] = "worker_lost"
    worker: WorkerId
    cause: Shown = Field(description="one sentence")
    beside: tuple[WorkerId, ...] = ()
    unfit: bool = False

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """All that were lost."""
        return (self.worker, *self.beside)


class WorkerTimes(Value):
    """Seconds of compute of one worker, for each micro-batch since the last news.

    Forward and backward. Recompute is left out: it is the forward's work again, and which micro-batches need it
    depends on who waited for whom, so that replicas of a stage differ in it without being slow.
    """

    worker: WorkerId
    generation: int
    compute_s: tuple[Annotated[float, Field(ge=0)], ...]
    device_s: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        default=(), description="the same as calibration measures it: processor time on a CPU; absent: no other"
    )


class NobodyHeard(Value):
    """For so long no worker could be heard, and now one is again: the manager stood still, or the network was gone."""

    kind: Literal["nobody_heard"] = "nobody_heard"
    lasted_s: float = Field(ge=0)


class ComputeTimesSeen(Value):
    """What heartbeats said of compute times, of all workers at once: one event an interval, not one a heartbeat."""

    kind: Literal["compute_times_seen"] = "compute_times_seen"
    times: tuple[WorkerTimes, ...]


class WorkerProbed(Value):
    """A worker answers a probe: how many times longer its work took than a healthy worker takes for it.

    None: it did not come to it, for an order came first, or it could not do the work.
    """

    kind: Literal["worker_probed"] = "worker_probed"
    worker: WorkerId
    probe: int
    slowdown: float | None = Field(gt=0)


class ManagerResumed(Value):
    """A new manager took over; its state was rebuilt from the journal. ``living``: the workers it can reach.

    What the old one had decided and perhaps not done is to be done again.
    """

    kind: Literal["manager_resumed"] = "manager_resumed"
    living: tuple[WorkerId, ...]


class UnitsWritten(Value):
    """A worker's background writer finished these units."""

    kind: Literal["units_written"] = "units_written"
    worker: WorkerId
    written: tuple[UnitWritten, ...] = Field(min_length=1)


class CheckpointFailed(Value):
    """A worker's background writer gave a file up, or (``worker`` is ``MANIFEST_WRITER``) that of the manifest."""

    kind: Literal["checkpoint_failed"] = "checkpoint_failed"
    worker: WorkerId
    error: Shown
    version: Version | None = Field(default=None, description="None: not told")


class PreCopyReported(Value):
    """A worker tells how far it has what is pre-copied to it."""

    kind: Literal["ahead_reported"] = "ahead_reported"
    worker: WorkerId
    report: PreCopyReport


class ManifestWritten(Value):
    """The manifest of this version is safely on storage: the checkpoint is complete."""

    kind: Literal["manifest_written"] = "manifest_written"
    version: Version


class CheckpointFound(Value):
    """The newest checkpoint that is whole. ``passed_over``: a sentence for each newer one, which was set aside."""

    kind: Literal["checkpoint_found"] = "checkpoint_found"
    manifest: Manifest
    passed_over: tuple[str, ...] = ()


class CheckpointNotFound(Value):
    """Storage did not tell which checkpoint is whole; or, if ``damaged``, none of them is.

    ``none``: there is none of a version that was asked for.
    """

    kind: Literal["checkpoint_not_found"] = "checkpoint_not_found"
    error: Shown
    damaged: bool
    none: bool = Field(default=False, exclude_if=lambda given: not given)


class StopRequested(Value):
    """The user wants the run to end at the next step boundary, resumable."""

    kind: Literal["stop_requested"] = "stop_requested"
    reason: Shown


class Tick(Value):
    """Time passed; sent at the latest at the ``wake_at_s`` of the last decision."""

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
    """Many workers answered the outstanding order alike: ``answer`` is that of each, but for its name."""

    kind: Literal["answered_alike"] = "answered_alike"
    workers: tuple[WorkerId, ...] = Field(min_length=1)
    answer: Answer


class Together(Value):
    """Several events that are taken one after the other in one decision."""

    kind: Literal["together"] = "together"
    events: tuple[Annotated[Single | AnsweredAlike, Field(discriminator="kind")], ...] = Field(min_length=1)


Event = Single | AnsweredAlike | Together
EVENT_TYPES: tuple[type[Single], ...] = get_args(Single)
EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])
