"""The journal file: SQLite in WAL mode, one table of lines."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic_core import PydanticSerializationError

from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import Event
from manager.controller.state.state import Decision
from manager.journal.records import DecisionRecord, Entry, EntryKind, Fact
from morph.contract.errors import RunDirError, RunDirStuck
from morph.contract.waits import Backoff

log = logging.getLogger(__name__)

RETRIES = Backoff(first_s=0.1, most_s=2.0)
LIMIT_S = 7 * 86400.0

Result = TypeVar("Result")


def patiently(attempt: Callable[[], Result], limit_s: float = LIMIT_S) -> Result:
    """Attempt something until the run directory lets it; says once that it waits, and once that it goes on. Blocks.

    Raises:
        RunDirStuck: it does not within ``limit_s``.
        KeyboardInterrupt: on a second Ctrl-C, as everywhere.
    """
    begin_s, pauses, told = time.monotonic(), RETRIES.pauses(), False
    while True:
        try:
            result = attempt()
        except RunDirStuck as error:
            if time.monotonic() - begin_s >= limit_s:
                raise
            if not told:
                log.warning("the run pauses: %s; it goes on when that has passed (Ctrl-C twice ends it now)", error)
            told = True
            time.sleep(next(pauses))
        else:
            if told:
                log.warning("the run goes on after a pause of %.1f s", time.monotonic() - begin_s)
            return result


BUSY_S = 5.0
WRITER_BUSY_S = 1.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    time_s REAL NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('config', 'event', 'decision', 'fact')),
    payload_json TEXT NOT NULL
)
"""
_TABLES = (
    _SCHEMA,
    "CREATE INDEX IF NOT EXISTS configs ON entries (sequence) WHERE kind = 'config'",
    "CREATE INDEX IF NOT EXISTS facts ON entries (sequence) WHERE kind = 'fact'",
    "CREATE TABLE IF NOT EXISTS snapshots (sequence INTEGER PRIMARY KEY, state_json TEXT NOT NULL)",
)
SNAPSHOT_EVERY = 1000
"""Decisions from one snapshot of the state to the next."""
_COLUMNS = "SELECT sequence, time_s, kind, payload_json FROM entries"
_INSERT = "INSERT INTO entries (time_s, kind, payload_json) VALUES (?, ?, ?)"


class Journal:
    """An open journal. Threads may share it. One process writes; others may read meanwhile.

    A line is safe from a crash of the process when the call returns; from a loss of power, up to the last
    checkpoint of the write-ahead log. Waits for another writer are bounded by ``WRITER_BUSY_S``. Beside the lines it
    keeps the state after one of the last decisions, so that a new manager replays few of them, however long the run is.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection, self._path = connection, path
        self._num_unsaved = SNAPSHOT_EVERY  # since the last snapshot: this process's first decision makes one
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path, *, read_only: bool = False) -> Journal:
        """Open a journal file; unless ``read_only``, make it when it is missing.

        Raises:
            RunDirError: the file is missing, cannot be written, or is not a journal.
            RunDirStuck: it is locked, or the disk is full.
        """
        if read_only and not path.is_file():
            raise RunDirError("holds no journal", source=str(path))
        uri = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
        try:
            busy_s = BUSY_S if read_only else WRITER_BUSY_S
            connection = sqlite3.connect(uri, uri=True, timeout=busy_s, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise RunDirError(f"the journal cannot be opened: {error}", source=str(path)) from error
        try:
            if read_only:
                connection.execute(f"{_COLUMNS} LIMIT 1")
            else:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = NORMAL")
                for table in _TABLES:
                    connection.execute(table)
        except sqlite3.Error as error:
            connection.close()
            stuck = isinstance(error, sqlite3.OperationalError) and path.is_file()
            kind = RunDirStuck if stuck else RunDirError
            raise kind(f"is not a journal, or is in use: {error}", source=str(path)) from error
        return cls(connection, path)

    def append(self, time_s: float, kind: EntryKind, payload_json: str) -> None:
        """Append one line.

        Raises:
            RunDirStuck: the file cannot be written now; nothing of it was.
            RunDirError: the file is damaged.
        """
        self._write([(time_s, kind, payload_json)])

    def append_config(self, time_s: float, config: ControllerConfig) -> None:
        """Begin a run, or a run resumed in the same directory."""
        self.append(time_s, "config", config.model_dump_json())

    def append_fact(self, time_s: float, fact: Fact) -> None:
        """Note something that is not an event of the controller."""
        self.append(time_s, "fact", fact.model_dump_json())

    def append_decision(self, time_s: float, event: Event, decision: Decision) -> None:
        """Append an event and what was decided, both or neither; to be called before the actions are carried out."""
        record = DecisionRecord.of(decision)
        state_json = None
        rows: list[tuple[float, EntryKind, str]]
        try:
            if self._num_unsaved + 1 >= SNAPSHOT_EVERY:
                state_json = decision.state.model_dump_json(exclude={"config"})
            rows = [(time_s, "event", event.model_dump_json()), (time_s, "decision", record.model_dump_json())]
        except PydanticSerializationError as error:
            if "KeyboardInterrupt" in str(error):  # which pydantic takes for an error of the value
                raise KeyboardInterrupt from error
            raise
        self._write(rows, state_json)
        self._num_unsaved = 0 if state_json is not None else self._num_unsaved + 1

    def read(self, after: int = 0, most: int = -1) -> tuple[Entry, ...]:
        """Return every line behind this sequence number, in the order written; ``most``: the first so many.

        Raises:
            RunDirError: the file cannot be read.
        """
        return self._entries(f"{_COLUMNS} WHERE sequence > ? ORDER BY sequence LIMIT ?", after, most)

    def last_config(self) -> Entry | None:
        """The line with which the last session began."""
        found = self._entries(f"{_COLUMNS} WHERE kind = 'config' ORDER BY sequence DESC LIMIT 1")
        return found[0] if found else None

    def facts(self, after: int) -> tuple[Entry, ...]:
        """The facts behind a line."""
        return self._entries(f"{_COLUMNS} WHERE kind = 'fact' AND sequence > ? ORDER BY sequence", after)

    def last_line(self) -> Entry | None:
        """The newest line."""
        found = self._entries(f"{_COLUMNS} ORDER BY sequence DESC LIMIT 1")
        return found[0] if found else None

    def snapshot(self) -> tuple[int, str] | None:
        """The newest snapshot of the state, without its configuration: behind which line, and as JSON."""
        rows = self._select("SELECT sequence, state_json FROM snapshots ORDER BY sequence DESC LIMIT 1")
        return (int(rows[0][0]), str(rows[0][1])) if rows else None

    def _entries(self, query: str, *values: int) -> tuple[Entry, ...]:
        return tuple(
            Entry(sequence=sequence, time_s=time_s, kind=kind, payload_json=payload)
            for sequence, time_s, kind, payload in self._select(query, *values)
        )

    def _select(self, query: str, *values: int) -> list[Any]:
        try:
            with self._lock:
                return self._connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise RunDirError(f"the journal cannot be read: {error}", source=str(self._path)) from error

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, rows: list[tuple[float, EntryKind, str]], state_json: str | None = None) -> None:
        with self._lock:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                try:
                    self._connection.executemany(_INSERT, rows)
                    if state_json is not None:
                        self._connection.execute("DELETE FROM snapshots")
                        self._connection.execute(
                            "INSERT INTO snapshots SELECT MAX(sequence), ? FROM entries", (state_json,)
                        )
                    self._connection.execute("COMMIT")
                except BaseException:
                    if self._connection.in_transaction:  # a full disk ends some by itself
                        self._connection.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                kind = RunDirStuck if isinstance(error, sqlite3.OperationalError) else RunDirError
                raise kind(f"the journal cannot be written: {error}", source=str(self._path)) from error
