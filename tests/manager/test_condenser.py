"""A journal that is condensed tells every reader what the same lines tell uncondensed, and never grows by the step."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from random_history import random_faults
from simulated_cluster import Faults, JournalledCluster
from simulated_job import make_config

from manager.accounting.spent import Prices
from manager.controller.state.state import ControllerState, initial_state
from manager.history.lives import lives_in
from manager.journal import condensed, journal as journal_module
from manager.journal.journal import Journal
from manager.journal.replay import replay
from manager.report.condenser import Condenser
from manager.report.events import EventReader
from manager.report.journal_reader import read_ledger, read_report
from manager.report.morph_trace import morph_trace
from manager.run_dir import JOURNAL
from manager.trackers.reading import HappeningsReader
from morph.contract.errors import RunDirError, RunDirStuck

LOSES_ALL = Faults(
    deaths_after_s=((8.0, 20), (30.0, 1)), joins_after_s=(9.0, 9.1, 9.2, 9.3), quiet_after_s=45.0, doubled=0.1
)


class Both(JournalledCluster):
    """Writes each line into two journals, of which one is condensed every ``every`` decisions."""

    def __init__(self, seed: int, run_dir: Path, faults: Faults, **fields: object) -> None:
        (run_dir / "plain").mkdir()
        super().__init__(seed, run_dir / "plain", faults, **fields)
        self.short = Journal.open(run_dir / JOURNAL)
        self.short.keeper = Condenser(self.short)
        self.short.append_config(self.now_s, make_config(**fields))
        append_decision, append_fact = self.journal.append_decision, self.journal.append_fact
        self.journal.append_decision = lambda *line: (append_decision(*line), self.short.append_decision(*line))[0]  # type: ignore[method-assign]
        self.journal.append_fact = lambda *line: (append_fact(*line), self.short.append_fact(*line))[0]  # type: ignore[method-assign]

    def close(self) -> None:
        self.journal.close()
        self.short.close()


def told(path: Path) -> dict[str, object]:
    """What each reader of a journal finds in it."""
    with Journal.open(path / JOURNAL, read_only=True) as journal:
        happenings = HappeningsReader("mem://checkpoints", Prices(paid_usd_per_h=3.6))
        report = read_report(path)
        return {
            "report": report.model_dump(),
            "ledger": read_ledger(path),
            "lives": lives_in(journal),
            "events": [one for one in EventReader().new(journal) if not one.routine],
            "happenings": [one for _, found in happenings.new(journal, 7) for one in found],
            "morphs": [morph_trace(journal.read(), morph) for morph in report.morphs if morph.resumed_at_s],
            "state": replay(journal),
            "moment": journal.last_moment(),
            "first": journal.first_line(),
        }


def check_alike(path: Path) -> None:
    short, plain = told(path), told(path / "plain")
    for name, found in plain.items():
        assert short[name] == found, name


@pytest.mark.parametrize("every", [3, 20, 90])
def test_a_condensed_journal_tells_every_reader_the_same(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SNAPSHOT_EVERY", every)
    monkeypatch.setattr(journal_module, "NUM_AT_LEVEL", (6, 18))
    cluster = Both(0, tmp_path, LOSES_ALL, expected_nodes=6, num_steps=60)
    cluster.run(6)
    cluster.close()
    report = read_report(tmp_path)
    assert report.steps_redone == sum(record.redone_later for record in report.steps) > 0
    assert report.morphs
    assert report.evaluations
    check_alike(tmp_path)
    with Journal.open(tmp_path / JOURNAL, read_only=True) as journal:
        head = journal.head()
        assert head is not None
        assert len(journal.read()) < (0.5 if every < 90 else 0.9) * journal.last_moment()[0]  # type: ignore[index]
