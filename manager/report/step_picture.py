"""Draws a step as the workers of a run measured it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from morph.contract.errors import RunDirError
from morph.contract.plan import kinds_in
from morph.contract.timeline import StepTimeline
from morph.runtime.step.timeline import lay_out
from morph.words import time_text
from simulator.render.timeline import draw_boxes


def draw_measured(timelines: Sequence[StepTimeline], replica: int, path: Path) -> None:
    """Write a PNG of one replica's measured step, as figure 7 of the Varuna paper; RunDirError if that fails."""
    laid = [one for one in lay_out(timelines) if one.timeline.replica == replica]
    first_stage = min((one.timeline.stage for one in laid), default=0)
    first = min((one.span.micro_batch for one in laid if one.span.micro_batch is not None), default=0)
    rows = [
        {
            "replica": replica,
            "stage": one.timeline.stage - first_stage,
            "task": "all_reduce" if one.span.kind == "reduce" else one.span.kind,
            "micro_batch": -1 if one.span.micro_batch is None else one.span.micro_batch - first,
            "start_s": one.start_s,
            "end_s": one.end_s,
        }
        for one in laid
        if one.span.kind in ("forward", "recompute", "backward", "reduce")
    ]
    frame, facts = pd.DataFrame(rows), timelines[0]
    which = "" if sum(replicas for _, replicas in kinds_in(facts.shape)) == 1 else f", replica {replica}"
    title = (
        f"{facts.shape.replace('x', ' x ')}, {facts.schedule}, step {facts.step}{which}: measured, "
        f"{time_text(frame['end_s'].max())} until every gradient was reduced"
    )
    draw_boxes(frame, False, title, path, RunDirError)
