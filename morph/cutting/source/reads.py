"""Detects files that are read while a job is loaded and its model is built: they may change while the code does not."""

from __future__ import annotations

import linecache
import os
import sys
import threading
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from morph.jobs.files import JobFiles, is_installed

_FROM_OUTSIDE = frozenset({"sqlite3.connect", "socket.connect", "subprocess.Popen", "os.posix_spawn", "os.system"})
_SYSTEM = tuple(Path(folder) for folder in ("/proc", "/sys", "/dev"))
_MORPH = Path(__file__).parents[2]
_watching = threading.local()


class Reads:
    """Records what this thread reads inside its ``with`` blocks, besides Python, packages and the job's code."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def __enter__(self) -> Reads:
        _hook()
        _watching.reads = self
        return self

    def __exit__(self, *_: object) -> None:
        _watching.reads = None


@contextmanager
def of_data() -> Iterator[None]:
    """Pause recording while the user's data set is read: its files are not part of the model."""
    before = getattr(_watching, "reads", None)
    _watching.reads = None
    try:
        yield
    finally:
        _watching.reads = before


@cache
def _hook() -> None:
    """Install an audit hook for files that Python opens; such a hook cannot be removed."""
    sys.addaudithook(_heard)


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    reads = getattr(_watching, "reads", None)
    if reads is None:
        return
    if event in _FROM_OUTSIDE:
        reads.found.append(event)
    elif event == "open" and _is_read(*arguments) and not _for_a_traceback():
        reads.found.append(os.fsdecode(arguments[0]))


def _for_a_traceback() -> bool:
    """Whether lines of code are being read for a traceback, as torch does for each operation of a graph."""
    frame = sys._getframe(2).f_back
    while frame is not None and frame.f_code.co_filename == tokenize.__file__:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == linecache.__file__


def _is_read(path: object, mode: object, flags: object) -> bool:
    if not isinstance(path, str | bytes | os.PathLike):
        return False  # an open file descriptor
    if isinstance(flags, int) and flags & os.O_ACCMODE == os.O_WRONLY:
        return False
    if isinstance(mode, str) and set(mode) & set("wxa") and "+" not in mode:
        return False
    known = Path(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100  # Path.resolve would look at the disk
    if any(known.is_relative_to(folder) for folder in _SYSTEM) or is_installed(known, known) or not known.is_file():
        return False
    if known.suffix in {".py", ".pyc"} and known.is_relative_to(_MORPH):
        return False
    if known.parent.suffix == ".egg-info" and known.parent.parent == _MORPH.parent:
        return False  # metadata of a clone, which torch's first export reads with that of all installed packages
    files = (finder for finder in sys.meta_path if isinstance(finder, JobFiles))
    return not (known.suffix == ".py" and any(finder.inside(str(known)) is not None for finder in files))
