"""The job's own files, packed for VMs that do not share this machine's folders."""

from __future__ import annotations

import io
import stat
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from morph.contract.errors import ConfigError
from morph.contract.messages import JobCode

MAX_BYTES = 32 * 1024 * 1024
"""Of all files together: they travel to each VM with the setup of its worker."""
_EPOCH = (1980, 1, 1, 0, 0, 0)
_LEFT_OUT = {"__pycache__", ".git"}


def pack(job_path: str, files: Sequence[str], source: str) -> JobCode:
    """Pack the file that defines a job and what it needs beside it.

    Args:
        job_path: path/to/file.py:name.
        files: Files and folders, relative to that file's folder.
        source: The file that names them, for errors.

    Raises:
        ConfigError: one of them is missing, a link or anything else than a file or folder, or all are too long.
    """
    path, _, name = job_path.rpartition(":")
    code = Path(path).resolve()
    packed, num_bytes = io.BytesIO(), 0
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        found = {code.name: code}
        for given in files:
            found |= {str(file.relative_to(code.parent)): file for file in _files(code.parent, given, source)}
        for inside, file in sorted(found.items()):
            content = file.read_bytes()
            num_bytes += len(content)
            if num_bytes > MAX_BYTES:
                raise _error("are too long together", inside, source, f"at most {MAX_BYTES} bytes; data lies elsewhere")
            archive.writestr(zipfile.ZipInfo(inside, _EPOCH), content, zipfile.ZIP_DEFLATED)
    return JobCode(job_path=f"{code.name}:{name}", archive=packed.getvalue())


def _files(folder: Path, given: str, source: str) -> Iterator[Path]:
    place = folder / given
    for part in (place, *place.parents):
        if part == folder:
            break
        if part.is_symlink():
            raise _error("is a link", given, source, "a file or folder")
    if not place.exists():
        raise _error("there is no such file or folder", given, source, f"what lies in {folder}")
    for file in [place] if place.is_file() else sorted(place.rglob("*")):
        if _LEFT_OUT.intersection(file.parts):
            continue
        mode = file.lstat().st_mode
        if stat.S_ISREG(mode):
            yield file
        elif not stat.S_ISDIR(mode):
            raise _error("holds a link, or what is no file", given, source, "files and folders")


def _error(problem: str, given: str, source: str, allowed: str) -> ConfigError:
    return ConfigError(problem, source=source, field="vms.environment.files", value=given, allowed=allowed)
