"""One stage of an emulated device, which takes the profile's times and memory instead of computing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from morph.runtime.emulation.clock import DeviceClock, Seconds
from morph.runtime.emulation.message import (
    LOSS_GRADIENT,
    Head,
    backward,
    forward,
    noise,
    read_head,
    weight_gradient,
    write_head,
)
from morph.runtime.emulation.unit import DeviceMemory
from morph.runtime.step.stage import GradientSink


@dataclass(frozen=True)
class SectionUnits:
    """A section's parameters: the sum of their first numbers, and each unit's (parameter, pattern of its gradient)."""

    index: int
    weights: float
    patterns: Mapping[str, Tensor]


@dataclass(frozen=True)
class TaskTimes:
    """The seconds of each of a step's micro-batches, in the stage's order; ``backward_s`` has a row per section."""

    forward_s: Seconds
    recompute_s: Seconds
    backward_s: Seconds


class EmulatedStage:
    """Runs tasks of one stage in one step, as ``morph.runtime.step.stage.Stage`` does; ``key`` is (seed, step)."""

    def __init__(
        self,
        sections: Sequence[SectionUnits],
        times: TaskTimes,
        micro_batches: Sequence[int],
        *,
        recompute: bool,
        clock: DeviceClock,
        memory: DeviceMemory,
        key: tuple[int, int],
        message: Tensor | None,
        gradient: Tensor | None,
    ) -> None:
        self._sections = tuple(sections)
        self._times = times
        self._places = {micro_batch: place for place, micro_batch in enumerate(micro_batches)}
        self._recompute = recompute
        self._clock = clock
        self._memory = memory
        self._key = key
        self._message = message
        self._gradient = gradient
        self._stored: dict[int, float] = {}
        self._runs: dict[int, list[float]] = {}
        self.ends_s: dict[int, float] = {}
        """The time, by the device's clock, at which the last backward so far had passed each section."""

    @property
    def num_stored(self) -> int:
        """The number of micro-batches of which only the stage's input is kept."""
        return len(self._stored)

    @property
    def num_live(self) -> int:
        """The number of micro-batches whose activations are kept for the backward."""
        return len(self._runs)

    def forward(self, micro_batch: int, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Take a forward's time; return the message for the next stage, or the loss."""
        begun_s = self._clock.begin()
        value = read_head(inputs[0], self._key[1], micro_batch) if inputs else noise(*self._key, micro_batch)
        values = self._run(micro_batch, value)
        if self._recompute:
            self._stored[micro_batch] = value
            self._memory.use(self.num_stored, self.num_live + 1)
        else:
            self._runs[micro_batch] = values
            self._memory.use(self.num_live, self.num_live)
        output = self._headed(self._message, micro_batch, values[-1])
        self._clock.end(begun_s, self._times.forward_s[self._places[micro_batch]])
        return (torch.tensor(1.0 + values[-1]) if output is None else output,)

    def recompute(self, micro_batch: int) -> None:
        """Take the time of running the forward again."""
        begun_s = self._clock.begin()
        self._runs[micro_batch] = self._run(micro_batch, self._stored[micro_batch])
        self._memory.use(self.num_stored, self.num_live)
        del self._stored[micro_batch]
        self._clock.end(begun_s, self._times.recompute_s[self._places[micro_batch]])

    def backward(
        self, micro_batch: int, output_gradients: Sequence[Tensor | None], sink: GradientSink
    ) -> tuple[Tensor | None, ...]:
        """Take a backward's time and give gradients to ``sink``; return the message for the previous stage."""
        begun_s = self._clock.begin()
        self._memory.use(self.num_stored, self.num_live)
        values = self._runs.pop(micro_batch)
        gradient = LOSS_GRADIENT
        took_s = 0.0
        if self._message is not None:
            arrived = output_gradients[0]
            assert arrived is not None
            gradient = read_head(arrived, self._key[1], micro_batch)
        for section, times_s in zip(reversed(self._sections), reversed(self._times.backward_s), strict=True):
            value = values.pop()
            took_s += float(times_s[self._places[micro_batch]])
            self.ends_s[section.index] = begun_s + took_s * self._clock.slowness
            scale = weight_gradient(gradient, value)
            for parameter, pattern in section.patterns.items():
                sink.add(section.index, parameter, pattern * scale)
            sink.done(section.index)
            gradient = backward(gradient, value)
        message = self._headed(self._gradient, micro_batch, gradient)
        self._clock.end(begun_s, took_s)
        return () if message is None else (message,)

    def _run(self, micro_batch: int, value: float) -> list[float]:
        values = []
        for section in self._sections:
            value = forward(value, section.weights, noise(*self._key, micro_batch, section.index))
            values.append(value)
        return values

    def _headed(self, message: Tensor | None, micro_batch: int, value: float) -> Tensor | None:
        if message is not None:
            write_head(message, Head(self._key[1], micro_batch, value))
        return message
