"""The live view of a run: a panel in a terminal, plain lines or JSON lines elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from manager.dashboard.snapshot import snapshot

if TYPE_CHECKING:
    from rich.console import RenderableType

    from manager.engine.loop.driver import Observed, Observer
    from manager.report.events import Told
    from manager.report.live import LiveRun

PLAIN_EVERY_S = 5.0
RECENT = 6
JSON_FIELDS = (
    *("time_s", "phase", "shape", "generation", "version", "saved_version", "examples_per_s"),
    *("loss", "metrics", "learning_rates"),
    *("dollars", "part_dollars", "dollars_on_demand", "remaining"),
)


@contextmanager
def run_view(run: LiveRun, *, plain: bool, as_json: bool = False, verbose: bool = False) -> Iterator[Observer]:
    """Show a run while the block runs; yields the driver's observer, which keeps ``run`` up to date.

    ``verbose``: plain lines also report the manager's decisions.
    """
    if as_json:
        yield _json_observer(run)
        return
    if plain or verbose or not sys.stdout.isatty():
        yield _plain_observer(run, verbose=verbose)
        return
    from rich.console import Console
    from rich.live import Live

    with Live(_panel(run), console=Console(), refresh_per_second=4, transient=True) as live:

        def observe(observed: Observed) -> None:
            run.take(observed.time_s, observed.event, observed.decision, observed.facts)
            live.update(_panel(run))

        yield observe


def _line(run: LiveRun, happened: Told) -> str:
    return f"{happened.time_s - run.start_s:7.1f} s  {happened.sentence}"


def _plain_observer(run: LiveRun, *, verbose: bool) -> Observer:
    shown_s: float | None = None
    shown: tuple[object, ...] = ()

    def observe(observed: Observed) -> None:
        nonlocal shown_s, shown
        lines = [
            _line(run, happened)
            for happened in run.take(observed.time_s, observed.event, observed.decision, observed.facts)
            if verbose or not happened.inner
        ]
        for line in lines:
            print(line, flush=True)
        shown_s = run.start_s if shown_s is None else shown_s
        now = (run.phase, run.shape, run.version)
        if observed.time_s - shown_s >= PLAIN_EVERY_S and now != shown and not lines:
            shown_s, shown = observed.time_s, now
            print(f"{observed.time_s - run.start_s:7.1f} s  {run.headline}", flush=True)

    return observe


def _json_observer(run: LiveRun) -> Observer:
    """Return an observer that prints one JSON object per line: for every notable event and every decided step."""

    def observe(observed: Observed) -> None:
        before = run.version
        has_news = bool(run.take(observed.time_s, observed.event, observed.decision, observed.facts))
        if not has_news and run.version == before:
            return
        reason, known = observed.decision.reason, snapshot(run)
        line = {"code": reason.code.value, "sentence": reason.sentence, "num_nodes": len(run.nodes)}
        line |= {name: known[name] for name in JSON_FIELDS}
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
