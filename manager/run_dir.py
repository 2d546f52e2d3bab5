"""A run directory: one run's journal, checkpoints and facts; used by one manager at a time.

The names below are all files that a run itself leaves there. Only its user can read them: files 0600, folders 0700.
"""

from __future__ import annotations

import fcntl
import math
import os
import shlex
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO

from pydantic import Field

from manager.host.signals import STOP_SIGNAL
from morph.contract.base import Value, read_json
from morph.contract.errors import RunDirError, RunDirStuck, WaitTimeout
from morph.contract.files import NO_ROOM, PRIVATE, RUN, write_whole
from morph.contract.job_facts import JobFacts
from morph.contract.kinds import mistaken

LOCK = "run.lock"
"""The file locked by the manager, with its process id and host. The manager touches it as a sign of life."""
GOES_ON = "goes_on.json"
"""The reason for which, and the time until which, `morph run --forever` waits between two managers."""
COMMAND = "command.json"
"""The run's request, so that the directory alone suffices to resume it."""
JOURNAL = "journal.sqlite"
ATTACHMENT = "attach.json"
"""The data with which the next manager takes over the VMs, while they live."""
VMS = "vms.json"
"""The names by which a provider knows the run's VMs."""
PAGE = "page.json"
"""The address of the run's page, with its token, while it is served."""
CODE = "code"
"""The job's files, packed, by their digest."""
CHECKPOINTS = "checkpoints"
LEASE = "lease.json"
"""The name by which the run leases the storage of checkpoints outside of its directory."""
DEVICES = "devices"
"""Files by which local VMs share CUDA devices."""
RECOVERED = "recovered"
"""The inputs of a run that was recovered from its checkpoints."""
WORKERS_LOG = "workers.log"
"""The output of workers that are processes of the manager's machine."""
_POLL_S = 0.1
LIFE_EVERY_S = 10.0
SILENT_S = 60.0
"""Seconds. A manager without a sign of life for so long counts as silent, or as gone if its lock is not visible here.
"""
_OF_RUNS = "the folder of a run, runs/NAME unless `morph run` was given another"


class RunFacts(Value):
    """The identity of the run in a run directory; a resume must agree."""

    schema_version: int = Field(default=1, ge=1, le=1)
    job: str = Field(description="path/to/file.py:name")
    fingerprint: str
    micro_batch_size: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    num_sections: int = Field(ge=1)
    checkpoint_url: str | None = Field(default=None, description="absent: in the run directory")
    code_sha256: str | None = Field(default=None, description="digest of its code; absent: it has yet to begin")
    known_by: JobFacts = Field(default=JobFacts(), description="facts that the loaded job must match")


def read_facts(path: Path) -> RunFacts:
    """Read the identity of the run in a run directory; RunDirError if it is not one."""
    if not path.is_dir():
        raise RunDirError(mistaken(path, "there is no such run directory"), source=str(path), allowed=_OF_RUNS)
    if not is_run(path):
        raise RunDirError(f"is not a run directory: it has no {RUN}", source=str(path), allowed=_OF_RUNS)
    return read_json(path / RUN, RunFacts, RunDirError)


def resuming(path: Path) -> str:
    """Return the command that resumes a run, as a shell takes it."""
    return shlex.join(["morph", "resume", str(path)])


def is_run(path: Path) -> bool:
    """Return whether a run was begun in a directory, which need not exist."""
    return (path / RUN).exists()


def check_free(path: Path) -> None:
    """Check that a run may begin in a directory, which need not exist.

    RunDirError: the path is not a directory, cannot be read, or holds something else.
    """
    where = str(path.resolve())
    if not path.exists():
        return
    try:
        names = {entry.name for entry in path.iterdir()}
    except NotADirectoryError as error:
        raise RunDirError("is not a directory", source=where) from error
    except OSError as error:
        raise RunDirError(f"cannot be read: {error.strerror}", source=where) from error
    others = {name for name in names if name != LOCK and not name.startswith(f".{RUN}.")}
    if RUN not in names and others:  # these two exist while the directory is being claimed
        raise RunDirError("is not empty and is not a run directory", source=where, allowed="a new or empty directory")


def write_in_run_dir(path: Path, content: str | bytes) -> None:
    """Write a file of a run directory atomically, for its user alone; RunDirError if it cannot be written.

    RunDirStuck if it cannot be written now, because the disk is full or read-only.
    """
    try:
        write_whole(path, content, PRIVATE)
    except OSError as error:
        raise not_writable(path.parent, error) from error


def not_writable(folder: Path, error: OSError) -> RunDirError:
    """Return the error to raise: ``RunDirStuck`` if the cause may pass."""
    kind = RunDirStuck if error.errno in NO_ROOM else RunDirError
    return kind(f"is not writable: {error.strerror}", source=str(folder))


def checkpoint_url(path: Path, facts: RunFacts) -> str:
    """Return where the checkpoints of a run directory are."""
    return facts.checkpoint_url or str(path.resolve() / CHECKPOINTS)


@contextmanager
def private_files() -> Iterator[None]:
    """In the block, let this process and its children write files only for their user: files 0600, folders 0700."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def as_its_folder(path: Path) -> Iterator[None]:
    """Write a file, as private as the others in its folder if that is a run directory."""
    with private_files() if is_run(path.parent) else nullcontext():
        yield


class RunDir:
    """An opened run directory; a context manager that holds its lock, and within which new files are private.

    RunDirError: it is in use by another process, not writable, of another job, or not empty and not a run's.
    """

    def __init__(self, path: Path, facts: RunFacts) -> None:
        self.path = path.resolve()
        self.facts = facts
        self.other_job: str | None = None
        """The job that the run began with, if its file's name, or its name in the file, differs from ours."""
        self._lock_file: IO[str] | None = None
        self._held = ExitStack()
        self._over = threading.Event()

    @property
    def checkpoint_url(self) -> str:
        """The URL of the run's checkpoints."""
        return checkpoint_url(self.path, self.facts)

    @property
    def journal_path(self) -> Path:
        """The path of the run's journal."""
        return self.path / JOURNAL

    def begin_with(self, facts: RunFacts) -> None:
        """Write atomically the code and data on which the run trains from now on; RunDirError if it cannot."""
        write_in_run_dir(self.path / RUN, facts.model_dump_json(indent=2) + "\n")
        self.facts = facts

    def __enter__(self) -> RunDir:
        self._make()
        with ExitStack() as entering:
            entering.enter_context(private_files())
            self._lock()
            entering.callback(self._unlock)
            self._claim()
            self._held = entering.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def _make(self) -> None:
        where = str(self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise RunDirError("is not a directory", source=where) from error
        except OSError as error:
            raise RunDirError(f"cannot be made: {error.strerror}", source=where) from error
        check_free(self.path)
        if not is_run(self.path):
            with suppress(OSError):  # another user's directory, which this user may write to
                self.path.chmod(0o700)

    def _lock(self) -> None:
        try:
            lock_file = (self.path / LOCK).open("a+", encoding="utf-8")
        except OSError as error:
            raise RunDirError(f"is not writable: {error.strerror}", source=str(self.path)) from error
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock_file.seek(0)
            holder = " on ".join(lock_file.read().split()) or "unknown"
            holder = holder.removesuffix(f" on {socket.gethostname()}")
            lock_file.close()
            raise in_use_by(holder, self.path) from error
        except OSError as error:
            lock_file.close()
            raise RunDirError(f"cannot be locked: {error.strerror}", source=str(self.path)) from error
        with suppress(OSError):  # a full disk: the directory is locked even so, but others cannot see by which process
            lock_file.truncate(0)
            os.write(lock_file.fileno(), f"{os.getpid()}\n{socket.gethostname()}\n".encode())
        self._lock_file = lock_file
        self._over.clear()
        threading.Thread(target=self._live, name="morph-sign-of-life", daemon=True).start()

    def _live(self) -> None:
        """Give signs of life until the directory is closed. A disk that does not accept them does not end the run."""
        while not self._over.wait(LIFE_EVERY_S):
            with suppress(OSError):
                os.utime(self.path / LOCK)

    def _unlock(self) -> None:
        self._over.set()
        if self._lock_file is not None:
            with suppress(OSError):
                self._lock_file.truncate(0)
            self._lock_file.close()
            self._lock_file = None

    def _of_another(self, path: str, field: str, ours: object, theirs: object) -> RunDirError:
        if self.other_job is not None:
            return self.belongs_to_another()
        is_hash = field == "fingerprint"
        return RunDirError(
            "belongs to another job or profile",
            source=path,
            field=field,
            value=None if is_hash else theirs,
            allowed=f"{'the model that the run began with' if is_hash else repr(ours)}, or another --run-dir",
        )

    def belongs_to_another(self, allowed: str = "") -> RunDirError:
        """Return an error that names the run's job. ``allowed``: alternatives to another directory."""
        return RunDirError(
            f"belongs to the job {self.other_job}",
            source=str(self.path),
            value=self.facts.job,
            allowed=f"that job, or another --run-dir{allowed}",
        )

    def _claim(self) -> None:
        path = self.path / RUN
        if not path.exists():
            self.begin_with(self.facts)
            return
        known = read_facts(self.path)
        self.other_job = None if Path(known.job).name == Path(self.facts.job).name else known.job
        for field in ("fingerprint", "micro_batch_size", "batch_size", "num_sections", "checkpoint_url"):
            ours, theirs = getattr(self.facts, field), getattr(known, field)
            if ours != theirs:
                raise self._of_another(str(path), field, ours, theirs)
        self.facts = self.facts.model_copy(update={"code_sha256": known.code_sha256, "known_by": known.known_by})


class NotRunning(RunDirError):
    """The run has no manager."""


def holder_of(run_dir: Path) -> int | None:
    """Return the process that manages a run now; None if there is none. RunDirError if the lock cannot be read."""
    try:
        lock_file = (run_dir / LOCK).open(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunDirError(f"its lock cannot be read: {error.strerror}", source=str(run_dir)) from error
    with lock_file:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            written = lock_file.read().split()
            return int(written[0]) if written and written[0].isdecimal() else None
        return None


class GoesOn(Value):
    """Why `morph run --forever` waits. ``again_s``: seconds since 1970."""

    sentence: str
    again_s: float


def of_manager(run_dir: Path, now_s: float) -> str:
    """Return what is wrong with the manager of a run that has not ended, as visible from here; empty: nothing.

    On its host a manager is known by the lock of its directory (RunDirError if it cannot be read); elsewhere its last
    sign of life is used.
    """
    holder = holder_of(run_dir)
    try:
        pid, host = [*(run_dir / LOCK).read_text(encoding="utf-8").split(), "", ""][:2]
        silent_s = max(0.0, now_s - (run_dir / LOCK).stat().st_mtime)
    except OSError:
        pid, host, silent_s = "", "", math.inf
    ours = host in ("", socket.gethostname())
    who = f"process {pid}" + ("" if ours else f" on {host}")
    if holder is not None or (pid and not ours and silent_s <= SILENT_S):
        return "" if silent_s <= SILENT_S else f"its manager, {who}, has given no sign of life for {silent_s:.0f} s"
    return f"its manager, {who}, is gone" if pid else "no process manages it"


def check_unused(run_dir: Path) -> None:
    """Check that no process manages a run, whose directory may not exist; RunDirError if one does, or if unknown."""
    holder = holder_of(run_dir) if run_dir.is_dir() else None
    if holder is not None:
        raise in_use_by(str(holder), run_dir)


def in_use_by(holder: str, run_dir: Path) -> RunDirError:
    """Return the error to raise if another process manages the run."""
    return RunDirError(f"is in use by process {holder}", source=str(run_dir.resolve()))


def living_holder_of(run_dir: Path) -> int:
    """Return the process that manages a run now; NotRunning if none does, RunDirError if the lock is unreadable."""
    holder = holder_of(run_dir)
    if holder is None:
        raise NotRunning("is not running: no process manages it", source=str(run_dir))
    return holder


def ask_to_stop(run_dir: Path) -> int:
    """Send the manager the signal to save and end; returns its process id.

    RunDirError: the run has no manager, or the process belongs to another user.
    """
    holder = living_holder_of(run_dir)
    try:
        os.kill(holder, STOP_SIGNAL)
    except ProcessLookupError as error:
        raise NotRunning("is not running: its manager just ended", source=str(run_dir)) from error
    except PermissionError as error:
        raise others_process(holder, run_dir) from error
    return holder


def others_process(holder: int, run_dir: Path) -> RunDirError:
    """Return the error to raise if the manager belongs to another user."""
    return RunDirError(f"process {holder} belongs to another user", source=str(run_dir))


def wait_for_end(run_dir: Path, timeout_s: float) -> None:
    """Block until the run has no manager; WaitTimeout if it continues for longer than ``timeout_s``."""
    until_s = time.monotonic() + timeout_s
    while holder_of(run_dir) is not None:
        if time.monotonic() >= until_s:
            raise WaitTimeout(f"{run_dir}: waited {timeout_s:g} s for the run to end; it goes on")
        time.sleep(_POLL_S)
