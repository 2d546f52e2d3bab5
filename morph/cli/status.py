"""``morph status``: what became of a run, read from its journal; also while it is running."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def status_command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="The whole report as JSON.")] = False,
    png: Annotated[Path | None, typer.Option(help="Draw the run into this file.")] = None,
) -> None:
    """Tell where a run stands: steps, shapes, morphs, loss.

    \b
    Example:
      morph status runs/tiny
      morph status runs/tiny --json | jq .version
    """
    from manager.report.reading import read_report
    from manager.report.summary import summarise
    from manager.run_dir import read_facts
    from morph.cli.checks import check_output
    from morph.contract.errors import RunDirError

    if png is not None:
        check_output(png, RunDirError)
    read_facts(run_dir)
    report = read_report(run_dir)
    print(report.model_dump_json(indent=2) if as_json else summarise(report))
    if png is not None:
        from morph.cli.run_picture import draw_run

        draw_run(report, png)
