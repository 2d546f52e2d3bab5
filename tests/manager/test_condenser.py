"""A condensed journal gives every reader the same results as the full one, and does not grow with each step."""

from __future__ import annotations

import itertools
import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import cast, get_args, get_type_hints

import pytest
from pydantic import BaseModel
from random_history import random_faults
from simulated_cluster import Faults, JournalledCluster, SimulatedCluster

from benchmarks.journal import Writer, one_worker
from manager.accounting.account import Account
from manager.accounting.ledger import Ledger
from manager.accounting.spent import Prices
from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import Event
from manager.controller.state.state import ControllerState, Decision
from manager.journal import journal as journal_module
from manager.journal.condensed import VERSION, Cut, digest_of
from manager.journal.journal import Journal
from manager.journal.records import Fact
from manager.journal.replay import replay
from manager.report import condenser as condenser_module
from manager.report.condenser import Condenser, condense_all
from manager.report.events import Told
from manager.report.fold import Fold, FoldReader
from manager.report.journal_reader import lives_in, read_ledger, read_report
from manager.report.morph_trace import morph_trace
from manager.report.steps import Step
from manager.run_dir import JOURNAL
from manager.trackers.reading import HappeningsReader
from morph.contract.errors import RunDirError, RunDirStuck
from tests.grids import IS_LONG

SEEDS = [seed for seed in range(2, 60) if seed != 11]
"""Chosen by hand; in the history of 11 the clock is set back between two changes of shape."""
PRICES = Prices(paid_usd_per_h=3.6)
LOSES_ALL = Faults(
    deaths_after_s=((8.0, 20), (30.0, 1)), joins_after_s=(9.0, 9.1, 9.2, 9.3), quiet_after_s=45.0, doubled=0.1
)


class Both(JournalledCluster):
    """Writes each line into two journals, of which one is condensed and opened anew every ``reopens`` lines."""

    def __init__(self, seed: int, run_dir: Path, faults: Faults, reopens: int = 0, **fields: object) -> None:
        (run_dir / "plain").mkdir()
        super().__init__(seed, run_dir / "plain", faults, **fields)
        self.path, self.reopens, self.num_lines = run_dir / JOURNAL, reopens, 0
        self.open_anew()
        self.short.append_config(self.now_s, self.state.config)
        plain = self.journal
        append_decision, append_fact, append_config = plain.append_decision, plain.append_fact, plain.append_config

        def both_decisions(time_s: float, event: Event, decision: Decision) -> None:
            append_decision(time_s, event, decision)
            self.next_line().append_decision(time_s, event, decision)

        def both_facts(time_s: float, fact: Fact) -> None:
            append_fact(time_s, fact)
            self.next_line().append_fact(time_s, fact)

        def both_configs(time_s: float, config: ControllerConfig) -> None:
            append_config(time_s, config)
            self.next_line().append_config(time_s, config)

        plain.append_decision = both_decisions  # type: ignore[method-assign]
        plain.append_config = both_configs  # type: ignore[method-assign]
        plain.append_fact = both_facts  # type: ignore[method-assign]

    def open_anew(self) -> None:
        """Open the journal anew, as another manager does."""
        self.short = Journal.open(self.path)
        self.short.condense(Condenser, replay(self.short) if self.short.last_config() else None)

    def next_line(self) -> Journal:
        self.num_lines += 1
        if self.reopens and self.num_lines % self.reopens == 0:
            self.short.close()
            self.open_anew()
        return self.short

    def close(self) -> None:
        assert self.short.keeper is not None, "it failed, and was left out"
        self.journal.close()
        self.short.close()


def told(path: Path, *, state: bool = True) -> dict[str, object]:
    """Return the result of each reader of a journal; with ``state``, including the controller's state."""
    with Journal.open(path / JOURNAL, read_only=True) as journal:
        happenings = HappeningsReader("mem://checkpoints", PRICES)
        report = read_report(path)
        return {
            "report": report.model_dump(),
            "ledger": read_ledger(path),
            "lives": lives_in(journal),
            "events": events_in(journal, FoldReader(Told)),
            "happenings": [one for _, found in happenings.new(journal, 7) for one in found],
            "morphs": [morph_trace(journal.read(), morph) for morph in report.morphs if morph.resumed_at_s],
            "state": replay(journal) if state else None,
            "moment": journal.last_moment(),
            "first": journal.first_line(),
        }


def events_in(journal: Journal, follower: FoldReader) -> list[Told]:
    found = [one.record for _, noted in follower.new(journal) for one in noted]
    return [one for one in found if isinstance(one, Told) and not one.routine]


def rows_of(path: Path) -> list[str]:
    """Return all that another process reads in a journal."""
    with closing(sqlite3.connect(path)) as file:
        return list(file.iterdump())


def check_alike(path: Path) -> None:
    short, plain = told(path), told(path / "plain")
    for name, found in plain.items():
        assert short[name] == found, name


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "NUM_AT_LEVEL", (6, 18))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("every", [3, 40])
def test_a_condensed_journal_gives_every_reader_the_same_result(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SNAPSHOT_EVERY", every)
    cluster = Both(0, tmp_path, LOSES_ALL, expected_nodes=6, num_steps=60)
    cluster.run(6)
    cluster.close()
    report = read_report(tmp_path)
    assert report.steps_redone == sum(record.redone_later for record in report.steps) > 0
    assert report.morphs
    assert report.evaluations
    check_alike(tmp_path)
    with Journal.open(tmp_path / JOURNAL, read_only=True) as journal:
        last = journal.last_moment()
        assert journal.head() is not None
        assert len(journal.read()) < 0.6 * last[0]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("seed", [0, 1, 11, *(pytest.param(seed, marks=pytest.mark.long) for seed in SEEDS)])
def test_readers_agree_whichever_managers_continued_the_journal(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Now and then another manager continues the journal, with its state replayed from the last snapshot."""
    monkeypatch.setattr(journal_module, "SNAPSHOT_EVERY", 11 + seed)
    faults, num_nodes, _ = random_faults(seed)
    cluster = Both(seed, tmp_path, faults, reopens=17)
    cluster.run(num_nodes)
    assert replay(cluster.short) == cluster.state
    cluster.close()
    check_alike(tmp_path)


@pytest.mark.usefixtures("small_blocks")
def test_a_follower_of_a_journal_misses_and_repeats_nothing_while_condensing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SNAPSHOT_EVERY", 10)
    found: list[list[object]] = [[], []]
    happenings, events = HappeningsReader("mem://checkpoints", PRICES), FoldReader(Told)

    def follow(cluster: SimulatedCluster, *_: object) -> None:
        assert isinstance(cluster, Both)
        if cluster.num_lines % 7 == 0:
            take(cluster.short)

    def take(journal: Journal) -> None:
        found[0] += [one for _, of_line in happenings.new(journal, 3) for one in of_line]
        found[1] += events_in(journal, events)

    cluster = Both(0, tmp_path, LOSES_ALL, expected_nodes=6, num_steps=40)
    cluster.observers = (*cluster.observers, follow)
    cluster.run(6)
    take(cluster.short)
    cluster.close()
    plain = told(tmp_path / "plain")
    assert found == [plain["happenings"], plain["events"]]


def test_a_kill_while_condensing_leaves_the_journal_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manager is killed, or the file is full, at statements of the transaction; readers always see the same."""
    cluster = Both(0, tmp_path, LOSES_ALL, expected_nodes=6, num_steps=20)
    cluster.run(6)
    expected, keeper, num = rows_of(cluster.path), cluster.short.keeper, 0
    assert isinstance(keeper, Condenser)
    monkeypatch.setattr(journal_module, "NUM_AT_LEVEL", (6, 18))
    real, whole = cluster.short._connection, cluster.short.last_moment()

    class Ends:
        """A connection that ends the process, or finds the disk full, at a given statement."""

        def __init__(self, end: int, error: BaseException) -> None:
            self.left, self.error = end, error

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def _counted(self, statement: str, *values: object) -> object:
            self.left -= not statement.startswith(("SELECT", "ROLLBACK"))
            if self.left < 0 and not statement.startswith("ROLLBACK"):
                raise self.error
            return real.execute(statement, *values)

        execute = _counted

    for num in itertools.count(0, 1 if IS_LONG else 7):  # odd: both errors come in turn
        error = sqlite3.OperationalError("database or disk is full") if num % 2 else SystemExit("killed")
        cluster.short._connection = Ends(num, error)  # type: ignore[assignment]
        try:
            cluster.short._condense(keeper.cut(), cluster.state)
        except (SystemExit, RunDirStuck):
            cluster.short._connection = real
            assert rows_of(cluster.path) == expected, f"after {num} statements"
            assert cluster.short.head() is None
        else:
            break
    cluster.short._connection = real
    assert num > 10
    assert cluster.short.last_moment() == whole
    cluster.close()
    check_alike(tmp_path)


def test_a_full_disk_puts_condensing_off_and_never_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SNAPSHOT_EVERY", 10)
    real, refused = Journal._condense, []

    def full(journal: Journal, cut: Cut, state: ControllerState) -> None:
        if len(refused) < 5:
            refused.append(cut)
            raise RunDirStuck("the journal cannot be written: database or disk is full")
        real(journal, cut, state)

    monkeypatch.setattr(Journal, "_condense", full)
    cluster = Both(0, tmp_path, LOSES_ALL, expected_nodes=6, num_steps=20)
    cluster.run(6)
    cluster.close()
    assert len(refused) == 5
    check_alike(tmp_path)


@pytest.mark.parametrize(("table", "column"), [("steps", "data"), ("kept", "data"), ("heads", "data")])
def test_condensed_blocks_are_read_as_written_or_refused(
    table: str, column: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SNAPSHOT_EVERY", 10)
    cluster = Both(0, tmp_path, LOSES_ALL, expected_nodes=6, num_steps=20)
    cluster.run(6)
    cluster.close()
    with sqlite3.connect(tmp_path / JOURNAL) as file:
        (data,) = file.execute(f"SELECT {column} FROM {table} LIMIT 1").fetchone()
        file.execute(f"UPDATE {table} SET {column} = ?", (bytes([data[0] ^ 1]) + data[1:],))
    with pytest.raises(RunDirError, match=r"journal\.sqlite: is damaged"):
        told(tmp_path)


def test_damaged_steps_in_the_journal_do_not_end_a_continued_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SNAPSHOT_EVERY", 20)
    monkeypatch.setattr(journal_module, "NUM_AT_LEVEL", (60, 600))
    with Journal.open(tmp_path / JOURNAL) as journal:
        journal.condense(Condenser)
        writer = Writer(journal, one_worker(1000), itertools.count(), 0.0)
        writer.until(50)
        journal._connection.execute("UPDATE steps SET digest = x'00' WHERE name = 'loss'")
        writer.until(200)
        assert journal.column("step").tolist() == list(range(len(journal.column("step"))))
        with pytest.raises(RunDirError, match="is damaged"):
            journal.column("loss")


def test_a_keeper_that_fails_is_left_out_and_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Cut:
        raise ValueError("a line of another version")

    monkeypatch.setattr(journal_module, "SNAPSHOT_EVERY", 20)
    monkeypatch.setattr(Condenser, "cut", fail)
    with Journal.open(tmp_path / JOURNAL) as journal:
        journal.condense(Condenser)
        Writer(journal, one_worker(1000), itertools.count(), 0.0).until(50)
        assert (journal.keeper, journal.head()) == (None, None)
        monkeypatch.setattr(Condenser, "__init__", fail)
        journal.condense(Condenser)
        assert journal.keeper is None
    assert len(read_report(tmp_path).steps) >= 49


def test_a_journal_of_an_older_version_is_read_once_its_run_is_resumed(tmp_path: Path) -> None:
    cluster = JournalledCluster(0, tmp_path, Faults())
    cluster.run(3)
    cluster.journal._connection.execute("PRAGMA user_version = 0")
    cluster.journal.close()
    with pytest.raises(RunDirError, match="was written by an older version of Morph"):
        read_report(tmp_path)
    with Journal.open(tmp_path / JOURNAL) as journal:
        journal.condense(Condenser)
    assert read_report(tmp_path).outcome == "finished"


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("goes_on", [False, True])
def test_many_uncondensed_lines_are_condensed_a_few_at_a_time(
    goes_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SNAPSHOT_EVERY", 10)
    monkeypatch.setattr(journal_module, "AT_ONCE", 7)
    (tmp_path / "plain").mkdir()
    cluster = JournalledCluster(0, tmp_path / "plain", LOSES_ALL, expected_nodes=6, num_steps=40)
    cluster.run(6)
    cluster.journal.close()
    shutil.copy(tmp_path / "plain" / JOURNAL, tmp_path / JOURNAL)
    with sqlite3.connect(tmp_path / JOURNAL) as file:
        file.execute("PRAGMA user_version = 1")
    held, said, largest = [], [], Condenser.cut

    def cut(keeper: Condenser) -> Cut:
        held.append(len([one for one in keeper.noted if isinstance(one.record, Step)]))
        return largest(keeper)

    def tell(line: int, last: int) -> None:
        said.append((line, last))
        with pytest.raises(RunDirError, match=f"is condensed up to line [0-9]+ of {last}" if held else "older version"):
            read_report(tmp_path)

    monkeypatch.setattr(Condenser, "cut", cut)
    with Journal.open(tmp_path / JOURNAL) as journal:
        journal.condense(Condenser, cluster.state if goes_on else None, tell)
        last = journal.last_moment()
        assert last is not None
        assert replay(journal) == cluster.state if goes_on else journal.snapshot() is not None
    assert [line for line, _ in said] == [*range(7, last[0], 7), last[0]]
    assert len(held) > 5
    assert max(held) < 40
    found, plain = told(tmp_path, state=goes_on), told(tmp_path / "plain", state=goes_on)
    assert found == plain
    with Journal.open(tmp_path / JOURNAL, read_only=True) as journal:
        assert len(tuple(journal.tail().entries)) < 60


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 60))])
@pytest.mark.parametrize("version", [None, 0])
def test_blocks_condensed_by_another_version_are_folded_anew(
    version: int | None, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of another version comes after every few lines; what an older state holds is never read."""
    monkeypatch.setattr(journal_module, "SNAPSHOT_EVERY", 11 + seed)
    open_anew = Both.open_anew

    def upgraded(cluster: Both) -> None:
        forget_states(cluster.path, version)
        open_anew(cluster)

    monkeypatch.setattr(Both, "open_anew", upgraded)
    faults, num_nodes, _ = random_faults(seed)
    cluster = Both(seed, tmp_path, faults, reopens=17)
    cluster.run(num_nodes)
    cluster.close()
    forget_states(tmp_path / JOURNAL, version)
    short, plain = told(tmp_path), told(tmp_path / "plain")
    for name in ("lives", "state", "moment", "events"):
        assert short[name] == plain[name], name
    assert settled_of(short["report"]) == settled_of(plain["report"])
    accounts = [cast(Ledger, one["ledger"]).account() for one in (short, plain)]
    assert accounts[0].total == accounts[1].total
    assert sum(accounts[0].parts_ns.values()) == accounts[0].total_ns


def settled_of(report: object) -> dict[str, object]:
    """Return all results except what was under way where the journal was condensed, and the nodes' times."""
    assert isinstance(report, dict)
    kept = {name: value for name, value in report.items() if name not in ("correction", "next_save", "account")}
    return kept | {"steps": [step | {"loss_scale": None} for step in kept["steps"]]}


def forget_states(path: Path, version: int | None) -> None:
    """Replace readers' stored progress as if another version had written it, which this version does not read."""
    with closing(sqlite3.connect(path)) as file, file:
        for (data,) in file.execute("SELECT data FROM heads").fetchall() if has_heads(file) else ():
            states = {"fold": "?", "account": json.loads(data)["account"]}
            changed = json.dumps(states if version is None else states | {"version": version}).encode()
            file.execute("UPDATE heads SET data = ?, digest = ?", (changed, digest_of(changed)))


def has_heads(file: sqlite3.Connection) -> bool:
    return file.execute("SELECT 1 FROM sqlite_master WHERE name = 'heads'").fetchone() is not None


def test_states_have_the_fields_of_their_version() -> None:
    """If this fails, raise ``VERSION`` in manager/journal/condensed.py, and add the new digest here."""
    assert (VERSION, digest_of(json.dumps(fields_of()).encode()).hex()) == (5, "31aa9712263001c63551d8f8462e7b34")


def fields_of() -> dict[str, list[str]]:
    """Return the fields and types of all classes in which readers keep their progress."""
    left: list[object] = [Fold, Account]
    found: dict[str, list[str]] = {}
    while left:
        kind = left.pop()
        left += get_args(kind)
        of_shape = isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, BaseModel))
        if isinstance(kind, type) and of_shape and kind is not ControllerConfig and kind.__name__ not in found:
            names = kind.model_fields if issubclass(kind, BaseModel) else [one.name for one in fields(kind)]
            types = get_type_hints(kind)
            found[kind.__name__] = [f"{name}: {types[name]}" for name in sorted(names)]
            left += [types[name] for name in names]
    return dict(sorted(found.items()))


def test_progress_of_condensing_a_long_journal_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "AT_ONCE", 7)
    monkeypatch.setattr(condenser_module, "LONG", 20)
    JournalledCluster(0, tmp_path, Faults()).run(3)
    said: list[str] = []
    condense_all(tmp_path / JOURNAL, said.append)
    assert 1 < len(said) < 10
    assert said[0].startswith("the run's journal is being condensed, once: ")


def test_lines_of_another_version_are_refused_in_a_sentence(tmp_path: Path) -> None:
    cluster = JournalledCluster(0, tmp_path, Faults())
    cluster.run(3)
    cluster.journal._connection.execute("UPDATE entries SET payload_json = '{}', digest = NULL WHERE sequence = 5")
    cluster.journal.close()
    with pytest.raises(
        RunDirError, match="line 5 of the journal cannot be read: it was written by another version of Morph, or"
    ):
        read_report(tmp_path)


def test_neither_readers_nor_blocks_grow_with_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SNAPSHOT_EVERY", 20)
    monkeypatch.setattr(journal_module, "NUM_AT_LEVEL", (16, 64))
    with Journal.open(tmp_path / JOURNAL) as journal:
        journal.condense(Condenser)
        writer, sizes = Writer(journal, one_worker(1000), itertools.count(), 0.0), []
        for version in (200, 400, 600):
            writer.until(version)
            head = journal.head()
            assert head is not None
            (num_lines,) = journal._connection.execute("SELECT count(*) FROM entries").fetchone()
            blocks = journal._connection.execute("SELECT count(*) FROM steps WHERE name = 'step'").fetchone()[0]
            sizes.append((len(head.states["fold"]), num_lines, blocks))
        assert max(size for size, _, _ in sizes) < 1.2 * sizes[0][0]
        assert max(num for _, num, _ in sizes) < 80
        assert max(num for _, _, num in sizes) <= 600 // 64 + 4 + 16
        assert len(journal.column("step")) > 500
