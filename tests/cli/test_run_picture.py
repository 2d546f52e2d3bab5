from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manager.accounting.account import Account, TimeUse
from manager.accounting.spent import NOTHING
from manager.controller.state.events import WorkerAnswered
from manager.journal.journal import Journal
from manager.report.picture import PLANNED, UNPLANNED, draw_run, run_figure
from manager.report.steps import Cost, SetBack, Step, StepRecord, Steps
from manager.report.values import MorphRecord, RunReport, ShapeSpan, SourceSum, VmCount
from manager.run_dir import JOURNAL, RunFacts
from morph.cli.main import app
from morph.contract.messages import Prepared
from morph.contract.timeline import ComputeTimes, Peaks, Span, StepTimeline

START_S = 1_700_000_000.0
BATCH = 48


def span(generation: int, shape: str, start_s: float, end_s: float | None, step_s: float, num_steps: int) -> ShapeSpan:
    depth, replicas = map(int, shape.split("x"))
    return ShapeSpan(
        generation=generation,
        shape=shape,
        num_workers=depth * replicas,
        batch_size=BATCH,
        start_s=START_S + start_s,
        end_s=None if end_s is None else START_S + end_s,
        first_version=0,
        num_steps=num_steps,
        expected_mini_batch_s=step_s,
        measured_mini_batch_s=step_s if num_steps else None,
    )


def morph(begin_s: float, pause_s: float | None, before: str, after: str, planned: bool = False) -> MorphRecord:
    return MorphRecord(
        planned=planned,
        cause="newcomers" if planned else "worker lost",
        lost_workers=() if planned else ("vm1",),
        killed_at_s=None if planned else START_S + begin_s,
        detected_at_s=START_S + begin_s + 0.02,
        reformed_at_s=None if pause_s is None else START_S + begin_s + pause_s / 2,
        resumed_at_s=None if pause_s is None else START_S + begin_s + pause_s,
        num_generations=1,
        from_shape=before,
        to_shape=after,
        version=10,
        steps_redone=0,
        sources={"peer": SourceSum(count=2, size_bytes=1000)},
        groups_s=0.1,
        state_s=0.05,
        received_bytes=1000,
    )


SPANS = (
    span(1, "3x2", 5, 30, 0.5, 45),
    span(2, "2x2", 30.4, 52, 0.7, 28),
    span(3, "4x1", 52.1, 52.3, 0.9, 0),
    span(4, "3x1", 53, 70, 1.0, 15),
    span(5, "3x2", 70.4, 108, 0.5, 70),
    span(6, "5x1", 108.3, None, 0.62, 17),
)
MORPHS = (
    morph(30, 0.6, "3x2", "2x2"),
    morph(52, 1.4, "2x2", "3x1"),
    morph(70, 0.5, "3x1", "3x2", planned=True),
    morph(108, 0.55, "3x2", "5x1"),
)


def steps() -> Steps:
    records, number = [], 0
    for one in SPANS:
        for index in range(one.num_steps):
            duration_s = one.expected_mini_batch_s * (1.0 + 0.12 * math.sin(7.0 * number))
            records.append(
                StepRecord(
                    step=number,
                    generation=one.generation,
                    decided_at_s=one.start_s + 0.2 + one.expected_mini_batch_s * (index + 1),
                    duration_s=duration_s,
                    compute_s=duration_s * 0.9,
                    loss=2.0 + 3.5 * math.exp(-number / 40) + 0.05 * math.sin(3.0 * number),
                    num_attempts=1,
                )
            )
            number += 1
    cost = Cost(vm_h=0.0, unpriced_h=0.0, usd=0.0, dearest_usd_per_h=math.nan)
    newer = [Step(record.step, record, cost) for record in records]
    return Steps(newer=newer, set_backs=[SetBack(num_decided=73, version=71)])  # steps 71 and 72 are repeated


def report(**changes: object) -> RunReport:
    counts = ((0, 2), (1, 4), (3, 6), (30, 5), (31, 4), (52, 3), (66, 6), (108, 5))
    return RunReport(
        job="gpt2-stdlib",
        num_steps=180,
        start_s=START_S,
        end_s=START_S + 119.5,
        version=175,
        checkpoint_version=160,
        outcome="finished",
        sentence="all steps are done",
        num_sessions=1,
        shapes=SPANS,
        morphs=MORPHS,
        steps=steps(),
        account=Account(parts=dict.fromkeys(TimeUse, NOTHING), total=NOTHING),
        vms=tuple(VmCount(time_s=START_S + time_s, num_vms=num_vms) for time_s, num_vms in counts),
    ).model_copy(update=changes)


def test_the_picture_is_a_png_of_1600_by_1000_pixels(tmp_path: Path) -> None:
    draw_run(report(), tmp_path / "run.png")
    data = (tmp_path / "run.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (1600, 1000)
    assert [path.name for path in tmp_path.iterdir()] == ["run.png"]


def test_every_panel_marks_every_morph_with_its_colour_and_pause() -> None:
    panels = run_figure(report()).axes
    for panel in panels:
        marks = [line for line in panel.lines if list(line.get_ydata()) == [0, 1] and len(set(line.get_xdata())) == 1]
        assert [round(line.get_xdata()[0]) for line in marks if line.get_color() in (PLANNED, UNPLANNED)] == [
            30, 52, 70, 108,
        ]  # fmt: skip
    assert [text.get_text() for text in panels[2].get_legend().get_texts()] == [
        "measured (dots: each step)", "expected by the planner",
    ]  # fmt: skip
    labels = {text.get_text(): text.get_color() for text in panels[0].texts}
    assert labels == {"600 ms": UNPLANNED, "1400 ms": UNPLANNED, "480 ms": PLANNED, "550 ms": UNPLANNED}


def test_the_curves_hold_what_the_report_holds() -> None:
    _, _, throughput, loss = run_figure(report()).axes
    measured = [line for line in throughput.lines if line.get_marker() == "."]
    assert sum(len(line.get_xdata()) for line in measured) == len(steps())
    assert measured[0].get_ydata()[0] == pytest.approx(BATCH / steps()[0].duration_s)
    dashed = [line.get_ydata()[0] for line in throughput.lines if line.get_linestyle() == "--"]
    assert dashed == pytest.approx([BATCH / one.expected_mini_batch_s for one in SPANS if one.num_steps])
    curve, again, *_ = loss.lines
    assert len(curve.get_xdata()) == len(steps()) - 2
    assert [round(value, 6) for value in again.get_ydata()] == [round(steps()[i].loss or 0, 6) for i in (71, 72)]


def test_a_run_that_never_stepped_can_be_drawn(tmp_path: Path) -> None:
    empty = report(shapes=(), morphs=(), steps=Steps(), vms=(), version=0, end_s=START_S)
    assert "no step was decided" in [text.get_text() for text in run_figure(empty).axes[2].texts]
    draw_run(empty, tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 0


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


def test_a_recorded_step_is_printed_drawn_and_written(run_dir: Path, tmp_path: Path) -> None:
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
