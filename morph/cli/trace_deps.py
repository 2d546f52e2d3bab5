"""``morph trace-deps``: report where a job's training step mixes sections."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import TYPE_CHECKING

import typer

from morph.cli.reading.options import JobArgument, JsonOption, MicroBatchOption, SectionsOption
from morph.cli.reading.progress import doing

if TYPE_CHECKING:
    from rich.table import Table

    from morph.tracing import DependencyReport

_EXIT_VIOLATION = 1
_PLAIN = ("activation", "constant")
"""Kinds that need no text besides the table."""


def trace_deps_command(
    job: JobArgument,
    as_json: JsonOption = False,
    num_sections: SectionsOption = None,
    m: MicroBatchOption = None,
) -> None:
    """Report dependencies between sections of a job: one process dry-runs one training step.

    The exit code is 1 if a dependency is a violation: such a job does not start.

    \b
    Example:
      morph trace-deps configs/jobs/tiny_gpt.py:job
      morph trace-deps configs/jobs/tiny_gpt.py:job -k 4 --json
    """
    doing(f"loading PyTorch and {job}")
    say = partial(doing, file=sys.stderr)  # the stream as it is now: while the job's code runs, its output is held back
    import torch

    from morph.cutting import cut, export_job
    from morph.jobs.files import imported_once
    from morph.jobs.job import load_job
    from morph.machine import available_bytes
    from morph.preflight.checks import CutJob, Effort, check, users_code
    from morph.tracing import micro_batch_size_of

    torch.set_num_threads(1)
    with users_code(job), imported_once(job):
        loaded = load_job(job)
        say("tracing the model")
        exported = export_job(loaded)
        wanted = num_sections if num_sections is not None else loaded.num_sections
        model = cut(exported, num_sections=wanted, micro_batch_size=micro_batch_size_of(loaded, m))
        effort = Effort(
            memory_bytes=available_bytes(), quick=True, leave_out=frozenset({"loss"}), refuse=False, say=say
        )
        found = check(CutJob(job, loaded, exported, model), effort)
    report = found.dependencies
    assert report is not None
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        _show(report, found.comparison)
    raise typer.Exit(_EXIT_VIOLATION if report.violations else 0)


def _show(report: DependencyReport, compared: str) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    console.print(
        f"{report.job}: one step in {report.num_sections} sections, m={report.micro_batch_size}; "
        f"parameter units {', '.join(report.units)}"
    )
    for note in report.notes:
        console.print(f"note: {note}")
    if report.findings:
        console.print(dependency_table(report))
    for finding in report.findings:
        if finding.kind in _PLAIN:
            continue
        console.print(f"{finding.status} {finding.id}", soft_wrap=True)
        console.print(f"  at    {finding.place.text}", soft_wrap=True)
        console.print(f"  what  {finding.message}", soft_wrap=True)
        if finding.advice:
            console.print(f"  do    {finding.advice}", soft_wrap=True)
    console.print(compared, soft_wrap=True)
    count = len(report.violations)
    console.print(f"{count} violation{'' if count == 1 else 's'}" if count else "no violation: the job may start")


def dependency_table(report: DependencyReport) -> Table:
    """Return one row for each finding; bytes are tied bytes, or bytes that cross for each micro-batch."""
    from morph.tables import table
    from morph.words import size_text

    rows = [
        (
            finding.status,
            finding.kind,
            finding.operator,
            _span(finding.units),
            (finding.place.user or finding.place.library or finding.place.function).rpartition("/")[2],
            size_text(finding.num_bytes) if finding.num_bytes else "",
        )
        for finding in report.findings
    ]
    columns = ("status", "kind", "operation", "sections", "where", "bytes")
    return table("Dependencies between sections", columns, rows, left=5)


def _span(units: tuple[str, ...]) -> str:
    return ", ".join(units) if len(units) <= 3 else f"{units[0]}, {units[1]} .. {units[-1]} ({len(units)})"
