"""What it costs the manager to order all workers and hear all answers, over the link that every worker has.

    python -m benchmarks worker_link

One round is one order to each worker and all answers back, with the orders of a real step and a real reshape, such as
the controller makes for so many nodes. Workers are processes that read and answer, and train nothing; who started them
makes no difference to their link.

Every size has a process of its own. Prints, for each: the round's median and 95th percentile; the CPU
time of the manager's process and of all others in a round; what its memory grew by; and its CPU time while nothing is
ordered and only heartbeats come, one a second and worker. The table says how many workers there were: no more are set
up than memory takes.
"""

from __future__ import annotations

import multiprocessing
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from benchmarks.controller_scale import Run, make_config
from benchmarks.harness import LOOPBACK, forked, head, kill, machine, numbers, row
from manager.controller.state.events import NodeAppeared, WorkerAnswered
from manager.engine.joining.link_server import Entrance, LinkServer, listen
from manager.engine.loop.event_queue import EventQueue
from manager.engine.loop.worker_pool import WorkerPool
from manager.journal.journal import Journal
from morph.contract.decided import Decided
from morph.contract.messages import (
    Heartbeat,
    MicroBatchLoss,
    Prepared,
    Reshaped,
    ReshapeOrder,
    StepOrder,
    WorkerReady,
    WorkerSetup,
)
from morph.contract.timeline import ComputeTimes
from morph.link.proof import new_secret
from morph.runtime.process.serving import serve

WARM_UP, LEAST_ROUNDS, IDLE_S = 3, 20, 5.0
STARTED_AT_ONCE = 8
LEAST_MEMORY_BYTES = 1_500_000_000
ROUND_TIMEOUT_S = 120.0
VM = "all"
TIMES = ComputeTimes(
    forward_s=0.0812345678,
    recompute_s=0.0787654321,
    backward_s=0.1623456789,
    reduce_s=0.0412345678,
    wait_s=0.0098765432,
    step_s=0.3734567891,
)


def make_setup(worker: str) -> WorkerSetup:
    return WorkerSetup(
        worker=worker,
        job_path="/home/user/job.py:job",
        fingerprint="f" * 64,
        num_sections=48,
        micro_batch_size=1,
        checkpoint_url="/home/user/runs/one/checkpoints",
        store_host="127.0.0.1",
        store_port=1,
        listen_host="127.0.0.1",
    )


def first_reshape(num_workers: int) -> ReshapeOrder:
    """What the controller orders first for so many nodes."""
    with tempfile.TemporaryDirectory() as name, Journal.open(Path(name) / "journal.sqlite") as journal:
        run = Run(make_config(num_workers), journal)
        names = [worker_name(number) for number in range(num_workers)]
        for worker in names:
            run.tell("", NodeAppeared(node=worker))
        for worker in names:
            run.tell("", WorkerAnswered(worker=worker, answer=WorkerReady(worker=worker, pid=1, setup_s=0)))
        assert run.state.reshape is not None
        return run.state.reshape


def step_order(step: int) -> StepOrder:
    return StepOrder(generation=1, step=step, decided=Decided(version=step, gradient_norm=1.2345678901234567))


def worker_name(number: int) -> str:
    return f"morph-abcdefgh-1-{number}"


class Answerer:
    """A worker that trains nothing, and answers as one does; as a last stage's its answers to steps have norms."""

    def __init__(self, worker: str) -> None:
        self._worker = worker

    def setup(self, _order: WorkerSetup) -> WorkerReady:
        return WorkerReady(worker=self._worker, pid=1, setup_s=0.0)

    def reshape(self, order: ReshapeOrder) -> Reshaped:
        return Reshaped(
            worker=self._worker, generation=order.generation, groups_s=0.0512345678, state_s=0.1, received_bytes=0
        )

    def step(self, order: StepOrder) -> Prepared:
        return Prepared(
            worker=self._worker,
            generation=order.generation,
            step=order.step,
            unit_norms_sq={"s46": 0.12345678901234567, "s47": 0.9876543210987654},
            losses=tuple(MicroBatchLoss(micro_batch=number, loss=3.14159265358979) for number in range(2)),
            times=TIMES,
        )

    def heartbeat(self, wait_s: float) -> Heartbeat:
        time.sleep(wait_s)
        return Heartbeat(worker=self._worker)

    def tell_again(self) -> None:
        """It has written nothing."""


class Launcher:
    """See the product's: the workers are forked before."""

    def start_worker(self, worker: str, vm: str) -> None:
        """There is none to start."""

    def kill(self, worker: str) -> None:
        """A benchmark in which one is lost is over."""

    def has_ended(self, _worker: str) -> bool:
        return False

    def adopt(self) -> tuple[str, ...]:
        return ()


def open_pool(event_queue: EventQueue, workers: list[str], ending: ExitStack) -> WorkerPool:
    """Fork the workers, which call until somebody answers, and let them in."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    entrance = Entrance(listen(LOOPBACK), new_secret())
    for worker in workers:
        ending.callback(kill, [forked(partial(serve, entrance.home(worker), lambda setup: Answerer(setup.worker)))])
    pool = WorkerPool(event_queue, make_setup, Launcher(), 60.0)
    ending.callback(LinkServer(entrance, pool).close)
    return pool


@dataclass(frozen=True)
class Figures:
    """Of one size; ``growth``: kB of the driver's memory for each order."""

    num_workers: int
    step_s: list[float]
    step_cpu_s: float
    others_cpu_s: float
    growth: float
    reshape_s: list[float]
    reshape_cpu_s: float
    idle_cpu: float
    order_bytes: tuple[int, int]


def measure(num_workers: int, seconds: float) -> Figures:
    with ExitStack() as ending:
        event_queue = EventQueue()
        workers = [worker_name(number) for number in range(num_workers)]
        pool = open_pool(event_queue, workers, ending)
        there = 0
        while there < num_workers and psutil.virtual_memory().available > LEAST_MEMORY_BYTES:
            batch = workers[there : there + STARTED_AT_ONCE]
            for worker in batch:
                pool.start(worker, VM)
            hear(event_queue, len(batch))
            there += len(batch)
        workers = workers[:there]
        reshape = first_reshape(there)
        steps = iter(range(1, 10**9))

        def order_step() -> None:
            order = step_order(next(steps))
            for worker in workers:
                pool.step(worker, order)

        def order_reshape() -> None:
            for worker in workers:
                pool.reshape(worker, reshape)

        idle_cpu_s = time.process_time()
        time.sleep(IDLE_S)
        idle_cpu = (time.process_time() - idle_cpu_s) / IDLE_S
        rounds(event_queue, there, order_step, 0.0)
        me, others_s = psutil.Process(), others()
        before_bytes = me.memory_info().rss
        step_s, step_cpu_s = rounds(event_queue, there, order_step, seconds)
        growth = (me.memory_info().rss - before_bytes) / 1e3 / len(step_s) / there
        others_cpu_s = (others() - others_s) / len(step_s)
        reshape_s, reshape_cpu_s = rounds(event_queue, there, order_reshape, seconds / 2)
        sizes = len(step_order(1000).model_dump_json()), len(reshape.model_dump_json())
        return Figures(there, step_s, step_cpu_s, others_cpu_s, growth, reshape_s, reshape_cpu_s, idle_cpu, sizes)


def rounds(
    event_queue: EventQueue, num_workers: int, order: Callable[[], None], seconds: float
) -> tuple[list[float], float]:
    """What each round took, and the CPU time of this process for one."""
    for _ in range(WARM_UP):
        order()
        hear(event_queue, num_workers)
    took_s: list[float] = []
    cpu_s, until_s = time.process_time(), time.monotonic() + seconds
    while len(took_s) < LEAST_ROUNDS or time.monotonic() < until_s:
        begin_s = time.perf_counter()
        order()
        hear(event_queue, num_workers)
        took_s.append(time.perf_counter() - begin_s)
    return took_s, (time.process_time() - cpu_s) / len(took_s)


def hear(event_queue: EventQueue, count: int) -> None:
    """Wait for so many answers."""
    for _ in range(count):
        stamped = event_queue.get(ROUND_TIMEOUT_S)
        assert stamped is not None, "an answer does not come"
        assert isinstance(stamped.item, WorkerAnswered), stamped.item


def others() -> float:
    """CPU seconds of all processes below this one."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            used = process.cpu_times()
            total += used.user + used.system
    return total


def quantiles_ms(values_s: list[float]) -> str:
    return f"{statistics.median(values_s) * 1e3:.1f}, {statistics.quantiles(values_s, n=20)[-1] * 1e3:.1f} ms"


def main(workers: str = "8,64,256", seconds: float = 6.0) -> None:
    print(machine())
    step = "a step: median, p95 | CPU of the manager | of all others | its memory, an order"
    head(f"workers | {step} | a reshape: median, p95 | CPU of the manager | CPU while idle | its order")
    for size in numbers(workers):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            found = pool.submit(measure, size, seconds).result()
        cpu = (f"{value * 1e3:.1f} ms" for value in (found.step_cpu_s, found.others_cpu_s))
        reshape = (quantiles_ms(found.reshape_s), f"{found.reshape_cpu_s * 1e3:.1f} ms", f"{found.idle_cpu:.1%}")
        size_kb = f"{found.order_bytes[1] / 1e3:.1f} kB"
        row(found.num_workers, quantiles_ms(found.step_s), *cpu, f"{found.growth:.2f} kB", *reshape, size_kb)
