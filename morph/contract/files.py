"""Files that are written completely or not at all, and archives of files."""

from __future__ import annotations

import errno
import io
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from morph.contract.errors import InputError

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""Errors of a disk that is full or read-only, which may pass."""
PRIVATE = 0o600
_EPOCH = (1980, 1, 1, 0, 0, 0)


def write_whole(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Write or replace a file atomically: a reader sees the old or the new content.

    Args:
        path: The file; its folder must exist.
        content: Text is written as UTF-8.
        mode: Permissions of the file, before the umask.

    Raises:
        OSError: the file cannot be written; nothing was changed or left behind.
    """
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


def check_output(path: Path, error_type: type[InputError]) -> None:
    """Refuse a file that cannot be written, before there is anything to write.

    Raises:
        InputError: the error is of type ``error_type`` and names the path.
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
    """Write a file that the user requested, completely or not at all.

    Raises:
        InputError: the file cannot be written; the error is of type ``error_type`` and names the file.
    """
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
