"""Lets a new manager find a killed manager's VMs, by ``attach.json`` in the run directory, which only the user can
read.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from manager.controller.state.state import ControllerState
from manager.engine.local_vms.host_line import HostLine
from manager.host.folders import sweep
from manager.journal.journal import Journal, patiently
from manager.journal.records import DIED_WITH_MANAGER, Fact, TraceMoment
from manager.journal.replay import nodes_up, replay, trace_moment
from manager.run_dir import ATTACHMENT, RunDir, write_in_run_dir
from morph.contract.base import Value, read_json
from morph.contract.errors import ClusterError, MorphError, RunDirError
from morph.link.proof import new_secret


class Attachment(Value):
    """The place of a run's VMs. ``command``: the values with which the run was started, by the names that the user
    knows.

    ``secret``: the secret that only the workers share. ``own_secret``: the secret from which each worker's own secret
    is derived; worker and manager authenticate each other by that. ``epoch_s``: see ``RunClock``.
    """

    schema_version: int = Field(default=1, ge=1, le=1)
    kind: Literal["ray", "processes", "provided"]
    control_socket: Path
    store_host: str
    store_port: int
    notice_port: int = Field(default=0, description="port that the agents of provided VMs call")
    secret: str = Field(default_factory=new_secret, min_length=32, repr=False)
    own_secret: str = Field(default_factory=new_secret, min_length=32, repr=False)
    command: dict[str, str] = Field(default_factory=dict)
    epoch_s: float | None = None


@dataclass(frozen=True)
class OrphanedRun:
    """A killed manager's run: a line to the process that owns its VMs, its greeting, and the journal's state.

    ``appeared``: VMs that were reported to the controller. ``moment``: the position in the trace.
    """

    attachment: Attachment
    line: HostLine
    greeting: dict[str, Any]
    state: ControllerState
    appeared: frozenset[str]
    moment: TraceMoment

    @property
    def vms(self) -> tuple[str, ...]:
        """The VMs that are up."""
        return tuple(self.greeting["vms"])


class TakeoverFailed(MorphError):
    """A run was found but cannot be taken over; the message says why. Nothing of it is left running."""


def write_attachment(run_dir: RunDir, attachment: Attachment) -> None:
    """Replace the file atomically; RunDirError if it cannot be written."""
    write_in_run_dir(run_dir.path / ATTACHMENT, attachment.model_dump_json(indent=2) + "\n")


def forget_attachment(run_dir: RunDir) -> None:
    """Remove the file: there is no longer anything to take over."""
    (run_dir.path / ATTACHMENT).unlink(missing_ok=True)


def find_living(run_dir: RunDir, command: dict[str, str]) -> OrphanedRun | None:
    """Find out whether the run's VMs live, and connect to them; None: no manager was killed. Takes seconds at most.

    The caller holds ``run_dir``, so that no other manager lives or starts. RunDirError: the run lives on for a while,
    but was started with other values than ``command`` has. TakeoverFailed: the VMs are gone, or were ended just now
    because this version cannot read the journal.
    """
    path = run_dir.path / ATTACHMENT
    if not path.exists():
        return None
    try:
        attachment = read_json(path, Attachment, RunDirError)
        _check_private(attachment.control_socket)
        line, greeting = HostLine.attach(attachment.control_socket, run_dir.path)
    except (RunDirError, ClusterError) as error:
        _note_last_sign_of_life(run_dir)
        forget_attachment(run_dir)
        raise TakeoverFailed(str(error)) from error
    differing = [name for name, value in attachment.command.items() if command.get(name) != value]
    if differing:
        line.close()
        raise RunDirError(
            "differs from the value with which this run was started, and its VMs still live",
            source=str(run_dir.path),
            field=differing[0],
            allowed="the same command, or any once they are gone, which takes takeover_patience_s of the cluster file",
        )
    try:
        with patiently(lambda: Journal.open(run_dir.journal_path)) as journal:
            state, moment = replay(journal), trace_moment(journal)
            appeared = nodes_up(journal) | frozenset(state.workers)
    except Exception as error:  # also if this version's controller cannot replay another version's decisions
        line.end()
        sweep()
        forget_attachment(run_dir)
        raise TakeoverFailed(str(error)) from error
    return OrphanedRun(attachment, line, greeting, state, appeared, moment)


def _note_last_sign_of_life(run_dir: RunDir) -> None:
    """Journal until when this machine's VMs lived, and cost money, if their host was killed and left a sign of it."""
    with suppress(RunDirError, OSError):
        attachment = read_json(run_dir.path / ATTACHMENT, Attachment, RunDirError)
        if attachment.kind == "provided":  # they do not end with a process of this machine
            return
        lived_s = attachment.control_socket.stat().st_mtime
        with Journal.open(run_dir.journal_path) as journal:
            last = journal.last_moment()
            if last is not None:
                journal.append_fact(max(last[1], lived_s), Fact(name=DIED_WITH_MANAGER))


def _check_private(control_socket: Path) -> None:
    """Connect to the socket only if a directory above it is closed to other users, who might have put it there."""
    try:
        above = [directory.stat() for directory in list(control_socket.parents)[:2]]  # Ray opens its own to all
    except OSError as error:
        raise ClusterError("the process that owned its VMs is gone") from error
    if not any(status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077 for status in above):
        raise ClusterError(f"{control_socket.parent} can be entered by others")
