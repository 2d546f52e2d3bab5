"""Folders for a run's sockets and secrets, below the folder for temporary files.

Each is held, by a shared lock on a file in it, by the manager and by the process that owns its VMs. Whoever of them
lives longest removes it. One that nobody holds is what processes left that were killed together: the next command of
the same user removes it, once nobody has a file of it open. Ray's agents, which outlive a killed node by minutes while
they try to report its end, are ended: they would make the folder anew, without a lock.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import signal
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from morph.contract.errors import ClusterError

PREFIX = "morph-"
LOCK = "held"
_held: dict[Path, int] = {}


def make_folder() -> Path:
    """Make one that only this user can enter, held until this process ends."""
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))  # short: sockets lie below it
    being_made = folder / f"{LOCK}.new"
    _held[folder] = _lock(being_made, fcntl.LOCK_SH, create=True)
    being_made.rename(folder / LOCK)  # whoever sweeps finds no lock, or a held one
    return folder


def hold(folder: Path) -> None:
    """Hold the folder of a manager that was killed too.

    Raises:
        ClusterError: it is gone, or is being removed.
    """
    try:
        _held[folder] = _lock(folder / LOCK, fcntl.LOCK_SH | fcntl.LOCK_NB, create=True)
    except OSError as error:
        raise ClusterError(f"{folder} is gone") from error


def holding(path: Path) -> tuple[int, ...]:
    """Descriptors by which this process holds the folders above a path; whoever inherits one holds it too."""
    return tuple(descriptor for folder, descriptor in _held.items() if folder in path.parents)


def sweep() -> None:
    """Remove folders of this user's that nobody holds any more; whatever else lies there is left alone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, none of ours, held, or just gone
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and (folder / LOCK).is_file():
                descriptor = _lock(folder / LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if all(_is_rays(user) and _end(user) for user in _users(folder)):
                    remove(folder)
                os.close(descriptor)


def remove(folder: Path) -> None:
    """Remove a folder, its lock last: into which processes that die still write, that one stays for the next sweep."""
    with suppress(OSError):
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != LOCK:
                entry.unlink(missing_ok=True)
        if all(entry.name == LOCK for entry in folder.iterdir()):
            shutil.rmtree(folder, ignore_errors=True)


def remove_at_exit(folder: Path) -> None:
    """When this process exits in order, remove its folder and whatever else is left by then."""
    atexit.register(sweep)  # called last
    atexit.register(remove, folder)


def _users(folder: Path) -> list[Path]:
    """The other processes, below ``/proc``, that have a file below a folder open."""
    return [
        process
        for process in Path("/proc").glob("[0-9]*")
        if process.name != str(os.getpid()) and any(path.startswith(f"{folder}/") for path in _open_files(process))
    ]


def _open_files(process: Path) -> Iterator[str]:
    with suppress(OSError):  # it just ended, or is another user's
        for descriptor in (process / "fd").iterdir():
            with suppress(OSError):
                yield str(descriptor.readlink())


def _is_rays(process: Path) -> bool:
    """Whether it is an agent or a worker of a Ray node; which titles itself so."""
    try:
        return (process / "cmdline").read_bytes().startswith(b"ray::")
    except OSError:
        return True  # it is gone


def _end(process: Path) -> bool:
    with suppress(ProcessLookupError):
        os.kill(int(process.name), signal.SIGKILL)
    return True


def _lock(path: Path, kind: int, *, create: bool = False) -> int:
    descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0) | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, kind)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
