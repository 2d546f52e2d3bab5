"""The files in one folder through which a training script and ``morph spot-run``, which started it, communicate.

``save`` holds the number of the newest order to save; the script appends a line of JSON to ``events`` for each event.
"""

from __future__ import annotations

import atexit
import errno
import json
import logging
import os
import shutil
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from morph.contract.errors import CheckpointError, InputError
from morph.file_lock import locked
from morph.spot.storage import read_newest, write_backup

log = logging.getLogger("morph.spot")

FOLDER, STORAGE = "MORPH_SPOT_FOLDER", "MORPH_SPOT_STORAGE"
EVENTS, SAVE = "events", "save"
END_TIMEOUT_S, RESTORE_S = 600.0, 3600.0


def ranks_here() -> int:
    """Return the number of ranks on this VM."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _is_first() -> bool:
    """Whether this rank is the one that receives orders to save, and whose backups count."""
    return os.environ.get("RANK", "0") == "0"


class Script:
    """One script's side. ``folder`` and ``storage``: None if ``morph spot-run`` did not start the script."""

    def __init__(self, folder: Path | None, storage: str | None) -> None:
        self._folder, self._storage = folder, storage
        self._answered = 0
        self._requested_s: float | None = None
        self._num_spools = 0
        self._warned: set[str] = set()
        self._waiting: tuple[int, Path, str] | None = None
        self._changed = threading.Condition()
        self._is_busy = False
        if folder is not None:
            threading.Thread(target=self._send_backups, name="morph-spot-backups", daemon=True).start()
            atexit.register(self._wait_for_backups)

    @classmethod
    def of_environment(cls) -> Script:
        """Return the script's side, from the environment that ``morph spot-run`` set."""
        folder = os.environ.get(FOLDER)
        return cls(Path(folder) if folder else None, os.environ.get(STORAGE))

    @contextmanager
    def step(self) -> Iterator[None]:
        """See ``morph.spot``."""
        begin_s = time.monotonic()
        yield
        self._tell(kind="step", seconds=time.monotonic() - begin_s)

    def should_save(self) -> bool:
        """See ``morph.spot``."""
        if self._folder is None or not _is_first():
            return False
        try:
            ordered = int((self._folder / SAVE).read_text())
        except (FileNotFoundError, ValueError):
            return False
        if ordered <= self._answered:
            return False
        self._answered, self._requested_s = ordered, time.monotonic()
        return True

    def backup(self, path: Path) -> None:
        """See ``morph.spot``."""
        path = path if path.name not in ("", "..") else path.resolve()
        if not (path.is_file() or path.is_dir()) or not path.name:
            allowed = "a file or folder that was saved"
            raise InputError("is not there, or is neither", field="backup", value=str(path), allowed=allowed)
        if self._folder is None or not _is_first():
            return
        self._num_spools += 1
        spool = self._folder / f"spool-{self._num_spools}"
        try:
            spool.mkdir()
            self._warn(_copied(path, spool / path.name))
        except OSError as error:  # a full disk, for example: the loop goes on, and an earlier backup stays the newest
            shutil.rmtree(spool, ignore_errors=True)
            sentence = f"{path} cannot be copied on the VM's disk: {error}"
            log.warning("morph.spot.backup: %s", sentence)
            self._requested_s = None
            self._tell(kind="refused", number=self._answered, sentence=sentence)
            return
        stall_s = None if self._requested_s is None else time.monotonic() - self._requested_s
        self._requested_s = None
        self._tell(kind="saved", number=self._answered, seconds=stall_s)
        with self._changed:
            before, self._waiting = self._waiting, (self._answered, spool, path.name)
            self._changed.notify_all()
        if before is not None:  # its upload has not begun, and a newer backup replaces it
            shutil.rmtree(before[1], ignore_errors=True)

    def restore(self) -> Path | None:
        """See ``morph.spot``."""
        if self._folder is None or self._storage is None:
            return None
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        into, found = self._folder / f"restored-{restart}", self._folder / f"found-{restart}"
        with locked(self._folder / "restoring", RESTORE_S):
            if ranks_here() > 1 and found.exists():  # another rank on this VM fetched the backup
                return Path(text) if (text := found.read_text()) else None
            newest = read_newest(self._storage, into)
            found.write_text("" if newest is None else str(newest))
        return newest

    def _send_backups(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None)
                assert self._waiting is not None
                (number, spool, name), self._waiting = self._waiting, None
                self._is_busy = True
            begin_s = time.monotonic()
            try:
                assert self._storage is not None
                write_backup(self._storage, spool / name)
                self._tell(kind="uploaded", number=number, seconds=time.monotonic() - begin_s)
            except Exception as error:  # whatever the error, the script's end must not hang
                sentence = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
                self._tell(kind="refused", number=number, sentence=sentence)
            shutil.rmtree(spool, ignore_errors=True)
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()

    def _warn(self, left_out: Sequence[str]) -> None:
        """Say what backups leave out, each once."""
        for one in left_out:
            if one not in self._warned:
                self._warned.add(one)
                log.warning("morph.spot.backup leaves out %s", one)

    def _wait_for_backups(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is None and not self._is_busy, END_TIMEOUT_S)

    def _tell(self, **event: object) -> None:
        if self._folder is None:
            return
        line = json.dumps(event).encode() + b"\n"
        try:
            descriptor = os.open(self._folder / EVENTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(descriptor, line)
            finally:
                os.close(descriptor)
        except OSError as error:
            log.warning("morph.spot cannot tell morph spot-run that a %s is done: %s", event["kind"], error)


def _copied(source: Path, target: Path) -> list[str]:
    """Copy a file or folder, with links as what they point to; return what was left out, and why. May raise OSError."""
    left_out: list[str] = []

    def copy(source: Path, target: Path, above: tuple[str, ...]) -> None:
        try:
            real, mode = os.path.realpath(source, strict=True), source.stat().st_mode
            if stat.S_ISREG(mode):
                shutil.copyfile(source, target)
            elif not stat.S_ISDIR(mode):
                left_out.append(f"{source}: it is neither a file nor a folder")
            elif real in above:
                left_out.append(f"{source}: it links to a folder that it is in")
            else:
                target.mkdir()
                for name in sorted(os.listdir(source)):  # noqa: PTH208 # only names are needed
                    copy(source / name, target / name, (*above, real))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP):
                raise
            problem = "it links to something that is not there" if source.is_symlink() else "it was deleted meanwhile"
            left_out.append(f"{source}: {problem}")

    copy(source, target, ())
    return left_out
