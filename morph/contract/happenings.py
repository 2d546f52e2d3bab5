"""The events of a run for trackers and callbacks, each once, read from its journal; ``step`` counts applied steps."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from morph.contract.base import Value


class StepDone(Value):
    """A step is decided. Seconds, examples and tokens are those of this step alone."""

    step: int = Field(ge=1)
    time_s: float = Field(description="seconds since 1970")
    loss: float | None = Field(description="None: NaN")
    metrics: dict[str, float]
    gradient_norm: float | None
    learning_rates: tuple[float, float] | None = Field(description="lowest and highest of all parameter groups")
    skipped: bool
    seconds: float = Field(description="time from the order to the decision")
    pause_s: float = Field(description="pause of training before the step for a change of shape; 0: none")
    examples_per_s: float | None
    tokens_per_s: float | None = Field(description="weight per second, if the loss has a weight")
    shape: str = Field(description='"PxD"')
    num_workers: int
    dollars: float | None = Field(description="cost of the whole run so far; None: no price is known")


class EvaluationDone(Value):
    """An evaluation is complete."""

    step: int = Field(ge=0)
    time_s: float
    loss: float | None
    metrics: dict[str, float]


class CheckpointDone(Value):
    """A checkpoint is complete. ``url`` is its folder."""

    step: int = Field(ge=0)
    time_s: float
    url: str


class ShapeChanged(Value):
    """Training begins, or continues in another shape. ``pause_s`` is the pause before; None: training had not begun."""

    step: int = Field(ge=0)
    time_s: float
    shape: str
    num_workers: int
    pause_s: float | None
    sentence: str


class Trouble(Value):
    """Something needs attention.

    ``setup_failed``: a worker could not be set up; ``bad_step``: a loss or a gradient is not finite, or a loss rose
    sharply; ``not_saved``: no checkpoint was completed for several intervals.
    """

    step: int = Field(ge=0)
    time_s: float
    kind: Literal["setup_failed", "bad_step", "not_saved"]
    sentence: str


class RunEnded(Value):
    """A session of the run is over; ``rests``: it waits without VMs for a retry; ``at_limit``: the user's limit."""

    step: int = Field(ge=0)
    time_s: float
    outcome: Literal["finished", "stopped", "failed"]
    sentence: str
    rests: bool = False
    at_limit: bool = False


Happening = StepDone | EvaluationDone | CheckpointDone | ShapeChanged | Trouble | RunEnded
