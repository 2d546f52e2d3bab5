"""What storage does not do, told in one sentence: each kind has errors of its own, which have no common class."""

from __future__ import annotations

import io
import os
import queue
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import fsspec

from morph.contract.errors import CheckpointDamaged, CheckpointError, MorphError

MOST_CHARACTERS = 300
T = TypeVar("T")


def is_local(url: str) -> bool:
    """Whether a URL is of this machine's file system, which does not fail for a moment as a network does."""
    return _is_local(fsspec.core.url_to_fs(url)[0])


def _is_local(filesystem: Any) -> bool:
    protocol = filesystem.protocol
    return "file" in ((protocol,) if isinstance(protocol, str) else protocol)


def read_whole(filesystem: Any, path: str) -> bytes:
    """Return what a file of a checkpoint holds; raises as ``open_file``, and whatever storage raises."""
    if _is_local(filesystem):
        open_file(path).close()
    return cast(bytes, filesystem.cat_file(path))


def open_file(path: str) -> io.FileIO:
    """Open a file of this machine; whoever can write there may have put something else, which would never end.

    Raises:
        CheckpointDamaged: it is a named pipe, a device or the like.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    file = io.FileIO(descriptor)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise CheckpointDamaged(f"{path}: is not a regular file")
    return file


def bounded(call: Callable[[], T], limit_s: float, what: str, *, spent_s: float = 0.0) -> T:
    """Return what ``call`` returns, and raise what it raises; give it up after ``limit_s``, less what is spent of it.

    No bound is kept by every kind of storage: a network file system that is gone blocks for good. The thread of a call
    that was given up is left behind, and ends with it.

    Raises:
        TimeoutError: it took longer.
    """
    outcome: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((call(), None))
        except BaseException as error:
            outcome.put((None, error))

    threading.Thread(target=run, name="morph-storage", daemon=True).start()
    try:
        value, error = outcome.get(timeout=max(0.0, limit_s - spent_s))
    except queue.Empty:
        raise TimeoutError(f"{what} took longer than {limit_s:.3g} s") from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Tell whatever storage raises as a CheckpointError; a file that is not there stays a FileNotFoundError."""
    try:
        yield
    except (FileNotFoundError, MorphError):
        raise
    except Exception as error:
        raise CheckpointError(f"{where}: cannot be read: {_first_line(error)}") from error


@contextmanager
def writing(where: str) -> Iterator[None]:
    """Tell whatever storage raises as a CheckpointError, where something is written or deleted."""
    try:
        yield
    except MorphError:
        raise
    except Exception as error:
        raise CheckpointError(f"{where}: cannot be written: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:MOST_CHARACTERS] if lines else type(error).__name__
