"""How a job's epochs divide into steps: a step has its own number of samples, the same in every shape."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from morph.contract.base import Value

EpochEnd = Literal["fill", "short", "drop"]
"""What happens to the last samples of an epoch if they do not fill a mini-batch; see ``Job.epoch_end``."""


class Epochs(Value):
    """The division of a job's epochs into steps.

    ``batch_size``: M, the samples of a whole step. ``end``: what happens to the samples that do not fill a step.
    """

    num_samples: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    end: EpochEnd = "fill"

    @property
    def num_left(self) -> int:
        """The number of samples of an epoch that do not fill a step."""
        return self.num_samples % self.batch_size

    @property
    def num_steps(self) -> int:
        """The number of steps that begin within an epoch, unless steps are filled from the next epoch."""
        return self.num_samples // self.batch_size + (self.end == "short" and self.num_left > 0)

    def positions(self, step: int) -> range:
        """Return the positions of a step's samples, counted through all epochs."""
        if self.end == "fill":
            return range(step * self.batch_size, (step + 1) * self.batch_size)
        epoch, place = divmod(step, self.num_steps)
        first = epoch * self.num_samples + place * self.batch_size
        return range(first, min(first + self.batch_size, (epoch + 1) * self.num_samples))

    def num_micro_batches(self, step: int, micro_batch_size: int) -> int:
        """Return the number of a step's micro-batches; the last one may have fewer samples than m."""
        return -(-len(self.positions(step)) // micro_batch_size)

    def steps_of(self, num_epochs: int) -> int:
        """Return the number of steps that read this many epochs; the last one may read further, if steps are filled."""
        if self.end == "fill":
            return -(-num_epochs * self.num_samples // self.batch_size)
        return num_epochs * self.num_steps
