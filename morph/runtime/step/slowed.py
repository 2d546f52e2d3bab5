"""A stage whose device is slow, for tests and demonstrations: after each task it stands still for a while."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from morph.runtime.step.section_run import AddGradient
from morph.runtime.step.stage import StageTasks


def slowed(stage: StageTasks, factor: float) -> StageTasks:
    """The stage, with every task taking ``factor`` (at least 1) times as long."""
    return stage if factor == 1.0 else SlowedStage(stage, factor)


class SlowedStage:
    """See ``slowed``; everything else as the stage within."""

    def __init__(self, stage: StageTasks, factor: float) -> None:
        self._stage = stage
        self._factor = factor

    @property
    def num_stored(self) -> int:
        """See ``StageTasks.num_stored``."""
        return self._stage.num_stored

    @property
    def num_live(self) -> int:
        """See ``StageTasks.num_live``."""
        return self._stage.num_live

    def forward(self, micro_batch: int, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """See ``StageTasks.forward``."""
        start_s = time.perf_counter()
        outputs = self._stage.forward(micro_batch, inputs)
        self._linger(start_s)
        return outputs

    def recompute(self, micro_batch: int) -> None:
        """See ``StageTasks.recompute``."""
        start_s = time.perf_counter()
        self._stage.recompute(micro_batch)
        self._linger(start_s)

    def backward(
        self, micro_batch: int, output_gradients: Sequence[Tensor | None], add: AddGradient
    ) -> tuple[Tensor | None, ...]:
        """See ``StageTasks.backward``."""
        start_s = time.perf_counter()
        gradients = self._stage.backward(micro_batch, output_gradients, add)
        self._linger(start_s)
        return gradients

    def _linger(self, start_s: float) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch ships no types for it
            torch.cuda.synchronize()
        time.sleep((self._factor - 1) * (time.perf_counter() - start_s))
