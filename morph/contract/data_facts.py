"""By what a job and its data sets are known again: settings, lengths and a few samples."""

from __future__ import annotations

from pydantic import Field

from morph.contract.base import Value
from morph.contract.errors import JobError


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


def require_same(found: JobFacts, began: JobFacts, source: str) -> None:
    """See that a job, as it was loaded here, is the one that a run began with.

    Args:
        found: As it is here.
        began: As it was; what it does not name is not compared, nor are settings that there are not here: another
            version of torch may know more.
        source: The job, for errors.

    Raises:
        JobError: naming the first setting or entry that differs.
    """
    for name, value in began.settings.items():
        here = found.settings.get(name, value)
        if here != value:
            raise _other("setting", source, name, here, value)
    for name, was in began.data.items():
        now = found.data.get(name)
        if now is None:
            raise _other("data", source, name, "none", f"{was.num_samples} samples")
        if now.num_samples != was.num_samples:
            raise _other("data", source, f"len({name}())", now.num_samples, str(was.num_samples))
        for ours, theirs in zip(now.samples, was.samples, strict=True):
            for key in sorted(ours.entries.keys() | theirs.entries.keys()):
                here, there = ours.entries.get(key, "absent"), theirs.entries.get(key, "absent")
                if here != there:
                    raise _other("data", source, f"{name}()[{ours.index}][{key!r}]", here, there)


def _other(what: str, source: str, field: str, found: object, began: str) -> JobError:
    return JobError(
        f"is not the {what} that the run began with", source=source, field=field, value=found, allowed=began
    )
