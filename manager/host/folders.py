"""Makes folders for a run's sockets and secrets, below the folder for temporary files.

A socket's path has 107 characters at most. If the path of the folder for temporary files is too long, as some batch
systems set it, a folder that every machine has is used instead.

The manager and the process that owns its VMs each hold a folder by a shared lock on a file in it. The one that lives
longer removes it. A folder without a holder was left by processes that were killed together: the next command of the
same user removes it, once no process has a file in it open. Ray's agents outlive a killed node by minutes while they
try to report its end. They are ended, because they would make the folder again, without a lock.
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
from itertools import chain
from pathlib import Path

from morph.contract.errors import ClusterError, ConfigError

PREFIX = "morph-"
LOCK = "held"
OWN_SOCKET = "control_socket"
"""The longest name of Morph's own sockets in a folder."""
RAYS_SOCKET = "ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.10000"
"""The longest name of Ray's sockets; its sessions are named by time and process."""
_SOCKET_BYTES = 107
_SHORT = ("/tmp", "/var/tmp")
_held: dict[Path, int] = {}


def make_folder(longest_socket: str = "") -> Path:
    """Make a folder that only this user can enter, held until this process ends.

    ``longest_socket``: the longest path of a socket below it. ConfigError if no folder for temporary files has a path
    that is short enough.
    """
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_place_for(longest_socket)))
    being_made = folder / f"{LOCK}.new"
    _held[folder] = _lock(being_made, fcntl.LOCK_SH, create=True)
    being_made.rename(folder / LOCK)  # a sweep finds no lock, or a held one
    return folder


def hold(folder: Path) -> None:
    """Also hold the folder of a killed manager; ClusterError if it is gone, or is being removed."""
    try:
        _held[folder] = _lock(folder / LOCK, fcntl.LOCK_SH | fcntl.LOCK_NB, create=True)
    except OSError as error:
        raise ClusterError(f"{folder} is gone") from error


def holding(path: Path) -> tuple[int, ...]:
    """Return the descriptors that hold the folders above a path; a process that inherits one holds its folder too."""
    return tuple(descriptor for folder, descriptor in _held.items() if folder in path.parents)


def sweep() -> None:
    """Remove this user's folders that no process holds any more; other files are left alone."""
    for folder in chain.from_iterable(Path(place).glob(f"{PREFIX}*") for place in _places()):
        with suppress(OSError):  # another user's, not Morph's, held, or just gone
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and (folder / LOCK).is_file():
                descriptor = _lock(folder / LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if all(_is_rays(user) and _end(user) for user in _users(folder)):
                    remove(folder)
                os.close(descriptor)


def remove(folder: Path) -> None:
    """Remove a folder, its lock last; if dying processes still write into it, it stays for the next sweep."""
    with suppress(OSError):
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != LOCK:
                entry.unlink(missing_ok=True)
        if all(entry.name == LOCK for entry in folder.iterdir()):
            shutil.rmtree(folder, ignore_errors=True)


def remove_at_exit(folder: Path) -> None:
    """When this process exits normally, remove its folder and other folders without a holder."""
    atexit.register(sweep)  # called last
    atexit.register(remove, folder)


def _places() -> tuple[str, ...]:
    """Return the places where folders may be, the user's choice first."""
    return tuple(dict.fromkeys((tempfile.gettempdir(), *_SHORT)))


def _place_for(longest_socket: str) -> str:
    if not longest_socket:
        return tempfile.gettempdir()
    longest = _SOCKET_BYTES - len(f"/{PREFIX}12345678/{longest_socket}")
    for place in _places():
        if len(os.fsencode(place)) <= longest and os.access(place, os.W_OK | os.X_OK):
            return place
    raise ConfigError(
        "sockets cannot lie below it, because its path is too long",
        source="TMPDIR",
        value=tempfile.gettempdir(),
        allowed=f"a folder whose path has at most {longest} bytes, or a /tmp that can be written",
    )


def _users(folder: Path) -> list[Path]:
    """Return the other processes, below ``/proc``, that have a file below a folder open."""
    return [
        process
        for process in Path("/proc").glob("[0-9]*")
        if process.name != str(os.getpid()) and any(path.startswith(f"{folder}/") for path in _open_files(process))
    ]


def _open_files(process: Path) -> Iterator[str]:
    with suppress(OSError):  # it has just ended, or is another user's
        for descriptor in (process / "fd").iterdir():
            with suppress(OSError):
                yield str(descriptor.readlink())


def _is_rays(process: Path) -> bool:
    """Return whether a process is an agent or a worker of a Ray node, by the title that it sets."""
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
