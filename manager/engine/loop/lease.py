"""Ensures that one manager at a time writes checkpoints at a URL, by an expiring lease stored beside them.

``run/lease-00000003.json`` below the checkpoint URL names its holder; the highest number counts. The holder rewrites
the file regularly. A manager that takes the lease over creates the next number. Storage with exclusive creation (local
disks, S3, Azure, Google Cloud, fsspec's memory) lets only one manager do so; elsewhere the last one wins.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

import fsspec
import psutil
from pydantic import Field, ValidationError

from manager.run_dir import LEASE, holder_of, is_run, write_in_run_dir
from morph.checkpoint.manifest import (
    LEASE_FOLDER,
    LEASE_NAME,
    files_in,
    lease_file,
    newest_lease,
    write_atomically,
)
from morph.checkpoint.storage import bounded, is_local, reading, writing
from morph.contract.base import Value
from morph.contract.errors import CheckpointError, CheckpointsTaken, RunDirError

LEASE_S = 180.0
"""Seconds. A lease that was not renewed for this time is free. Its holder renews it every third of this time."""
CLOSE_TIMEOUT_S = 15.0
TAKE_TIMEOUT_S = 120.0
_MOST_TRIES = 8


class Holder(Value):
    """A manager.

    ``run``: a name that its run directory stores. ``processes``: identifies the system and namespace of ``pid``; empty:
    not known.
    """

    run: str
    run_dir: str
    host: str
    pid: int
    processes: str

    def __str__(self) -> str:
        return f"the run in {self.run_dir} (process {self.pid} on {self.host})"

    @property
    def is_dead(self) -> bool:
        """Whether the manager is known to have ended: its process was on this machine and is gone."""
        if not self.processes or self.processes != _processes():
            return False
        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True


def run_name(run_dir: Path) -> str:
    """Return the name by which other runs know this one in leases; it is made at the first call.

    It is stored in the run directory, so that a manager recognises its predecessor's lease. A copied directory is
    another run.
    """
    path, folder = run_dir / LEASE, 0
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        folder = run_dir.stat().st_ino
        known = json.loads(path.read_text(encoding="utf-8"))
        if known["folder"] == folder:
            return str(known["run"])
    name = uuid.uuid4().hex
    with contextlib.suppress(RunDirError):  # a full disk: the next manager then waits for the lease to expire
        write_in_run_dir(path, json.dumps({"run": name, "folder": folder}))
    return name


def this_process(run: str, run_dir: Path) -> Holder:
    """Return this process as the manager of a run."""
    return Holder(
        run=run, run_dir=str(run_dir.resolve()), host=socket.gethostname(), pid=os.getpid(), processes=_processes()
    )


def _processes() -> str:
    with contextlib.suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    return ""


class _Written(Value):
    """The content of the file. ``id``: identifies this lease, even among several of one holder."""

    schema_version: int = Field(default=1, ge=1, le=1)
    id: str
    holder: Holder
    lease_s: float = Field(gt=0)
    renewed_at_s: float = Field(description="seconds since 1970, by the holder's clock")
    released: bool = False


class Lease:
    """A manager's lease of a checkpoints' URL: taken, renewed by a thread until closed, and checked before each write.

    ``lease_s``: see ``LEASE_S``. ``now_s``: returns seconds since 1970.
    """

    def __init__(
        self, url: str, holder: Holder, *, lease_s: float = LEASE_S, now_s: Callable[[], float] = time.time
    ) -> None:
        self._url, self._holder, self._lease_s, self._now_s = url.rstrip("/"), holder, lease_s, now_s
        self._id = uuid.uuid4().hex
        self._number: int | None = None
        self._lock = threading.Lock()
        self._lost: str | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def run(self) -> str:
        """The name under which the run holds the lease."""
        return self._holder.run

    def check_free(self) -> None:
        """Check that the lease could be taken, without writing anything; raises as ``take`` does."""
        self._check_run_dir()
        with reading(self._url):
            _, written = self._newest()
        if written is not None and not self._is_free(written):
            raise self._held(written)

    def take(self, *, by_force: bool = False) -> Holder | None:
        """Take the lease, and renew it from now on; return the holder from whom it was taken by force.

        ``by_force``: even from a manager that may live, which stops when it next checks; without it, RunDirError if
        another manager holds the lease. CheckpointError if storage does not answer; ``hold`` tries again.
        """
        self._check_run_dir()
        if self._thread is None:
            self._thread = threading.Thread(target=self._renew_until_over, name="morph-lease", daemon=True)
            self._thread.start()
        try:
            return bounded(partial(self._take_now, by_force=by_force), TAKE_TIMEOUT_S, "storage")
        except TimeoutError as error:
            raise CheckpointError(f"{self._url}: cannot be written: {error}") from error

    def _take_now(self, *, by_force: bool) -> Holder | None:
        with self._lock, writing(self._url):
            return self._take(by_force=by_force)

    def hold(self) -> None:
        """Check before a write that the lease is still ours, and renew it; take it if it could not be taken before.

        CheckpointsTaken if another manager holds it, CheckpointError if storage does not answer.
        """
        self.check()
        try:
            with self._lock, writing(self._url):
                if self._number is None:
                    self._take()
                number, written = self._newest()
                if written is not None and written.id != self._id:
                    raise CheckpointsTaken(
                        f"{self._url}: its checkpoints were taken over by {written.holder}; this run stops, and writes "
                        "nothing more there"
                    )
                self._write(self._number if number is None else number)
        except RunDirError as error:
            self._lost = str(error)
            raise CheckpointsTaken(self._lost) from error
        except CheckpointsTaken as error:
            self._lost = str(error)
            raise

    def check(self) -> None:
        """Raise CheckpointsTaken if the lease was lost, as far as is known without reading storage."""
        if self._lost is not None:
            raise CheckpointsTaken(self._lost)

    def close(self) -> None:
        """Release the lease, so that no manager has to wait for its expiry; gives up after ``CLOSE_TIMEOUT_S``."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
        if self._number is not None and self._lost is None:
            with contextlib.suppress(Exception):  # each kind of storage has its own errors; the lease expires
                bounded(self._release, CLOSE_TIMEOUT_S, "storage")

    def _release(self) -> None:
        number, written = self._newest()
        if number is not None and written is not None and written.id == self._id:
            self._write(number, released=True)

    def _renew_until_over(self) -> None:
        while not self._over.wait(self._lease_s / 3):
            with contextlib.suppress(CheckpointError, CheckpointsTaken):  # reported when the next checkpoint is written
                self.hold()

    def _take(self, *, by_force: bool = False) -> Holder | None:
        for _ in range(_MOST_TRIES):
            number, written = self._newest()
            free = written is None or self._is_free(written)
            if written is not None and not free and not by_force:
                raise self._held(written)
            next_number = 1 if number is None else number + 1
            if self._make(next_number):
                self._number = next_number
                self._remove_before(next_number)
                return None if free or written is None else written.holder
        raise RunDirError("several managers want its checkpoints at the same time", source=self._url)

    def _is_free(self, written: _Written) -> bool:
        same_run = written.holder.run == self._holder.run  # we hold its lock, so its former manager is dead
        expired = self._now_s() > written.renewed_at_s + written.lease_s
        return same_run or written.released or expired or written.holder.is_dead

    def _held(self, written: _Written) -> RunDirError:
        ago_s = max(0.0, self._now_s() - written.renewed_at_s)
        return RunDirError(
            f"its checkpoints are in use by {written.holder}, which confirmed it {ago_s:.0f} s ago",
            source=self._url,
            allowed=f"another place for checkpoints; or once that run has ended, or was silent for "
            f"{written.lease_s:g} s; or with --take-over, which makes it stop",
        )

    def _check_run_dir(self) -> None:
        """Refuse a running run's directory: its checkpoints have no lease, because the directory is locked."""
        folder = Path(self._url).parent
        if "://" not in self._url and folder != Path(self._holder.run_dir) and is_run(folder):
            pid = holder_of(folder)
            if pid is not None:
                raise RunDirError(
                    f"its checkpoints are in use by the run in {folder} (process {pid})",
                    source=self._url,
                    allowed="another place for checkpoints; or once that run has ended",
                )

    # ---- files ----

    def _newest(self) -> tuple[int | None, _Written | None]:
        """Return the highest number and its content; the content is None if no manager wrote it."""
        number, content = newest_lease(self._url)
        try:
            return number, None if content is None else _Written.model_validate_json(content)
        except ValidationError:
            return number, None

    def _content(self, *, released: bool = False) -> bytes:
        written = _Written(
            id=self._id, holder=self._holder, lease_s=self._lease_s, renewed_at_s=self._now_s(), released=released
        )
        return written.model_dump_json(indent=1).encode()

    def _write(self, number: int | None, *, released: bool = False) -> None:
        assert number is not None
        write_atomically(f"{self._url}/{LEASE_FOLDER}/{lease_file(number)}", self._content(released=released))

    def _make(self, number: int) -> bool:
        """Create the file of a number unless it exists; return whether it now holds this lease."""
        where = f"{self._url}/{LEASE_FOLDER}/{lease_file(number)}"
        filesystem, path = fsspec.core.url_to_fs(where)
        try:
            if is_local(where):
                _make_local(Path(path), self._content())
            else:
                filesystem.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
                filesystem.pipe_file(path, self._content(), mode="create")
        except Exception as error:
            newest, written = self._newest()
            if newest is None or newest < number:
                raise error  # the error is not that the file exists
            return written is not None and written.id == self._id
        newest, written = self._newest()
        return newest == number and written is not None and written.id == self._id

    def _remove_before(self, number: int) -> None:
        filesystem, folder = fsspec.core.url_to_fs(f"{self._url}/{LEASE_FOLDER}")
        for name in files_in(filesystem, folder):
            if name.startswith(LEASE_NAME) and name < lease_file(number):
                with contextlib.suppress(Exception):  # it no longer counts
                    filesystem.rm_file(f"{folder}/{name}")


def _make_local(path: Path, content: bytes) -> None:
    """Create a file atomically, unless it exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        whole.write_bytes(content)
        try:
            os.link(whole, path)
        except FileExistsError:
            raise
        except OSError:  # the file system has no links
            with path.open("xb") as file:
                file.write(content)
    finally:
        whole.unlink(missing_ok=True)
