"""Slurm: the signals that the shell of a job's step records, and the time limit, which is known in advance.

Slurm sends SIGTERM to the steps of a preempted job, ``GraceTime`` of its partition before it kills them, or USR2 if the
user asked for that (``signal_s``). The shell (``manager/providers/slurm/spec.py``) writes the moment to ``notice`` in
the node's folder; ``limits`` beside it has the other known values. The shell ends the node once ``left`` exists.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from pydantic import Field, ValidationError

from manager.notices.source import NoticeUnavailable, Standing
from morph.contract.base import Value

SIGNALLED, TIME_LIMIT = "slurm: signalled", "slurm: time limit"


class SlurmLimits(Value):
    """The known facts about a job's end.

    ``grace_s``: the time from the signal to the kill; ``ahead_s``: how long before its time limit the job gets a
    notice; ``ends_s``: the time limit, in seconds since 1970; None: there is none, or Slurm did not report it.
    """

    grace_s: float = Field(ge=0)
    ahead_s: float = Field(ge=0)
    ends_s: float | None = None


class SlurmNotices:
    """Reads the files of a node's folder. ``clock``: returns seconds since 1970."""

    name = "slurm"

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._clock = folder, clock

    def standing(self) -> tuple[Standing, ...]:
        try:
            limits = SlurmLimits.model_validate_json((self._folder / "limits").read_bytes())
            noted = self._folder / "notice"
            signalled_s = noted.stat().st_mtime if noted.exists() else None
        except (OSError, ValidationError) as error:
            raise NoticeUnavailable(f"{self._folder}: {error}") from error
        now_s, notices = self._clock(), []
        if signalled_s is not None:
            notices.append(Standing(notice=SIGNALLED, lead_s=max(0.0, signalled_s + limits.grace_s - now_s)))
        if limits.ends_s is not None and limits.ends_s - now_s <= limits.ahead_s:
            notices.append(Standing(notice=TIME_LIMIT, lead_s=max(0.0, limits.ends_s - now_s)))
        return tuple(notices)

    def acknowledge(self, _notice: str) -> None:
        """Let the shell end the job, so that another job gets its place."""
        (self._folder / "left").touch()
