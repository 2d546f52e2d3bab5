"""Facts that identify the job of a run and its data sets, and how its epochs divide into steps, in any shape."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from morph.contract.base import Value

EpochEnd = Literal["fill", "short", "drop"]
"""What happens to the last samples of an epoch if they do not fill a mini-batch; see ``Job.epoch_end``."""


class Epochs(Value):
    """The division of epochs into steps of ``batch_size`` samples; ``end``: what happens to an incomplete step."""

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


class SampleFacts(Value):
    """One sample. ``entries``: type, shape and sha256 of the bytes of each tensor, as one text, by its name."""

    index: int = Field(ge=0)
    entries: dict[str, str]


class DataFacts(Value):
    """A data set; every worker of a run must find the same.

    ``rows``: digests of 1, 2, 4, ... samples that are spread over the data set, and of as many as could be read in some
    time, by their number; only where a run starts. ``fingerprint``: what the data set says of itself.
    """

    num_samples: int = Field(ge=0)
    samples: tuple[SampleFacts, ...] = ()
    rows: dict[int, str] = Field(default_factory=dict)
    fingerprint: str | None = None

    def most_compared(self, began: DataFacts) -> int:
        """Return the largest number of samples of which both have a digest; 0 if there is none."""
        return max(self.rows.keys() & began.rows.keys(), default=0)

    def joined(self, began: DataFacts) -> DataFacts:
        """Return the same facts with the digests of an earlier start, if the data is that of the start."""
        num = self.most_compared(began)
        same = self.num_samples == began.num_samples and self.rows.get(num) == began.rows.get(num)
        return self.model_copy(update={"rows": {**began.rows, **self.rows}}) if same else self


class JobFacts(Value):
    """Facts that identify a run's job besides its code: data sets by the job's fields, settings as text, epochs."""

    data: dict[str, DataFacts] = Field(default_factory=dict)
    settings: dict[str, str] = Field(default_factory=dict)
    epochs: Epochs | None = None

    def joined(self, began: JobFacts) -> JobFacts:
        data = {name: facts.joined(began.data.get(name, facts)) for name, facts in self.data.items()}
        return self.model_copy(update={"data": data})
