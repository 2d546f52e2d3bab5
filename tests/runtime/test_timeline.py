"""A recorded step: its trace is complete and consistent, and can be read back from a journal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manager.controller.state.events import WorkerAnswered
from manager.journal.records import Entry
from manager.report.timelines import draw_measured, timelines_of
from morph.contract.errors import InputError
from morph.contract.messages import Prepared
from morph.contract.timeline import ComputeTimes, Peaks, Span, SpanKind, StepTimeline
from morph.runtime.step.timeline import lay_out, trace, write_trace
from tests.runtime.trace_checks import check_trace, complete

PNG = b"\x89PNG"
LATER_NS = 5_000_000_000


def span(kind: SpanKind, micro_batch: int | None, start_s: float, end_s: float) -> Span:
    return Span(kind=kind, micro_batch=micro_batch, start_s=start_s, end_s=end_s)


def timeline(
    stage: int, spans: tuple[Span, ...], *, replica: int = 0, start_ns: int = 0, step: int = 3
) -> StepTimeline:
    return StepTimeline(
        worker=f"w{stage}",
        stage=stage,
        replica=replica,
        shape="2x1",
        schedule="varuna",
        window=2,
        step=step,
        start_ns=start_ns,
        peaks=Peaks(in_flight=1),
        spans=spans,
    )


def two_stages() -> tuple[StepTimeline, StepTimeline]:
    """Return timelines of two stages; stage 1 begins the step 1 s after stage 0, and waits for its activation."""
    first = (
        span("forward", 4, 0.0, 2.0),
        span("wait", None, 2.0, 5.0),
        span("recompute", 4, 5.0, 6.0),
        span("backward", 4, 6.0, 8.0),
        span("send_activation", 4, 2.0, 2.5),
        span("receive_gradient", 4, 0.0, 5.0),
        span("reduce", None, 8.0, 9.0),
    )
    second = (
        span("wait", None, 0.0, 2.0),
        span("forward", 4, 2.0, 3.0),
        span("backward", 4, 3.0, 3.5),
        span("receive_activation", 4, 0.0, 2.0),
        span("send_gradient", 4, 3.5, 3.9),
        span("reduce", None, 4.0, 8.0),
    )
    return timeline(0, first, start_ns=LATER_NS), timeline(1, second, start_ns=LATER_NS + 10**9)


def test_workers_are_laid_over_each_other_by_their_clocks() -> None:
    traced = trace(two_stages())
    check_trace(traced)
    starts_us = {(event["pid"], event["name"]): event["ts"] for event in complete(traced)}
    assert starts_us[0, "F4"] == 0
    assert starts_us[1, "F4"] == 3e6
    names = {
        (event["pid"], event["args"]["name"]) for event in traced["traceEvents"] if event["name"] == "process_name"
    }
    assert names == {(0, "replica 0 stage 0 (w0)"), (1, "replica 0 stage 1 (w1)")}


def test_a_receive_lasts_from_its_send_although_it_was_posted_long_before() -> None:
    received = {one.span.kind: one for one in lay_out(two_stages()) if one.span.kind.startswith("receive")}
    assert (received["receive_activation"].start_s, received["receive_activation"].end_s) == (2.0, 3.0)
    assert (received["receive_gradient"].start_s, received["receive_gradient"].end_s) == (4.5, 5.0)


def test_a_clock_that_runs_behind_gives_no_negative_duration() -> None:
    first, second = two_stages()
    check_trace(trace((first, second.model_copy(update={"start_ns": LATER_NS - 10 * 10**9}))))


def test_a_trace_is_written_as_json_and_a_bad_place_is_named(tmp_path: Path) -> None:
    path = tmp_path / "timeline-3.json"
    write_trace(two_stages(), path)
    assert json.loads(path.read_text()) == json.loads(json.dumps(trace(two_stages())))
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    with pytest.raises(InputError, match="nowhere"):
        write_trace(two_stages(), tmp_path / "nowhere" / "timeline.json")


def test_a_measured_step_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "gantt.png"
    draw_measured(two_stages(), 0, path)
    assert path.read_bytes().startswith(PNG)


def entry(answered: StepTimeline | None, *, generation: int = 1, attempt: int = 0, step: int = 3) -> Entry:
    times = ComputeTimes(forward_s=0, recompute_s=0, backward_s=0, reduce_s=0, wait_s=0, step_s=0)
    worker = answered.worker if answered else "w0"
    answer = Prepared(worker=worker, generation=generation, step=step, attempt=attempt, times=times, timeline=answered)
    event = WorkerAnswered(worker=worker, answer=answer)
    return Entry(sequence=1, time_s=0, kind="event", payload_json=event.model_dump_json())


def test_a_journal_gives_the_last_complete_recording_of_each_step() -> None:
    first, second = two_stages()
    redone = tuple(one.model_copy(update={"start_ns": one.start_ns + 1}) for one in (first, second))
    lost = first.model_copy(update={"start_ns": 7})
    entries = (
        entry(None, step=2),
        entry(second),
        entry(first),
        entry(redone[0], attempt=1),
        entry(redone[1], attempt=1),
        entry(lost, generation=2),  # its peer was lost, so that no other worker answered
    )
    assert timelines_of(entries) == {3: redone}
    assert timelines_of(entries[:2]) == {}
