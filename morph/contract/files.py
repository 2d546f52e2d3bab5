"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""Errors of a disk that is full or read-only: these pass."""
PRIVATE = 0o600


def write_whole(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Write or replace a file in one moment: a reader finds it as it was, or as it is to be.

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
