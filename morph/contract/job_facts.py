"""Facts that identify the job of a run and its data sets, and their differences from the start of the run."""

from __future__ import annotations

from pydantic import Field

from morph.contract.base import Value
from morph.contract.epochs import Epochs


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
    """Facts that identify a run's job besides its code: data sets by the job's fields, and settings as text.

    ``epochs``: their division into steps, which follows from the others.
    """

    data: dict[str, DataFacts] = Field(default_factory=dict)
    settings: dict[str, str] = Field(default_factory=dict)
    epochs: Epochs | None = None

    def joined(self, began: JobFacts) -> JobFacts:
        data = {name: facts.joined(began.data.get(name, facts)) for name, facts in self.data.items()}
        return self.model_copy(update={"data": data})
