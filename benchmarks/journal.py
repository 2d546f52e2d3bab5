"""A long journal: its size on disk, and the processor time and memory for reading it.

    python -m benchmarks journal --steps 2000000 --workers 100 --last 2000

Morph's own writer makes it: every event is decided and appended as by a live manager, without workers. One worker
trains first, and is lost and replaced now and then; its condensed steps are repeated in the journal as later steps.
Then many workers train the last steps, so that there are as many uncondensed lines as with many workers. Each reading
is measured in a process of its own, without its imports. ``--plain``: nothing is condensed or repeated.
"""

from __future__ import annotations

import itertools
import json
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from benchmarks.controller_scale import NUM_SECTIONS, TIMES, UNIT_BYTES, make_config, make_plan
from benchmarks.harness import ROOT, head, machine, option, row
from manager.controller.decide import decide
from manager.controller.state.actions import SendCommit, SendStep, StartWorker, WriteManifest
from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import (
    Event,
    ManifestWritten,
    NodeAppeared,
    Paid,
    Tick,
    UnitsWritten,
    WorkerAnswered,
    WorkerLost,
)
from manager.controller.state.state import Phase, initial_state
from manager.journal.condensed import SEQUENCE, Cut
from manager.journal.journal import Journal
from manager.journal.records import VM_KILLED, VM_UP, Fact
from manager.report.condenser import Condenser
from manager.report.journal_reader import read_report
from manager.run_dir import JOURNAL
from morph.contract.cluster import Policy
from morph.contract.messages import Aborted, MicroBatchLoss, Prepared, Reshaped, UnitWritten, WorkerReady

STEP_S = 2.0
POLICY = Policy(checkpoint_every_steps=250, redundancy="off")
LOSS_EVERY = 500
"""Steps from one loss to the next among many workers."""
READERS = ("status", "page", "resume", "take-over", "events", "report")


class Writer:
    """A manager whose workers answer at once; its clock advances by ``STEP_S`` per step."""

    def __init__(self, journal: Journal, config: ControllerConfig, names: itertools.count[int], now_s: float) -> None:
        self.journal, self.names, self.now_s = journal, names, now_s
        self.state, self.random = initial_state(config), random.Random(0)
        journal.append_config(now_s, config)
        for _ in range(config.expected_nodes):
            self.appear()

    def tell(self, event: Event) -> None:
        """Decide on an event, and carry out all orders except steps and reshapes."""
        decision = decide(self.state, event, self.now_s)
        self.journal.append_decision(self.now_s, event, decision)
        self.state = decision.state
        for action in decision.actions:
            if isinstance(action, StartWorker):
                ready = WorkerReady(worker=action.worker, pid=1, setup_s=1.0)
                self.tell(WorkerAnswered(worker=action.worker, answer=ready))
            elif isinstance(action, WriteManifest):
                self.tell(ManifestWritten(version=action.manifest.version))
            elif isinstance(action, SendStep | SendCommit) and action.order.checkpoint_units:
                version = action.order.step if isinstance(action, SendStep) else action.order.version
                self.write(action.worker, version, action.order.checkpoint_units)

    def write(self, worker: str, version: int, units: tuple[str, ...]) -> None:
        written = [
            UnitWritten(worker=worker, version=version, unit=unit, file=unit, size_bytes=UNIT_BYTES, sha256="0" * 64)
            for unit in units
        ]
        self.tell(UnitsWritten(worker=worker, written=tuple(written)))

    def appear(self) -> None:
        name = f"n{next(self.names)}"
        self.journal.append_fact(self.now_s, Fact(name=VM_UP, worker=name))
        self.tell(NodeAppeared(node=name, paid=Paid(usd_per_h=0.9)))

    def lose(self) -> None:
        """Lose a worker of the shape; the others give up their orders, and a replacement comes."""
        worker = self.state.slots[0].worker
        self.journal.append_fact(self.now_s, Fact(name=VM_KILLED, worker=worker))
        self.tell(WorkerLost(worker=worker, cause="killed"))
        self.appear()

    def until(self, version: int) -> None:
        """Train up to a version."""
        while self.state.version < version:
            order = self.state.step.order
            waiting = [worker for worker in self.state.workers if worker in self.state.step.awaited]
            if order is None or not waiting:
                self.now_s += STEP_S
                self.tell(Tick())
                continue
            reshapes = order.kind == "reshape" or self.state.phase is Phase.RESHAPING
            self.now_s += STEP_S * self.random.uniform(0.9, 1.1)
            for worker in waiting:
                if worker not in self.state.step.awaited:
                    break
                answer = self.aborted(worker) if order.abort_sent_s is not None else self.answer(worker, reshapes)
                self.tell(WorkerAnswered(worker=worker, answer=answer))

    def aborted(self, worker: str) -> Aborted:
        return Aborted(worker=worker, generation=self.state.generation, peer_lost=False)

    def answer(self, worker: str, reshapes: bool) -> Reshaped | Prepared:
        generation, step = self.state.generation, self.state.version
        if reshapes:
            return Reshaped(worker=worker, generation=generation, groups_s=0.1, state_s=0.2, received_bytes=1000)
        slot = next(slot for slot in self.state.slots if slot.worker == worker)
        losses: tuple[MicroBatchLoss, ...] = ()
        if self.state.plan is not None and slot.stage == len(self.state.plan.stages) - 1:
            metrics = {"right": self.random.random()}
            losses = (MicroBatchLoss(micro_batch=slot.replica, loss=8 / (1 + step**0.3), metrics=metrics),)
        rates = (1e-3 / (1 + step), 1e-3)
        return Prepared(
            worker=worker, generation=generation, step=step, losses=losses, learning_rates=rates, times=TIMES
        )


def one_worker(num_steps: int) -> ControllerConfig:
    units: dict[str, tuple[int, ...]] = {f"s{section}": (section,) for section in range(NUM_SECTIONS)}
    return ControllerConfig(
        fingerprint="f",
        plans={1: make_plan(1, 1, 1)},
        units=units,
        unit_bytes=dict.fromkeys(units, UNIT_BYTES),
        num_steps=num_steps,
        expected_nodes=1,
        policy=POLICY,
    )


class Recorded(Condenser):
    """A condenser that records every cut."""

    def __init__(self, journal: Journal) -> None:
        super().__init__(journal)
        self.cuts: list[Cut] = []

    def cut(self) -> Cut:
        made = super().cut()
        self.cuts.append(made)
        return made


def repeat(journal: Journal, keeper: Recorded, few: Writer, num_steps: int) -> None:
    """Repeat the condensed steps so far as so many later steps, which are not decided."""
    fold, cuts = keeper.fold, keeper.cuts
    journal.append_config(few.now_s, begun_at(few.state.config, few, few.state.version))  # dissolves its shape
    journal._condense(keeper.cut(), few.state)
    keeper.forget()
    num_decided = sum(len(cut.columns[SEQUENCE]) for cut in cuts)
    first, last = cuts[0], cuts[-1]
    with sqlite3.connect(journal._path) as other:
        packs = other.execute("SELECT first, last, data, digest FROM kept").fetchall()
    rounds = max(0, num_steps - fold.version) // fold.version
    for number in range(1, rounds + 1):
        moved: dict[str, Any] = {"sequence": number * last.sequence, "step": number * fold.version}
        moved |= {"decided_at_s": number * (few.now_s - first.time_s)}
        for cut in cuts:
            at, at_s = cut.sequence + moved["sequence"], cut.time_s + moved["decided_at_s"]
            columns = {name: column + moved.get(name, 0) for name, column in cut.columns.items()}
            records = [
                kept._replace(sequence=kept.sequence + moved["sequence"], time_s=kept.time_s + moved["decided_at_s"])
                for kept in cut.records
                if kept.kind != "set_back"
            ]
            journal._condense(replace(cut, sequence=at, time_s=at_s, columns=columns, records=records), few.state)
        with journal._transaction() as connection:
            connection.executemany(
                "INSERT INTO kept VALUES (?, ?, ?, ?)",
                [(begin + moved["sequence"], end + moved["sequence"], *pack) for begin, end, *pack in packs],
            )
            connection.execute("UPDATE sqlite_sequence SET seq = ?", (moved["sequence"] + last.sequence,))
    fold.figures.num_decided += rounds * num_decided
    fold.morphs.version *= rounds + 1
    few.now_s += rounds * (few.now_s - first.time_s)


def begun_at(config: ControllerConfig, few: Writer, version: int) -> ControllerConfig:
    """Return the configuration of a session that begins at a version, as if that was saved."""
    checkpoint = few.state.saving.checkpoint
    assert checkpoint is not None, "nothing was saved"
    checkpoint = checkpoint.model_copy(update={"version": version})
    return config.model_copy(update={"initial_checkpoint": checkpoint, "initial_version": version, "policy": POLICY})


def write(run_dir: Path, steps: int, workers: int, last: int, few_steps: int, *, plain: bool) -> None:
    """Make the journal, and print the time for that."""
    names: itertools.count[int] = itertools.count()
    with Journal.open(run_dir / JOURNAL) as journal:
        keeper = None if plain else Recorded(journal)
        journal.keeper = keeper
        begin_s, few = time.process_time(), Writer(journal, one_worker(10**9), names, 1.7e9)
        decided = steps - last if keeper is None else min(few_steps, steps - last)
        few.until(decided // 2)
        few.lose()
        few.until(decided)
        _told("one worker", decided, time.process_time() - begin_s, run_dir)
        version = few.state.version
        if keeper is not None:
            begin_s = time.process_time()
            repeat(journal, keeper, few, steps - last)
            version = keeper.fold.version
            _told("the same again", version - decided, time.process_time() - begin_s, run_dir)
        begin_s, size = time.process_time(), _size(run_dir)
        many = Writer(journal, begun_at(make_config(workers), few, version), names, few.now_s)
        while many.state.version < version + last:
            many.until(min(many.state.version + LOSS_EVERY, version + last))
            if many.state.version < version + last:
                many.lose()
        _told(f"{workers} workers", last, time.process_time() - begin_s, run_dir)
        print(f"{version + last} steps, the last {last} of them {(_size(run_dir) - size) / last:.0f} bytes a step")


def _told(who: str, steps: int, took_s: float, run_dir: Path) -> None:
    took_us, size_mb = took_s / max(1, steps) * 1e6, _size(run_dir) / 1e6
    print(f"{who}, {steps} steps: {took_us:.0f} us of CPU a step; {size_mb:.1f} MB so far", flush=True)


def _size(run_dir: Path) -> int:
    return sum(path.stat().st_size for path in run_dir.glob(f"{JOURNAL}*"))


def reading(name: str, run_dir: Path) -> Callable[[], object]:
    """Return the function of a reader, with everything that it needs imported."""
    from manager.dashboard.snapshot import snapshot
    from manager.journal.replay import nodes_up, replay, trace_moment
    from manager.report.events import Told
    from manager.report.fold import FoldReader
    from manager.report.journal_reader import lives_in, read_ledger
    from manager.report.live import LiveRun
    from manager.report.page import report_page
    from manager.report.summary import summarise

    path = run_dir / JOURNAL

    def page() -> object:
        live = LiveRun("job", None, 8)
        live.fold.ledger = read_ledger(run_dir)
        return snapshot(live)

    def resume() -> object:
        with Journal.open(path) as journal:
            journal.condense(Condenser)
            return lives_in(journal), read_ledger(run_dir), journal.keeper, journal.last_moment()

    def take_over() -> object:
        with Journal.open(path) as journal:
            found = replay(journal), trace_moment(journal), nodes_up(journal)
        return found, resume()

    def events() -> object:
        with Journal.open(path, read_only=True) as journal:
            return list(FoldReader(Told).new(journal))

    ways: dict[str, Callable[[], object]] = {
        "status": lambda: summarise(read_report(run_dir)),
        "page": page,
        "resume": resume,
        "take-over": take_over,
        "events": events,
        "report": lambda: report_page(read_report(run_dir)),
    }
    return ways[name]


_MEASURED = """
import json, resource, sys, time
from pathlib import Path
import matplotlib.figure, numpy, pandas
from benchmarks.journal import reading
work = reading(sys.argv[1], Path(sys.argv[2]))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
before_mb, begin_s = peak(), time.process_time()
work()
print(json.dumps([time.process_time() - begin_s, peak() - before_mb]))
"""


def main(
    steps: int = 2_000_000,
    workers: int = 100,
    last: int = 2000,
    few: int = 40_000,
    plain: bool = False,
    run_dir: Annotated[Path | None, option("made there, and kept; one that is there is only read")] = None,
) -> None:
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        directory = run_dir or Path(name)
        if not (directory / JOURNAL).is_file():
            directory.mkdir(parents=True, exist_ok=True)
            write(directory, steps, workers, min(last, steps // 2), few, plain=plain)
        with Journal.open(directory / JOURNAL, read_only=True) as journal:
            num_lines, num_steps = sum(1 for _ in journal.tail().entries), len(read_report(directory).steps)
        size = _size(directory)
        print(f"{size / 1e6:.1f} MB, {size / num_steps:.0f} bytes a step; {num_lines} lines are not condensed yet")
        head("reading | CPU s | MB beyond imports")
        for reader in READERS:
            command = [sys.executable, "-c", _MEASURED, reader, str(directory)]
            done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, timeout=3600)
            took_s, most_mb = json.loads(done.stdout.splitlines()[-1])
            row(reader, f"{took_s:.2f}", f"{most_mb:.0f}")
