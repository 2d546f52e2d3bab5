"""A worker's measured timeline of one step, and its sums."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from morph.contract.base import Value
from morph.contract.plan import Schedule

Count = Annotated[int, Field(ge=0)]

SpanKind = Literal[
    "forward",
    "recompute",
    "backward",
    "wait",
    "reduce",
    "send_activation",
    "send_gradient",
    "receive_activation",
    "receive_gradient",
]


class Span(Value):
    """An activity, in seconds since the step's start on this worker; ``micro_batch`` is the global number."""

    kind: SpanKind
    micro_batch: int | None = None
    start_s: float
    end_s: float

    @model_validator(mode="after")
    def _forwards(self) -> Span:
        if self.end_s < self.start_s:
            raise ValueError(f"ends at {self.end_s}, before it starts at {self.start_s}")
        return self


class Peaks(Value):
    """The largest numbers of micro-batches that a stage held at once in one step.

    ``in_flight``: stored inputs and live graphs together, which the plan's window bounds; ``live_graphs``: those with a
    graph for the backward; ``untaken_*``: those that have arrived and are not yet used; ``unsent_*``: those that were
    handed to a link and have not left yet.
    """

    in_flight: Count = 0
    live_graphs: Count = 0
    untaken_activations: Count = 0
    untaken_gradients: Count = 0
    unsent_activations: Count = 0
    unsent_gradients: Count = 0


class StepTimeline(Value):
    """One worker's timeline of one step; ``start_ns``: the wall clock at its start, spans count on a monotonic one."""

    worker: str
    stage: Count
    replica: Count
    shape: str = Field(description="PxD")
    schedule: Schedule
    window: int = Field(ge=1)
    step: Count
    start_ns: int
    peaks: Peaks
    spans: tuple[Span, ...]


class ComputeTimes(Value):
    """Compute time of one stage in one step, for the heartbeat and the expected-against-measured table."""

    forward_s: float = Field(ge=0)
    recompute_s: float = Field(ge=0)
    backward_s: float = Field(ge=0)
    reduce_s: float = Field(ge=0)
    wait_s: float = Field(ge=0, description="idle within the step")
    step_s: float = Field(ge=0, description="whole step, from its start to the reduced gradients")
    late_s: float = Field(
        default=0.0,
        ge=0,
        description="for an emulated device: seconds by which busy hosts delayed the end of its step",
    )


class MicroBatchTimes(Value):
    """Wall-clock seconds of a worker's micro-batches, in the order in which they finished, one entry each."""

    generation: int
    forward_s: tuple[float, ...]
    recompute_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    processor_s: tuple[float, ...] = Field(
        default=(), description="processor time of forward and backward; empty if the device is not a processor"
    )
    queued_s: tuple[float, ...] = Field(
        default=(), description="their time ready to run while other threads had the cores; empty if not known"
    )
