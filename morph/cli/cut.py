"""``morph cut``: show where a job's model would be cut, without training it or building its weights."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

from morph.cli.reading.options import JobArgument, JsonOption, MicroBatchOption, PngOption, SectionsOption
from morph.cli.reading.progress import doing
from morph.contract.files import check_output
from morph.words import counted, kind_name, short_source

if TYPE_CHECKING:
    from rich.table import Table

    from morph.cutting.cuts.report import CutReport

WIDTH = 100


def cut_command(
    job: JobArgument,
    num_sections: SectionsOption = None,
    m: MicroBatchOption = None,
    as_json: JsonOption = False,
    png: PngOption = None,
) -> None:
    """Show where a job's model is cut: the places, and the bytes that would cross each.

    Nothing is trained, and the weights take no memory.

    \b
    Example:
      morph cut configs/jobs/tiny_gpt.py:job
      morph cut configs/jobs/gpt2_big.py:gpt2_8_3b -k 24 --png cuts.png
    """
    from morph.tables import wide_console

    check_output(png)
    report, compared = _find(job, num_sections, m)
    if png is not None:
        from morph.cli.cut_picture import draw_cuts

        draw_cuts(report, job, png)
    if as_json:
        print(json.dumps(asdict(report)))
        return
    console = wide_console(WIDTH)
    console.print(_section_table(report))
    if report.cuts:
        console.print(_cut_table(report))
    for line in (*_notes(report), compared):
        console.print(line, soft_wrap=True, highlight=False)
    if png is not None:
        print(f"drawn: {png}")


def _find(job_path: str, num_sections: int | None, m: int | None) -> tuple[CutReport, str]:
    """Return the cuts, and a sentence that compares them with the plain model."""
    doing(f"loading PyTorch and {job_path}")
    say = partial(doing, file=sys.stderr)  # the stream as it is now: while the job's code runs, its output is held back
    from morph.cutting.cache.cut_job import LoadedJob
    from morph.cutting.cuts.report import report_cuts
    from morph.jobs.files import imported_once
    from morph.machine import available_bytes
    from morph.preflight.checks import CutJob, Effort, check, users_code

    with users_code(job_path), imported_once(job_path):
        loaded = LoadedJob(job_path)
        job = loaded.job
        say("tracing the model")
        exported = loaded.exported
        wanted = num_sections if num_sections is not None else job.num_sections
        model = loaded.cut(wanted, m or job.micro_batch_size or 1).model
        effort = Effort(
            memory_bytes=available_bytes(), quick=True, leave_out=frozenset({"dependencies"}), refuse=False, say=say
        )
        found = check(CutJob(job_path, job, exported, model), effort)
        for warning in found.warnings:
            print(warning, file=sys.stderr)
        return report_cuts(exported, model), found.comparison


def _section_table(report: CutReport) -> Table:
    """Return one row for each sequence of neighbouring sections of one kind."""
    from rich.table import Table

    title = f"{counted(len(report.sections), 'section')}, {report.num_parameters:,} parameters"
    table = Table(title=title, title_justify="left")
    for name in ("section", "kind"):
        table.add_column(name, no_wrap=True)
    table.add_column("begins in", overflow="fold", ratio=2)
    for name in ("compute", "parameters", "again"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("loads", overflow="fold", ratio=1)
    for kind, sections in groupby(report.sections, key=lambda section: section.kind):
        first, *more = sections
        table.add_row(
            f"{first.index}-{more[-1].index}" if more else str(first.index),
            kind_name(kind),
            first.begins_in,
            f"{first.compute_share:.1%}" + (" each" if more else ""),
            f"{first.num_parameters:,}",
            str(first.num_replicated),
            ", ".join(first.batch_keys),
        )
    return table


def _cut_table(report: CutReport) -> Table:
    from rich.table import Table

    table = Table(title="Cuts: where, compute before and after, what crosses", title_justify="left")
    table.add_column("section", no_wrap=True)
    table.add_column("begins in", overflow="fold", ratio=1)
    for name in ("before", "after", "bytes/sample"):
        table.add_column(name, justify="right", no_wrap=True)
    for cut in report.cuts:
        tensors = ", ".join(f"{dtype}{list(shape)}" for _, shape, dtype in cut.tensors)
        table.add_row(
            str(cut.before_section),
            "\n".join(part for part in (cut.module, short_source(cut.source), tensors) if part),
            f"{cut.share_before:.1%}",
            f"{cut.share_after:.1%}",
            f"{cut.bytes_per_sample:,}",
        )
    return table


def _notes(report: CutReport) -> list[str]:
    kinds = len({section.kind for section in report.sections})
    tied = [f"{unit} ({', '.join(names)})" for unit, names in report.tied_units]
    shares = [section.compute_share for section in report.sections]
    lines = [
        "again: cheap operations without weights or random numbers that each section computes for itself; loads: "
        "what the section reads of a batch",
        f"kinds of sections: {kinds} of {len(shares)}; only one of each kind is measured",
        f"balance: the largest section has {max(shares) * len(shares):.2f} times its even share of compute",
        f"tied weights: {'; '.join(tied) or 'none'}",
        f"parameters without influence on the loss: {', '.join(report.unused_parameters) or 'none'}",
    ]
    if report.bound_by is not None:
        only = "one section only, so no pipeline" if len(shares) == 1 else "sections are uneven"
        lines.append(f"{only}: {report.bound_by}")
    if report.refusal is not None:
        how = "cut at the user's marks" if report.cuts else "not cut"
        lines.append(f"{how}, and run as it is written; torch.export says: {report.refusal}")
    if report.written_buffers:
        lines.append(f"buffers that the forward writes, as part of the state: {', '.join(report.written_buffers)}")
    if report.metrics:
        lines.append(f"metrics: {', '.join(report.metrics)}")
    if report.not_recorded is None:
        lines.append("weights: each worker creates only those of its own sections")
    else:
        lines.append(f"weights: every worker builds the whole model, because: {report.not_recorded}")
    return lines
