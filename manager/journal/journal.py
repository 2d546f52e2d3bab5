"""The journal file: SQLite in WAL mode, one table of lines."""

from __future__ import annotations

import heapq
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, Self, TypeVar, get_args

import numpy as np
from pydantic_core import PydanticSerializationError

from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import Event
from manager.controller.state.state import ControllerState, Decision
from manager.journal.condensed import (
    NUM_AT_LEVEL,
    SEQUENCE,
    TABLES,
    VERSION,
    Column,
    Cut,
    Head,
    Keeper,
    Kept,
    Tail,
    absent,
    packed,
    packed_lines,
    proven,
    row_digest,
    state_json,
    unpacked,
    unpacked_lines,
)
from manager.journal.records import Decided, DecisionRecord, Entry, EntryKind, Fact, JournalLine, LineReader
from morph.contract.errors import RunDirError, RunDirStuck
from morph.contract.waits import Backoff

log = logging.getLogger(__name__)

RETRIES = Backoff(first_s=0.1, most_s=2.0)
LIMIT_S = 7 * 86400.0

Result = TypeVar("Result")
BUSY_S = 5.0
WRITER_BUSY_S = 1.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    time_s REAL NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('config', 'event', 'decision', 'fact')),
    payload_json TEXT NOT NULL,
    digest BLOB
)
"""
_TABLES = (
    _SCHEMA,
    "CREATE INDEX IF NOT EXISTS configs ON entries (sequence) WHERE kind = 'config'",
    "CREATE INDEX IF NOT EXISTS facts ON entries (sequence) WHERE kind = 'fact'",
    "CREATE TABLE IF NOT EXISTS snapshots (sequence INTEGER PRIMARY KEY, state_json TEXT NOT NULL, digest BLOB)",
    *TABLES,
)
LAYOUT = 2
"""The number of the file's layout. A file with an older layout has only lines until a manager condenses them."""
AT_ONCE = 2048
"""The largest number of lines to read at once."""
SNAPSHOT_EVERY = 1000
"""The number of decisions from one snapshot of the state to the next, and from one cut to the next."""
_HAS_TABLE = "SELECT 1 FROM sqlite_master WHERE name = ?"
_WITH_DIGESTS = ("entries", "records", "snapshots")
"""Tables whose rows have a digest, except those that older versions wrote."""
_COLUMNS = "SELECT sequence, time_s, kind, payload_json FROM entries"
_PROVABLE = "SELECT sequence, time_s, kind, payload_json, digest FROM entries"
_INSERT = "INSERT INTO entries (sequence, time_s, kind, payload_json, digest) VALUES (?, ?, ?, ?, ?)"
_LAST = "SELECT seq FROM sqlite_sequence WHERE name = 'entries'"
_KINDS = frozenset(get_args(EntryKind))
DAMAGE = "damage"
"""The kind of records about lines that were damaged or missing when they were condensed."""


def patiently(attempt: Callable[[], Result], limit_s: float = LIMIT_S) -> Result:
    """Retry an action until the run directory allows it, and report once that it waits and once that it continues;
    RunDirStuck after ``limit_s``, KeyboardInterrupt on a second Ctrl-C.
    """
    begin_s, pauses, is_noted = time.monotonic(), RETRIES.pauses(), False
    while True:
        try:
            result = attempt()
        except RunDirStuck as error:
            if time.monotonic() - begin_s >= limit_s:
                raise
            if not is_noted:
                log.warning("the run pauses: %s; it continues once that is resolved (Ctrl-C twice ends it now)", error)
            is_noted = True
            time.sleep(next(pauses))
        else:
            if is_noted:
                log.warning("the run goes on after a pause of %.1f s", time.monotonic() - begin_s)
            return result


_told: set[tuple[Path, int]] = set()


def _is_sound(row: Sequence[Any]) -> bool:
    """Whether a row is as it was written, by the digest in its last column; older rows have none."""
    *values, digest = row
    return digest is None or row_digest(*values) == digest


class _Sieve:
    """Passes on the lines of a journal that are as they were written.

    After damage, or a gap, the lines up to the next configuration are left out: that is how the journal of a manager
    looks that was killed there. Of lines up to ``head``, which are condensed, only the damaged one is left out.
    ``after``: the line before the first one. ``strict``: damage is an error.
    """

    def __init__(self, path: Path, head: int, after: int, *, strict: bool = False) -> None:
        self._path, self._head, self._strict = path, head, strict
        self._last, self._skips = max(head, after), False
        self.noted: dict[int, str] = {}
        """A sentence about each line that was found damaged or missing."""

    def entry(self, row: Sequence[Any]) -> Entry | None:
        """Return a row's line, or None; if ``strict``, RunDirError if it is damaged or lines before it are missing."""
        sequence, time_s, kind, payload, _ = row
        sound = _is_sound(row) and kind in _KINDS and isinstance(time_s, float) and isinstance(payload, str)
        if sequence > self._head:
            gap, self._last = sequence > self._last + 1, sequence
            self._skips = (self._skips or gap or not sound) and not (sound and kind == "config")
            if gap:
                self._note(sequence - 1, "is missing")
        if not sound:
            self._note(sequence, "is damaged")
        if not sound or self._skips:
            return None
        return Entry(sequence=sequence, time_s=time_s, kind=kind, payload_json=payload)

    def _note(self, sequence: int, what: str) -> None:
        if self._strict:
            raise RunDirError(f"line {sequence} of the journal {what}", source=str(self._path))
        rest = " with what follows it in its session" if sequence > self._head else ""
        self.noted[sequence] = f"line {sequence} of the journal {what}, and left out{rest}"
        _warn(self._path, sequence, self.noted[sequence])


def _warn(path: Path, sequence: int, sentence: str) -> None:
    if (path, sequence) not in _told:
        _told.add((path, sequence))
        log.warning("%s: %s", path, sentence)


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))


def _without_digests(connection: sqlite3.Connection) -> list[str]:
    """Return the tables of a file whose rows have no digests, because an older version made it."""
    columns = {table: connection.execute(f"PRAGMA table_info({table})").fetchall() for table in _WITH_DIGESTS}
    return [table for table, rows in columns.items() if rows and "digest" not in [column[1] for column in rows]]


class Journal:
    """An open journal. Threads may share it. One process writes; others may read meanwhile.

    A line survives a crash of the process once the call returns; after a loss of power, lines up to the last checkpoint
    of the write-ahead log remain. Waits for another writer are bounded by ``WRITER_BUSY_S``. Beside the lines, the
    journal stores the state after one of the last decisions, so that a new manager replays few lines, however long the
    run is.

    With a ``keeper`` the lines are condensed now and then, in one transaction: readers find each line either as it was
    or condensed, never both or neither, whenever the writer is killed.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path, without: Sequence[str] = ()) -> None:
        """``without``: the tables of a file that only older versions wrote, whose rows have no digests."""
        self._connection, self._path = connection, path
        connection.text_factory = lambda data: data.decode("utf-8", "surrogateescape")  # damage is found by digests
        self._provable = _PROVABLE.replace("digest", "NULL") if "entries" in without else _PROVABLE
        self._digest = dict.fromkeys(_WITH_DIGESTS, "digest") | dict.fromkeys(without, "NULL")
        self._num_unsaved = SNAPSHOT_EVERY  # since the last snapshot; this process's first decision makes one
        self._lock = threading.RLock()
        self._damage: dict[int, str] = {}  # not recorded yet, because these lines are not condensed yet
        self.keeper: Keeper | None = None

    @classmethod
    def open(cls, path: Path, *, read_only: bool = False) -> Journal:
        """Open a journal file; make it if it is missing, unless ``read_only``.

        RunDirError: it is missing, cannot be written, or is not a journal. RunDirStuck: it is locked, or the disk is
        full.
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
                old = connection.execute("PRAGMA user_version").fetchone() != (LAYOUT,)
                begun = old and connection.execute(_HAS_TABLE, ("heads",)).fetchone() is not None
            else:
                is_new = connection.execute(_HAS_TABLE, ("entries",)).fetchone() is None
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = NORMAL")
                for table in _TABLES:
                    connection.execute(table)
                for table in _without_digests(connection):
                    connection.execute(f"ALTER TABLE {table} ADD COLUMN digest BLOB")
                if is_new:
                    connection.execute(f"PRAGMA user_version = {LAYOUT}")
            without = _without_digests(connection)
        except sqlite3.Error as error:
            connection.close()
            stuck = isinstance(error, sqlite3.OperationalError) and path.is_file()
            kind = RunDirStuck if stuck else RunDirError
            raise kind(f"is not a journal, or is in use: {error}", source=str(path)) from error
        journal = cls(connection, path, without)
        journal._recall_damage()
        if read_only and old:
            head, last = journal.head() if begun else None, journal.last_moment() if begun else None
            journal.close()
            sentence, allowed = "was written by an older version of Morph", "a run that is resumed with this one"
            if head is not None and last is not None:
                sentence += f", and is condensed up to line {head.sequence} of {last[0]}"
                allowed += ", once its manager has condensed all of it"
            raise RunDirError(sentence, source=str(path), allowed=allowed)
        return journal

    def _recall_damage(self) -> None:
        """Warn of lines that were damaged when they were condensed, and so are left out of what is read."""
        if self._select(_HAS_TABLE, "records"):
            columns = f"sequence, time_s, kind, payload_json, {self._digest['records']}"
            for row in filter(_is_sound, self._select(f"SELECT {columns} FROM records WHERE kind = ?", DAMAGE)):
                _warn(self._path, row[0], json.loads(row[3])["sentence"])

    def append(self, time_s: float, kind: EntryKind, payload_json: str) -> None:
        """Append one line. RunDirStuck: nothing was written, and cannot be now; RunDirError: the file is damaged."""
        self._write([(time_s, kind, payload_json)])

    def append_config(self, time_s: float, config: ControllerConfig) -> None:
        """Append the configuration that begins a run, or resumes one in the same directory."""
        with self._lock:
            self._tell(JournalLine(self._write([(time_s, "config", config.model_dump_json())]), time_s, config))

    def append_fact(self, time_s: float, fact: Fact) -> None:
        """Append a fact that is not an event for the controller."""
        with self._lock:
            self._tell(JournalLine(self._write([(time_s, "fact", fact.model_dump_json())]), time_s, fact))

    def append_decision(self, time_s: float, event: Event, decision: Decision) -> None:
        """Append an event and its decision, both or neither; call it before the actions are carried out."""
        record = DecisionRecord.of(decision)
        saved = None
        rows: list[tuple[float, EntryKind, str]]
        try:
            if self._num_unsaved + 1 >= SNAPSHOT_EVERY:
                saved = state_json(decision.state)
            rows = [(time_s, "event", event.model_dump_json()), (time_s, "decision", record.model_dump_json())]
        except PydanticSerializationError as error:
            if "KeyboardInterrupt" in str(error):  # which pydantic would report as an error of the value
                raise KeyboardInterrupt from error
            raise
        with self._lock:
            self._tell(JournalLine(self._write(rows, saved), time_s, Decided(event, record)))
            self._num_unsaved = 0 if saved is not None else self._num_unsaved + 1
            if self.keeper is not None and self.keeper.num_taken >= SNAPSHOT_EVERY and self.keeper.may_cut:
                try:
                    self._condense(self.keeper.cut(), decision.state)
                except RunDirStuck as error:  # nothing was changed; retried after one of the next decisions
                    log.info("older lines of the journal are condensed later: %s", error)
                except Exception as error:
                    self._leave_out(error)
                else:
                    self.keeper.forget()
                    self._num_unsaved = 0

    def _tell(self, line: JournalLine) -> None:
        if self.keeper is not None:
            try:
                self.keeper.take(line)
            except Exception as error:
                self._leave_out(error)

    def _leave_out(self, error: Exception) -> None:
        """Go on without a keeper that failed with any error: there are more lines than necessary, but none is lost.

        Ending the run would not help: the run could not be resumed, because the next manager would read the same lines.
        """
        log.warning("the run's journal is no longer condensed, and grows: %s: %s", type(error).__name__, error)
        self.keeper = None

    def condense(
        self,
        keeper: Callable[[Journal], Keeper],
        state: ControllerState | None = None,
        tell: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        """Condense all existing lines, a few at a time, and further lines from now on.

        ``keeper``: makes a keeper for this journal, which continues after the condensed part. ``state``: the
        controller's after the last line, if a manager continues from it. ``tell``: called now and then with the last
        condensed line and the last line of all. RunDirStuck if the file cannot be written now.
        """
        try:
            self.keeper = keeper(self)
            self._catch_up(self.keeper, state, tell)
        except RunDirStuck:
            self.keeper = None
            raise
        except Exception as error:
            self._leave_out(error)
        if self._select("PRAGMA user_version") != [(LAYOUT,)]:
            with self._transaction() as connection:
                connection.execute(f"PRAGMA user_version = {LAYOUT}")

    def _catch_up(self, keeper: Keeper, state: ControllerState | None, tell: Callable[[int, int], None]) -> None:
        head, last = self.head(), (self.last_moment() or (0, 0.0))[0]
        if state is not None:
            with self._transaction():
                self._snapshot(last, state_json(state))
        at, reader = 0 if head is None else head.sequence, LineReader()
        sieve = _Sieve(self._path, at, at)
        self._damage = sieve.noted
        while at < last:
            for row in self._select(f"{self._provable} WHERE sequence > ? ORDER BY sequence LIMIT ?", at, AT_ONCE):
                at, entry = row[0], sieve.entry(row)
                line = None if entry is None else reader.line(entry)
                if line is not None:
                    keeper.take(line)
                    if keeper.num_taken >= SNAPSHOT_EVERY and keeper.may_cut:
                        self._condense(keeper.cut())
                        keeper.forget()
            tell(at, last)

    def read(self, after: int = 0) -> tuple[Entry, ...]:
        """Return all lines that ``each`` reads."""
        return tuple(self.each(after))

    def each(self, after: int = 0, until: int | None = None, *, strict: bool = False) -> Iterator[Entry]:
        """Read every line after one sequence number, and up to another, in the order written, as of now.

        Condensed lines of steps at which nothing else happened no longer exist. ``strict``: a damaged line is an error;
        otherwise it is left out, with the rest of its session. RunDirError: the file cannot be read, or a line is
        damaged.
        """
        last = 2**62 if until is None else until
        with self._at_one_moment():
            packs = self._select("SELECT data, digest, first, last FROM kept WHERE last > ? ORDER BY first", after)
            query = f"{self._provable} WHERE sequence > ? AND sequence <= ? ORDER BY sequence"
            entries = self._one_by_one(query, after, last, strict=strict)
        kept = (entry for data, digest, *at in packs for entry in unpacked_lines(data, digest, str(self._path), *at))
        return heapq.merge(
            (line for line in kept if after < line.sequence <= last), entries, key=lambda entry: entry.sequence
        )

    def tail(self, after: int = 0, kinds: Sequence[str] = (), *, rows: bool = False, most: int = -1) -> Tail:
        """Return the content after a line: first the condensed part, then line by line; RunDirError if unreadable.

        ``kinds``, ``rows``: the records, and the rows of the columns, to return. ``most``: the largest number of
        uncondensed lines to return; these are the first ones.
        """
        query = f"{self._provable} WHERE sequence > ? ORDER BY sequence LIMIT ?"
        with self._at_one_moment():
            head = self.head()
            if head is None or head.sequence <= after:
                return Tail(None, (), range(0), self._one_by_one(query, after, most))
            records = self._records(f"kind IN ({_marks(kinds)}) AND sequence > ?", *kinds, after)
            first, num = 0, 0
            if rows:
                sequences = self.column(SEQUENCE)
                first, num = int(np.searchsorted(sequences, after, side="right")), len(sequences)
            return Tail(head, records, range(first, num), self._one_by_one(query, head.sequence, most))

    def head(self) -> Head | None:
        """Return the newest cut; None: nothing is condensed."""
        rows = self._select("SELECT sequence, time_s, data, digest FROM heads")
        if not rows:
            return None
        sequence, time_s, data, digest = rows[0]
        states = json.loads(proven(data, digest, str(self._path), sequence, time_s))
        return Head(sequence, time_s, states, states.pop("version", None))

    def records(self, kind: str) -> list[Kept]:
        """Return all records of one kind."""
        return self._records("kind = ?", kind)

    def _records(self, where: str, *values: int | str) -> list[Kept]:
        """Return records in their order; RunDirError if one of them is damaged."""
        columns = f"sequence, time_s, kind, payload_json, {self._digest['records']}"
        rows = self._select(f"SELECT {columns} FROM records WHERE {where} ORDER BY sequence, rowid", *values)
        if not all(map(_is_sound, rows)):
            raise RunDirError("is damaged: a part of it differs from what was written", source=str(self._path))
        return [Kept(*row[:-1]) for row in rows]

    def column_names(self) -> list[str]:
        """Return the names of the columns of decided steps."""
        return [name for (name,) in self._select("SELECT DISTINCT name FROM steps")]

    def column(self, name: str, rows: range | None = None, level: int | None = None) -> Column:
        """Return one column of all condensed steps, of those in some rows, or of those at one level."""
        levels = tuple(range(len(NUM_AT_LEVEL) + 1)) if level is None else (level,)
        where = f"WHERE level IN ({_marks(levels)}) AND name = ?"
        with self._at_one_moment():
            blocks = self._select(f"SELECT first, num FROM steps {where} ORDER BY first", *levels, SEQUENCE)
            ends = list(accumulate((num for _, num in blocks), initial=0))
            wanted = range(ends[-1]) if rows is None else range(rows.start, min(rows.stop, ends[-1]))
            column = absent(name, max(0, len(wanted)))
            needed = {
                first: begin - wanted.start
                for (first, num), begin in zip(blocks, ends, strict=False)
                if begin < wanted.stop and begin + num > wanted.start
            }
            if not needed:
                return column
            columns = "first, num, data, digest"
            between = f"{where} AND first BETWEEN {min(needed)} AND {max(needed)}"
            for first, num, data, digest in self._rows(f"SELECT {columns} FROM steps {between}", *levels, name):
                values, at = unpacked(data, digest, name, str(self._path), first, num), needed.get(first, 0)
                values = values[max(0, -at) : len(column) - at]
                column[max(0, at) : max(0, at) + len(values)] = values
            return column

    def first_line(self) -> Entry | None:
        """Return the oldest line, which is never condensed."""
        entries = self._entries(f"{self._provable} ORDER BY sequence LIMIT 1")
        return entries[0] if entries else None

    def last_config(self, before: int | None = None) -> Entry | None:
        """Return the line that began the last session; ``before``: the session that contains this line."""
        where = "kind = 'config'" + ("" if before is None else f" AND sequence <= {before}")
        return next(iter(self._entries(f"{self._provable} WHERE {where} ORDER BY sequence DESC")), None)

    def facts(self, after: int) -> tuple[Entry, ...]:
        """Return the facts after a line."""
        return self._entries(f"{self._provable} WHERE kind = 'fact' AND sequence > ? ORDER BY sequence", after)

    def last_moment(self) -> tuple[int, float] | None:
        """Return the number of the newest line, and when it was written."""
        with self._at_one_moment():
            moments = self._select("SELECT sequence, time_s FROM entries ORDER BY sequence DESC LIMIT 1")
            moments += self._select("SELECT sequence, time_s FROM heads")
            return max(moments, default=None)

    def snapshot(self) -> tuple[int, str] | None:
        """Return the newest snapshot, without its configuration: the line before it, and the state as JSON."""
        columns = f"sequence, state_json, {self._digest['snapshots']}"
        rows = self._select(f"SELECT {columns} FROM snapshots ORDER BY sequence DESC LIMIT 1")
        if rows and not _is_sound(rows[0]):
            raise RunDirError("is damaged: its snapshot differs from what was written", source=str(self._path))
        return (int(rows[0][0]), str(rows[0][1])) if rows else None

    @contextmanager
    def _at_one_moment(self) -> Iterator[None]:
        """Let all reads in the context see the file as of one moment."""
        with self._lock:
            begins = not self._connection.in_transaction
            if begins:
                self._select("BEGIN")
            try:
                yield
            finally:
                if begins and self._connection.in_transaction:
                    self._select("COMMIT")

    def _rows(self, query: str, *values: int | str) -> Iterator[Any]:
        """Yield rows one after another, because together they may be large."""
        try:
            with self._lock:
                yield from self._connection.execute(query, values)
        except sqlite3.Error as error:
            raise RunDirError(f"the journal cannot be read: {error}", source=str(self._path)) from error

    def _one_by_one(self, query: str, after: int, *values: int, strict: bool = False) -> Iterator[Entry]:
        """Return lines without loading all at once, as of this call: SQLite keeps that state for the reader."""
        try:
            with self._lock:
                heads = self._connection.execute("SELECT max(sequence) FROM heads").fetchone()[0] or 0
                cursor = self._connection.execute(query, (after, *values))
                first = cursor.fetchone()
        except sqlite3.Error as error:
            raise RunDirError(f"the journal cannot be read: {error}", source=str(self._path)) from error
        return self._fetched(cursor, first, _Sieve(self._path, heads, after, strict=strict))

    def _fetched(self, cursor: sqlite3.Cursor, row: Any, sieve: _Sieve) -> Iterator[Entry]:
        try:
            while row is not None:
                if (entry := sieve.entry(row)) is not None:
                    yield entry
                with self._lock:
                    row = cursor.fetchone()
        except sqlite3.Error as error:
            raise RunDirError(f"the journal cannot be read: {error}", source=str(self._path)) from error

    def _entries(self, query: str, *values: int) -> tuple[Entry, ...]:
        """Return the sound ones of some lines that do not follow one another."""
        sieve = _Sieve(self._path, 2**62, 0)
        return tuple(entry for row in self._select(query, *values) if (entry := sieve.entry(row)) is not None)

    def _select(self, query: str, *values: int | str) -> list[Any]:
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

    def _write(self, rows: list[tuple[float, EntryKind, str]], saved: str | None = None) -> int:
        """Append lines, and a snapshot of the state after them; returns the number of the last line."""
        with self._transaction() as connection:
            sequence = int((connection.execute(_LAST).fetchone() or (0,))[0])
            for sequence, (time_s, kind, payload) in enumerate(rows, sequence + 1):  # noqa: B020
                row = (sequence, float(time_s), kind, payload)
                connection.execute(_INSERT, (*row, row_digest(*row)))
            if saved is not None:
                self._snapshot(sequence, saved)
            return sequence

    def _snapshot(self, sequence: int, saved: str) -> None:
        self._connection.execute("DELETE FROM snapshots")
        snapshot = (sequence, saved, row_digest(sequence, saved))
        self._connection.execute("INSERT INTO snapshots (sequence, state_json, digest) VALUES (?, ?, ?)", snapshot)

    def _condense(self, cut: Cut, state: ControllerState | None = None) -> None:
        """Replace the lines up to a cut by their condensed form, and store ``state``; RunDirStuck: all is unchanged."""
        head = json.dumps({**cut.states, "version": VERSION}).encode()
        saved = None if state is None else state_json(state)
        decided = "sequence <= ? AND kind IN ('event', 'decision')"
        damage = [
            Kept(sequence, cut.time_s, DAMAGE, json.dumps({"sentence": sentence}))
            for sequence, sentence in self._damage.items()
            if sequence <= cut.sequence
        ]
        with self._transaction() as connection:
            rows = connection.execute(f"{_COLUMNS} WHERE {decided} ORDER BY sequence", (cut.sequence,)).fetchall()
            kept = [row for row in rows if row[0] in cut.kept]
            if kept:
                pack = (kept[0][0], kept[-1][0], packed_lines(kept))
                connection.execute("INSERT INTO kept VALUES (?, ?, ?, ?)", (*pack, row_digest(*pack)))
            connection.execute(f"DELETE FROM entries WHERE {decided}", (cut.sequence,))
            for record in (*cut.records, *damage):
                values = (record[0], float(record[1]), *record[2:])
                insert = "INSERT INTO records (sequence, time_s, kind, payload_json, digest) VALUES (?, ?, ?, ?, ?)"
                connection.execute(insert, (*values, row_digest(*values)))
            connection.execute("DELETE FROM heads")
            place = (cut.sequence, float(cut.time_s))
            connection.execute("INSERT INTO heads VALUES (?, ?, ?, ?)", (*place, head, row_digest(*place, head)))
            if saved is not None:
                self._snapshot(cut.sequence, saved)
            if len(cut.columns[SEQUENCE]):
                self._put_block(0, cut.columns)
                self._join_blocks()
        for record in damage:
            del self._damage[record.sequence]

    def _put_block(self, level: int, columns: Mapping[str, Column]) -> None:
        first, num = int(columns[SEQUENCE][0]), len(columns[SEQUENCE])
        for name, values in columns.items():
            data = packed(values, name)
            block = (level, name, first, num, data, row_digest(name, first, num, data))
            self._connection.execute("INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?)", block)

    def _join_blocks(self) -> None:
        for level, num_steps in enumerate(NUM_AT_LEVEL):
            query = "SELECT name, sum(num) FROM steps WHERE level = ? GROUP BY name"
            counts = dict(self._connection.execute(query, (level,)).fetchall())
            if counts.get(SEQUENCE, 0) < num_steps:
                return
            try:
                columns = {name: self.column(name, level=level) for name in counts}
            except RunDirError as error:  # readers report it; the run goes on, and the blocks stay as they are
                log.warning("decided steps in the journal stay in small blocks: %s", error)
                self._connection.execute("UPDATE steps SET level = ? WHERE level = ?", (level + 1, level))
            else:
                self._connection.execute("DELETE FROM steps WHERE level = ?", (level,))
                self._put_block(level + 1, columns)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                try:
                    yield self._connection
                    self._connection.execute("COMMIT")
                except BaseException:
                    if self._connection.in_transaction:  # a full disk ends some transactions
                        self._connection.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                kind = RunDirStuck if isinstance(error, sqlite3.OperationalError) else RunDirError
                raise kind(f"the journal cannot be written: {error}", source=str(self._path)) from error
