"""The emulated device: times and sizes from a profile, which a worker uses instead of computing and sending.

The manager makes it for one micro-batch size (``manager.rehearsal.device``). Times are seconds of the rehearsal's own
clock, sizes bytes. Sizes named ``real_`` are those of the tensors that the emulation moves and keeps; every other size
is the profile's and is only counted.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from morph.contract.base import Value

Number = Annotated[int, Field(strict=True, ge=0)]
Bytes = Number
Seconds = Annotated[float, Field(strict=True, ge=0)]
Factor = Annotated[float, Field(strict=True, gt=0)]
Count = Annotated[int, Field(strict=True, ge=1)]

HEADER_NUMBERS = 5
"""The number of float64 values at the head of every emulated message."""


class Duration(Value):
    """A duration: ``median_s`` each time, or with jitter a draw from evenly spaced quantiles."""

    median_s: Seconds
    quantiles_s: tuple[Seconds, ...] = Field(default=(), description="ascending; empty: always the median")


class EmulatedSection(Value):
    """One section at the emulated micro-batch size."""

    forward: Duration
    backward: Duration
    real_message_bytes: int = Field(
        strict=True, ge=8 * HEADER_NUMBERS, description="size of the tensor that crosses the next cut-point"
    )
    held_bytes: Bytes = Field(description="parameters, optimizer state and accumulated gradients")
    input_bytes: Bytes = Field(description="input of one micro-batch, kept for the recompute")
    activation_bytes: Bytes = Field(description="tensors of one micro-batch, kept between forward and backward")
    extra_bytes: Bytes = Field(default=0, description="further memory while one of its tasks runs")


class EmulatedUnit(Value):
    """One parameter unit: ``real_values`` float32 parameters stand for it."""

    id: str
    sections: tuple[Number, ...] = Field(min_length=1)
    real_values: Count
    reduced_bytes: Bytes = Field(description="size of its accumulated gradient in the profile")
    optimizer_s: Seconds


class Message(Duration):
    """One-way time of a message; ``wire_s`` of it occupies the wire, so that the next message waits for it."""

    wire_s: Seconds = 0.0


class EmulatedLinks(Value):
    """Messages over one kind of link, by the section before the cut-point."""

    activation: tuple[Message, ...]
    gradient: tuple[Message, ...]


class Curve(Value):
    """A time over a size: linear between points, constant before the first and beyond the last."""

    sizes_bytes: tuple[Annotated[float, Field(strict=True)], ...] = Field(min_length=1)
    times_s: tuple[Seconds, ...] = Field(min_length=1)


class Slowdown(Value):
    """A fail-stutter device: tasks of ``stage`` (in one replica, or in all) take ``factor`` times as long."""

    stage: Number
    replica: Number | None = None
    factor: Factor


class EmulatedDevice(Value):
    """Everything that an emulated worker knows about the job and its device.

    ``contention[n]`` is the factor of tasks when n workers share a node. ``forgiven_s``: a task that begins late by up
    to this, because the host was busy, ends as if it had begun in time.
    """

    sections: tuple[EmulatedSection, ...] = Field(min_length=1)
    units: tuple[EmulatedUnit, ...] = Field(min_length=1)
    intra_node: EmulatedLinks
    inter_node: EmulatedLinks
    between_zones: EmulatedLinks | None = Field(default=None, description="None: as inter_node")
    all_reduce: dict[int, Curve] = Field(description="AR(D) over the reduced bytes, by ring size")
    all_reduce_over_zones: dict[int, Curve] = Field(
        default={}, description="AR(D) of members in several zones, where that takes longer"
    )
    state_s_per_byte: Seconds = Field(
        default=0.0, description="time to receive a unit's state from a peer, by bytes really received"
    )
    exact: bool = Field(description="gradients are summed in fixed point")
    optimizer: Literal["adam", "sgd"]
    seed: Number = 0
    jitter_seed: Number | None = Field(default=None, description="None: medians, no jitter")
    slow: tuple[Slowdown, ...] = ()
    contention: dict[int, Factor] = Field(default_factory=dict, description="factors that are not 1")
    memory_bytes: Count | None = Field(default=None, description="memory of the device; None: no limit")
    forgiven_s: Seconds = 0.0
    node_types: dict[str, EmulatedDevice] = Field(
        default={}, description="devices of other types, by the type that a stage names; units and sizes are the same"
    )

    @model_validator(mode="after")
    def _consistent(self) -> EmulatedDevice:
        borders = len(self.sections) - 1
        for links in (self.intra_node, self.inter_node, self.between_zones or self.inter_node):
            if len(links.activation) != borders or len(links.gradient) != borders:
                raise ValueError(f"links need {borders} activation and gradient times")
        for name, device in self.node_types.items():
            if [unit.id for unit in device.units] != [unit.id for unit in self.units]:
                raise ValueError(f"node_types[{name!r}] has other units")
        return self

    def of_type(self, node_type: str) -> EmulatedDevice:
        """Return the device of a type of node, or this one if there is none of that name."""
        return self.node_types.get(node_type, self)
