"""The values of a report. Times are the shell's wall-clock times; durations are seconds unless named otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Literal

import numpy as np
from pydantic import Field

from manager.accounting.account import Account
from manager.accounting.spent import Prices
from manager.controller.state.profile_correction import Correction
from manager.controller.state.saves import NextSave
from manager.report.remaining import Remaining, remaining
from manager.report.steps import StepRecord, Steps
from morph.contract.base import Value
from morph.contract.messages import WorkerId
from morph.contract.pool import Pool
from morph.words import counted

MOST_POINTS = 512
"""The number of steps that a forecast looks at."""
SourceKind = Literal["keep", "peer", "ahead", "checkpoint", "initial"]


def numbers_text(numbers: Mapping[str, float]) -> str:
    """Return metrics and similar numbers in one line."""
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())


def rates_text(rates: tuple[float, float]) -> str:
    """Return the learning rate, or the lowest and the highest, as text."""
    return " to ".join(dict.fromkeys(f"{rate:.4g}" for rate in rates))


class EvaluationRecord(Value):
    """The job's evaluation data at one version; loss and metrics are means over its micro-batches."""

    version: int
    loss: float | None = Field(description="None: it is not a number")
    metrics: dict[str, float]

    @property
    def text(self) -> str:
        """The loss and the metrics in one line."""
        loss = "loss is not a number" if self.loss is None else f"loss {self.loss:.4f}"
        return f"{loss}, {numbers_text(self.metrics)}" if self.metrics else loss


class ShapeSpan(Value):
    """One generation, from its reshape order to the next one (or the end)."""

    generation: int
    shape: str = Field(description='"PxD"')
    num_workers: int
    pool: Pool | None = Field(default=None, description="its GPUs, if they are of several types")
    batch_size: int
    start_s: float
    end_s: float | None
    first_version: int
    num_steps: int
    expected_mini_batch_s: float = Field(description="for workers with a device each")
    num_shared_cores: int | None = Field(
        default=None, description="the cores that the run's workers and its manager share; None: they have their own"
    )
    measured_mini_batch_s: float | None = Field(description="median over its steps; None: there are none")

    @property
    def expected_here_s(self) -> float | None:
        """The expected seconds of a mini-batch; None for workers that share cores, for which there is no forecast."""
        return self.expected_mini_batch_s if self.num_shared_cores is None else None

    @property
    def examples_per_s(self) -> float | None:
        """The measured speed while stepping."""
        return self.batch_size / self.measured_mini_batch_s if self.measured_mini_batch_s else None


class SourceSum(Value):
    """The number of (worker, unit) states from one kind of source, and their bytes."""

    count: int
    size_bytes: int


class MorphRecord(Value):
    """One morph, from the loss of a generation, or its planned end, to the next decided step, with all attempts."""

    planned: bool = Field(description="at a step boundary, for newcomers")
    cause: str
    lost_workers: tuple[WorkerId, ...] = ()
    joined: tuple[WorkerId, ...] = Field(default=(), description="members of the new generation, not of the old one")
    left: tuple[WorkerId, ...] = Field(default=(), description="not lost, but not in the new generation")
    injected: tuple[WorkerId, ...] = Field(default=(), description="workers lost or left because of `morph inject`")
    killed_at_s: float | None = Field(default=None, description="first kill of its VMs, if the shell recorded it")
    detected_at_s: float
    reformed_at_s: float | None = Field(default=None, description="first order of the new generation")
    resumed_at_s: float | None = Field(default=None, description="next decided step; None: the run ended before")
    num_generations: int = Field(default=0, description="generations formed until one trained")
    from_shape: str
    to_shape: str | None = None
    version: int = Field(description="the decided version at its beginning")
    steps_redone: int = 0
    sources: dict[SourceKind, SourceSum] = Field(default={}, description="sources of the new generation")
    groups_s: float = Field(default=0.0, description="longest of its members")
    state_s: float = Field(default=0.0, description="longest of its members")
    received_bytes: int = 0

    @property
    def pause_ms(self) -> float | None:
        """The time from the kill (else the detection) to the end of the next decided step."""
        return None if self.resumed_at_s is None else (self.resumed_at_s - self.began_s) * 1e3

    @property
    def began_s(self) -> float:
        """The time of the kill, unless training had stopped before because of newcomers or another loss."""
        return self.detected_at_s if self.killed_at_s is None else min(self.killed_at_s, self.detected_at_s)


class VmCount(Value):
    """A record: the number of VMs from this time on."""

    time_s: float
    num_vms: int


class SessionBegun(Value):
    """A record: a manager began from this version; ``saved``: the checkpoint from which it began."""

    version: int
    saved: int | None


class ShapeLeft(Value):
    """A record: the run has left its last shape, in which ``num_steps`` steps were decided."""

    end_s: float
    num_steps: int


class Saved(Value):
    """A record: this version is a complete checkpoint."""

    version: int


class SessionOver(Value):
    """A record: the run, or its session, has ended at this version. ``rests``, ``at_limit``: see ``Finish``."""

    version: int
    outcome: Literal["finished", "stopped", "failed"]
    sentence: str
    rests: bool = False
    at_limit: bool = False


class RunReport(Value):
    """A run as its journal records it; a resumed run includes its earlier sessions."""

    job: str
    num_steps: int
    start_s: float
    end_s: float
    version: int = Field(description="last decided version")
    checkpoint_version: int | None
    best_version: int | None = Field(default=None, description="the best evaluated one; None: the job defines no best")
    outcome: Literal["finished", "stopped", "failed", "running", "unmanaged"]
    sentence: str
    num_sessions: int
    shapes: tuple[ShapeSpan, ...]
    morphs: tuple[MorphRecord, ...]
    steps: Steps
    steps_redone: int = Field(default=0, description="decided steps that were run again because of a loss")
    first_loss: tuple[int, float] | None = Field(default=None, description="the first step with a loss, and the loss")
    last_loss: tuple[int, float] | None = None
    evaluations: tuple[EvaluationRecord, ...] = ()
    account: Account
    vms: tuple[VmCount, ...]
    correction: Correction | None = Field(default=None, description="correction to the profile, from the last session")
    next_save: NextSave | None = Field(default=None, description="as last known; None: the run is over, or none is due")

    @property
    def no_forecast(self) -> str:
        """Why no time of a step is forecast, for readers; empty if a shape has a forecast."""
        shared = {shape.num_shared_cores for shape in self.shapes}
        if None in shared or not shared:
            return ""
        return f"no forecast of steps: the workers and the manager share {counted(max(filter(None, shared)), 'core')}"

    @property
    def losses(self) -> dict[int, float]:
        """The loss by step, from the last run of each step."""
        steps, losses = self.steps.column("step").tolist(), self.steps.column("loss").tolist()
        return {step: loss for step, loss in zip(steps, losses, strict=True) if loss == loss}

    def remaining(self, prices: Prices | None = None) -> Remaining | None:
        """Return the forecast of a running session; None if nothing can be said yet, or none is running.

        Generations are counted from 0 in each session, except in one that takes over the nodes of the last.
        """
        if self.outcome != "running":
            return None
        begins = [span.start_s for last, span in pairwise(self.shapes) if span.generation <= last.generation]
        decided_s = self.steps.column("decided_at_s")
        rows = np.flatnonzero(decided_s >= (begins[-1] if begins else self.start_s))
        if not len(rows):
            return None
        first, bill = int(rows[0]), self.account.bill(prices)
        begun_usd = self.steps.cost(first).dollars(prices)
        chosen = rows[np.unique(np.linspace(0, len(rows) - 1, min(len(rows), MOST_POINTS)).round().astype(np.int64))]
        points = list(zip(decided_s[chosen].tolist(), (self.steps.column("step")[chosen] + 1).tolist(), strict=True))
        return remaining(points, self.end_s, self.num_steps, (begun_usd, None if bill is None else bill.total_usd))

    @property
    def changes_text(self) -> str:
        """The number of changes of shape, of those after a loss, and of those after a loss by ``morph inject``."""
        text = f"{len(self.morphs)}, {sum(not morph.planned for morph in self.morphs)} of them after a loss"
        injected = sum(bool(morph.injected) for morph in self.morphs)
        return text + (f" ({injected} by morph inject)" if injected else "")

    @property
    def first_step(self) -> StepRecord | None:
        """The first decided step that counts."""
        rows = np.flatnonzero(~self.steps.redone)
        return self.steps[int(rows[0])] if len(rows) else None

    @property
    def last_step(self) -> StepRecord | None:
        """The last decided step that counts."""
        rows = np.flatnonzero(self.steps.column("step") < self.version)
        return self.steps[int(rows[-1])] if len(rows) else None

    @property
    def num_skipped(self) -> int:
        """The number of steps that count and left the weights unchanged."""
        return int(np.count_nonzero(self.steps.column("skipped").astype(np.bool_) & ~self.steps.redone))
