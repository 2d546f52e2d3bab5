"""Files that are written completely or not at all, and archives of files."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import socket
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from morph.contract.errors import InputError, WaitTimeout

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""Errors of a disk that is full or read-only, which may pass."""
PRIVATE = 0o600
LOCK_LOOK_S = 0.1
_EPOCH = (1980, 1, 1, 0, 0, 0)


def write_whole(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Write or replace a file atomically, in an existing folder; after an OSError everything is as it was."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    data = content.encode() if isinstance(content, str) else content
    try:
        partial.unlink(missing_ok=True)  # the file of a killed process may still be open elsewhere
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def locked(path: Path, limit_s: float, tell: Callable[[str], None] = lambda _: None) -> Iterator[None]:
    """Hold the lock of a file, which is made if missing; ``tell`` is given its holder. Raises WaitTimeout."""
    until_s, holder = time.monotonic() + limit_s, ""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE), "r+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                file.seek(0)
                if not holder:
                    holder = file.readline().strip() or "an unknown process"
                    tell(f"waits for at most {limit_s:g} s for {holder}, which holds {path}")
                if time.monotonic() >= until_s:
                    raise WaitTimeout(f"{holder} holds {path} for more than {limit_s:g} s") from None
                time.sleep(LOCK_LOOK_S)
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} of {socket.gethostname()}\n")
        file.flush()
        yield


def check_output(path: Path, error_type: type[InputError]) -> None:
    """Refuse a file that cannot be written, before there is anything to write."""
    if path.is_dir():
        raise error_type("cannot be written: it is a folder", source=str(path), allowed="a file name")
    if not path.parent.is_dir():
        raise error_type(
            "cannot be written: its folder does not exist", source=str(path), allowed="a file in an existing folder"
        )
    if not os.access(path.parent, os.W_OK):
        raise error_type("cannot be written: its folder is not writable", source=str(path))


def write_output(path: Path, content: str | bytes, error_type: type[InputError]) -> None:
    """Write a file that the user requested, completely or not at all."""
    check_output(path, error_type)
    try:
        write_whole(path, content)
    except OSError as error:
        raise error_type(f"cannot be written: {error.strerror}", source=str(path)) from error


def packed(files: Mapping[str, bytes], mode: int = PRIVATE) -> bytes:
    """Return a zip archive of files, by their paths in it; the same files give the same bytes."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = mode << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    return out.getvalue()


def code_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield each file below a folder with its relative path, in order; skip hidden and compiled files and links."""
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        is_passed = any(part.startswith((".", "__pycache__")) for part in inside.parts)
        if path.is_file() and not path.is_symlink() and not is_passed:
            yield inside.as_posix(), path
