"""A damaged journal changes no figure silently, is called damaged, and does not keep its run from continuing."""

from __future__ import annotations

import logging
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from simulated_cluster import Faults, JournalledCluster

from manager.journal import journal as journal_module
from manager.journal.journal import Journal
from manager.journal.replay import replay
from manager.report.condenser import Condenser
from manager.report.events import Told
from manager.report.fold import FoldReader
from manager.report.journal_reader import read_report
from manager.report.values import RunReport
from manager.run_dir import JOURNAL
from morph.contract.errors import RunDirError

SEED, NUM_DAMAGES = 5, 40


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of a run, of whose journal a part is condensed."""
    monkeypatch.setattr(journal_module, "SNAPSHOT_EVERY", 60)
    (tmp_path / "run").mkdir()
    cluster = JournalledCluster(0, tmp_path / "run", Faults(deaths_after_s=((8.0, 20),), joins_after_s=(9.0, 9.1)))
    with cluster.journal as journal:
        journal.condense(Condenser)
        cluster.run(6)
    with closing(sqlite3.connect(tmp_path / "run" / JOURNAL)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    return tmp_path / "run"


def answers(run: Path) -> tuple[RunReport, list[object]]:
    with Journal.open(run / JOURNAL, read_only=True) as journal:
        return read_report(run), [*FoldReader(Told).new(journal)]


def test_no_random_damage_changes_a_figure_silently_or_ends_in_a_raw_error(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, chance = answers(run), random.Random(SEED)
    data = (run / JOURNAL).read_bytes()
    used = [at for at, byte in enumerate(data) if byte]
    seen = {"same": 0, "told": 0, "refused": 0}
    for number in range(NUM_DAMAGES):
        damaged = bytearray(data)
        at, bit = chance.choice(used), chance.randrange(8)
        damaged[at] ^= 1 << bit
        copy = tmp_path / f"damaged{number}"
        shutil.copytree(run, copy)
        (copy / JOURNAL).write_bytes(damaged)
        caplog.clear()
        try:
            is_same = answers(copy) == whole  # which reads all columns
        except RunDirError:
            seen["refused"] += 1
            continue
        said = any("of the journal is " in record.getMessage() for record in caplog.records)
        assert said or is_same, f"seed {SEED}, damage {number}: bit {bit} of byte {at}"
        seen["told" if said else "same"] += 1
    assert all(seen.values()), seen


def damaged_line(run: Path, change: Callable[[str], str]) -> int:
    """Change one of the newest lines, as a disk may; return its number."""
    with closing(sqlite3.connect(run / JOURNAL, isolation_level=None)) as connection:
        newest = "(SELECT max(sequence) FROM entries)"
        query = f"SELECT max(sequence) FROM entries WHERE kind = 'event' AND sequence < {newest} - 8"
        (sequence,) = connection.execute(query).fetchone()
        (text,) = connection.execute("SELECT payload_json FROM entries WHERE sequence = ?", (sequence,)).fetchone()
        if change(text):
            connection.execute("UPDATE entries SET payload_json = ? WHERE sequence = ?", (change(text), sequence))
        else:
            connection.execute("DELETE FROM entries WHERE sequence = ?", (sequence,))
        return int(sequence)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda text: text.replace("kind", "kinf", 1), "is damaged"),
        (lambda text: text[:-2], "is damaged"),
        (lambda _: "", "is missing"),
    ],
    ids=["a bit", "cut off", "gone"],
)
def test_readers_answer_up_to_a_damaged_line_and_its_run_goes_on(
    run: Path, change: Callable[[str], str], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole, _ = answers(run)
    sequence = damaged_line(run, change)
    before, events = answers(run)
    assert f"line {sequence} of the journal {what}, and left out with what follows it" in caplog.text
    assert "version of Morph" not in caplog.text
    assert 0 < before.version <= whole.version
    assert before.losses.items() <= whole.losses.items()
    assert events
    with Journal.open(run / JOURNAL) as journal:
        with pytest.raises(RunDirError, match=f"line {sequence} of the journal {what}"):
            replay(journal)  # so a take-over gives up, and the run goes on from its newest checkpoint
        entry = journal.last_config()
        assert entry is not None
        caplog.set_level(logging.WARNING)
        journal.condense(Condenser)
        journal.append(entry.time_s + 1e6, "config", entry.payload_json)
        new = journal.read(journal.head().sequence if journal.head() else 0)
    assert [one.time_s for one in new if one.kind == "config"][-1] == entry.time_s + 1e6, "the next session is read"


def test_readers_mention_damage_that_was_condensed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sequence = damaged_line(run, lambda text: text[:-2])
    (tmp_path / "later").mkdir()
    cluster = JournalledCluster(0, tmp_path / "later", Faults())
    with cluster.journal as later, Journal.open(run / JOURNAL) as journal:
        cluster.run(6)
        begun = journal.last_moment()
        assert begun is not None
        for line in later.read():
            journal.append(begun[1] + line.time_s, line.kind, line.payload_json)
        journal.condense(Condenser)
    said = f"line {sequence} of the journal is damaged, and left out with what follows it"
    for _ in range(2):  # each time as another process, which has not said it
        monkeypatch.setattr(journal_module, "_told", set())
        caplog.clear()
        report, events = answers(run)
        assert report.steps
        assert events
        assert [record.getMessage().count(said) for record in caplog.records] == [1]
    with closing(sqlite3.connect(run / JOURNAL)) as connection:
        lines = connection.execute("SELECT count(*) FROM entries WHERE sequence = ?", (sequence,)).fetchone()
    assert lines == (0,), "it was not condensed"


def test_a_journal_without_digests_is_read_and_gets_them_with_its_next_line(run: Path) -> None:
    whole = answers(run)
    with closing(sqlite3.connect(run / JOURNAL, isolation_level=None)) as connection:
        for table in ("entries", "records", "snapshots"):
            connection.execute(f"ALTER TABLE {table} DROP COLUMN digest")
    assert answers(run) == whole
    with Journal.open(run / JOURNAL) as journal:
        journal.append(1e6, "fact", '{"name": "new"}')
        replay(journal)
        assert journal._select("SELECT count(digest) FROM entries") == [(1,)]
    assert answers(run)[0].version == whole[0].version
