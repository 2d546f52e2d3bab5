"""Workers of an elastic ring, all of them forks of this process: started, killed, and watched step by step."""

from __future__ import annotations

import importlib
import os
import random
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

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
    """A worker's step: when it was done, its number, of how many workers, and how many messages it has sent so far.

    ``sync``: under which strategy; ``seen``: held-out loss and accuracy, where the worker looked.
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
    """What torch and Morph import only when they are used is imported once, for all forks."""
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
    """One worker: a step is a sleep in place of compute, and then so many gradients. Sends its address, then steps."""
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


class Ring:
    """The workers of a run.

    Args:
        num_workers: At the start.
        work: What each does with its end of a pipe.
        silence_s: Until a silent worker is given up.
        own: More variables of the worker that is started as number so many.
    """

    def __init__(
        self,
        num_workers: int,
        work: Callable[[Connection], object],
        silence_s: float = 10.0,
        own: Callable[[int], Mapping[str, str]] | None = None,
    ) -> None:
        self._work, self._own, self._num_started = work, own, 0
        self.workers: list[Worker] = []
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
        ours, theirs = Pipe()
        own = {NUMBER: str(self._num_started), **(self._own(self._num_started) if self._own else {})}
        self._num_started += 1

        def body() -> None:
            ours.close()
            for worker in self.workers:
                worker.lane.close()
            os.environ |= {**environment, **own}
            self._work(theirs)

        pid = forked(body)
        theirs.close()
        self.workers.append(Worker(pid, ours))

    def kill(self, count: int, chooser: random.Random) -> float:
        """End some workers at once; returns when."""
        dead = chooser.sample(self.workers, count)
        now_s = time.time()
        kill(worker.pid for worker in dead)
        for worker in dead:
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

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
