"""Files that are written completely or not at all, and archives of files."""

from __future__ import annotations

import errno
import io
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from morph.contract.errors import InputError

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""Errors of a disk that is full or read-only, which may pass."""
PRIVATE = 0o600
RUN = "run.json"
"""The identity of a run; a directory with this file is a run directory."""
FILES_OF_RUNS = frozenset(
    {RUN, "run.lock", "command.json", "journal.sqlite", "attach.json", "vms.json", "lease.json", "goes_on.json"}
)
"""Files in a run's folder without which it cannot be resumed or watched."""
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


def check_output(*paths: Path | None, read: Iterable[Path | None] = ()) -> None:
    """Refuse what cannot be written, devices, files of code, settings or a run, and what is ``read``, before work."""
    inputs = [each for each in read if each is not None and each.exists()]
    for path in filter(None, paths):
        problem, allowed = "", "a file in an existing folder"
        if path.is_dir():
            problem, allowed = "it is a folder", "a file name"
        elif (path.exists() and not path.is_file()) or path.parent.absolute() == Path("/dev"):
            problem, allowed = "it is a device or a pipe", "a regular file"  # a rename would replace it
        elif path.name in FILES_OF_RUNS and (path.parent / RUN).exists():
            problem, allowed = "the run in its folder needs this file", "another name"
        elif path.exists() and any(path.samefile(each) for each in inputs):
            problem, allowed = "the command reads this file", "another name"
        elif path.suffix in (".py", ".yaml", ".yml"):
            problem, allowed = f"{path.suffix} is the ending of code or settings", "another name"
        elif not path.parent.is_dir():
            problem = "its folder does not exist"
        elif not os.access(path.parent, os.W_OK):
            problem = "its folder is not writable"
        if problem:
            raise InputError(f"cannot be written: {problem}", source=str(path), allowed=allowed)


def write_output(path: Path, content: str | bytes) -> None:
    """Write a file that the user requested, completely or not at all; through a link if the path is one."""
    check_output(path)
    try:
        write_whole(Path(os.path.realpath(path)), content)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", source=str(path)) from error


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
