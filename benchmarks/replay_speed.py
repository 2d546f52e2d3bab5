"""How long a new manager needs to read a long journal back, from its last snapshot and from the start.

    python benchmarks/replay_speed.py --events 100000

No worker runs: their answers are made up. Prints seconds of CPU time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from controller_scale import Run, make_config

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
    begin_s = time.process_time()
    work()
    print(f"{what}: {time.process_time() - begin_s:.2f} s of CPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--nodes", type=int, default=16)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal.sqlite"
        with Journal.open(path) as journal:
            version = write(journal, options.nodes, options.events)
        size_mb = path.stat().st_size / 1e6
        print(f"{options.nodes} workers, {options.events} events, version {version}, {size_mb:.0f} MB")
        with Journal.open(path) as journal:
            timed(f"replay from the last snapshot, at most {SNAPSHOT_EVERY} events back", lambda: replay(journal))
            timed("facts of the trace and the VMs", lambda: (trace_moment(journal), nodes_up(journal)))
            journal._connection.execute("DELETE FROM snapshots")
            timed("replay from the start", lambda: replay(journal))


if __name__ == "__main__":
    main()
