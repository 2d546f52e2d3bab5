"""What happens in a run, as trackers and callbacks are told of it: read from its journal, each thing once.

``step`` is everywhere the number of steps applied: 1 after the first one. A step that is run again after a loss is told
once.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from morph.contract.base import Value


class StepDone(Value):
    """A step is decided. Seconds, examples and tokens are those of this step alone."""

    step: int = Field(ge=1)
    time_s: float = Field(description="when, in seconds since 1970")
    loss: float | None = Field(description="None: it is not a number")
    metrics: dict[str, float]
    gradient_norm: float | None
    learning_rates: tuple[float, float] | None = Field(description="lowest and highest of all parameter groups")
    skipped: bool
    seconds: float = Field(description="from its order until it is decided")
    pause_s: float = Field(description="for which training had stood before, to change its shape; 0: it had not")
    examples_per_s: float | None
    tokens_per_s: float | None = Field(description="of a loss with a weight: how much counted, in a second")
    shape: str = Field(description='"PxD"')
    num_workers: int
    dollars: float | None = Field(description="of the whole run so far; None: no price is known")


class EvaluationDone(Value):
    """An evaluation is complete."""

    step: int = Field(ge=0)
    time_s: float
    loss: float | None
    metrics: dict[str, float]


class CheckpointDone(Value):
    """A checkpoint is complete. ``url``: of its folder."""

    step: int = Field(ge=0)
    time_s: float
    url: str


class ShapeChanged(Value):
    """Training goes on in another shape, or begins. ``pause_s``: for how long it stood; None: it had not begun."""

    step: int = Field(ge=0)
    time_s: float
    shape: str
    num_workers: int
    pause_s: float | None
    sentence: str


class Trouble(Value):
    """Something needs a look.

    ``setup_failed``: a worker could not be set up; ``bad_step``: a loss or a gradient is not finite, or a loss leapt
    up; ``not_saved``: no checkpoint was completed for several intervals, which are told with its first one.
    """

    step: int = Field(ge=0)
    time_s: float
    kind: Literal["setup_failed", "bad_step", "not_saved"]
    sentence: str


class RunEnded(Value):
    """A session of the run is over.

    ``rests``: without VMs, until the manager tries again. ``at_limit``: a limit of the user's is reached.
    """

    step: int = Field(ge=0)
    time_s: float
    outcome: Literal["finished", "stopped", "failed"]
    sentence: str
    rests: bool = False
    at_limit: bool = False


Happening = StepDone | EvaluationDone | CheckpointDone | ShapeChanged | Trouble | RunEnded
