"""What a run looked like. Times are wall-clock seconds as the shell stamped them, durations seconds unless named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from manager.accounting.account import Account
from manager.controller.state.profile_correction import Correction
from manager.controller.state.saves import NextSave
from morph.contract.base import Value
from morph.contract.messages import WorkerId

SourceKind = Literal["keep", "peer", "ahead", "checkpoint", "initial"]


def numbers_text(numbers: Mapping[str, float]) -> str:
    """Metrics and the like in one line."""
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())


def rates_text(rates: tuple[float, float]) -> str:
    """The learning rate, or the lowest and the highest."""
    return " to ".join(dict.fromkeys(f"{rate:.4g}" for rate in rates))


class StepRecord(Value):
    """One decided step. ``redone_later``: its state was lost afterwards, and the step run again."""

    step: int
    generation: int
    decided_at_s: float
    duration_s: float = Field(description="order to decision, overflow attempts included")
    compute_s: float = Field(description="longest step_s that a member reported")
    loss: float | None = Field(description="mean over micro-batches, in their order; None: none that is a number")
    metrics: dict[str, float] = Field(default_factory=dict, description="means likewise; those that are numbers")
    weight: float | None = Field(default=None, description="of all its losses; None: they are means over samples")
    learning_rates: tuple[float, float] | None = Field(default=None, description="lowest and highest; None: unknown")
    gradient_norm: float | None = Field(default=None, description="before clipping; None: the job does not ask for it")
    skipped: bool = Field(default=False, description="a gradient was not finite, or nothing counted: weights stayed")
    loss_scale: float | None = Field(default=None, description="of this step; None: the job has none")
    num_attempts: int
    redone_later: bool = False


class EvaluationRecord(Value):
    """The job's evaluation data at one version; loss and metrics are means over its micro-batches."""

    version: int
    loss: float | None = Field(description="None: it is not a number")
    metrics: dict[str, float]

    @property
    def text(self) -> str:
        """Loss and metrics in one line."""
        loss = "loss is not a number" if self.loss is None else f"loss {self.loss:.4f}"
        return f"{loss}, {numbers_text(self.metrics)}" if self.metrics else loss


class ShapeSpan(Value):
    """One generation, from its reshape order to the next one (or the end)."""

    generation: int
    shape: str = Field(description='"PxD"')
    num_workers: int
    batch_size: int
    start_s: float
    end_s: float | None
    first_version: int
    num_steps: int
    expected_mini_batch_s: float = Field(description="of workers that have a device each")
    shared_mini_batch_s: float | None = Field(
        default=None, description="expected of workers that share this machine's cores; None: each has its own"
    )
    measured_mini_batch_s: float | None = Field(description="median over its steps; None: it decided none")

    @property
    def expected_here_s(self) -> float:
        """Expected seconds of a mini-batch on what the workers really have."""
        return self.expected_mini_batch_s if self.shared_mini_batch_s is None else self.shared_mini_batch_s

    @property
    def examples_per_s(self) -> float | None:
        """Measured speed while stepping."""
        return self.batch_size / self.measured_mini_batch_s if self.measured_mini_batch_s else None


class SourceSum(Value):
    """How many (worker, unit) states came from one kind of source, and their bytes."""

    count: int
    size_bytes: int


class MorphRecord(Value):
    """From losing a generation, or leaving it on purpose, to the next decided step; several attempts are one morph."""

    planned: bool = Field(description="at a step boundary, for newcomers")
    cause: str
    lost_workers: tuple[WorkerId, ...]
    joined: tuple[WorkerId, ...] = Field(default=(), description="of the generation that went on, not of the one left")
    left: tuple[WorkerId, ...] = Field(default=(), description="the other way round, and not lost")
    injected: tuple[WorkerId, ...] = Field(default=(), description="of those lost or left: by `morph inject`")
    killed_at_s: float | None = Field(description="first of its VMs killed, when the shell noted it")
    detected_at_s: float
    reformed_at_s: float | None = Field(description="first order of the generation that went on")
    resumed_at_s: float | None = Field(description="next decided step; None: the run ended before")
    num_generations: int = Field(description="formed until one went on")
    from_shape: str
    to_shape: str | None
    version: int = Field(description="decided when it began")
    steps_redone: int
    sources: dict[SourceKind, SourceSum] = Field(description="of the generation that went on")
    groups_s: float = Field(description="longest of its members")
    state_s: float = Field(description="longest of its members")
    received_bytes: int

    @property
    def pause_ms(self) -> float | None:
        """From the kill (else the detection) to the next decided step, that step included."""
        return None if self.resumed_at_s is None else (self.resumed_at_s - self._began_s) * 1e3

    @property
    def reshape_ms(self) -> float | None:
        """From the kill (else the detection) to the first order of the new generation."""
        return None if self.reformed_at_s is None else (self.reformed_at_s - self._began_s) * 1e3

    @property
    def _began_s(self) -> float:
        """The kill, unless training had stopped before it: for newcomers, or by another loss."""
        return self.detected_at_s if self.killed_at_s is None else min(self.killed_at_s, self.detected_at_s)


class VmCount(Value):
    """From this time on there were so many VMs."""

    time_s: float
    num_vms: int


class RunReport(Value):
    """A run as its journal tells it; a resumed run is told whole."""

    job: str
    num_steps: int
    start_s: float
    end_s: float
    version: int = Field(description="decided last")
    checkpoint_version: int | None
    outcome: Literal["finished", "stopped", "failed", "running", "unmanaged"]
    sentence: str
    num_sessions: int
    shapes: tuple[ShapeSpan, ...]
    morphs: tuple[MorphRecord, ...]
    steps: tuple[StepRecord, ...]
    evaluations: tuple[EvaluationRecord, ...] = ()
    account: Account
    vms: tuple[VmCount, ...]
    correction: Correction | None = Field(default=None, description="of the profile, as learned in the last session")
    next_save: NextSave | None = Field(default=None, description="as last told; None: the run is over, or none is due")

    @property
    def losses(self) -> dict[int, float]:
        """Loss by step, the last run of each."""
        return {record.step: record.loss for record in self.steps if record.loss is not None}

    @property
    def steps_redone(self) -> int:
        """How many decided steps were run again because their state was lost."""
        return sum(record.redone_later for record in self.steps)
