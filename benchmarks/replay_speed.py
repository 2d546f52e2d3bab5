"""How long a new manager needs to read a long journal back, from its last snapshot and from the start.

    python -m benchmarks replay_speed --events 100000

No worker runs: their answers are made up. Prints seconds of CPU time.
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from benchmarks.controller_scale import Run, make_config
from benchmarks.harness import cpu_s
from manager.controller.state.events import NodeAppeared, WorkerAnswered
from manager.journal.journal import SNAPSHOT_EVERY, Journal
from manager.journal.replay import nodes_up, replay, trace_moment
from morph.contract.messages import Prepared, Reshaped, WorkerReady


def write(journal: Journal, num_nodes: int, num_events: int) -> int:
    """A run that trains, as a live manager writes it; returns the version that it reached."""
    config = make_config(num_nodes)
    journal.append_config(0.0, config)
    run = Run(config, journal)
    run.journalling = True
    for number in range(num_nodes):
        run.tell("", NodeAppeared(node=f"n{number}"))
    for number in range(num_nodes):
        ready = WorkerReady(worker=f"n{number}", pid=1, setup_s=0)
        run.tell("", WorkerAnswered(worker=f"n{number}", answer=ready))
    run.answers("", "", run.busy, Reshaped)
    while len(run.written_s) < num_events:
        run.answers("", "", run.busy, Prepared)
    print(f"writing: {1e6 * sum(run.written_s) / len(run.written_s):.0f} us of CPU an event, snapshots included")
    return run.state.version


def timed(what: str, work: Callable[[], object]) -> None:
    print(f"{what}: {cpu_s(work):.2f} s of CPU")


def main(events: int = 100_000, nodes: int = 16) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal.sqlite"
        with Journal.open(path) as journal:
            version = write(journal, nodes, events)
        size_mb = path.stat().st_size / 1e6
        print(f"{nodes} workers, {events} events, version {version}, {size_mb:.0f} MB")
        with Journal.open(path) as journal:
            timed(f"replay from the last snapshot, at most {SNAPSHOT_EVERY} events back", lambda: replay(journal))
            timed("facts of the trace and the VMs", lambda: (trace_moment(journal), nodes_up(journal)))
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("DELETE FROM snapshots")
        with Journal.open(path) as journal:
            timed("replay from the start", lambda: replay(journal))
