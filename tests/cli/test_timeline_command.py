from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manager.controller.state.events import WorkerAnswered
from manager.journal.journal import Journal
from manager.run_dir import JOURNAL, RunFacts
from morph.cli.main import app
from morph.contract.messages import Prepared
from morph.contract.timeline import ComputeTimes, Peaks, Span, StepTimeline

TIMES = ComputeTimes(forward_s=1, recompute_s=0, backward_s=1, reduce_s=0, wait_s=0, step_s=2)


def recorded(step: int) -> Prepared:
    spans = (
        Span(kind="forward", micro_batch=0, start_s=0, end_s=0.125),
        Span(kind="backward", micro_batch=0, start_s=0.125, end_s=0.375),
    )
    timeline = StepTimeline(
        worker="vm0",
        stage=0,
        replica=0,
        shape="1x1",
        schedule="gpipe",
        window=3,
        step=step,
        start_ns=10**18,
        peaks=Peaks(in_flight=1, live_graphs=1),
        spans=spans,
    )
    return Prepared(worker="vm0", generation=1, step=step, times=TIMES, timeline=timeline)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    facts = RunFacts(job="a.py:job", fingerprint="f", micro_batch_size=1, batch_size=4, num_sections=2)
    (path / "run.json").write_text(facts.model_dump_json())
    with Journal.open(path / JOURNAL) as journal:
        for step in (2, 5):
            event = WorkerAnswered(worker="vm0", answer=recorded(step))
            journal.append(float(step), "event", event.model_dump_json())
    return path


def run(*arguments: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["timeline", *map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


def test_a_step_is_told_drawn_and_written(run_dir: Path, tmp_path: Path) -> None:
    png, trace = tmp_path / "gantt.png", tmp_path / "trace.json"
    code, told, _ = run(run_dir, "--step", 2, "--png", png, "--perfetto", trace)
    assert code == 0
    assert "Step 2: 1 x 1, gpipe schedule" in told
    assert "1 of 3" in told
    assert "125 ms" in told
    assert "250 ms" in told
    assert png.read_bytes().startswith(b"\x89PNG")
    events = json.loads(trace.read_text())["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "X"] == ["F0", "B0"]


def test_without_a_number_the_step_recorded_last_is_shown(run_dir: Path) -> None:
    code, told, _ = run(run_dir)
    assert code == 0
    assert "Step 5" in told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--step", 3), "--step: was not recorded (got 3); allowed: 2, 5"),
        (("--replica", 1), "--replica: has no such replica (got 1); allowed: 0 to 0"),
        (("--png", "nowhere/gantt.png"), "nowhere/gantt.png: cannot be written: its folder does not exist"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_one_line(run_dir: Path, options: tuple[object, ...], told: str) -> None:
    code, _, error = run(run_dir, *options)
    assert code == 2
    assert told in error
    assert error.count("\n") == 1


def test_a_run_without_a_recorded_step_says_how_to_record_one(run_dir: Path) -> None:
    (run_dir / JOURNAL).unlink()
    Journal.open(run_dir / JOURNAL).close()
    code, _, error = run(run_dir)
    assert code == 2
    assert "--timeline-step" in error
