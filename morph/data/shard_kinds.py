"""The kinds of files that hold samples: lines of JSON, tar archives, Parquet, and Mosaic's MDS."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from morph.contract.errors import JobError
from morph.data.shard_files import CACHE_BYTES, File, Mapped, ScannedFiles, Shard, ShardedFiles, cut_into_shards

_BLOCK = tarfile.BLOCKSIZE
_NEW_LINE, _RETURN = 10, 13
_NUMBERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "str": bytes.decode,
    "int": lambda content: int.from_bytes(content, "little", signed=True),
    "json": json.loads,
    "str_int": int,
    "str_float": float,
    "jpeg": bytes,
    "png": bytes,
}
_BITS = {
    f"{kind}{bits}": bits + number for bits in (8, 16, 32, 64) for number, kind in enumerate(("uint", "int", "float"))
}
_NUMBER_OF = {code: name for name, code in _BITS.items() if name != "float8"}
"""MDS's codes for the type of an array whose column does not fix one."""


class Jsonl(ScannedFiles):
    """Files with one JSON value per line; a sample is the result of ``json.loads``. Empty lines are skipped.

    The arguments are those of ``ShardedFiles``.
    """

    kind = "jsonl"
    suffixes = (".jsonl", ".ndjson")

    def _scan(self, file: File) -> Iterator[tuple[int, int, int]]:
        if file.compression is None:
            yield from self._stretches(file)
            return
        parts = list(self._stretches(file))
        yield 0, parts[-1][1] if parts else 0, sum(num for _, _, num in parts)

    def _stretches(self, file: File) -> Iterator[tuple[int, int, int]]:
        with self._opened(file) as opened:
            start, rest = 0, b""
            while content := opened.read(self._shard_bytes):
                whole, new_line, after = content.rpartition(b"\n")
                if not new_line:
                    rest += content
                    continue
                stretch = rest + whole + new_line
                yield start, start + len(stretch), len(_lines(stretch)[0])
                start, rest = start + len(stretch), after
            if rest:
                yield start, start + len(rest), len(_lines(rest)[0])

    def _read(self, shard: Shard, file: IO[bytes], start: int) -> Sequence[Any]:
        return _JsonLines(shard, Mapped(file, start, start + shard.stop - shard.start)) if shard.stop else ()


def _lines(content: bytes | memoryview) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return start and stop of every non-empty line."""
    symbols = np.frombuffer(content, np.uint8)
    stops = np.flatnonzero(symbols == _NEW_LINE)
    if len(symbols) and symbols[-1] != _NEW_LINE:
        stops = np.append(stops, len(symbols))
    starts = np.concatenate([[0], stops[:-1] + 1]).astype(np.int64)[: len(stops)]
    length = stops - starts
    filled = (length > 1) | ((length == 1) & (symbols[np.minimum(starts, len(symbols) - 1)] != _RETURN))
    return starts[filled], stops[filled]


class _JsonLines(Sequence[Any]):
    def __init__(self, shard: Shard, mapped: Mapped) -> None:
        self._shard, self._mapped = shard, mapped
        self._starts, self._stops = _lines(mapped.whole)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        start, stop = int(self._starts[index]), int(self._stops[index])
        try:
            return json.loads(self._mapped[start:stop])
        except ValueError as error:
            field = f"byte {self._shard.start + start}"
            raise JobError(f"is not JSON: {error}", source=self._shard.file.name, field=field) from error


class Tar(ScannedFiles):
    """Tar archives in WebDataset's format: neighbouring files whose names agree up to the first dot are one sample.

    A sample is a dict from suffix (``jpg``, ``cls``, ``seg.png``) to bytes, and from ``__key__`` to the name before it.
    The arguments are those of ``ShardedFiles``.
    """

    kind = "tar"
    suffixes = (".tar", ".tgz")

    def _scan(self, file: File) -> Iterator[tuple[int, int, int]]:
        with self._opened(file) as opened:
            size = file.size if file.compression is None else None
            entries = ((start, stop) for start, stop, _ in _tar_samples(opened, file.name, size))
            if file.compression is None:
                yield from cut_into_shards(entries, self._shard_bytes)
                return
            spans = list(entries)
            yield 0, spans[-1][1] if spans else 0, len(spans)

    def _read(self, shard: Shard, file: IO[bytes], start: int) -> Sequence[Any]:
        stop = start + shard.stop - shard.start
        size = file.seek(0, 2)
        file.seek(start)
        samples = [parts for _, _, parts in _tar_samples(file, shard.file.name, size, stop)]
        return _TarSamples(samples, Mapped(file, start, stop), start) if samples else ()


def _tar_samples(
    file: Any, name: str, size: int | None, until: int | None = None
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield start and stop of each sample of an archive, and where its parts begin and end, by suffix.

    ``file``: the archive, read from the present position. ``size``: its size in bytes; None: it can only be read from
    the beginning to the end.
    """
    key, start, stop, parts = None, 0, 0, dict[str, Any]()
    try:
        archive = tarfile.open(fileobj=file, mode="r|" if size is None else "r:")  # noqa: SIM115 # the archive does not own the file
        for member in archive:
            if until is not None and member.offset >= until:
                break
            if not member.isreg() or member.issparse():
                continue
            end = member.offset_data + member.size
            if size is not None and end > size:
                raise JobError("ends within a sample", source=name, value=size, allowed=f"at least {end} bytes")
            path = PurePosixPath(member.name)
            before, _, suffix = path.name.partition(".")
            of = str(path.with_name(before)) if before else member.name
            if of != key and parts:
                yield start, stop, parts
                parts = {}
            if not parts:
                key, start, parts = of, member.offset, {"__key__": of}
            parts[suffix] = member.offset_data, end
            stop = member.offset_data + -(-member.size // _BLOCK) * _BLOCK
            stop = stop if size is None else min(stop, size)
            archive.members = []  # type: ignore[attr-defined]  # otherwise a long archive keeps every member
    except tarfile.TarError as error:
        raise JobError(f"is not a tar archive: {error}", source=name) from error
    if size is not None and size % _BLOCK:  # tarfile mistakes a truncated header for the end
        raise JobError("ends within a sample", source=name, value=size, allowed=f"blocks of {_BLOCK} bytes")
    if parts:
        yield start, stop, parts


class _TarSamples(Sequence[Any]):
    def __init__(self, samples: Sequence[Mapping[str, Any]], mapped: Mapped, base: int) -> None:
        self._samples, self._mapped, self._base = samples, mapped, base

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: Any) -> Any:
        return {
            suffix: place if suffix == "__key__" else self._mapped[place[0] - self._base : place[1] - self._base]
            for suffix, place in self._samples[index].items()
        }


class Parquet(ScannedFiles):
    """Parquet files; a sample is a row, as a dict from column to the value that pyarrow returns. Needs pyarrow.

    Args:
        urls: As for ``ShardedFiles``.
        columns: The columns to read; None: all.
        options: The other arguments of ``ShardedFiles``.
    """

    kind = "parquet"
    suffixes = (".parquet", ".pq")

    def __init__(self, urls: str | Sequence[str], *, columns: Sequence[str] | None = None, **options: Any) -> None:
        try:
            import pyarrow.ipc
            import pyarrow.parquet
        except ImportError as error:
            raise self._wrong(
                "needs pyarrow", "urls", None, "pip install -e '.[parquet]' in the clone of Morph"
            ) from error
        self._arrow, self._columns = pyarrow, None if columns is None else list(columns)
        super().__init__(urls, **options)

    def _scan(self, file: File) -> Iterator[tuple[int, int, int]]:
        """Yield shards whose start and stop are numbers of row groups; only the end of the file is read."""
        with self._parquet(file) as opened:
            groups = [opened.metadata.row_group(number) for number in range(opened.metadata.num_row_groups)]
        size = np.concatenate([[0], np.cumsum([group.total_byte_size for group in groups])])
        rows = np.concatenate([[0], np.cumsum([group.num_rows for group in groups])])
        entries = ((number, number + 1) for number in range(len(groups)))
        for start, stop, _ in cut_into_shards(entries, self._shard_bytes, lambda a, b: int(size[b] - size[a])):
            yield start, stop, int(rows[stop] - rows[start])

    def _copies(self, shard: Shard) -> bool:  # noqa: ARG002
        """Whether a shard is read from a copy: always, with rows unpacked once so that each can be read by itself."""
        return True

    def _fetch(self, shard: Shard, into: BinaryIO) -> None:
        with self._parquet(shard.file) as parquet:
            names = parquet.schema_arrow.names
            if missing := sorted({*(self._columns or ())} - {*names}):
                raise self._wrong("has no such column", "columns", missing[0], ", ".join(names), shard.file.name)
            table = parquet.read_row_groups(list(range(shard.start, shard.stop)), columns=self._columns)
        with self._arrow.ipc.new_file(into, table.schema) as writer:
            writer.write_table(table)

    def _read(self, shard: Shard, file: IO[bytes], start: int) -> Sequence[Any]:  # noqa: ARG002
        size = file.seek(0, 2)
        return _TableRows(self._arrow.ipc.open_file(self._arrow.py_buffer(Mapped(file, 0, size).whole)).read_all())

    def _told(self) -> list[str]:
        return [repr(self._columns)]

    @contextmanager
    def _parquet(self, file: File) -> Iterator[Any]:
        with self.fs.open(file.name, "rb") as opened:
            try:
                parquet = self._arrow.parquet.ParquetFile(opened)
            except self._arrow.ArrowInvalid as error:
                raise JobError(f"is not a Parquet file: {error}", source=file.name) from error
            yield parquet


class _TableRows(Sequence[Any]):
    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: Any) -> Any:
        return self._table.slice(index, 1).to_pylist()[0]


class Mds(ShardedFiles):
    """A folder that MosaicML's ``MDSWriter`` wrote, with ``index.json``; a sample is a dict from column to value.

    Columns of bytes, texts, numbers, JSON and numpy arrays are decoded as by Mosaic; pictures (``jpeg``, ``png``) stay
    bytes. Pickles are refused, because reading one can run code. The other arguments are those of ``ShardedFiles``.
    """

    kind = "mds"
    suffixes = (".mds",)

    def __init__(
        self,
        url: str,
        *,
        options: Mapping[str, Any] | None = None,
        cache: str | Path | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        super().__init__(f"{url.rstrip('/')}/index.json", options=options, cache=cache, cache_bytes=cache_bytes)

    def _shards(self, files: Sequence[File], index: str | None) -> list[Shard]:  # noqa: ARG002
        folder, name = str(PurePosixPath(files[0].name).parent), files[0].name
        try:
            entries = json.loads(self.fs.cat_file(name))["shards"]
            shards = [self._shard(folder, files[0].version, entry) for entry in entries]
        except (ValueError, KeyError, TypeError) as error:
            problem = f"is not an index of MDS shards: {type(error).__name__}: {error}"
            raise JobError(problem, source=name, allowed="index.json as MDSWriter writes it") from error
        self._columns = {shard: _Columns(entry, name) for shard, entry in zip(shards, entries, strict=True)}
        return shards

    def _shard(self, folder: str, version: str, entry: Mapping[str, Any]) -> Shard:
        held = entry["zip_data"] or entry["raw_data"]
        file = File(f"{folder}/{held['basename']}", held["bytes"], version)
        is_beside = PurePosixPath(held["basename"]).name == held["basename"]
        is_known = entry["zip_data"] is None or file.compression is not None
        if entry["format"] != "mds" or not is_beside or not is_known:
            raise ValueError(f"{held['basename']!r} of format {entry['format']!r}, packed by {entry['compression']!r}")
        return Shard(file, 0, entry["raw_data"]["bytes"], entry["samples"])

    def _read(self, shard: Shard, file: IO[bytes], start: int) -> Sequence[Any]:
        return _MdsSamples(Mapped(file, start, start + shard.stop), self._columns[shard])


class _Columns:
    """The columns of a shard, as the shard's entry in the index describes them."""

    def __init__(self, entry: Mapping[str, Any], source: str) -> None:
        self.names, self.sizes = entry["column_names"], entry["column_sizes"]
        self.decode = [_decoder(encoding) for encoding in entry["column_encodings"]]
        for name, encoding, decode in zip(self.names, entry["column_encodings"], self.decode, strict=True):
            if decode is None:
                allowed = f"{', '.join(sorted(_DECODERS))}, ndarray, {', '.join(_NUMBERS)}"
                raise JobError("cannot be decoded", source=source, field=name, value=encoding, allowed=allowed)

    def sample(self, content: bytes) -> dict[str, Any]:
        """Return the values of a sample: its bytes hold first the sizes of columns that vary, then the columns."""
        place, sizes = 0, []
        for size in self.sizes:
            if size is None:
                size, place = int.from_bytes(content[place : place + 4], "little"), place + 4
            sizes.append(size)
        values = {}
        for name, size, decode in zip(self.names, sizes, self.decode, strict=True):
            assert decode is not None
            values[name], place = decode(content[place : place + size]), place + size
        return values


class _MdsSamples(Sequence[Any]):
    def __init__(self, mapped: Mapped, columns: _Columns) -> None:
        self._mapped, self._columns = mapped, columns
        num_samples = int.from_bytes(mapped[0:4], "little")
        self._bounds = np.frombuffer(mapped[4 : 4 * (num_samples + 2)], "<u4")

    def __len__(self) -> int:
        return max(0, len(self._bounds) - 1)

    def __getitem__(self, index: Any) -> Any:
        return self._columns.sample(self._mapped[int(self._bounds[index]) : int(self._bounds[index + 1])])


def _decoder(encoding: str) -> Callable[[bytes], Any] | None:
    """Return the function that decodes the bytes of a column; None if there is none."""
    if encoding in _NUMBERS:
        return lambda content: np.frombuffer(content, encoding)[0]
    kind, *given = encoding.split(":")
    if kind != "ndarray" or len(given) > 2 or (given and given[0] not in _NUMBERS):
        return _DECODERS.get(encoding)
    dtype, shape = given[0] if given else None, tuple(map(int, given[1].split(","))) if len(given) > 1 else None
    return lambda content: _array(content, dtype, shape)


def _array(content: bytes, dtype: str | None, shape: tuple[int, ...] | None) -> NDArray[Any]:
    """Return an array; its bytes begin with its type and shape, unless its column fixes them."""
    place = 0
    if dtype is None:
        dtype, place = _NUMBER_OF[content[0]], 1
    if shape is None:
        num_dims, width = content[place] >> 2, 1 << (content[place] & 3)
        end = place + 1 + num_dims * width
        shape, place = tuple(np.frombuffer(content[place + 1 : end], f"<u{width}").tolist()), end
    return np.frombuffer(content[place:], dtype).reshape(shape).copy()
