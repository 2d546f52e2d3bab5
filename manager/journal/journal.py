"""The journal file: SQLite in WAL mode, one table of lines."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from manager.controller.config import ControllerConfig
from manager.controller.events import Event
from manager.controller.state import Decision
from manager.journal.records import DecisionRecord, Entry, EntryKind, Fact
from morph.contract.errors import RunDirError

FILE_NAME = "journal.sqlite"
BUSY_S = 5.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    time_s REAL NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('config', 'event', 'decision', 'fact')),
    payload_json TEXT NOT NULL
)
"""
_INSERT = "INSERT INTO entries (time_s, kind, payload_json) VALUES (?, ?, ?)"


class Journal:
    """An open journal. Threads may share it. One process writes; others may read meanwhile.

    A line is safe from a crash of the process when the call returns; from a loss of power, up to the last
    checkpoint of the write-ahead log. Waits for another writer are bounded by ``BUSY_S``.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection, self._path = connection, path
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path, *, read_only: bool = False) -> Journal:
        """Open a journal file; unless ``read_only``, make it when it is missing.

        Raises:
            RunDirError: the file is missing, cannot be written, or is not a journal.
        """
        if read_only and not path.is_file():
            raise RunDirError("holds no journal", source=str(path))
        uri = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
        try:
            connection = sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise RunDirError(f"the journal cannot be opened: {error}", source=str(path)) from error
        try:
            if read_only:
                connection.execute("SELECT sequence, time_s, kind, payload_json FROM entries LIMIT 1")
            else:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = NORMAL")
                connection.execute(_SCHEMA)
        except sqlite3.Error as error:
            connection.close()
            raise RunDirError(f"is not a journal, or is in use: {error}", source=str(path)) from error
        return cls(connection, path)

    def append(self, time_s: float, kind: EntryKind, payload_json: str) -> None:
        """Append one line.

        Raises:
            RunDirError: the file cannot be written.
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
        self._write([(time_s, "event", event.model_dump_json()), (time_s, "decision", record.model_dump_json())])

    def read(self, after: int = 0) -> tuple[Entry, ...]:
        """Return every line behind this sequence number, in the order written.

        Raises:
            RunDirError: the file cannot be read.
        """
        try:
            with self._lock:
                rows = self._connection.execute(
                    "SELECT sequence, time_s, kind, payload_json FROM entries WHERE sequence > ? ORDER BY sequence",
                    (after,),
                ).fetchall()
        except sqlite3.Error as error:
            raise RunDirError(f"the journal cannot be read: {error}", source=str(self._path)) from error
        return tuple(
            Entry(sequence=sequence, time_s=time_s, kind=kind, payload_json=payload)
            for sequence, time_s, kind, payload in rows
        )

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, rows: list[tuple[float, EntryKind, str]]) -> None:
        with self._lock:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                try:
                    self._connection.executemany(_INSERT, rows)
                except BaseException:
                    self._connection.execute("ROLLBACK")
                    raise
                self._connection.execute("COMMIT")
            except sqlite3.Error as error:
                raise RunDirError(f"the journal cannot be written: {error}", source=str(self._path)) from error
