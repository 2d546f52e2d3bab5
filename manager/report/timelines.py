"""Reads the timelines that the workers of a run recorded from its journal."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from manager.controller.state.events import (
    EVENT,
    WorkerAnswered,
)
from manager.journal.journal import Journal
from manager.journal.records import (
    Entry,
)
from manager.run_dir import JOURNAL
from morph.contract.messages import Prepared
from morph.contract.plan import kinds_in
from morph.contract.timeline import StepTimeline

_MARK = '"timeline":{'


def read_timelines(run_dir: Path) -> dict[int, tuple[StepTimeline, ...]]:
    """Return timelines by step, one for each worker, of the last complete run of the step; RunDirError: no journal."""
    with Journal.open(run_dir / JOURNAL, read_only=True) as journal:
        return timelines_of(journal.each())


def timelines_of(entries: Iterable[Entry]) -> dict[int, tuple[StepTimeline, ...]]:
    """Return timelines by step, as ``read_timelines`` does, from the lines of a journal."""
    gathered: dict[tuple[int, int, int], dict[tuple[int, int], StepTimeline]] = {}
    found: dict[int, tuple[StepTimeline, ...]] = {}
    for entry in entries:
        if entry.kind == "config":
            gathered.clear()  # generations are counted from 0 again
        if entry.kind != "event" or _MARK not in entry.payload_json:
            continue
        event = EVENT.validate_json(entry.payload_json)
        if not (isinstance(event, WorkerAnswered) and isinstance(event.answer, Prepared) and event.answer.timeline):
            continue
        answer, timeline = event.answer, event.answer.timeline
        together = gathered.setdefault((answer.generation, answer.step, answer.attempt), {})
        together[timeline.replica, timeline.stage] = timeline
        if len(together) == sum(stages * replicas for stages, replicas in kinds_in(timeline.shape)):
            found[answer.step] = tuple(together[place] for place in sorted(together))
    return found
