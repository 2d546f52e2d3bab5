"""Job file: everything about one run in one YAML file; and by what its job and data sets are known again."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from morph.contract import ranges
from morph.contract.base import Value
from morph.contract.cluster import ClusterConfig
from morph.contract.plan import Schedule


class JobPart(Value):
    """What is trained. Paths are relative to the job file's folder."""

    code: str = Field(min_length=3, pattern=r"^.+:[^:]+$", description="path/to/file.py:name of a morph.Job")
    profile: str = Field(min_length=1, description="what `morph calibrate` wrote for it")
    steps: Annotated[int, ranges.COUNT.field] = Field(default=100, description="optimizer steps of the whole run")
    batch_size: Annotated[int, ranges.BATCH.field] | None = Field(
        default=None, description="samples in a step, to be held against the job's own; absent: not held against it"
    )
    run_dir: str | None = Field(
        default=None, min_length=1, description="journal, checkpoints and pictures; absent: runs/NAME of the job"
    )
    checkpoint_url: str | None = Field(
        default=None,
        min_length=1,
        description="fsspec URL (az://, s3://, gs://) or path that every VM reaches; absent: checkpoints in run_dir",
    )
    schedule: Schedule | None = Field(
        default=None, description="order of the tasks; the weights do not depend on it; absent: the fastest"
    )
    recompute: bool | None = Field(
        default=None,
        description="false keeps activations instead of running forwards again: more memory; absent: the faster",
    )
    pipeline_depth: Annotated[int, Field(ge=1, le=ranges.SECTIONS)] | None = Field(
        default=None,
        description="P of every shape: with fewer workers the run waits; absent: the fastest with those that are there",
    )
    num_replicas: Annotated[int, ranges.GPUS.field] | None = Field(
        default=None,
        description="D at most: fewer while workers are missing or where more are no faster; absent: any",
    )


class JobFile(ClusterConfig):
    """Root of a job file: a cluster file's sections, and the job."""

    job: JobPart


class SampleFacts(Value):
    """One sample. ``entries``: type, shape and sha256 of the bytes of each tensor, as one text, by its name."""

    index: int = Field(ge=0)
    entries: dict[str, str]


class DataFacts(Value):
    """A data set, as every worker of a run must find it."""

    num_samples: int = Field(ge=0)
    samples: tuple[SampleFacts, ...] = ()


class JobFacts(Value):
    """By what the job of a run is known again, besides its code: data sets by the job's fields, settings as text."""

    data: dict[str, DataFacts] = Field(default_factory=dict)
    settings: dict[str, str] = Field(default_factory=dict)
