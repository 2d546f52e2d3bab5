"""Every error that Morph raises on purpose, grouped by what the caller should do.

MorphError
├── InputError                fix the input: names source, field, value, what is allowed
│   ├── JobError              the job file or what it defines
│   ├── ExportError           torch.export refused the model
│   ├── ProfileError          a profile file, or a profile that does not fit the job
│   ├── PlanError             a shape that cannot be
│   ├── TraceError            a trace file
│   ├── ConfigError           a cluster or job configuration file
│   └── RunDirError           a run directory in use, not writable, or of another job
│       └── RunDirStuck       it cannot be written now, because its disk is full or its journal is locked: wait
├── GenerationAborted         retry: the group was dissolved, a new generation follows
├── PeerLost                  retry: a collective failed because a peer went away
└── TrainingStopped           stop: the run cannot go on
    ├── NonFiniteGradient     a gradient is NaN or infinite
    ├── CheckpointError       a checkpoint cannot be read
    │   └── CheckpointDamaged it is not what was written, and will never be: an older one may be whole
    ├── CheckpointsTaken      another manager has taken the run's checkpoints over: write nothing more there
    ├── ClusterError          the cluster cannot be started or reached
    │   └── ClusterLost       what the run stood on is gone: a new cluster can go on from the newest checkpoint
    └── WaitTimeout           a bounded wait ran out; says what was waited for
"""

from __future__ import annotations

import re


class MorphError(Exception):
    """Root of everything that Morph raises on purpose."""


class InputError(MorphError):
    """A mistake in something that the user gave.

    Args:
        message: What is wrong, in one sentence.
        source: File or argument that contains the value.
        field: Dotted name of the field.
        value: The offending value, shown with ``repr``.
        allowed: What would be accepted.
    """

    def __init__(
        self,
        message: str,
        *,
        source: str | None = None,
        field: str | None = None,
        value: object = None,
        allowed: str | None = None,
    ) -> None:
        self.message = message
        self.source = source
        self.field = field
        self.value = value
        self.allowed = allowed
        super().__init__(str(self))

    def __str__(self) -> str:
        where = ": ".join(part for part in (self.source, self.field) if part)
        text = f"{where}: {self.message}" if where else self.message
        if self.value is not None:
            text += f" (got {self.value!r})"
        if self.allowed is not None:
            text += f"; allowed: {self.allowed}"
        return text


class JobError(InputError):
    """The job file, or what it defines, is wrong."""


def wrong_job(field: str, message: str, value: object = None, allowed: str | None = None) -> JobError:
    """Return what is wrong with a field of a job, or with what it makes."""
    return JobError(message, source="Job", field=field, value=value, allowed=allowed)


class ExportError(InputError):
    """torch.export refused the model."""


class ProfileError(InputError):
    """A profile file is wrong, or belongs to another job."""


class PlanError(InputError):
    """The shape requested cannot be."""


class TraceError(InputError):
    """A trace file is wrong."""


class ConfigError(InputError):
    """A configuration file is wrong."""


class RunDirError(InputError):
    """The run directory is in use, not writable, or belongs to another job."""


class RunDirStuck(RunDirError):
    """It, or its journal, cannot be written now: a full or read-only disk, another process's lock. That passes."""


class GenerationAborted(MorphError):
    """The group of this generation was dissolved; the manager will form a new one."""


class PeerLost(MorphError):
    """A message or collective failed because a peer went away."""


class TrainingStopped(MorphError):
    """The run cannot go on."""


class NonFiniteGradient(TrainingStopped):
    """A gradient is NaN or infinite."""


class CheckpointError(TrainingStopped):
    """A checkpoint cannot be read; whether it is whole may not be known."""


class CheckpointDamaged(CheckpointError):
    """A checkpoint is not what was written: a file is missing or differs from its manifest."""


class CheckpointsTaken(TrainingStopped):
    """Another manager has taken over the place of the run's checkpoints."""


class ClusterError(TrainingStopped):
    """The cluster cannot be started or reached."""


class ClusterLost(ClusterError):
    """What a run stood on is gone; it can go on from its newest checkpoint on a new one."""


class WaitTimeout(TrainingStopped):
    """A bounded wait ran out."""


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return a text as a terminal can be sent it: what would control it is shown as an escape, as ``\\x1b``.

    Ends of lines and tabs stay.
    """
    return _CONTROL.sub(_escape, text) if _CONTROL.search(text) else text


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
