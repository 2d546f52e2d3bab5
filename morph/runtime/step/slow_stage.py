"""A stage whose device is slow, for tests and demonstrations: after each task it pauses."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from morph.runtime.device.task_clock import Mark, TaskClock
from morph.runtime.step.section_run import GradientSink
from morph.runtime.step.stage import StageTasks


def slowed(stage: StageTasks, factor: float, clock: TaskClock) -> StageTasks:
    """Return the stage, with every task ``factor`` (at least 1) times as long on the device with this clock."""
    return stage if factor == 1.0 else SlowStage(stage, factor, clock)


class SlowStage:
    """See ``slowed``; all else is delegated to the inner stage."""

    def __init__(self, stage: StageTasks, factor: float, clock: TaskClock) -> None:
        self._stage = stage
        self._factor = factor
        self._clock = clock

    @property
    def num_stored(self) -> int:
        return self._stage.num_stored

    @property
    def num_live(self) -> int:
        return self._stage.num_live

    def forward(self, micro_batch: int, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        start = self._clock.mark()
        outputs = self._stage.forward(micro_batch, inputs)
        self._linger(start)
        return outputs

    def recompute(self, micro_batch: int) -> None:
        start = self._clock.mark()
        self._stage.recompute(micro_batch)
        self._linger(start)

    def backward(
        self, micro_batch: int, output_gradients: Sequence[Tensor | None], sink: GradientSink
    ) -> tuple[Tensor | None, ...]:
        start = self._clock.mark()
        gradients = self._stage.backward(micro_batch, output_gradients, sink)
        self._linger(start)
        return gradients

    def _linger(self, start: Mark) -> None:
        end = self._clock.mark()
        self._clock.wait(end)
        time.sleep((self._factor - 1) * self._clock.seconds(start, end))
