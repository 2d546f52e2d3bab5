"""Files that are written completely or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from morph.contract.errors import InputError

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""Errors of a disk that is full or read-only: these pass."""
PRIVATE = 0o600


def write_whole(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Write or replace a file atomically: a reader sees the old or the new content.

    Args:
        path: The file; its folder is there.
        content: Text is written as UTF-8.
        mode: Of the file, less the umask.

    Raises:
        OSError: it cannot be written; nothing was changed, and nothing is left behind.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    data = content.encode() if isinstance(content, str) else content
    try:
        partial.unlink(missing_ok=True)  # of a process that was killed: others might have it open
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def check_output(path: Path, error_type: type[InputError]) -> None:
    """Refuse a file that cannot be written, before there is anything to write.

    Raises:
        InputError: of ``error_type``, naming the path.
    """
    if path.is_dir():
        raise error_type("cannot be written: it is a folder", source=str(path), allowed="a file name")
    if not path.parent.is_dir():
        raise error_type(
            "cannot be written: its folder does not exist", source=str(path), allowed="a file in an existing folder"
        )
    if not os.access(path.parent, os.W_OK):
        raise error_type("cannot be written: its folder is not writable", source=str(path))


def write_output(path: Path, content: str | bytes, error_type: type[InputError]) -> None:
    """Write what the user asked for, whole or not at all.

    Raises:
        InputError: of ``error_type``, naming the file that cannot be written.
    """
    check_output(path, error_type)
    try:
        write_whole(path, content)
    except OSError as error:
        raise error_type(f"cannot be written: {error.strerror}", source=str(path)) from error
