"""The live view of a run: a panel in a terminal, plain lines or JSON lines elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

    from manager.engine.driver import Observed, Observer
    from manager.report.live import Happened, LiveRun

PLAIN_EVERY_S = 5.0
RECENT = 6


@contextmanager
def run_view(run: LiveRun, *, plain: bool, as_json: bool = False) -> Iterator[Observer]:
    """Show a run while the block runs; yields the driver's observer, which keeps ``run`` up to date."""
    if as_json:
        yield _json_observer(run)
        return
    if plain or not sys.stdout.isatty():
        yield _plain_observer(run)
        return
    from rich.console import Console
    from rich.live import Live

    with Live(_panel(run), console=Console(), refresh_per_second=4, transient=True) as live:

        def observe(observed: Observed) -> None:
            run.take(observed.time_s, observed.event, observed.decision)
            live.update(_panel(run))

        yield observe


def _line(run: LiveRun, happened: Happened) -> str:
    return f"{happened.time_s - run.start_s:7.1f} s  {happened.sentence}"


def _plain_observer(run: LiveRun) -> Observer:
    told_s: float | None = None

    def observe(observed: Observed) -> None:
        nonlocal told_s
        happened = run.take(observed.time_s, observed.event, observed.decision)
        if happened is not None:
            print(_line(run, happened), flush=True)
        told_s = run.start_s if told_s is None else told_s
        if observed.time_s - told_s >= PLAIN_EVERY_S:
            told_s = observed.time_s
            print(f"{observed.time_s - run.start_s:7.1f} s  {run.headline}", flush=True)

    return observe


def _json_observer(run: LiveRun) -> Observer:
    """One JSON object a line: everything worth telling, and every decided step."""

    def observe(observed: Observed) -> None:
        before = run.version
        told = run.take(observed.time_s, observed.event, observed.decision) is not None
        if not told and run.version == before:
            return
        reason, account = observed.decision.reason, run.ledger.account()
        bill = account.bill(run.prices)
        line = {
            "time_s": observed.time_s,
            "code": reason.code.value,
            "sentence": reason.sentence,
            "phase": run.phase,
            "shape": run.shape,
            "generation": run.generation,
            "version": run.version,
            "num_nodes": len(run.nodes),
            "loss": run.loss,
            "examples_per_s": run.examples_per_s,
            "dollars": None if bill is None else bill.total_usd,
            "part_dollars": None if bill is None else {part.value: bill.part_usd(part) for part in bill.parts},
            "dollars_on_demand": account.on_demand_usd(run.prices),
        }
        print(json.dumps(line), flush=True)

    return observe


def _panel(run: LiveRun) -> RenderableType:
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    for node in run.nodes:
        table.add_row(node, Text(run.role(node), style="green" if node in run.places else "yellow"))
    recent = [_line(run, happened) for happened in list(run.recent)[-RECENT:]]
    events = Text("\n".join(recent), style="dim", no_wrap=True, overflow="ellipsis")
    bar = ProgressBar(total=run.num_steps, completed=run.version) if run.num_steps else Text("")
    elapsed_s = run.time_s - run.start_s
    return Panel(
        Group(Text(run.headline, style="bold"), bar, table, events), title=f"morph run {run.job}, {elapsed_s:.0f} s"
    )
