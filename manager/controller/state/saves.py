"""Checkpoints in storage and on their way there, and the durations of saves, by which the next save is timed."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from morph.contract.base import Value
from morph.contract.checkpoint import Manifest, SaveKind
from morph.contract.decided import LossTrend
from morph.contract.evaluation import Best, Judged
from morph.contract.messages import UnitId, UnitWritten, Version, WorkerId


class NextSave(Value):
    """The time of the next checkpoint (at the step boundary nearest to ``due_s``), and the reason."""

    due_s: float
    interval_s: float = Field(description="between two checkpoints, as known now")
    kind: SaveKind
    why: str


class SaveTimes(Value):
    """Times of this session, in seconds; None: not measured yet. Repeated measurements are exponential means.

    ``saved_s``: when the state of the newest complete checkpoint was copied, or when training began or went back to it;
    ``since_s``: this time, or when the state of the checkpoint under way was copied. ``durable_s``: from that copy to a
    complete checkpoint. ``stall_s``: how long a save keeps the worker with the most bytes to copy from training.
    ``num_refused``: saves in a row that storage refused; ``retry_s``: when the next save is tried after them.
    ``num_lost``, ``vm_s``: the number of lost VMs, and the sum of their lifetimes.
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
    insurance: NextSave | None = Field(default=None, description="the save that costs least, as last computed")
    weighs: bool = Field(default=False, description="a save was completed since followers were last considered")


class Doubt(Value):
    """Doubt whether a checkpoint can be loaded: a worker could not load it, and no step was decided since then.

    ``open``: an undamaged checkpoint must be found before the next shape is formed; ``asked``: storage is being
    searched for one; ``answered``: one was found. ``num_tries``: how often storage was read. ``failed``: workers that
    could not load the checkpoint since it was last found undamaged; ``unable``: workers that cannot load undamaged
    files, so that others read for them.
    """

    version: Version
    sentence: str
    status: Literal["open", "asked", "answered"] = "open"
    num_tries: int = 0
    failed: frozenset[WorkerId] = frozenset()
    unable: frozenset[WorkerId] = frozenset()
    at_most: Version | None = Field(default=None, description="the newest version that counts; None: any version")


class PendingCheckpoint(Value):
    """A checkpoint on its way to storage: the writer of each unit, and the written units.

    ``stale``: it may never be completed, so another may begin; ``refused``: writers whose storage refused the data.
    """

    version: Version
    writers: dict[UnitId, WorkerId]
    written: dict[UnitId, UnitWritten] = Field(default_factory=dict)
    started_s: float
    copied_s: float | None = Field(default=None, description="when its state was copied; None: at ``started_s``")
    kind: SaveKind = "periodic"
    shape: str = Field(default="", description="shape (PxD) in which it was copied")
    judged: Judged = Field(default=Judged(), description="by then")
    losses: LossTrend = Field(default=LossTrend(), description="by then")
    stale: bool = False
    refused: frozenset[WorkerId] = frozenset()

    @property
    def complete(self) -> bool:
        """Whether every unit is in storage."""
        return len(self.written) == len(self.writers)

    @property
    def debtors(self) -> set[WorkerId]:
        """The workers that still have units to write."""
        return {worker for unit, worker in self.writers.items() if unit not in self.written}


class Saving(Value):
    """Complete checkpoints, and checkpoints that are being written."""

    checkpoint: Manifest | None = Field(default=None, description="newest complete checkpoint")
    checkpoint_base: Version = Field(default=0, description="the next checkpoint is counted from this version")
    doubt: Doubt | None = Field(default=None, description="doubt whether the newest checkpoint can be loaded")
    pending: PendingCheckpoint | None = Field(default=None, description="the newest that is under way")
    earlier: tuple[PendingCheckpoint, ...] = Field(
        default=(),
        description="versions that may be the best, or to which a bad step goes back, written before the pending one",
    )
    sealing: tuple[Manifest, ...] = Field(default=(), description="manifests being written")
    sealing_since_s: float | None = None
    unsaved_since_s: float | None = Field(default=None, description="since when storage refuses the last checkpoint")
    save_retry_s: float | None = Field(default=None, description="when the refused write is tried again")
    save_times: SaveTimes = SaveTimes()
    newest: tuple[Version, ...] = Field(default=(), description="the last complete checkpoints, ascending")
    candidates: tuple[Best, ...] = Field(default=(), description="evaluated versions that are not complete yet")
    marked: Best | None = Field(default=None, description="the best of all complete checkpoints")

    @property
    def under_way(self) -> tuple[PendingCheckpoint, ...]:
        """All checkpoints that workers write, the oldest first."""
        return self.earlier if self.pending is None else (*self.earlier, self.pending)
