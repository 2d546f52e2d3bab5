"""Every error that Morph raises on purpose, grouped by what the caller should do.

MorphError
├── InputError                fix the input: names source, field, value, what is allowed
│   ├── JobError              the job file or what it defines
│   ├── ExportError           torch.export refused the model
│   ├── ProfileError          a profile file, or a profile that does not fit the job
│   ├── PlanError             an impossible shape
│   ├── TraceError            a trace file
│   ├── ConfigError           a cluster or job configuration file
│   └── RunDirError           a run directory in use, not writable, or of another job
│       ├── RunFinished       its run has reached the last step that was asked for: nothing is left to do
│       └── RunDirStuck       it cannot be written now, because its disk is full or its journal is locked: wait
├── GenerationAborted         retry: the group was dissolved, a new generation follows
├── PeerLost                  retry: a collective failed because a peer went away
└── TrainingStopped           stop: the run cannot continue
    ├── NonFiniteGradient     a gradient is NaN or infinite
    ├── CheckpointError       a checkpoint cannot be read
    │   └── CheckpointDamaged a file is missing or differs: an older one may be intact
    ├── CheckpointsTaken      another manager has taken the run's checkpoints over: write nothing more there
    ├── ClusterError          the cluster cannot be started or reached
    │   └── ClusterLost       the cluster is gone: a new one can continue from the newest checkpoint
    └── WaitTimeout           a bounded wait timed out; names what it waited for
"""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


class MorphError(Exception):
    """The root of all errors that Morph raises on purpose."""


class InputError(MorphError):
    """A mistake in something that the user gave: in the file or argument ``source``, at the dotted name ``field``."""

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
    """Return an error about a field of a job or about its result."""
    return JobError(message, source="Job", field=field, value=value, allowed=allowed)


class ExportError(InputError):
    """torch.export refused the model."""


class ProfileError(InputError):
    """A profile file is wrong, or belongs to another job."""


class PlanError(InputError):
    """The requested shape is impossible."""


class TraceError(InputError):
    """A trace file is wrong."""


class ConfigError(InputError):
    """A configuration file is wrong."""


class RunDirError(InputError):
    """The run directory is in use, not writable, or belongs to another job."""


class RunFinished(RunDirError):
    """The run has reached the last step that was asked for."""


class RunDirStuck(RunDirError):
    """The run directory or its journal cannot be written for now: full or read-only disk, another process's lock."""


class GenerationAborted(MorphError):
    """The group of this generation was dissolved; the manager will form a new one."""


class PeerLost(MorphError):
    """A message or collective failed because a peer went away."""


class TrainingStopped(MorphError):
    """The run cannot continue."""


class NonFiniteGradient(TrainingStopped):
    """A gradient is NaN or infinite."""


class CheckpointError(TrainingStopped):
    """A checkpoint cannot be read; it may be intact."""


class CheckpointDamaged(CheckpointError):
    """A checkpoint is damaged: a file is missing or differs from its manifest."""


class CheckpointsTaken(TrainingStopped):
    """Another manager has taken over the storage of the run's checkpoints."""


class ClusterError(TrainingStopped):
    """The cluster cannot be started or reached."""


class ClusterLost(ClusterError):
    """The cluster of a run is gone; the run can continue from its newest checkpoint on a new one."""


class WaitTimeout(TrainingStopped):
    """A bounded wait timed out."""


def printable(text: str) -> str:
    """Return a text that is safe for a terminal: control characters but line ends and tabs become escapes such as
    ``\\x1b``.
    """
    return _CONTROL.sub(_escape, text) if _CONTROL.search(text) else text


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()
