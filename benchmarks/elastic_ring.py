"""Workers of an elastic ring, all of them forks of this process: started, killed, and watched step by step."""

from __future__ import annotations

import importlib
import os
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Self

import torch
from torch import Tensor, nn

import morph.elastic
from benchmarks.harness import LOOPBACK, forked, kill
from morph.elastic.invitation import FOUNDERS, JOIN, LISTEN_FD, SECRET, SILENCE

TIMEOUT_S = 240.0
NUMBER = "BENCHMARK_WORKER_NUMBER"
"""The variable that tells a worker how many were started before it."""
Address = tuple[str, int]


@dataclass(frozen=True)
class Told:
    """A worker's step: its end, its number, the number of workers, and the number of messages sent so far.

    ``sync``: the strategy; ``seen``: held-out loss and accuracy, where the worker evaluated them.
    """

    time_s: float
    step: int
    num_workers: int
    num_sent: int = 0
    sync: str = "s-sgd"
    seen: tuple[float, float] | None = None


@dataclass
class Worker:
    pid: int
    lane: Connection
    address: Address | None = None
    steps: list[Told] = field(default_factory=list)


def import_before_forks() -> None:
    """Import lazily loaded parts of torch and Morph once, for all forks."""
    for make in (torch.optim.SGD, torch.optim.AdamW):
        make([torch.zeros(1, requires_grad=True)]).step()
    importlib.import_module("morph.elastic.optimizer")


def train_sum(
    lane: Connection,
    step_s: float,
    num_values: int,
    *,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    accumulation: str = "exact",
    sync: str = "s-sgd",
) -> None:
    """Run one worker, whose step sleeps and then sums gradients. It sends its address, then its steps."""
    torch.set_num_threads(1)
    model = nn.Linear(num_values, 1, bias=False)
    optimizer = morph.elastic.Optimizer(
        make(model.parameters(), lr=1e-3),
        model,
        accumulation=accumulation,  # type: ignore[arg-type]
        sync=sync,
    )
    membership = optimizer._participation.membership
    lane.send(tuple(membership.address)[:2])

    def loss(_: object) -> Tensor:
        time.sleep(step_s)
        found: Tensor = model.weight.square().sum()
        return found

    while True:
        used = optimizer.sync
        optimizer.step(loss)
        lane.send(Told(time.time(), optimizer.num_steps, optimizer.num_workers, membership.num_sent, used))


class Forks:
    """Workers that are forks of this process, and the steps that they report."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.num_started = 0

    def start(self, work: Callable[[Connection], object]) -> None:
        """Fork one more worker; ``work`` is called with its end of a pipe."""
        ours, theirs = Pipe()
        self.num_started += 1

        def body() -> None:
            ours.close()
            for worker in self.workers:
                worker.lane.close()
            work(theirs)

        pid = forked(body)
        theirs.close()
        self.workers.append(Worker(pid, ours))

    def kill(self, count: int, chooser: random.Random) -> float:
        """Kill some workers at once; return when."""
        dead = chooser.sample(self.workers, count)
        now_s = time.time()
        kill(worker.pid for worker in dead)
        for worker in dead:
            worker.lane.close()
            self.workers.remove(worker)
        return now_s

    def watch(self, until: Callable[[], bool], what: str) -> None:
        """Receive steps until a condition holds.

        Raises:
            TimeoutError: the condition does not hold in time.
        """
        end_s = time.monotonic() + TIMEOUT_S
        while not until():
            if time.monotonic() > end_s:
                raise TimeoutError(f"waited {TIMEOUT_S:g} s for {what}")
            by_lane = {id(worker.lane): worker for worker in self.workers}
            for lane in wait([worker.lane for worker in self.workers], 0.5):
                assert isinstance(lane, Connection)
                worker = by_lane[id(lane)]
                try:
                    told = lane.recv()
                except EOFError:
                    raise RuntimeError(f"worker {worker.pid} ended by itself") from None
                if isinstance(told, Told):
                    worker.steps.append(told)
                else:
                    worker.address = told

    def settle(self, num_workers: int, steps: int) -> None:
        """Wait until all have done so many steps together."""
        since = {worker.pid: len(worker.steps) for worker in self.workers}

        def settled() -> bool:
            return all(
                len(new := worker.steps[since[worker.pid] :]) >= steps and new[-1].num_workers == num_workers
                for worker in self.workers
            )

        self.watch(settled, f"{num_workers} workers to train")

    def close(self) -> None:
        """End all workers."""
        kill(worker.pid for worker in self.workers)
        self.workers.clear()

    def firsts(self, since_s: float) -> list[tuple[Told, int]]:
        """Return each worker's first step after a time in which only present workers took part."""
        left = len(self.workers)
        after = [
            (next((step for step in one.steps if step.time_s > since_s and step.num_workers <= left), None), one.pid)
            for one in self.workers
        ]
        return [(step, pid) for step, pid in after if step is not None]

    def lose(self, count: int, chooser: random.Random) -> tuple[float, list[tuple[Told, int]]]:
        """Kill some workers; return when, and each survivor's first step without them, once all have one."""
        killed_s = self.kill(count, chooser)
        self.watch(lambda: len(self.firsts(killed_s)) == len(self.workers), "every survivor to go on")
        return killed_s, self.firsts(killed_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Ring(Forks):
    """The workers of a run of ``morph.elastic``.

    Args:
        num_workers: At the start.
        work: What each does with its end of a pipe.
        silence_s: Until a silent worker is given up.
    """

    def __init__(self, num_workers: int, work: Callable[[Connection], object], silence_s: float = 10.0) -> None:
        super().__init__()
        self._work = work
        os.environ |= {SECRET: "benchmark", SILENCE: str(silence_s)}
        if num_workers == 1:
            self._fork({FOUNDERS: "1"})
            return
        with socket.create_server((LOOPBACK, 0), backlog=128) as listening:
            host, port = listening.getsockname()[:2]
            self._fork({LISTEN_FD: str(listening.fileno()), FOUNDERS: str(num_workers)})
            for _ in range(num_workers - 1):
                self._fork({JOIN: f"{host}:{port}"})

    def add(self) -> None:
        """Start a worker that joins."""
        host, port = next(worker.address for worker in self.workers if worker.address is not None)
        self._fork({JOIN: f"{host}:{port}"})

    def _fork(self, environment: dict[str, str]) -> None:
        number = str(self.num_started)

        def body(lane: Connection) -> None:
            os.environ |= {**environment, NUMBER: number}
            self._work(lane)

        self.start(body)
