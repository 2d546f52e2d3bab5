"""Measured timelines of one step as a Chrome/Perfetto trace: one process per worker, one track per kind of work.

The format is the JSON object of the Trace Event Format (complete events, ``"ph": "X"``, in microseconds), which
https://ui.perfetto.dev and chrome://tracing open.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from morph.contract.errors import RunDirError
from morph.contract.files import write_output
from morph.contract.timeline import Span, SpanKind, StepTimeline

_TRACKS: dict[SpanKind, str] = {
    "forward": "compute",
    "recompute": "compute",
    "backward": "compute",
    "wait": "compute",
    "send_activation": "send activations",
    "send_gradient": "send gradients",
    "receive_activation": "receive activations",
    "receive_gradient": "receive gradients",
    "reduce": "reduce",
}
_TRACK_IDS = {track: number for number, track in enumerate(dict.fromkeys(_TRACKS.values()))}
_LETTERS: dict[SpanKind, str] = {"forward": "F", "recompute": "R", "backward": "B"}
_TRANSFERS: tuple[SpanKind, ...] = ("send_activation", "send_gradient", "receive_activation", "receive_gradient")
_SOURCES: dict[SpanKind, tuple[SpanKind, int]] = {
    "receive_activation": ("send_activation", -1),
    "receive_gradient": ("send_gradient", 1),
}
"""The kind of send that feeds a receive, and the offset of its stage."""


@dataclass(frozen=True)
class Laid:
    """A span on the common clock: seconds since the first worker began the step."""

    timeline: StepTimeline
    span: Span
    start_s: float
    end_s: float


def lay_out(timelines: Sequence[StepTimeline]) -> list[Laid]:
    """Put the spans of all workers on one clock, by worker and start; transfers of one direction do not overlap."""
    begin_ns = min((timeline.start_ns for timeline in timelines), default=0)
    laid = [
        Laid(timeline, span, span.start_s + after_s, span.end_s + after_s)
        for timeline in timelines
        for after_s in ((timeline.start_ns - begin_ns) / 1e9,)
        for span in timeline.spans
    ]
    handed_over_s = {_key(drawn): drawn.start_s for drawn in laid if drawn.span.kind.startswith("send")}
    computed = [drawn for drawn in laid if drawn.span.kind not in _TRANSFERS]
    transfers = [drawn for drawn in laid if drawn.span.kind in _TRANSFERS]
    every = computed + list(_in_order(transfers, handed_over_s))
    return sorted(every, key=lambda drawn: (drawn.timeline.replica, drawn.timeline.stage, drawn.start_s, drawn.end_s))


def trace(timelines: Sequence[StepTimeline]) -> dict[str, Any]:
    """Return the trace of one step, as an object for JSON."""
    ordered = sorted(timelines, key=lambda timeline: (timeline.replica, timeline.stage))
    pids = {(timeline.replica, timeline.stage): number for number, timeline in enumerate(ordered)}
    events: list[dict[str, Any]] = []
    for timeline in ordered:
        pid = pids[timeline.replica, timeline.stage]
        label = f"replica {timeline.replica} stage {timeline.stage} ({timeline.worker})"
        events.append(_named("process_name", pid, 0, {"name": label}))
        events.append(_named("process_sort_index", pid, 0, {"sort_index": pid}))
        for track, tid in _TRACK_IDS.items():
            events.append(_named("thread_name", pid, tid, {"name": track}))
            events.append(_named("thread_sort_index", pid, tid, {"sort_index": tid}))
    events += [_complete(span, pids[span.timeline.replica, span.timeline.stage]) for span in lay_out(timelines)]
    facts = {"step": ordered[0].step, "shape": ordered[0].shape, "schedule": ordered[0].schedule} if ordered else {}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}


def write_trace(timelines: Sequence[StepTimeline], path: Path) -> None:
    """Write the trace of one step into a file, atomically."""
    write_output(path, json.dumps(trace(timelines)), RunDirError)


def _key(laid: Laid) -> tuple[int, int, SpanKind, int | None]:
    return laid.timeline.replica, laid.timeline.stage, laid.span.kind, laid.span.micro_batch


def _in_order(
    transfers: Iterable[Laid], handed_over_s: dict[tuple[int, int, SpanKind, int | None], float]
) -> list[Laid]:
    free_s: dict[tuple[int, int, SpanKind], float] = {}
    ordered = []
    for transfer in sorted(transfers, key=lambda transfer: transfer.end_s):
        replica, stage, kind, micro_batch = _key(transfer)
        start_s = max(transfer.start_s, free_s.get((replica, stage, kind), transfer.start_s))
        if kind in _SOURCES:
            sent, offset = _SOURCES[kind]
            start_s = max(start_s, handed_over_s.get((replica, stage + offset, sent, micro_batch), start_s))
        free_s[replica, stage, kind] = transfer.end_s
        ordered.append(Laid(transfer.timeline, transfer.span, min(start_s, transfer.end_s), transfer.end_s))
    return ordered


def _named(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _complete(laid: Laid, pid: int) -> dict[str, Any]:
    span = laid.span
    number = "" if span.micro_batch is None else str(span.micro_batch)
    start_us, end_us = round(laid.start_s * 1e6, 3), round(laid.end_s * 1e6, 3)
    return {
        "ph": "X",
        "name": f"{_LETTERS.get(span.kind, span.kind.replace('_', ' ') + ' ' * bool(number))}{number}",
        "cat": span.kind,
        "pid": pid,
        "tid": _TRACK_IDS[_TRACKS[span.kind]],
        "ts": start_us,
        "dur": round(end_us - start_us, 3),
        "args": {"micro_batch": span.micro_batch, "stage": laid.timeline.stage, "replica": laid.timeline.replica},
    }
