"""``morph events``: what happened in a run and why the manager did what it did."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from manager.journal.journal import Journal
    from manager.report.events import Told

POLL_S = 0.5


def events_command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's directory.")],
    last: Annotated[int | None, typer.Option(min=1, help="Only so many of the newest.", show_default=False)] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the run ends (or Ctrl-C).")] = False,
    every: Annotated[bool, typer.Option("--all", help="Routine too: each answer, each step.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Print the events of a run with the reason of each decision.

    \b
    Example:
      morph events runs/tiny --last 20
      morph events runs/tiny --follow --json | jq .sentence
    """
    from manager.journal.journal import FILE_NAME, Journal
    from manager.run_dir import read_facts

    read_facts(run_dir)
    with Journal.open(run_dir / FILE_NAME, read_only=True) as journal:
        for entry in _told(journal, run_dir, follow=follow, last=last, every=every):
            print(json.dumps(entry.model_dump()) if as_json else entry.line, flush=True)


def _told(journal: Journal, run_dir: Path, *, follow: bool, last: int | None, every: bool) -> Iterator[Told]:
    """What is written, and, when it is followed, what is still to come: until the run ends or nobody manages it."""
    from manager.report.events import EventReader
    from manager.stopping import holder_of

    reader = EventReader()
    known = [told for told in reader.take(journal.read()) if every or not told.routine]
    yield from known[-last:] if last else known
    managed = True
    while follow and managed and not reader.over:
        managed = holder_of(run_dir) is not None
        if managed:
            time.sleep(POLL_S)
        yield from (told for told in reader.take(journal.read(after=reader.sequence)) if every or not told.routine)
