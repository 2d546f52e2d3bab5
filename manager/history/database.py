"""The user's history of VMs: one SQLite file for all runs, which several managers may write at once."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import ValidationError

from manager.report.lives import Life
from morph.contract.errors import InputError
from morph.user_cache import data_folder

FILE_NAME = "history.sqlite"
SCHEMA = 1
BUSY_S = 2.0
MOST_LIVES = 50_000
"""The largest number of VMs, about 25 MB; beyond it, VMs that ended longest ago are removed."""
KIND = ("provider", "size", "region", "zone")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS lives (
    run TEXT NOT NULL,
    vm TEXT NOT NULL,
    begun_s REAL NOT NULL,
    ended_s REAL NOT NULL,
    provider TEXT NOT NULL,
    size TEXT NOT NULL,
    region TEXT NOT NULL,
    zone TEXT NOT NULL,
    life_json TEXT NOT NULL,
    PRIMARY KEY (run, vm, begun_s)
) WITHOUT ROWID
"""
_TRIM = """
DELETE FROM lives WHERE (run, vm, begun_s) IN (
    SELECT run, vm, begun_s FROM lives ORDER BY ended_s DESC LIMIT -1 OFFSET ?
)
"""


class HistoryError(InputError):
    """The history cannot be used: it is locked, damaged, read-only or of a newer Morph, or its disk is full."""


def history_path() -> Path:
    """Return the path of this user's history, which need not exist."""
    return data_folder() / FILE_NAME


def keep_lives(path: Path, run: str, lives: Sequence[Life]) -> None:
    """Store the lives of a run's VMs in one transaction, replacing earlier entries for the same VMs.

    Waits at most ``BUSY_S`` for another writer. HistoryError if the file cannot be written; it is unchanged.
    """
    rows = [
        (run, life.vm, life.begun_s, life.ended_s, *_kind(life), life.model_dump_json(exclude_defaults=True))
        for life in lives
    ]
    if not rows:
        return
    with _opened(path, "rwc") as connection:
        connection.execute(_SCHEMA)
        connection.execute(f"PRAGMA user_version = {SCHEMA}")
        connection.executemany("INSERT OR REPLACE INTO lives VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        connection.execute(_TRIM, (MOST_LIVES,))


def kept_lives(path: Path, kind: Mapping[str, str]) -> tuple[Life, ...]:
    """Return the lives of a kind, such as ``{"provider": "azure"}``; HistoryError if the file cannot be read."""
    if _is_empty(path):
        return ()
    where, values = _where(kind)
    try:
        with _opened(path, "ro") as connection:
            rows = connection.execute(f"SELECT life_json FROM lives{where} ORDER BY ended_s", values).fetchall()
        return tuple(Life.model_validate_json(row[0]) for row in rows)
    except ValidationError as error:
        raise HistoryError("is damaged: an entry is not a VM", source=str(path)) from error


def forget_lives(path: Path, kind: Mapping[str, str]) -> int:
    """Remove the VMs of a kind, or all if no kind is named; return their number. HistoryError: none was removed."""
    if _is_empty(path):
        return 0
    where, values = _where(kind)
    with _opened(path, "rw") as connection:
        return connection.execute(f"DELETE FROM lives{where}", values).rowcount


@contextmanager
def _opened(path: Path, mode: str) -> Iterator[sqlite3.Connection]:
    """Open a transaction in the file; a writing one holds the lock from its beginning."""
    try:
        if mode == "rwc":
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(FileExistsError):  # an existing file is not opened here: closing it would end our locks on it
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))  # only for its user
        uri = f"{path.absolute().as_uri()}?mode={mode}"
        connection = sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None)
        try:
            connection.execute("BEGIN" if mode == "ro" else "BEGIN IMMEDIATE")
            version = int(connection.execute("PRAGMA user_version").fetchone()[0])
            if version > SCHEMA:
                raise HistoryError(f"was written by a newer Morph (schema {version})", source=str(path))
            yield connection
            connection.execute("COMMIT")
        finally:
            connection.close()  # uncommitted changes are undone
    except sqlite3.Error as error:
        done = "read" if mode == "ro" else "written"
        raise HistoryError(f"cannot be {done}: {error}", source=str(path)) from error
    except OSError as error:
        raise HistoryError(f"cannot be opened: {error.strerror}", source=str(path)) from error


def _is_empty(path: Path) -> bool:
    try:
        return not path.stat().st_size
    except FileNotFoundError:
        return True
    except OSError as error:
        raise HistoryError(f"cannot be read: {error.strerror}", source=str(path)) from error


def _kind(life: Life) -> tuple[str, ...]:
    return tuple(getattr(life.facts, name) for name in KIND)


def _where(kind: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    assert set(kind) <= set(KIND), "no column"
    if not kind:
        return "", ()
    return " WHERE " + " AND ".join(f"{name} = ?" for name in kind), tuple(kind.values())
