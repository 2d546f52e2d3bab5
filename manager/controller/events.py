"""What can happen to a job. Events are stamped with wall-clock seconds by the shell that saw them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from morph.contract.base import Value
from morph.contract.messages import Answer, UnitWritten, Version, WorkerId

MANIFEST_WRITER = "manager"
"""The name under which the shell reports that a manifest could not be written."""


class NodeAppeared(Value):
    """A VM is up; its worker is not started yet. The id is new for each incarnation, and becomes the worker's."""

    kind: Literal["node_appeared"] = "node_appeared"
    node: WorkerId


class WorkerAnswered(Value):
    """A worker answered its setup or its outstanding order."""

    kind: Literal["worker_answered"] = "worker_answered"
    worker: WorkerId
    answer: Answer


class WorkerLost(Value):
    """A worker died, its VM went away, or it fell silent."""

    kind: Literal["worker_lost"] = "worker_lost"
    worker: WorkerId
    cause: str = Field(description="one sentence")


class UnitsWritten(Value):
    """A worker's background writer finished these units."""

    kind: Literal["units_written"] = "units_written"
    worker: WorkerId
    written: tuple[UnitWritten, ...] = Field(min_length=1)


class CheckpointFailed(Value):
    """A worker's background writer gave up, or (``worker`` is ``MANIFEST_WRITER``) the writer of the manifest."""

    kind: Literal["checkpoint_failed"] = "checkpoint_failed"
    worker: WorkerId
    error: str


class ManifestWritten(Value):
    """The manifest of this version is safely on storage: the checkpoint is complete."""

    kind: Literal["manifest_written"] = "manifest_written"
    version: Version


class StopRequested(Value):
    """The user wants the run to end at the next step boundary, resumable."""

    kind: Literal["stop_requested"] = "stop_requested"
    reason: str


class Tick(Value):
    """Time passed; sent at the latest at the ``wake_at_s`` of the last decision."""

    kind: Literal["tick"] = "tick"


Event = (
    NodeAppeared
    | WorkerAnswered
    | WorkerLost
    | UnitsWritten
    | CheckpointFailed
    | ManifestWritten
    | StopRequested
    | Tick
)
EVENT_TYPES: tuple[type[Event], ...] = (
    NodeAppeared,
    WorkerAnswered,
    WorkerLost,
    UnitsWritten,
    CheckpointFailed,
    ManifestWritten,
    StopRequested,
    Tick,
)
EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])
