"""Statistics of VM losses in published spot traces, which give the prior of ``ExpectedLosses``.

    python -m benchmarks trace_statistics TRACE.csv...

Prints one line for each trace, and the combination of all: every trace counts once, whatever its length, as one kind of
VM. Weights express how much the traces differ: those of a Gamma and of a Beta distribution with the traces' mean and
variance; the third is the variance within a trace over that between traces.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from manager.history.estimate import seen
from manager.report.lives import Ending, Life, together
from morph.contract.trace import Trace, load_trace


def lives_of_trace(trace: Trace) -> tuple[Life, ...]:
    """Return the lives of a trace's VMs; lives that last until its end are censored."""
    begun: dict[str, float] = {}
    lives: list[Life] = []
    for time_s, events in groupby(trace.events, key=lambda event: event.time_s):
        for event in events:
            if event.event == "add":
                begun[event.node_id] = time_s
            else:
                begun_s = begun.pop(event.node_id)
                lives.append(Life(vm=event.node_id, begun_s=begun_s, ended_s=time_s, ending=Ending.REVOKED))
    lives += [
        Life(vm=vm, begun_s=begun_s, ended_s=trace.duration_s, ending=Ending.RUN_OVER) for vm, begun_s in begun.items()
    ]
    return together(lives)


def lines(paths: list[Path]) -> Iterator[str]:
    """Print the table and the prior."""
    yield f"{'trace':<24}{'VM-hours':>10}{'losses':>8}{'a VM-hour':>11}{'bulk share':>12}{'of the VMs':>12}"
    found, bulks = [], []
    for path in paths:
        lives = lives_of_trace(load_trace(path))
        events = {life.ended_s: life.lost_with / life.lost_of for life in lives if life.lost_with > 1}
        one = seen(lives)
        found.append(one)
        bulks.append(list(events.values()))
        yield (
            f"{path.stem:<24}{one.hours:10.1f}{one.num_lost:8d}{one.num_lost / one.hours:11.3f}"
            f"{one.num_bulk / one.num_lost:12.2f}{statistics.mean(events.values()):12.2f}"
        )
    rates = [one.num_lost / one.hours for one in found]
    shares = [one.num_bulk / one.num_lost for one in found]
    means = [statistics.mean(fractions) for fractions in bulks]
    within = statistics.mean(statistics.variance(fractions) for fractions in bulks)
    rate, share, fraction = (statistics.mean(figures) for figures in (rates, shares, means))
    gamma, beta = rate / statistics.variance(rates), share * (1 - share) / statistics.variance(shares) - 1
    yield f"losses of a VM in an hour: {rate:.3f}, as of {gamma:.1f} VM-hours"
    yield f"of them with others: {share:.2f}, as of {beta:.1f} losses"
    yield f"of the VMs at a time: {fraction:.2f}, as of {within / statistics.variance(means):.1f} such events"


def main(
    traces: Annotated[list[Path], typer.Argument(help="in Morph's format, of one kind of VM each")],
) -> None:
    print("\n".join(lines(traces)))
