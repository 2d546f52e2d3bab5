"""Evaluations: their schedule, their metrics over all samples, the best version, and the early end of training."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from morph.contract.base import Value

MOST_SAMPLE_BYTES = 16 * 2**20
"""Most bytes that an evaluation may return for all samples together; they are sent to the manager and kept."""


class BestRule(Value):
    """Rules for the best evaluated version, and for the end of training after several worse ones (``Job.best``)."""

    metric: str = "loss"
    mode: Literal["min", "max"] = "min"
    patience: int | None = Field(default=None, ge=1)
    min_delta: float = Field(default=0.0, ge=0)

    def is_better(self, value: float | None, than: float | None, by: float = 0.0) -> bool:
        """Return whether a value is better by more than ``min_delta``; NaN is worse than any number."""
        if value is None or than is None:
            return value is not None
        return (than - value if self.mode == "min" else value - than) > by


class EvaluationSize(Value):
    """When a job is evaluated, and on how much; ``finishes``: it computes whole metrics (``Job.eval_metrics``)."""

    every_steps: int | None = Field(default=None, ge=1)
    every_samples: int | None = Field(default=None, ge=1, description="training samples between two evaluations")
    batch_size: int = Field(default=1, ge=1)
    num_micro_batches: int = Field(ge=1)
    best: BestRule | None = None
    finishes: bool = False

    @property
    def acts(self) -> bool:
        """Whether the manager has to process the result of an evaluation."""
        return self.finishes or self.best is not None

    def is_due(self, version: int) -> bool:
        """Whether this version is evaluated: by its steps, or as the first after the end of an epoch."""
        if version == 0:
            return False
        if self.every_steps is not None and version % self.every_steps == 0:
            return True
        if self.every_samples is None:
            return False
        end = version * self.batch_size
        return end // self.every_samples > (end - self.batch_size) // self.every_samples


class Best(Value):
    """The best version that was evaluated so far, by the job's metric."""

    version: int = Field(ge=1)
    metric: str
    value: float


class Judged(Value):
    """The outcome of the evaluations up to ``last_version``; ``num_worse``: those in a row that were not better."""

    last_version: int = Field(default=0, ge=0)
    best: Best | None = None
    num_worse: int = Field(default=0, ge=0)

    def after(self, rule: BestRule, version: int, value: float | None) -> Judged:
        """Return the outcome with one more evaluation; a version that was judged before changes nothing."""
        if version <= self.last_version:
            return self
        before = None if self.best is None else self.best.value
        best = self.best
        if value is not None and rule.is_better(value, before):
            best = Best(version=version, metric=rule.metric, value=value)
        improved = rule.is_better(value, before, rule.min_delta)
        return Judged(last_version=version, best=best, num_worse=0 if improved else self.num_worse + 1)

    def is_over(self, rule: BestRule | None) -> bool:
        """Whether training ends early."""
        return rule is not None and rule.patience is not None and self.num_worse >= rule.patience


class Array(Value):
    """An array of numbers; the first dimension of ``shape`` is the number of samples."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    dtype: str = Field(description="a NumPy dtype")
    shape: tuple[int, ...] = Field(min_length=1)
    data: bytes = Field(repr=False, max_length=MOST_SAMPLE_BYTES)


class EvaluationTotals(Value):
    """A whole evaluation: loss, means and sums by name (None: NaN), and the values of each sample."""

    version: int = Field(ge=0)
    values: dict[str, float | None]
    samples: dict[str, Array] = Field(default_factory=dict)


class FinishedMetrics(Value):
    """The result of ``Job.eval_metrics`` for an evaluation."""

    version: int = Field(ge=0)
    values: dict[str, float | None]
