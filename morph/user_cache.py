"""Files that Morph keeps for one user between runs: private, checked by a digest, of bounded size, and replaceable."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import xxhash

from morph.contract.errors import WaitTimeout
from morph.file_lock import locked

MOST_BYTES = 256 << 20
"""The largest size of all files in one folder, in bytes."""
_LOCK = ".lock-"
_NUM_LOCKS = 16
_LOCK_S = 60.0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path:
    """Return the folder of this user's caches of Morph."""
    return _folder("MORPH_CACHE_DIR", "XDG_CACHE_HOME", "Library/Caches", ".cache")


def data_folder() -> Path:
    """Return the folder of this user's data of Morph that is useful beyond one run and cannot be made again."""
    return _folder("MORPH_DATA_DIR", "XDG_DATA_HOME", "Library/Application Support", ".local/share")


def _folder(own: str, general: str, on_a_mac: str, elsewhere: str) -> Path:
    """Return the folder that variable ``own`` names, or morph in that of ``general``, or in the usual folder."""
    if named := os.environ.get(own):
        return Path(named)
    common, usual = os.environ.get(general), on_a_mac if sys.platform == "darwin" else elsewhere
    return (Path(common) if common and Path(common).is_absolute() else Path.home() / usual) / "morph"


def read_kept(folder: Path, name: str) -> bytes | None:
    """Return the content that was kept under a name.

    None if there is none, if it cannot be read or is damaged, and if another user owns or could have written the file
    or its folder.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not (stat.S_ISREG(status.st_mode) and _private(status) and _private(folder.lstat())):
                return None
            digest, content = file.read(hashlib.sha256().digest_size), file.read(MOST_BYTES)
        if hashlib.sha256(content).digest() == digest:
            with contextlib.suppress(OSError):
                os.utime(folder / name)  # it is in use, so it is not among the oldest
            return content
    return None


def keep(folder: Path, name: str, content: bytes) -> None:
    """Write a file whole or not at all, readable only by this user, and remove the oldest files if there are too many
    bytes.

    A folder that cannot be written, or that others can write to, is left as it is.
    """
    if len(content) > MOST_BYTES // 2:
        return
    with contextlib.suppress(OSError):
        if _made(folder):
            whole = hashlib.sha256(content).digest() + content
            _write_whole(folder / name, lambda file: file.write(whole))
            _remove_oldest(folder, MOST_BYTES)


def open_kept(folder: Path, name: str, write: Callable[[BinaryIO], object], most_bytes: int) -> IO[bytes]:
    """Open a file for reading; if it is missing or damaged, it is written first, and the oldest files are removed.

    Its digest is in a file beside it.

    Processes that open the same file wait for the one that writes it, but for a minute at most; then they write it too.
    ``most_bytes``: the largest size of all files in the folder. An open file stays readable when it is removed. Raises
    OSError if the file cannot be written, or another user could write to its folder.
    """
    if not _made(folder):
        raise PermissionError(f"{folder} belongs to another user, or others may write to it")
    if (kept := _opened(folder / name)) is not None:
        return kept
    lock = folder / f"{_LOCK}{int(hashlib.sha256(name.encode()).hexdigest(), 16) % _NUM_LOCKS}"
    with contextlib.ExitStack() as held:
        with contextlib.suppress(WaitTimeout):
            held.enter_context(locked(lock, _LOCK_S))
        if (kept := _opened(folder / name)) is not None:
            return kept
        proof = xxhash.xxh3_128()
        _write_whole(folder / name, lambda file: write(cast("BinaryIO", _Proved(file, proof))))
        file = (folder / name).open("rb")
        _write_whole(_proof_of(folder / name), lambda file: file.write(proof.digest()))
        _remove_oldest(folder, most_bytes)
        return file


class _Proved(io.RawIOBase):
    """A file that is being written, and a digest of its content so far."""

    def __init__(self, file: BinaryIO, proof: xxhash.xxh3_128) -> None:
        self._file, self._proof = file, proof

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def write(self, content: Any) -> int:
        self._proof.update(content)
        return self._file.write(content)


def _proof_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.xxh3")


def _opened(path: Path) -> IO[bytes] | None:
    """Open a file with the content that was written; None if the file or its digest is damaged or gone."""
    with contextlib.suppress(FileNotFoundError):
        file = path.open("rb")
        try:
            if hashlib.file_digest(file, xxhash.xxh3_128).digest() == _proof_of(path).read_bytes():
                file.seek(0)
                os.utime(file.fileno())  # it is in use, so it is not among the oldest
                os.utime(_proof_of(path))
                return file
        except BaseException:
            file.close()
            raise
        file.close()
    return None


def _made(folder: Path) -> bool:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return _private(folder.lstat())


def _write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def _private(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_WRITE


def _remove_oldest(folder: Path, most_bytes: int) -> None:
    facts = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                facts.append((entry.stat(follow_symlinks=False), entry.path))
    total_bytes = sum(status.st_size for status, _ in facts)
    for status, path in sorted(facts, key=lambda fact: fact[0].st_mtime_ns):
        if total_bytes <= most_bytes:
            return
        if Path(path).name.startswith(_LOCK):
            continue
        Path(path).unlink(missing_ok=True)
        total_bytes -= status.st_size
