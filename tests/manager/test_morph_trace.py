"""One change of shape is told span by span."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from simulated_cluster import Faults, JournalledCluster
from typer.testing import CliRunner

from manager.journal.journal import FILE_NAME, Journal
from manager.report.morph_trace import MANAGER, chrome_trace, morph_trace
from manager.report.reading import report_of
from manager.run_dir import RunFacts
from morph.cli.main import app

FACTS = RunFacts(job="job.py:job", fingerprint="f", micro_batch_size=2, batch_size=8, num_sections=6)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which a VM was killed and another came."""
    directory = tmp_path_factory.mktemp("run")
    faults = Faults(deaths_after_s=((6.0, 1),), joins_after_s=(8.0,))
    cluster = JournalledCluster(0, directory, faults, expected_nodes=6)
    assert cluster.run(6).outcome == "finished"
    cluster.journal.close()
    (directory / "run.json").write_text(FACTS.model_dump_json())
    return directory


def test_a_forced_change_goes_from_the_kill_over_groups_and_state_to_the_next_step(run_dir: Path) -> None:
    with Journal.open(run_dir / FILE_NAME, read_only=True) as journal:
        entries = journal.read()
    morph = report_of(entries).morphs[0]
    trace = morph_trace(entries, morph)
    assert trace.spans[0].what == f"{morph.lost_workers[0]} killed"
    workers = {span.who for span in trace.spans} - {MANAGER}
    assert len(workers) == 5
    by_kind = {
        what: [span for span in trace.spans if span.what == what] for what in ("form groups", "take state", "step")
    }
    members = {span.who for span in by_kind["step"]}
    assert len(by_kind["step"]) == len(members) == 4, "one for each member of 2x2"
    assert members <= {span.who for span in by_kind["take state"]}, "the fifth serves what it holds, or nothing"
    assert max(span.duration_s for span in by_kind["form groups"]) == pytest.approx(morph.groups_s)
    assert max(span.duration_s for span in by_kind["take state"]) == pytest.approx(morph.state_s)
    assert max(span.end_s for span in trace.spans) == pytest.approx((morph.pause_ms or 0) / 1e3)
    for worker in workers:
        own = [span for span in trace.spans if span.who == worker]
        assert all(before.end_s <= after.start_s + 1e-9 for before, after in itertools.pairwise(own))


def test_the_trace_is_what_perfetto_reads(run_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "morph.json"
    told = CliRunner().invoke(app, ["timeline", str(run_dir), "--morph", "2", "--json", str(path)])
    assert told.exit_code == 0, told.output
    assert "Change 2" in told.stdout
    written = json.loads(path.read_text())
    names = {event["args"]["name"] for event in written["traceEvents"] if event["name"] == "process_name"}
    assert MANAGER in names
    assert all(event["dur"] > 0 for event in written["traceEvents"] if event["ph"] == "X")
    with Journal.open(run_dir / FILE_NAME, read_only=True) as journal:
        entries = journal.read()
    assert written == json.loads(json.dumps(chrome_trace(morph_trace(entries, report_of(entries).morphs[1]))))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--morph", "9"), "--morph: has no such change (got 9); allowed: 1 to"),
        (("--morph", "1", "--step", "3"), "--step"),
    ],
)
def test_a_change_that_there_is_not_is_refused(run_dir: Path, options: tuple[str, ...], told: str) -> None:
    done = CliRunner().invoke(app, ["timeline", str(run_dir), *options])
    assert done.exit_code == 2
    assert told in done.output
