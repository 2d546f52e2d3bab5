"""The cost of the controller's decisions and of heartbeats with many nodes, and its growth with their number.

    python -m benchmarks controller_scale

No worker runs: answers are synthetic, and ``decide`` is called as in the live loop. Prints the CPU time for each kind
of event, and the journal's part of it.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from benchmarks.harness import head, machine, numbers, row
from benchmarks.workers import plan_by_hand
from manager.controller.decide import decide
from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import (
    ComputeTimesSeen,
    Event,
    NodeAppeared,
    NoticeGiven,
    Tick,
    WorkerAnswered,
    WorkerLost,
    WorkerTimes,
)
from manager.controller.state.state import ControllerState, Decision, Phase, initial_state
from manager.journal.journal import Journal
from morph.contract.messages import Aborted, Prepared, Reshaped, WorkerReady
from morph.contract.plan import Plan
from morph.contract.timeline import ComputeTimes

NUM_SECTIONS = 48
UNIT_BYTES = 100_000_000
TIMES = ComputeTimes(forward_s=0.1, recompute_s=0.1, backward_s=0.2, reduce_s=0.1, wait_s=0.0, step_s=0.5)
MICRO_BATCHES_PER_HEARTBEAT = 4


def make_plan(depth: int, replicas: int, num_micro_batches: int) -> Plan:
    counts = {num_micro_batches // replicas, -(-num_micro_batches // replicas)}
    speed = float(depth * replicas)
    return plan_by_hand(
        [round(stage * NUM_SECTIONS / depth) for stage in range(depth + 1)],
        replicas,
        {count: ("F" * count + "B" * count,) * depth for count in counts if count},
        num_micro_batches=num_micro_batches,
        step_s=1 / speed,
        examples_per_s=speed,
    )


def make_config(num_nodes: int) -> ControllerConfig:
    """Return a configuration with plans for this number of nodes and for one replica fewer; up to 24 stages."""
    depth = min(24, max(2, num_nodes // 4))
    replicas = num_nodes // depth
    units: dict[str, tuple[int, ...]] = {f"s{section}": (section,) for section in range(NUM_SECTIONS)}
    shapes = {(depth, replicas), (depth, replicas - 1), (depth // 2, 2 * replicas - 1)}
    return ControllerConfig(
        fingerprint="f",
        plans={wide * deep: make_plan(deep, wide, 2 * replicas) for deep, wide in shapes if wide},
        units=units,
        unit_bytes=dict.fromkeys(units, UNIT_BYTES),
        num_steps=10**9,
        expected_nodes=num_nodes,
    )


class Run:
    """A controller and the CPU seconds of each kind of decision. Its clock advances by a millisecond per event."""

    def __init__(self, config: ControllerConfig, journal: Journal) -> None:
        self.state: ControllerState = initial_state(config)
        self.journal = journal
        self.now_s = 0.0
        self.took_s: dict[str, list[float]] = defaultdict(list)
        self.written_s: list[float] = []
        self.journalling = False

    def tell(self, kind: str, event: Event) -> Decision:
        self.now_s += 0.001
        begin_s = time.process_time()
        decision = decide(self.state, event, self.now_s)
        self.took_s[kind].append(time.process_time() - begin_s)
        if self.journalling:
            begin_s = time.process_time()
            self.journal.append_decision(self.now_s, event, decision)
            self.written_s.append(time.process_time() - begin_s)
        self.state = decision.state
        return decision

    def answers(self, kind: str, last: str, workers: Iterable[str], make: type[Prepared | Reshaped | Aborted]) -> None:
        """Let all workers answer; the last answer, which triggers a decision, is counted separately."""
        waiting = list(workers)
        for worker in waiting:
            event = WorkerAnswered(worker=worker, answer=self.answer(worker, make))
            self.tell(last if worker is waiting[-1] else kind, event)

    def answer(self, worker: str, make: type[Prepared | Reshaped | Aborted]) -> Prepared | Reshaped | Aborted:
        generation = self.state.generation
        if make is Prepared:
            return Prepared(worker=worker, generation=generation, step=self.state.version, times=TIMES)
        if make is Reshaped:
            return Reshaped(worker=worker, generation=generation, groups_s=0, state_s=0, received_bytes=0)
        return Aborted(worker=worker, generation=generation, peer_lost=False)

    @property
    def busy(self) -> list[str]:
        return [worker for worker in self.state.workers if worker in self.state.step.awaited]


def play(num_nodes: int, steps: int, journal: Journal) -> Run:
    run = Run(make_config(num_nodes), journal)
    names = [f"n{number}" for number in range(num_nodes)]
    for name in names:
        run.tell("a node appears", NodeAppeared(node=name))
    for name in names:
        ready = WorkerAnswered(worker=name, answer=WorkerReady(worker=name, pid=1, setup_s=0))
        kind = "the first shape is formed" if name == names[-1] else "a worker is ready"
        run.tell(kind, ready)
    run.answers("a worker is reshaped", "the first step is ordered", run.busy, Reshaped)
    for step in range(steps):
        run.journalling = step == 0
        run.answers("a worker prepared a step", "a step is decided, the next ordered", run.busy, Prepared)
        run.journalling = False
        seen = [
            WorkerTimes(worker=name, generation=run.state.generation, compute_s=(0.1,) * MICRO_BATCHES_PER_HEARTBEAT)
            for name in run.state.member_units
        ]
        run.tell("heartbeats of all, in one event", ComputeTimesSeen(times=tuple(seen)))
        run.tell("a tick", Tick())
    victim = run.state.slots[len(run.state.slots) // 2].worker
    run.tell("a member is lost", WorkerLost(worker=victim, cause="killed"))
    run.answers("a worker gives up", "the next shape is formed", run.busy, Aborted)
    assert run.state.phase is Phase.RESHAPING
    run.answers("a worker is reshaped", "the first step is ordered", run.busy, Reshaped)
    run.tell("a notice", NoticeGiven(worker=run.state.slots[0].worker, lead_s=30.0))
    last = [*run.busy]
    run.answers("a worker prepared a step", "a step is decided, a noticed node left out", last, Prepared)
    return run


def heartbeat_bytes(run: Run) -> int:
    """Return the bytes in the journal of one event with the times of all workers."""
    times = tuple(
        WorkerTimes(worker=name, generation=1, compute_s=(0.123456,) * MICRO_BATCHES_PER_HEARTBEAT)
        for name in run.state.workers
    )
    return len(ComputeTimesSeen(times=times).model_dump_json())


def order_bytes(run: Run) -> int:
    """Return the bytes as JSON of a reshape order, of which every member gets one."""
    assert run.state.reshape is not None
    return len(run.state.reshape.model_dump_json())


def main(nodes: str = "10,100,1000,10000", steps: int = 1) -> None:
    runs: dict[int, Run] = {}
    for num_nodes in numbers(nodes):
        with tempfile.TemporaryDirectory() as directory, Journal.open(Path(directory) / "journal.sqlite") as journal:
            runs[num_nodes] = play(num_nodes, steps, journal)
    whole_s = [sum(run.took_s["a worker prepared a step"]) / (steps + 1) for run in runs.values()]
    decided_s = [statistics.median(run.took_s["a step is decided, the next ordered"]) for run in runs.values()]
    kinds = dict.fromkeys(kind for run in runs.values() for kind in run.took_s)
    figures = {kind: [statistics.median(run.took_s[kind]) * 1e3 for run in runs.values()] for kind in kinds}
    figures |= {
        "an answer in the journal": [statistics.median(run.written_s) * 1e3 for run in runs.values()],
        "all answers of a step": [(part + last) * 1e3 for part, last in zip(whole_s, decided_s, strict=True)],
        "compute times of all heartbeats in the journal, kB": [heartbeat_bytes(run) / 1e3 for run in runs.values()],
        "a reshape order, kB": [order_bytes(run) / 1e3 for run in runs.values()],
    }
    print(f"{machine()}; growth: its exponent over the last tenfold")
    head("CPU ms of one decision, median | " + " | ".join(map(str, runs)) + " | growth")
    counts = list(runs)
    for kind, values in figures.items():
        growth = ""
        if len(values) > 1 and values[-2] > 0:
            growth = f"{math.log(values[-1] / values[-2]) / math.log(counts[-1] / counts[-2]):.2f}"
        row(kind, *(f"{value:.3f}" for value in values), growth)
