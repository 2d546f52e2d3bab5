"""Checkpoints: what is on storage and on its way there, and what saves take, by which the next one is timed."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from morph.contract.base import Value
from morph.contract.checkpoint import Manifest, SaveKind
from morph.contract.decided import LossTrend
from morph.contract.evaluation import Best, Judged
from morph.contract.messages import UnitId, UnitWritten, Version, WorkerId


class NextSave(Value):
    """When the next checkpoint begins, at the step boundary nearest to ``due_s``, and why then."""

    due_s: float
    interval_s: float = Field(description="between two of them, as things stand")
    kind: SaveKind
    why: str


class SaveTimes(Value):
    """Of this session. Times in seconds; None: not seen yet. What is measured again and again is a mean that forgets.

    ``saved_s``: when the state of the newest complete checkpoint was copied, or when training began or went back to it;
    ``since_s``: the same, or of the one under way.
    ``durable_s``: from that copy to a complete checkpoint. ``stall_s``: for which a save keeps the worker from training
    that has most to copy. ``num_refused``: saves in a row that storage did not take, after which ``retry_s`` is when
    the next one is tried. ``num_lost``, ``vm_s``: VMs that were lost, and how long these lived, together.
    """

    saved_s: float | None = None
    since_s: float | None = None
    ordered_s: float | None = Field(default=None, description="when the present step was ordered")
    step_s: float | None = None
    stall_s: float | None = None
    durable_s: float | None = None
    allocation_s: float | None = Field(default=None, description="from a request to a VM that is up")
    num_refused: int = 0
    retry_s: float | None = None
    num_lost: int = 0
    vm_s: float = 0.0
    insurance: NextSave | None = Field(default=None, description="that costs least, as it was worked out last")
    weighs: bool = Field(default=False, description="one is complete since followers were weighed")


class Doubt(Value):
    """That a checkpoint can be loaded: a worker could not, and no step was decided since.

    ``open``: a whole one has to be found before the next shape is formed; ``asked``: storage is being read for it;
    ``answered``: one was found. ``num_tries``: how often storage was read. ``failed``: who could not load it since that
    was last found whole; ``unable``: who could not load what is whole, so that others read it for them.
    """

    version: Version
    sentence: str
    status: Literal["open", "asked", "answered"] = "open"
    num_tries: int = 0
    failed: frozenset[WorkerId] = frozenset()
    unable: frozenset[WorkerId] = frozenset()
    at_most: Version | None = Field(default=None, description="the newest is needed up to this version; None: of all")


class PendingCheckpoint(Value):
    """A checkpoint on its way to storage: who writes which unit, and what is there already.

    ``stale``: a writer was lost or its generation dissolved, so it may never be completed and another may begin.
    ``refused``: writers whose storage took nothing; they are told to write again. ``started_s``: since when it is
    waited for; with each unit that is written the wait begins anew.
    """

    version: Version
    writers: dict[UnitId, WorkerId]
    written: dict[UnitId, UnitWritten] = Field(default_factory=dict)
    started_s: float
    copied_s: float | None = Field(default=None, description="when its state was copied; None: when it was started")
    kind: SaveKind = "periodic"
    shape: str = Field(default="", description="PxD in which it was copied")
    judged: Judged = Field(default=Judged(), description="by then")
    losses: LossTrend = Field(default=LossTrend(), description="by then")
    stale: bool = False
    refused: frozenset[WorkerId] = frozenset()

    @property
    def complete(self) -> bool:
        """Every unit is on storage."""
        return len(self.written) == len(self.writers)

    @property
    def debtors(self) -> set[WorkerId]:
        """The workers that still have units to write."""
        return {worker for unit, worker in self.writers.items() if unit not in self.written}


class Saving(Value):
    """Where the state is safe, and what is being made so."""

    checkpoint: Manifest | None = Field(default=None, description="newest complete checkpoint")
    checkpoint_base: Version = Field(default=0, description="the next checkpoint is counted from this version")
    doubt: Doubt | None = Field(default=None, description="that the newest checkpoint can be loaded")
    pending: PendingCheckpoint | None = Field(default=None, description="the newest that is under way")
    earlier: tuple[PendingCheckpoint, ...] = Field(
        default=(),
        description="versions that may be the best, or to which a bad step goes back, written before the pending one",
    )
    sealing: tuple[Manifest, ...] = Field(default=(), description="manifests being written")
    sealing_since_s: float | None = None
    unsaved_since_s: float | None = Field(default=None, description="since when storage refuses what the end waits for")
    save_retry_s: float | None = Field(default=None, description="when that is tried again")
    save_times: SaveTimes = SaveTimes()
    newest: tuple[Version, ...] = Field(default=(), description="the last complete checkpoints, ascending")
    candidates: tuple[Best, ...] = Field(default=(), description="evaluated versions that are not complete yet")
    marked: Best | None = Field(default=None, description="the best of all complete checkpoints")

    @property
    def under_way(self) -> tuple[PendingCheckpoint, ...]:
        """All that workers write, in their order."""
        return self.earlier if self.pending is None else (*self.earlier, self.pending)
