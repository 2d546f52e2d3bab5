"""How long an elastic ring stands still when workers are killed (as Spotnik's figure 4).

    python benchmarks/elastic_recovery.py --workers 16 --kills 20

Workers are forks of one process. A step is a sleep of --step-s in place of compute, then 128 KiB of gradients summed
exactly. One, two or three workers are killed at once at a random moment (seeded); new ones join when the rest has gone
on. Prints, for each number of losses, the time from the kill until every survivor has a step without the dead, less a
plain step: quartiles and worst; and the most control messages that a survivor sent for it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import signal
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
from torch import Tensor, nn

import morph.elastic
from morph.elastic.invitation import FOUNDERS, JOIN, LISTEN_FD, SECRET, SILENCE

NUM_VALUES = 32 * 1024
SETTLE_STEPS = (3, 6)
TIMEOUT_S = 240.0


StepTold = tuple[float, int, int, int]
"""When a step was done, its number, of how many workers, and the messages that this one has sent until then."""


def train(lane: Connection, step_s: float) -> None:
    """One worker; sends (time, steps, workers, messages sent) after each step, first its address."""
    torch.set_num_threads(1)
    model = nn.Linear(NUM_VALUES, 1, bias=False)
    optimizer = morph.elastic.Optimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model)
    membership = optimizer._session.membership
    lane.send(tuple(membership.address)[:2])

    def loss(_: object) -> Tensor:
        time.sleep(step_s)
        found: Tensor = model.weight.square().sum()
        return found

    while True:
        optimizer.step(loss)
        lane.send((time.time(), optimizer.num_steps, optimizer.num_workers, membership.num_sent))


@dataclass
class Worker:
    pid: int
    lane: Connection
    address: tuple[str, int] | None = None
    steps: list[StepTold] = field(default_factory=list)


class Ring:
    """The workers of a run, all of them forks of this process."""

    def __init__(
        self, num_workers: int, step_s: float, silence_s: float, work: Callable[[Connection, float], None] = train
    ) -> None:
        self._step_s, self._work = step_s, work
        self.workers: list[Worker] = []
        os.environ |= {SECRET: "benchmark", SILENCE: str(silence_s)}
        with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
            address = listening.getsockname()[:2]
            self._fork({LISTEN_FD: str(listening.fileno()), FOUNDERS: str(num_workers)})
            for _ in range(num_workers - 1):
                self._fork({JOIN: f"{address[0]}:{address[1]}"})

    def add(self) -> None:
        """Start a worker that joins."""
        host, port = next(worker.address for worker in self.workers if worker.address is not None)
        self._fork({JOIN: f"{host}:{port}"})

    def _fork(self, environment: dict[str, str]) -> None:
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                for worker in self.workers:
                    worker.lane.close()
                os.environ |= environment
                self._work(theirs, self._step_s)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        theirs.close()
        self.workers.append(Worker(pid, ours))

    def kill(self, count: int, chooser: random.Random) -> float:
        """End some workers at once; returns when."""
        dead = chooser.sample(self.workers, count)
        now_s = time.time()
        for worker in dead:
            os.kill(worker.pid, signal.SIGKILL)
        for worker in dead:
            os.waitpid(worker.pid, 0)
            worker.lane.close()
            self.workers.remove(worker)
        return now_s

    def watch(self, until: Callable[[], bool], what: str) -> None:
        """Take steps in until a condition holds.

        Raises:
            TimeoutError: it does not.
        """
        end_s = time.monotonic() + TIMEOUT_S
        while not until():
            if time.monotonic() > end_s:
                raise TimeoutError(f"waited {TIMEOUT_S:g} s for {what}")
            by_lane = {id(worker.lane): worker for worker in self.workers}
            for lane in wait([worker.lane for worker in self.workers], 0.5):
                worker = by_lane[id(lane)]
                try:
                    told = lane.recv()  # type: ignore[union-attr]
                except EOFError:
                    raise RuntimeError(f"worker {worker.pid} ended by itself") from None
                if worker.address is None:
                    worker.address = told
                else:
                    worker.steps.append(told)

    def settle(self, num_workers: int, steps: int) -> None:
        """Wait until all have done so many steps together."""
        since = {worker.pid: len(worker.steps) for worker in self.workers}

        def settled() -> bool:
            return all(
                len(new := worker.steps[since[worker.pid] :]) >= steps and new[-1][2] == num_workers
                for worker in self.workers
            )

        self.watch(settled, f"{num_workers} workers to train")

    def lose(self, count: int, chooser: random.Random) -> tuple[float, int]:
        """Kill some; returns the seconds until every survivor went on, and the most messages that one sent."""
        sent = {worker.pid: worker.steps[-1][3] for worker in self.workers}
        killed_s, left = self.kill(count, chooser), len(self.workers)

        def first(worker: Worker) -> StepTold | None:
            return next((step for step in worker.steps if step[0] > killed_s and step[2] <= left), None)

        self.watch(lambda: all(first(worker) for worker in self.workers), "every survivor to go on")
        found = [(first(worker), worker.pid) for worker in self.workers]
        most = max(step[3] - sent[pid] for step, pid in found if step)
        return max(step[0] for step, _ in found if step) - killed_s, most

    def close(self) -> None:
        for worker in self.workers:
            os.kill(worker.pid, signal.SIGKILL)
        for worker in self.workers:
            os.waitpid(worker.pid, 0)


def plain_step_s(ring: Ring) -> float:
    steps = ring.workers[0].steps[-4:]
    return statistics.median(after[0] - before[0] for before, after in pairwise(steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--kills", type=int, default=20, help="for each number of losses at once")
    parser.add_argument("--together", type=int, default=3, help="most workers killed at once")
    parser.add_argument("--step-s", type=float, default=0.05, help="a step's compute")
    parser.add_argument("--silence-s", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=3600.0, help="stop after this time with the kills so far")
    parser.add_argument("--out", type=Path, default=None, help="also write every pause as JSON")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    warm = torch.zeros(1, requires_grad=True)
    torch.optim.SGD([warm]).step()  # what torch imports only then is imported once, before the forks
    importlib.import_module("morph.elastic.optimizer")
    begin_s, load, chooser = time.monotonic(), os.getloadavg()[0], random.Random(options.seed)
    found: dict[int, list[tuple[float, float, int]]] = {count: [] for count in range(1, options.together + 1)}
    ring = Ring(options.workers, options.step_s, options.silence_s)
    try:
        for _ in range(options.kills):
            for count in found:
                if time.monotonic() - begin_s > options.limit_s:
                    break
                ring.settle(options.workers, chooser.randint(*SETTLE_STEPS))
                time.sleep(chooser.uniform(0.0, 2 * options.step_s))
                step_s = plain_step_s(ring)
                pause_s, most = ring.lose(count, chooser)
                found[count].append((pause_s, step_s, most))
                print(f"  {count} lost: {pause_s:.3f} s, of which a plain step {step_s:.3f} s", file=sys.stderr)
                for _ in range(count):
                    ring.add()
    finally:
        ring.close()
    print(f"{options.workers} workers, {os.cpu_count()} cores, load {load:.1f} before, torch {torch.__version__}")
    print(f"{'lost':>5}{'kills':>7}{'q1':>9}{'median':>9}{'q3':>9}{'worst':>9}{'plain step':>12}{'messages':>10}")
    for count, pauses in found.items():
        if len(pauses) < 2:
            continue
        beyond = [max(0.0, pause_s - step_s) for pause_s, step_s, _ in pauses]
        first, middle, third = statistics.quantiles(beyond, n=4, method="inclusive")
        plain = statistics.median(step_s for _, step_s, _ in pauses)
        times = "".join(f"{value:9.3f}" for value in (first, middle, third, max(beyond)))
        print(f"{count:>5}{len(pauses):>7}{times}{plain:12.3f}{max(most for _, _, most in pauses):>10}")
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
