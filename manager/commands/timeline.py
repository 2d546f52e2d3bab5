"""``morph timeline``: the times of the workers' tasks in one step, as a table, a picture or a Perfetto trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from morph.cli.reading.options import PngOption, RunDirArgument
from morph.contract.errors import RunDirError
from morph.contract.files import check_output, write_whole
from morph.words import time_text

if TYPE_CHECKING:
    from morph.contract.timeline import SpanKind, StepTimeline


def timeline_command(
    run_dir: RunDirArgument,
    step: Annotated[
        int | None, typer.Option(min=0, help="Step to show. Default: the last recorded one.", show_default=False)
    ] = None,
    replica: Annotated[int, typer.Option(min=0, help="The replica to draw.")] = 0,
    png: PngOption = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write the trace into this file, for ui.perfetto.dev.")] = None,
    morph: Annotated[
        int | None,
        typer.Option(min=1, help="Show a change of shape instead; 1 is the first that `morph status` lists."),
    ] = None,
) -> None:
    """Show what each worker did in a step: `morph run --timeline-step` records it. `--morph` shows a change of shape.

    \b
    Example:
      morph run configs/runs/tiny_gpt.yaml --timeline-step 5
      morph timeline runs/tiny --step 5 --png gantt.png
      morph timeline runs/tiny --morph 1 --perfetto morph.json
    """
    from rich.console import Console

    from manager.report.timelines import draw_measured, read_timelines
    from manager.run_dir import read_facts
    from morph.runtime.step.timeline import write_trace
    from morph.tables import table

    check_output(png, perfetto)
    read_facts(run_dir)
    if morph is not None:
        for option, value in (("--step", step), ("--png", png)):
            if value:
                raise RunDirError("cannot be combined with --morph", field=option, allowed="one of the two")
        _show_morph(run_dir, morph, perfetto)
        return
    timelines = _chosen(read_timelines(run_dir), step, run_dir)
    num_replicas = len({timeline.replica for timeline in timelines})
    if replica >= num_replicas:
        allowed = f"0 to {num_replicas - 1}"
        raise RunDirError("has no such replica", source=str(run_dir), field="--replica", value=replica, allowed=allowed)
    console, first = Console(), timelines[0]
    first_stage = {each.replica: min(o.stage for o in timelines if o.replica == each.replica) for each in timelines}
    rows = [
        (
            timeline.replica,
            timeline.stage - first_stage[timeline.replica],
            timeline.worker,
            *(_spent(timeline, kind) for kind in ("forward", "recompute", "backward", "wait", "reduce")),
            f"{timeline.peaks.in_flight} of {timeline.window}",
        )
        for timeline in timelines
    ]
    columns = ("replica", "stage", "worker", "F", "R", "B", "wait", "reduce", "in flight")
    title = f"Step {first.step}: {first.shape.replace('x', ' x ')}, {first.schedule} schedule"
    console.print(table(title, columns, rows, light=True))
    if png is not None:
        draw_measured(timelines, replica, png)
        console.print(f"Drew {png}.")
    if perfetto is not None:
        write_trace(timelines, perfetto)
        console.print(f"Wrote {perfetto}.")


def _show_morph(run_dir: Path, number: int, path: Path | None) -> None:
    """Print one change of shape, worker by worker."""
    import json

    from manager.journal.journal import Journal
    from manager.report.journal_reader import read_report
    from manager.report.morph_trace import chrome_trace, morph_trace
    from manager.run_dir import JOURNAL
    from morph.tables import table, wide_console

    with Journal.open(run_dir / JOURNAL, read_only=True) as journal:
        entries = journal.read()
    morphs = read_report(run_dir).morphs
    if number > len(morphs):
        allowed = f"1 to {len(morphs)}" if morphs else "none: the shape never changed"
        raise RunDirError("has no such change", source=str(run_dir), field="--morph", value=number, allowed=allowed)
    trace = morph_trace(entries, morphs[number - 1])
    title = f"Change {number}: {trace.from_shape} -> {trace.to_shape or 'none'}; {trace.cause}"
    rows = [
        (
            f"{span.start_s * 1e3:.1f} ms",
            time_text(span.duration_s) if span.duration_s else "",
            span.who,
            span.what,
            span.detail,
        )
        for span in trace.spans
    ]
    console = wide_console(160)
    console.print(table(title, ("at", "for", "who", "what", "detail"), rows, left=5, light=True))
    if path is not None:
        write_whole(path, json.dumps(chrome_trace(trace)))
        console.print(f"Wrote {path}.")


def _chosen(recorded: dict[int, tuple[StepTimeline, ...]], step: int | None, run_dir: Path) -> Sequence[StepTimeline]:
    if not recorded:
        raise RunDirError("no step was recorded; run it with --timeline-step", source=str(run_dir))
    wanted = list(recorded)[-1] if step is None else step
    if wanted not in recorded:
        allowed = ", ".join(map(str, sorted(recorded)))
        raise RunDirError("was not recorded", source=str(run_dir), field="--step", value=wanted, allowed=allowed)
    return recorded[wanted]


def _spent(timeline: StepTimeline, kind: SpanKind) -> str:
    spent_s = sum(span.end_s - span.start_s for span in timeline.spans if span.kind == kind)
    return time_text(spent_s) if spent_s else "-"
