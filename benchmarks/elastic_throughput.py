"""A step of elastic workers against one of DistributedDataParallel, without losses (as Spotnik's figure 5).

    python benchmarks/elastic_throughput.py --rounds 3

Workers are forks of one process. A model has as many values as one of Spotnik's, in tensors of one million; its
backward makes a gradient for each. A step is a sleep of --step-s in place of the rest of the compute, that backward
with the all-reduce beside it, and SGD. The ways take turns within each round. Prints medians of step times over all
rounds and the throughput against DistributedDataParallel, which applies gradients without asking whether all have them.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import morph.elastic
from morph.elastic.invitation import FOUNDERS, JOIN, LISTEN_FD, SECRET

SIZES = {"ResNet-50": 25_557_032, "Inception-V3": 23_834_568, "BERT-base": 109_482_240, "VGG-16": 138_357_544}
"""Trained values of each model."""
TENSOR_VALUES = 1_000_000
WAYS = ("DDP", "fast", "exact")
NUM_WARM = 2
TIMEOUT_S = 240.0


class Values(nn.Module):
    """So many trained values; the output is the sum of their squares."""

    def __init__(self, num_values: int) -> None:
        super().__init__()
        sizes = [TENSOR_VALUES] * (num_values // TENSOR_VALUES) + [num_values % TENSOR_VALUES]
        self.parts = nn.ParameterList([nn.Parameter(torch.full((size,), 0.01)) for size in sizes])

    def forward(self, wait_s: float) -> Tensor:
        time.sleep(wait_s)
        return torch.stack([part.square().sum() for part in self.parts]).sum()


def stepper(way: str, num_values: int, port: int, rank: int, size: int, step_s: float) -> Callable[[], object]:
    """Return what does one step of a worker."""
    model = Values(num_values)
    plain = torch.optim.SGD(model.parameters(), lr=1e-6)
    if way != "DDP":
        optimizer = morph.elastic.Optimizer(plain, model, accumulation="exact" if way == "exact" else "fast")
        return lambda: optimizer.step(lambda _: model(step_s))
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    wrapped = DistributedDataParallel(model)

    def step() -> None:
        plain.zero_grad()
        wrapped(step_s).backward()
        plain.step()

    return step


def worker(lane: Connection, num_steps: int, make: Callable[[], Callable[[], object]]) -> None:
    """Send the seconds of each step."""
    torch.set_num_threads(1)
    step = make()
    for _ in range(num_steps):
        begin_s = time.perf_counter()
        step()
        lane.send(time.perf_counter() - begin_s)
    lane.recv()  # until the others are done too


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def step_times(way: str, num_values: int, size: int, num_steps: int, step_s: float) -> list[float]:
    """Return the seconds of each step after the first ones, of the slowest worker."""
    lanes, pids = [], []
    port = free_port()
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        for rank in range(size):
            ours, theirs = Pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    host, where = listening.getsockname()[:2]
                    first = {LISTEN_FD: str(listening.fileno()), FOUNDERS: str(size)}
                    os.environ |= {SECRET: "benchmark", **(first if rank == 0 else {JOIN: f"{host}:{where}"})}
                    worker(theirs, num_steps, lambda: stepper(way, num_values, port, rank, size, step_s))  # noqa: B023 # called here
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)
            theirs.close()
            lanes.append(ours)
            pids.append(pid)
    try:
        times = []
        for _ in range(num_steps):
            for lane in lanes:
                if not lane.poll(TIMEOUT_S):
                    raise TimeoutError(f"no step of {way} within {TIMEOUT_S:g} s")
            times.append(max(lane.recv() for lane in lanes))
        return times[NUM_WARM:]
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="of each way in a round")
    parser.add_argument("--step-s", type=float, default=0.0, help="compute beside the backward")
    parser.add_argument("--models", nargs="+", default=list(SIZES), choices=list(SIZES))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    importlib.import_module("morph.elastic.optimizer")
    load = os.getloadavg()[0]
    print(f"{options.workers} workers, {os.cpu_count()} cores, load {load:.1f} before, torch {torch.__version__}")
    print(f"{options.step_s:g} s of compute beside the backward; medians of step times in seconds")
    print(f"{'model':>14}{'MB':>6}{'DDP':>9}{'fast':>9}{'exact':>9}{'fast/DDP':>10}{'exact/DDP':>11}{'DDP spread':>12}")
    for model in options.models:
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(options.rounds):
            for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
                found[way] += step_times(way, SIZES[model], options.workers, options.steps, options.step_s)
        ddp, fast, exact = (statistics.median(found[way]) for way in WAYS)
        low, _, high = statistics.quantiles(found["DDP"], n=4)
        print(
            f"{model:>14}{SIZES[model] * 4 / 1e6:6.0f}{ddp:9.3f}{fast:9.3f}{exact:9.3f}{ddp / fast:10.2f}"
            f"{ddp / exact:11.2f}{low:7.3f}-{high:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
