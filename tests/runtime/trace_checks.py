"""Properties of every trace of a step, whatever recorded it."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

FIELDS = {"ph", "ts", "dur", "pid", "tid", "name"}


def complete(traced: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in traced["traceEvents"] if event["ph"] == "X"]


def check_trace(traced: dict[str, Any]) -> None:
    """Check the fields that every viewer needs, and the invariants of a worker with one device."""
    assert {event["ph"] for event in traced["traceEvents"]} == {"X", "M"}
    events = complete(traced)
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    tasks: dict[tuple[int, int], dict[str, dict[str, Any]]] = defaultdict(dict)
    for event in events:
        assert event.keys() >= FIELDS
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        tracks[event["pid"], event["tid"]].append(event)
        if event["cat"] in {"forward", "recompute", "backward"}:
            kinds = tasks[event["pid"], event["args"]["micro_batch"]]
            assert event["cat"] not in kinds
            kinds[event["cat"]] = event
    for track in tracks.values():
        track.sort(key=lambda event: event["ts"])
        for one, following in itertools.pairwise(track):
            assert one["ts"] + one["dur"] <= following["ts"] + 0.01, (one, following)
    assert tasks
    for kinds in tasks.values():
        assert {"forward", "backward"} <= kinds.keys()
        order = [kinds[kind] for kind in ("forward", "recompute", "backward") if kind in kinds]
        assert order == sorted(order, key=lambda event: event["ts"])
