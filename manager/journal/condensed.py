"""The form of condensed journal lines: columns of decided steps, records, and lines that are kept whole."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from manager.controller.state.state import ControllerState
from manager.journal.records import Entry, JournalLine
from morph.contract.errors import RunDirError

Column = np.ndarray[Any, np.dtype[Any]]
WHOLE = frozenset({"sequence", "step", "generation", "num_attempts", "skipped"})
"""Columns of whole numbers; the others are floats, with NaN for unknown values."""
VERSION = 5
"""The version of the stored state; raise it whenever that changes. A cut of another version is condensed again."""
ACCOUNT = "account"
"""The key, in a cut, of the cost so far, which could otherwise be computed only from the lines."""
SEQUENCE = "sequence"
"""The column that every block has: the number of the line that decided each step."""
NUM_AT_LEVEL = (512, 16_384)
"""The number of steps in a level's blocks that become one block of the next, so that blocks are few and none is big."""
ROW_DIGEST_BYTES = 20
TABLES = (
    "CREATE TABLE IF NOT EXISTS steps (level INTEGER, name TEXT, first INTEGER, num INTEGER, data BLOB, digest BLOB, "
    "PRIMARY KEY (level, name, first))",
    "CREATE TABLE IF NOT EXISTS records (sequence INTEGER, time_s REAL, kind TEXT, payload_json TEXT, digest BLOB)",
    "CREATE INDEX IF NOT EXISTS records_by_kind ON records (kind, sequence)",
    "CREATE TABLE IF NOT EXISTS kept (first INTEGER PRIMARY KEY, last INTEGER, data BLOB, digest BLOB)",
    "CREATE TABLE IF NOT EXISTS heads (sequence INTEGER PRIMARY KEY, time_s REAL, data BLOB, digest BLOB)",
)


class Kept(NamedTuple):
    """A stored record: its line, its time, its kind, and its content."""

    sequence: int
    time_s: float
    kind: str
    payload_json: str


@dataclass(frozen=True)
class Cut:
    """All lines up to one, condensed.

    ``states``: the state of each reader after that line, as JSON. ``columns``: the columns, all of the same length, of
    the steps decided since the last cut. ``records``: the other results of these lines. ``kept``: the events and
    decisions that stay as they are; facts and configurations always stay.
    """

    sequence: int
    time_s: float
    states: Mapping[str, str]
    columns: Mapping[str, Column]
    records: Sequence[Kept]
    kept: frozenset[int]


@dataclass(frozen=True)
class Head:
    """The newest cut: its last line ``sequence`` at ``time_s``, and the state of each reader after it.

    ``version``: the version of these states; None: there are none.
    """

    sequence: int
    time_s: float
    states: Mapping[str, str]
    version: int | None = VERSION


@dataclass(frozen=True)
class Tail:
    """The content of a journal after a line, at one moment.

    ``head``: None if nothing after that line is condensed. ``records``, ``rows``: those requested from the condensed
    part after it. ``entries``: the lines that are not condensed yet, read one after another as of that moment.
    """

    head: Head | None
    records: Sequence[Kept]
    rows: range
    entries: Iterator[Entry]


class Keeper(Protocol):
    """Follows the lines appended to a journal, and condenses them: ``Condenser``, whose module imports this one."""

    @property
    def num_taken(self) -> int:
        """The number of decisions since the last cut."""

    @property
    def may_cut(self) -> bool:
        """Whether every step up to the last line is completely decided."""

    def take(self, line: JournalLine) -> None:
        """Process a line that was written."""

    def cut(self) -> Cut:
        """Return everything up to the last line, condensed."""

    def forget(self) -> None:
        """Record that the last cut is written."""


def state_json(state: ControllerState) -> str:
    """Return the controller's state as the journal stores it: without its configuration, which has its own line."""
    return state.model_dump_json(exclude={"config"})


def digest_of(data: bytes) -> bytes:
    """Return a digest that proves that these bytes were read as they were written."""
    return hashlib.blake2b(data, digest_size=16).digest()


def row_digest(*values: object) -> bytes:
    """Return a digest of all values of a row; it is longer than that of ``digest_of``, which older rows have."""
    hashed = hashlib.blake2b(digest_size=ROW_DIGEST_BYTES)
    for value in values:
        data = value if isinstance(value, bytes) else f"{value}".encode("utf-8", "surrogateescape")
        hashed.update(f"{type(value).__name__} {len(data)} ".encode() + data)
    return hashed.digest()


def packed(values: Column, name: str) -> bytes:
    """Return a column as few bytes: whole numbers as differences, and bytes of the same position side by side."""
    if name in WHOLE:
        values = np.diff(values.astype(np.int64), prepend=np.int64(0))
    places = np.ascontiguousarray(values, dtype="<i8" if name in WHOLE else "<f8").view(np.uint8).reshape(-1, 8).T
    return zlib.compress(np.ascontiguousarray(places).tobytes(), 2)


def unpacked(data: bytes, digest: bytes, name: str, source: str, *place: object) -> Column:
    """Return the column of these bytes; ``place``: the row's other values. RunDirError if the bytes are damaged."""
    places = np.frombuffer(zlib.decompress(proven(data, digest, source, name, *place)), dtype=np.uint8).reshape(8, -1)
    values = np.ascontiguousarray(places.T).view("<i8" if name in WHOLE else "<f8").reshape(-1)
    return np.cumsum(values) if name in WHOLE else values


def packed_lines(rows: Sequence[tuple[int, float, str, str]]) -> bytes:
    """Return lines as few bytes."""
    return zlib.compress(json.dumps(rows).encode(), 6)


def unpacked_lines(data: bytes, digest: bytes, source: str, *place: object) -> list[Entry]:
    """Return the lines of these bytes; ``place``: the row's other values. RunDirError if the bytes are damaged."""
    rows = json.loads(zlib.decompress(proven(data, digest, source, *place)))
    return [Entry(sequence=row[0], time_s=row[1], kind=row[2], payload_json=row[3]) for row in rows]


def proven(data: bytes, digest: bytes, source: str, *place: object) -> bytes:
    """Return these bytes if they and the other values of their row equal those written; else RunDirError."""
    if not isinstance(data, bytes) or not isinstance(digest, bytes):
        is_same = False
    elif len(digest) == ROW_DIGEST_BYTES:
        is_same = row_digest(*place, data) == digest
    else:
        is_same = digest_of(data) == digest
    if not is_same:
        raise RunDirError("is damaged: a part of it differs from what was written", source=source)
    return data


def absent(name: str, num: int) -> Column:
    """Return a column for steps that do not have this number."""
    return np.zeros(num, dtype=np.int64) if name in WHOLE else np.full(num, np.nan)
