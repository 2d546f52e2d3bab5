"""What older lines of a journal are condensed into: columns of decided steps, records, lines that are kept whole."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from manager.controller.state.state import ControllerState
from manager.journal.records import Entry, Line
from morph.contract.errors import RunDirError

Column = np.ndarray[Any, np.dtype[Any]]
WHOLE = frozenset({"sequence", "step", "generation", "num_attempts", "skipped"})
"""Columns of whole numbers; the others are floats, in which what is not known is no number."""
VERSION = 1
"""Of what readers keep of where they stand; raise it with any change of that. What has another is folded anew."""
ACCOUNT = "account"
"""Under which a cut has what everything cost so far, for which nothing but the lines themselves is enough."""
SEQUENCE = "sequence"
"""The column that every block has: of the line that decided the step."""
NUM_AT_LEVEL = (512, 16_384)
"""So many steps in the blocks of a level become one block of the next: few blocks are to be read, none is big."""
TABLES = (
    "CREATE TABLE IF NOT EXISTS steps (level INTEGER, name TEXT, first INTEGER, num INTEGER, data BLOB, digest BLOB, "
    "PRIMARY KEY (level, name, first))",
    "CREATE TABLE IF NOT EXISTS records (sequence INTEGER, time_s REAL, kind TEXT, payload_json TEXT)",
    "CREATE INDEX IF NOT EXISTS records_by_kind ON records (kind, sequence)",
    "CREATE TABLE IF NOT EXISTS kept (first INTEGER PRIMARY KEY, last INTEGER, data BLOB, digest BLOB)",
    "CREATE TABLE IF NOT EXISTS heads (sequence INTEGER PRIMARY KEY, time_s REAL, data BLOB, digest BLOB)",
)


class Kept(NamedTuple):
    """A record: which line told it, when, under which name it is kept, and what it is."""

    sequence: int
    time_s: float
    kind: str
    payload_json: str


@dataclass(frozen=True)
class Cut:
    """All lines up to one, condensed.

    ``states``: where each reader of the journal stands behind it, as JSON. ``columns``: of the steps decided since the
    last cut, each as long as the others. ``records``: what else came of these lines. ``kept``: the events and decisions
    among them that stay as they are; facts and configurations always do.
    """

    sequence: int
    time_s: float
    states: Mapping[str, str]
    columns: Mapping[str, Column]
    records: Sequence[Kept]
    kept: frozenset[int]


@dataclass(frozen=True)
class Head:
    """The newest cut: behind which line, when that was written, and where each reader stood.

    ``version``: of these states; None: they have none.
    """

    sequence: int
    time_s: float
    states: Mapping[str, str]
    version: int | None = VERSION


@dataclass(frozen=True)
class Tail:
    """What a journal says behind a line, as it stood at one moment.

    ``head``: absent where nothing behind that line is condensed. ``records``, ``rows``: of what is condensed behind it,
    as far as they were asked for; rows of the columns. ``entries``: the lines that are not condensed yet, read one
    after the other as they stood at that moment.
    """

    head: Head | None
    records: Sequence[Kept]
    rows: range
    entries: Iterator[Entry]


class Keeper(Protocol):
    """Follows what is appended to a journal, and says what it comes to."""

    @property
    def num_taken(self) -> int:
        """Decisions since the last cut."""

    @property
    def may_cut(self) -> bool:
        """Whether no step is half decided behind the last line."""

    def take(self, line: Line) -> None:
        """Take in a line that was written."""

    def cut(self) -> Cut:
        """Everything up to the last line, condensed."""

    def forget(self) -> None:
        """That is written."""


def state_json(state: ControllerState) -> str:
    """The controller's state as the journal keeps it: without its configuration, which has a line of its own."""
    return state.model_dump_json(exclude={"config"})


def digest_of(data: bytes) -> bytes:
    """Return what proves that these bytes are read as they were written."""
    return hashlib.blake2b(data, digest_size=16).digest()


def packed(values: Column, name: str) -> bytes:
    """A column as few bytes: whole numbers by their differences, and bytes of one place next to one another."""
    if name in WHOLE:
        values = np.diff(values.astype(np.int64), prepend=np.int64(0))
    places = np.ascontiguousarray(values, dtype="<i8" if name in WHOLE else "<f8").view(np.uint8).reshape(-1, 8).T
    return zlib.compress(np.ascontiguousarray(places).tobytes(), 2)


def unpacked(data: bytes, digest: bytes, name: str, source: str) -> Column:
    """The column again.

    Raises:
        RunDirError: it is damaged.
    """
    places = np.frombuffer(zlib.decompress(proven(data, digest, source)), dtype=np.uint8).reshape(8, -1)
    values = np.ascontiguousarray(places.T).view("<i8" if name in WHOLE else "<f8").reshape(-1)
    return np.cumsum(values) if name in WHOLE else values


def packed_lines(rows: Sequence[tuple[int, float, str, str]]) -> bytes:
    """Lines as few bytes."""
    return zlib.compress(json.dumps(rows).encode(), 6)


def unpacked_lines(data: bytes, digest: bytes, source: str) -> list[Entry]:
    """The lines again.

    Raises:
        RunDirError: they are damaged.
    """
    rows = json.loads(zlib.decompress(proven(data, digest, source)))
    return [Entry(sequence=row[0], time_s=row[1], kind=row[2], payload_json=row[3]) for row in rows]


def proven(data: bytes, digest: bytes, source: str) -> bytes:
    """Return what was read, if it is what was written.

    Raises:
        RunDirError: it is not.
    """
    if digest_of(data) != digest:
        raise RunDirError("is damaged: a part of it is not as it was written", source=source)
    return data


def absent(name: str, num: int) -> Column:
    """A column of steps that have no such number."""
    return np.zeros(num, dtype=np.int64) if name in WHOLE else np.full(num, np.nan)
