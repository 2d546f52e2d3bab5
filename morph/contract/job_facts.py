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
    """A data set; every worker of a run must find the same."""

    num_samples: int = Field(ge=0)
    samples: tuple[SampleFacts, ...] = ()


class JobFacts(Value):
    """Facts that identify a run's job besides its code: data sets by the job's fields, and settings as text.

    ``epochs``: their division into steps, which follows from the others.
    """

    data: dict[str, DataFacts] = Field(default_factory=dict)
    settings: dict[str, str] = Field(default_factory=dict)
    epochs: Epochs | None = None
