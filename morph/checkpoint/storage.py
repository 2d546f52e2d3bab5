"""Turns failures of storage into one sentence: each kind of storage has its own errors, without a common class."""

from __future__ import annotations

import errno
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
    """Whether a URL is in this machine's file system, which has no transient failures, unlike a network."""
    return _is_local(fsspec.core.url_to_fs(url)[0])


def _is_local(filesystem: Any) -> bool:
    protocol = filesystem.protocol
    return "file" in ((protocol,) if isinstance(protocol, str) else protocol)


def read_whole(filesystem: Any, path: str) -> bytes:
    """Return the content of a checkpoint's file; raises what ``open_file`` raises, and the storage's own errors."""
    if _is_local(filesystem):
        with open_file(path) as file:
            return file.readall()
    return cast(bytes, filesystem.cat_file(path))


def open_file(path: str) -> io.FileIO:
    """Open a local file in the folder of a checkpoint, which another user may have made.

    Raises CheckpointDamaged if the file or its folder is a symbolic link, or if it is a named pipe, a device or
    similar, which might be read without end.
    """
    folder, name = os.path.split(path)
    try:
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=place)
        finally:
            os.close(place)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise CheckpointDamaged(f"{path}: is a symbolic link or in one, and links are not followed") from error
    file = io.FileIO(descriptor)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise CheckpointDamaged(f"{path}: is not a regular file")
    return file


def bounded(call: Callable[[], T], limit_s: float, what: str, *, spent_s: float = 0.0) -> T:
    """Return the result of ``call``, or raise its error; give up after ``limit_s``, less ``spent_s``.

    Some kinds of storage have no timeout: a network file system that is gone blocks for ever. After a timeout, the
    call's thread is left behind, and ends with the call. Raises TimeoutError if the call took longer.
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
    """Raise any error of storage as a CheckpointError, except that of a missing file, which stays FileNotFoundError."""
    try:
        yield
    except (FileNotFoundError, MorphError):
        raise
    except Exception as error:
        raise CheckpointError(f"{where}: cannot be read: {_first_line(error)}") from error


@contextmanager
def writing(where: str) -> Iterator[None]:
    """Raise any error of storage as a CheckpointError, in code that writes or deletes."""
    try:
        yield
    except MorphError:
        raise
    except Exception as error:
        raise CheckpointError(f"{where}: cannot be written: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:MOST_CHARACTERS] if lines else type(error).__name__
