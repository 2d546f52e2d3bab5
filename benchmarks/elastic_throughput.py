"""Steps of elastic workers compared with DistributedDataParallel, without losses (as in Spotnik's figure 5).

    python -m benchmarks elastic_throughput --rounds 3

Workers are forks of one process. A model has as many values as one of Spotnik's, in tensors of one million; its
backward makes a gradient for each. A step consists of a sleep of --step-s for the rest of the compute, that backward
with an overlapped all-reduce, and SGD. The ways take turns within each round. Prints medians of step times over all
rounds, and the throughput relative to DistributedDataParallel, which applies gradients without checking that all
workers have them.
"""

from __future__ import annotations

import os
import random
import socket
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Annotated

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.nn.parallel import DistributedDataParallel

import morph.elastic
from benchmarks.elastic_ring import NUMBER, Ring, Told, import_before_forks
from benchmarks.harness import LOOPBACK, Seed, head, in_turns, machine, option, quartiles, row, wall_s, words

SIZES = {"ResNet-50": 25_557_032, "Inception-V3": 23_834_568, "BERT-base": 109_482_240, "VGG-16": 138_357_544}
"""Trained values of each model."""
TENSOR_VALUES = 1_000_000
WAYS = ("DDP", "fast", "exact")
NUM_WARM = 2


class Values(nn.Module):
    """A model with so many trained values, whose output is the sum of their squares."""

    def __init__(self, num_values: int) -> None:
        super().__init__()
        sizes = [TENSOR_VALUES] * (num_values // TENSOR_VALUES) + [num_values % TENSOR_VALUES]
        self.parts = nn.ParameterList([nn.Parameter(torch.full((size,), 0.01)) for size in sizes])

    def forward(self, wait_s: float) -> Tensor:
        time.sleep(wait_s)
        return torch.stack([part.square().sum() for part in self.parts]).sum()


def stepper(way: str, num_values: int, port: int, rank: int, size: int, step_s: float) -> Callable[[], object]:
    """Return a function that runs one step of a worker."""
    model = Values(num_values)
    plain = torch.optim.SGD(model.parameters(), lr=1e-6)
    if way != "DDP":
        optimizer = morph.elastic.Optimizer(plain, model, accumulation="exact" if way == "exact" else "fast")
        return lambda: optimizer.step(lambda _: model(step_s))
    store = TCPStore(LOOPBACK, port, size, rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    wrapped = DistributedDataParallel(model)

    def step() -> None:
        plain.zero_grad()
        wrapped(step_s).backward()
        plain.step()

    return step


def train(lane: Connection, num_steps: int, size: int, make: Callable[[int], Callable[[], object]]) -> None:
    """Train, and send the time of each step."""
    torch.set_num_threads(1)
    lane.send(None)  # no address: no worker joins later
    step = make(int(os.environ[NUMBER]))
    for number in range(num_steps):
        took_s = wall_s(step)
        lane.send(Told(took_s, number, size))
    lane.recv()  # waits until the others are done


def step_times(way: str, num_values: int, size: int, num_steps: int, step_s: float) -> list[float]:
    """Return the seconds of each step after the first ones, of the slowest worker."""
    with socket.create_server((LOOPBACK, 0)) as listening:
        port = int(listening.getsockname()[1])
    make = partial(stepper, way, num_values, port, size=size, step_s=step_s)
    with Ring(size, partial(train, num_steps=num_steps, size=size, make=make)) as ring:
        ring.watch(lambda: all(len(worker.steps) == num_steps for worker in ring.workers), f"steps of {way}")
        steps = zip(*(worker.steps for worker in ring.workers), strict=True)
        return [max(each.time_s for each in step) for step in steps][NUM_WARM:]


def main(
    workers: int = 2,
    rounds: int = 3,
    steps: Annotated[int, option("of each way in a round")] = 8,
    step_s: Annotated[float, option("compute beside the backward")] = 0.0,
    models: str = ",".join(SIZES),
    seed: Seed = 0,
) -> None:
    import_before_forks()
    print(f"{workers} workers, {machine()}; {step_s:g} s of compute beside the backward; medians of step times, s")
    head("gradients of | MB | DDP (quartiles) | fast | exact | fast / DDP | exact / DDP")
    for model in words(models, SIZES):
        ways = {way: partial(step_times, way, SIZES[model], workers, steps, step_s) for way in WAYS}
        found = in_turns(ways, rounds, shuffled=random.Random(seed))
        times = {way: [step for turn in turns for step in turn] for way, turns in found.items()}
        ddp, fast, exact = (statistics.median(times[way]) for way in WAYS)
        lower, _, upper, _ = quartiles(times["DDP"])
        cells = (f"{fast:.3f}", f"{exact:.3f}", f"{ddp / fast:.2f}", f"{ddp / exact:.2f}")
        row(model, f"{SIZES[model] * 4 / 1e6:.0f}", f"{ddp:.3f} ({lower:.3f} to {upper:.3f})", *cells)
