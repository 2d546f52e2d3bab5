"""Commands that show or end a run: ``morph status``, ``events``, ``report``, ``page``, ``stop``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from morph.cli.reading.options import JsonOption, OnDemandOption, PngOption, PriceOption, RunDirArgument
from morph.contract.errors import RunDirError
from morph.contract.files import check_output, write_whole
from morph.words import counted

if TYPE_CHECKING:
    from manager.accounting.spent import Prices

POLL_S = 0.5


def status_command(
    run_dir: RunDirArgument,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Also show the cause of each change of shape and the source of its state."),
    ] = False,
    as_json: JsonOption = False,
    png: PngOption = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write a table of all decided steps into this file (CSV).", show_default=False)
    ] = None,
) -> None:
    """Show how a run is doing, or how it ended: its steps, shapes, changes of shape, and loss.

    \b
    Example:
      morph status runs/tiny
      morph status runs/tiny --csv steps.csv
      morph status runs/tiny --json | jq .version
    """
    from manager.report.journal_reader import read_report
    from manager.report.summary import summarise, with_its_manager
    from manager.run_dir import as_its_folder, read_facts

    check_output(png, csv)
    read_facts(run_dir)
    report = with_its_manager(read_report(run_dir), run_dir)
    print(report.model_dump_json(indent=2) if as_json else summarise(report, verbose=verbose))
    if png is not None:
        from manager.report.picture import draw_run

        draw_run(report, png)
        print(f"drawn: {png}", file=sys.stderr)  # standard output may be JSON
    if csv is not None:
        with as_its_folder(csv):
            write_whole(csv, report.steps.frame().to_csv(index=False))
        print(f"written: {csv}", file=sys.stderr)


def events_command(
    run_dir: RunDirArgument,
    last: Annotated[
        int | None, typer.Option(min=1, help="Show only this many of the newest events.", show_default=False)
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Continue until the run ends, or until Ctrl-C.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also show each decision of the manager with its reason.")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="Also show routine events: each answer, each step.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Print what happened in a run: its shapes, losses, notices and checkpoints.

    \b
    Example:
      morph events runs/tiny --last 20
      morph events runs/tiny --verbose
      morph events runs/tiny --follow --json | jq .sentence
    """
    from manager.journal.journal import Journal
    from manager.report.events import Told
    from manager.report.fold import FoldReader
    from manager.run_dir import JOURNAL, holder_of, read_facts

    def show(entries: list[Told]) -> None:
        for entry in entries:
            print(json.dumps(entry.model_dump()) if as_json else entry.line, flush=True)

    read_facts(run_dir)
    with Journal.open(run_dir / JOURNAL, read_only=True) as journal:
        follower = FoldReader(Told)

        def new() -> list[Told]:
            records = (item.record for _, noted in follower.new(journal) for item in noted)
            entries = [entry for entry in records if isinstance(entry, Told)]
            return [entry for entry in entries if every or not (entry.routine or (entry.inner and not verbose))]

        show(new()[-last if last else None :])
        managed = True
        while follow and managed and not follower.fold.is_over:  # until the run ends or has no manager
            managed = holder_of(run_dir) is not None
            if managed:
                time.sleep(POLL_S)
            show(new())


def report_command(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="One run, or several to compare.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Default: report.html in the run's directory; of several runs, here."),
    ] = None,
    price: PriceOption = None,
    on_demand_price: OnDemandOption = None,
    tensorboard: Annotated[
        Path | None,
        typer.Option(help="Write no page, but event files for TensorBoard, in DIR/NAME of each run.", metavar="DIR"),
    ] = None,
) -> None:
    """Write one self-contained HTML page about a run: where its time and money went, its shapes and their changes.

    Of several runs, the page shows loss, throughput and dollars side by side.

    \b
    Example:
      morph report runs/tiny --price 0.9 --on-demand-price 3.06
      morph report runs/a runs/b -o compared.html
      morph report runs/a runs/b --tensorboard logs
    """
    from manager.accounting.spent import no_price, prices_of
    from manager.report.journal_reader import read_report
    from manager.report.page import comparison_page, report_page
    from manager.run_dir import as_its_folder, read_facts

    prices = prices_of(price, on_demand_price)
    for run_dir in run_dirs:
        read_facts(run_dir)
    names = [run_dir.resolve().name for run_dir in run_dirs]
    runs = dict(zip(names if len({*names}) == len(names) else map(str, run_dirs), run_dirs, strict=True))
    if tensorboard is not None:
        _write_events(runs, tensorboard, prices)
        return
    path = output or (run_dirs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    check_output(path)
    reports = {name: read_report(run_dir) for name, run_dir in runs.items()}
    if prices is not None and any(report.account.bill(prices) is None for report in reports.values()):
        raise no_price()
    first = next(iter(reports.values()))
    page = comparison_page(reports, prices) if len(reports) > 1 else report_page(first, prices)
    try:
        with as_its_folder(path):
            write_whole(path, page)
    except OSError as error:
        raise RunDirError(f"cannot be written: {error.strerror}", source=str(path)) from error
    print(f"report: {path}")


def _write_events(runs: dict[str, Path], folder: Path, prices: Prices | None) -> None:
    """Write what a run's own tracker would have written; a second call adds what is new."""
    from manager.journal.journal import Journal
    from manager.run_dir import JOURNAL, read_facts
    from manager.trackers.reading import HappeningsReader
    from manager.trackers.sinks import TensorBoard, check_trackers

    check_trackers(("tensorboard",), (), "--tensorboard", folder)
    for name, run_dir in runs.items():
        sink = TensorBoard(run_dir, read_facts(run_dir).job, folder / name)
        known, num_written = sink.open(), 0
        with Journal.open(run_dir / JOURNAL, read_only=True) as journal:
            for _, happenings in HappeningsReader(str(run_dir / "checkpoints"), prices).new(journal):
                for happening in happenings:
                    if not known.has(happening):
                        sink.tell(happening)
                        num_written += 1
        sink.close()
        print(f"{folder / name}: {counted(num_written, 'event')}; to look at them: tensorboard --logdir {folder}")


def page_command(run_dir: RunDirArgument) -> None:
    """Print the address of an active run's page: it is on loopback. The address holds a token, so keep it secret.

    \b
    Example:
      morph page runs/tiny
      curl -H "Authorization: Bearer TOKEN" http://127.0.0.1:PORT/metrics
    """
    from manager.dashboard.server import read_address
    from manager.report.journal_reader import read_report
    from manager.report.summary import with_its_manager
    from manager.run_dir import holder_of, read_facts

    read_facts(run_dir)
    if holder_of(run_dir) is None:  # a killed manager leaves an address at which nothing is served any more
        report = with_its_manager(read_report(run_dir), run_dir)
        then = f"the same figures and curves as a file: morph report {run_dir}"
        raise RunDirError(f"serves no page: {report.outcome} ({report.sentence}); {then}", source=str(run_dir))
    print(read_address(run_dir).with_token)


def stop_command(
    run_dir: RunDirArgument,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the end; 0: do not wait.")] = 600.0,
) -> None:
    """Ask a run to end at its next step boundary: it saves a checkpoint, for which this command waits.

    If steps are left, its `morph run` ends with exit code 75, and the same `morph run` command continues the run.

    \b
    Example:
      morph stop runs/tiny
    """
    from manager.run_dir import ask_to_stop, read_facts, resuming, wait_for_end

    read_facts(run_dir)
    holder = ask_to_stop(run_dir)
    print(f"the run (process {holder}) was asked to stop at the next step boundary", flush=True)
    if wait:
        wait_for_end(run_dir, wait)
        print(f"the run has ended; {resuming(run_dir)} continues it from its newest checkpoint")
