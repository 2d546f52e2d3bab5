"""Reads samples in files that fsspec can open: lists shards, counts their samples, and keeps local copies.

A shard is a part of a file that is read at once. All files are read once to find where shards begin and how many
samples they have; the result is kept as an index. Shards of uncompressed local files are read in place. Others are
copied into the user's cache, one copy for all processes of a machine; the oldest are removed when there are too many.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import infer_compression

from morph.contract.errors import JobError
from morph.user_cache import cache_folder, keep, open_kept, read_kept

log = logging.getLogger(__name__)

CACHE_BYTES = 16 << 30
SHARD_BYTES = 32 << 20
_VERSION = 1
_SCANS_AT_ONCE = 8
_COPIED_AT_ONCE = 8 << 20
_PACKED = {".tgz": "gzip", ".zstd": "zstd"}
"""Suffixes that fsspec does not know."""
_MADE = ("mtime", "LastModified", "last_modified", "created", "updated", "ETag", "etag")
"""The fields in which file systems report the version of a file."""


@dataclass(frozen=True)
class File:
    """A file with samples. ``version`` changes with the content, if the file system has one; ``size`` in bytes."""

    name: str
    size: int
    version: str

    @property
    def compression(self) -> str | None:
        """The compression of the file, by its suffix."""
        method = _PACKED.get(PurePosixPath(self.name).suffix) or infer_compression(self.name)
        return None if method is None else str(method)


@dataclass(frozen=True)
class Shard:
    """``num_samples`` samples of a file, from byte ``start`` to ``stop``, counted in the compressed file."""

    file: File
    start: int
    stop: int
    num_samples: int


class Mapped:
    """A shard's bytes, memory-mapped from a file; ``shard[a:b]`` counts from the start of the shard."""

    def __init__(self, file: IO[bytes], start: int, stop: int) -> None:
        self._shift = start % mmap.ALLOCATIONGRANULARITY
        self._memory = mmap.mmap(
            file.fileno(), stop - start + self._shift, access=mmap.ACCESS_READ, offset=start - self._shift
        )
        self.num_bytes = stop - start

    def __getitem__(self, wanted: slice) -> bytes:
        return self._memory[wanted.start + self._shift : wanted.stop + self._shift]

    @property
    def whole(self) -> memoryview:
        """Return all bytes of the shard, without a copy."""
        return memoryview(self._memory)[self._shift :]


class ShardedFiles(ABC):
    """The base of ``Jsonl``, ``Tar``, ``Parquet`` and ``Mds``: a source of ``Stream``, in files.

    Args:
        urls: A folder, file or pattern (``s3://bucket/c4/*.jsonl.gz``), or several of them, in any file system of
            fsspec. Files are taken in the order of their names.
        index: A URL that all processes and machines can read; the first process that has the index writes it there.
            None: each machine makes its own, and reads all files once for it.
        options: Options of the file system in fsspec.
        cache: A folder for copies of shards. None: a folder in the user's cache.
        cache_bytes: The greatest size of all copies together.
        shard_bytes: The intended size of a shard. A compressed file is one shard.

    Raises:
        JobError: there are no such files, or they are not of this kind.
    """

    kind = ""
    suffixes: tuple[str, ...] = ()

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        index: str | None = None,
        options: Mapping[str, Any] | None = None,
        cache: str | Path | None = None,
        cache_bytes: int = CACHE_BYTES,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        for field, value in (("cache_bytes", cache_bytes), ("shard_bytes", shard_bytes)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise self._wrong("is not right", field, value, "a whole number from 1")
        self._options = dict(options or {})
        self._cache = cache_folder() / "shards" if cache is None else Path(cache)
        self._cache_bytes, self._shard_bytes = cache_bytes, shard_bytes
        self.fs, files = self._found([urls] if isinstance(urls, str) else list(urls))
        self._is_local = isinstance(self.fs, LocalFileSystem)
        self.shards = self._shards(files, index)
        self.sizes = [shard.num_samples for shard in self.shards]

    @abstractmethod
    def _read(self, shard: Shard, file: IO[bytes], start: int) -> Sequence[Any]:
        """Return the samples of a shard, which begins at ``start`` of the open file."""

    def _fetch(self, shard: Shard, into: BinaryIO) -> None:
        """Copy a shard, uncompressed, into a file."""
        if shard.file.compression is None:
            for begin in range(shard.start, shard.stop, _COPIED_AT_ONCE):
                into.write(self.fs.cat_file(shard.file.name, begin, min(begin + _COPIED_AT_ONCE, shard.stop)))
            return
        with self._opened(shard.file) as file:
            while content := file.read(_COPIED_AT_ONCE):
                into.write(content)

    def _copies(self, shard: Shard) -> bool:
        return not self._is_local or shard.file.compression is not None

    def open(self, shard: int) -> Sequence[Any]:
        """Return the samples of a shard."""
        given = self.shards[shard]
        if self._copies(given):
            with self._copy(given) as file:
                samples = self._read(given, file, 0)
        else:
            with Path(given.file.name).open("rb") as file:
                samples = self._read(given, file, given.start)
        if len(samples) != given.num_samples:
            field, allowed = "index", f"{given.num_samples}, as when the index was made: remove the index"
            raise self._wrong("has another number of samples", field, len(samples), allowed, given.file.name)
        return samples

    def prepare(self, shard: int) -> None:
        """Make a copy of a shard if one is needed. Any thread may call this."""
        given = self.shards[shard]
        if self._copies(given):
            self._copy(given).close()

    def _opened(self, file: File) -> Any:
        try:
            return self.fs.open(file.name, "rb", compression=file.compression)
        except ValueError as error:
            allowed = "a compression that fsspec knows here (for .zst: pip install zstandard)"
            raise self._wrong(f"cannot be unpacked: {error}", "urls", None, allowed, file.name) from error

    def _copy(self, shard: Shard) -> IO[bytes]:
        facts = [self.kind, str(self.fs.protocol), *map(str, (shard, sorted(self._options))), *self._told()]
        name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        try:
            return open_kept(self._cache, name, lambda file: self._fetch(shard, file), self._cache_bytes)
        except OSError as error:
            problem = f"cannot be copied: {type(error).__name__}: {error}"
            allowed = "a folder of this user with room for the shards of a window"
            raise self._wrong(problem, "cache", str(self._cache), allowed, shard.file.name) from error

    def _told(self) -> list[str]:
        """Return the settings that, besides the shard, determine the content of a copy."""
        return []

    def _found(self, urls: Sequence[str]) -> tuple[Any, list[File]]:
        """Return the file system and the files that the URLs name."""
        if not urls:
            raise self._wrong("names no file", "urls", None, "at least one file, folder or pattern")
        files: dict[str, File] = {}
        fs, _ = fsspec.core.url_to_fs(urls[0], **self._options)
        for url in urls:
            its_fs, path = fsspec.core.url_to_fs(url, **self._options)
            if its_fs.protocol != fs.protocol:
                raise self._wrong("is not in the file system of the first", "urls", url, str(urls[0]))
            before = len(files)
            try:
                if "*" in path or "?" in path or "[" in path:
                    infos = fs.glob(path, detail=True)
                elif fs.isdir(path):
                    infos = {name: info for name, info in fs.find(path, detail=True).items() if self._is_of_kind(name)}
                else:
                    infos = {path: fs.info(path)}
            except FileNotFoundError:
                infos = {}
            for name, info in infos.items():
                if info["type"] == "file":
                    version = next((str(info[key]) for key in _MADE if info.get(key) is not None), "")
                    files[name] = File(name, int(info["size"] or 0), version)
            if len(files) == before:
                raise self._wrong("names no file", "urls", url, f"files such as part-0000{self.suffixes[0]}")
        return fs, [files[name] for name in sorted(files)]

    def _is_of_kind(self, name: str) -> bool:
        plain = PurePosixPath(name)
        return not plain.name.startswith((".", "_")) and bool({*plain.suffixes} & {*self.suffixes})

    @abstractmethod
    def _shards(self, files: Sequence[File], index: str | None) -> list[Shard]:
        """Return the shards of these files, in their order."""

    def _wrong(
        self, message: str, field: str, value: object, allowed: str | None, source: str | None = None
    ) -> JobError:
        return JobError(message, source=source or type(self).__name__, field=field, value=value, allowed=allowed)


class ScannedFiles(ShardedFiles):
    """Files whose shards are found by reading the files once; the result is kept as an index."""

    @abstractmethod
    def _scan(self, file: File) -> Iterator[tuple[int, int, int]]:
        """Read a file; yield start, stop and number of samples of each shard."""

    def _shards(self, files: Sequence[File], index: str | None) -> list[Shard]:
        """Return the shards from the index of the files; the index is made and kept if there is none."""
        common = os.path.commonpath([str(PurePosixPath(file.name).parent) for file in files])
        facts = [[os.path.relpath(file.name, common), file.size] for file in files]
        head = {"version": _VERSION, "kind": self.kind, "shard_bytes": self._shard_bytes, "files": facts}
        versions = [file.version for file in files]
        name = hashlib.sha256(json.dumps([head, common, versions]).encode()).hexdigest()
        folder = cache_folder() / "shard-indices"
        content = self._read_index(index) if index is not None else read_kept(folder, name)
        if content is not None and (known := _parsed(content, head)) is not None:
            return [Shard(files[number], *place) for number, *place in known]
        if index is None and not self._is_local:
            log.info("reading %d %s files once, to count their samples", len(files), self.kind)
        with ThreadPoolExecutor(min(_SCANS_AT_ONCE, len(files))) as pool:
            scanned = list(pool.map(lambda file: list(self._scan(file)), files))
        shards = [[number, *place] for number, places in enumerate(scanned) for place in places]
        content = json.dumps(head | {"shards": shards}).encode()
        if index is not None:
            self._write_index(index, content)
        else:
            keep(folder, name, content)
        return [Shard(files[number], *place) for number, *place in shards]

    def _read_index(self, url: str) -> bytes | None:
        fs, path = fsspec.core.url_to_fs(url, **self._options)
        try:
            return bytes(fs.cat_file(path))
        except FileNotFoundError:
            return None

    def _write_index(self, url: str, content: bytes) -> None:
        """Write the index atomically, as object stores do anyway; elsewhere, a finished file is renamed."""
        fs, path = fsspec.core.url_to_fs(url, **self._options)
        partial = f"{path}.{os.getpid()}.partial" if isinstance(fs, LocalFileSystem) else path
        try:
            fs.makedirs(str(PurePosixPath(path).parent), exist_ok=True)
            fs.pipe_file(partial, content)
            if partial != path:
                Path(partial).replace(path)
        except OSError as error:
            log.warning("the index of samples cannot be kept at %s: %s", url, error)


def _parsed(content: bytes, head: Mapping[str, Any]) -> list[list[int]] | None:
    """Return an index's shards: number of the file, start, stop and number of samples; None if files differ."""
    try:
        known = json.loads(content)
        shards = known.pop("shards")
        rows = [[int(number) for number in row] for row in shards]
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    num_files = len(head["files"])
    fits = all(len(row) == 4 and 0 <= row[0] < num_files and 0 <= row[1] <= row[2] and row[3] >= 0 for row in rows)
    return rows if known == head and fits else None


def cut_into_shards(
    entries: Iterator[tuple[int, int]], shard_bytes: int, size_of: Callable[[int, int], int] = lambda a, b: b - a
) -> Iterator[tuple[int, int, int]]:
    """Join neighbouring entries (start, stop) until a shard has ``shard_bytes``; yield what ``_scan`` yields."""
    start = stop = num = 0
    for begin, end in entries:
        if num == 0:
            start = begin
        stop, num = end, num + 1
        if size_of(start, stop) >= shard_bytes:
            yield start, stop, num
            num = 0
    if num:
        yield start, stop, num
