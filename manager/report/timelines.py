"""Reads the timelines that the workers of a run recorded from its journal, and draws one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from manager.controller.state.events import EVENT, WorkerAnswered
from manager.journal.journal import Journal
from manager.journal.records import Entry
from manager.run_dir import JOURNAL
from morph.contract.errors import RunDirError
from morph.contract.messages import Prepared
from morph.contract.plan import kinds_in
from morph.contract.timeline import StepTimeline
from morph.runtime.step.timeline import lay_out
from morph.words import time_text

_MARK = '"timeline":{'


def read_timelines(run_dir: Path) -> dict[int, tuple[StepTimeline, ...]]:
    """Return timelines by step, one for each worker, of the last complete run of the step; RunDirError: no journal."""
    with Journal.open(run_dir / JOURNAL, read_only=True) as journal:
        return timelines_of(journal.each())


def timelines_of(entries: Iterable[Entry]) -> dict[int, tuple[StepTimeline, ...]]:
    """Return timelines by step, as ``read_timelines`` does, from the lines of a journal."""
    gathered: dict[tuple[int, int, int], dict[tuple[int, int], StepTimeline]] = {}
    by_step: dict[int, tuple[StepTimeline, ...]] = {}
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
            by_step[answer.step] = tuple(together[place] for place in sorted(together))
    return by_step


def draw_measured(timelines: Sequence[StepTimeline], replica: int, path: Path) -> None:
    """Write a PNG of one replica's measured step, as figure 7 of the Varuna paper; RunDirError if that fails."""
    import pandas as pd

    from simulator.render.timeline import draw_boxes

    laid = [laid_span for laid_span in lay_out(timelines) if laid_span.timeline.replica == replica]
    first_stage = min((laid_span.timeline.stage for laid_span in laid), default=0)
    first = min((laid_span.span.micro_batch for laid_span in laid if laid_span.span.micro_batch is not None), default=0)
    rows = [
        {
            "replica": replica,
            "stage": laid_span.timeline.stage - first_stage,
            "task": "all_reduce" if laid_span.span.kind == "reduce" else laid_span.span.kind,
            "micro_batch": -1 if laid_span.span.micro_batch is None else laid_span.span.micro_batch - first,
            "start_s": laid_span.start_s,
            "end_s": laid_span.end_s,
        }
        for laid_span in laid
        if laid_span.span.kind in ("forward", "recompute", "backward", "reduce")
    ]
    frame, facts = pd.DataFrame(rows), timelines[0]
    which = "" if sum(replicas for _, replicas in kinds_in(facts.shape)) == 1 else f", replica {replica}"
    title = (
        f"{facts.shape.replace('x', ' x ')}, {facts.schedule}, step {facts.step}{which}: measured, "
        f"{time_text(frame['end_s'].max())} until every gradient was reduced"
    )
    draw_boxes(frame, False, title, path, RunDirError)
