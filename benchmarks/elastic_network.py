"""Throughput of a worker as workers are added on slow links: s-sgd, ad-psgd and auto (as Spotnik's figure 6).

    python benchmarks/elastic_network.py --workers 8 --hold-s 9

Each worker is a fork of this process in a network namespace of its own, whose link has --megabytes-per-s in each
direction (tbf; Linux, root, iproute2). A step is a sleep of --step-s in place of compute, then the gradients or the
model of --megabytes. One worker begins, and another one joins after every --hold-s seconds. Prints, for each number of
workers, the steps per second of a worker from its second step with that many on (median over workers), and the share
of them that was done under s-sgd.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import statistics
import sys
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from elastic_recovery import Ring
from torch import Tensor, nn

import morph.elastic
from manager.engine.local_vms.namespaces import HostNetwork, check_permitted, enter
from morph.elastic.invitation import FOUNDERS, LISTEN, SECRET, SILENCE

NAMESPACE = "BENCHMARK_NAMESPACE"
SYNCS = ("s-sgd", "ad-psgd", "auto")
Told = tuple[float, int, int, str]
"""When a step was done, its number, of how many workers, and under which strategy."""


def train(lane: Connection, step_s: float, num_values: int, sync: str) -> None:
    """One worker on its host."""
    enter(os.environ[NAMESPACE])
    torch.set_num_threads(1)
    model = nn.Linear(num_values, 1, bias=False)
    optimizer = morph.elastic.Optimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3), model, accumulation="fast", sync=sync
    )
    lane.send(tuple(optimizer._session.membership.address)[:2])

    def loss(_: object) -> Tensor:
        time.sleep(step_s)
        found: Tensor = model.weight.square().sum()
        return found

    while True:
        used = optimizer.sync
        optimizer.step(loss)
        lane.send((time.time(), optimizer.num_steps, optimizer.num_workers, used))


class Spread(Ring):
    """A ring whose workers are on hosts of their own; begins with one."""

    def __init__(self, network: HostNetwork, step_s: float, num_values: int, sync: str) -> None:
        self._network, self._step_s = network, step_s
        self._work = partial(train, num_values=num_values, sync=sync)
        self.workers = []
        os.environ |= {SECRET: "benchmark", SILENCE: "30"}
        self._fork({FOUNDERS: "1"})

    def _fork(self, environment: dict[str, str]) -> None:
        host = len(self.workers)
        own = {LISTEN: self._network.address(host), NAMESPACE: self._network.namespace(host)}
        super()._fork(environment | own)


def rates(ring: Spread, num_workers: int) -> tuple[float, float]:
    """Return the median of steps per second of a worker with so many, and the share of them under s-sgd."""
    found, num_s_sgd, num_steps = [], 0, 0
    for worker in ring.workers:
        steps: list[Told] = [step for step in worker.steps if step[2] == num_workers][1:]  # type: ignore[misc] # told by ``train``
        if len(steps) > 1:
            found.append((len(steps) - 1) / (steps[-1][0] - steps[0][0]))
        num_s_sgd += sum(step[3] == "s-sgd" for step in steps)
        num_steps += len(steps)
    return statistics.median(found), num_s_sgd / num_steps


def measured(network: HostNetwork, sync: str, options: argparse.Namespace) -> list[tuple[float, float]]:
    """Return rate and share for each number of workers."""
    ring = Spread(network, options.step_s, round(options.megabytes * 1e6 / 4), sync)
    found = []
    try:
        for num_workers in range(1, options.workers + 1):
            ring.settle(num_workers, 2)
            until_s = time.monotonic() + options.hold_s
            ring.watch(lambda: time.monotonic() > until_s, "time to pass")  # noqa: B023 # called here
            found.append(rates(ring, num_workers))
            print(f"  {sync}, {num_workers}: {found[-1][0]:.2f} steps/s", file=sys.stderr)
            if num_workers < options.workers:
                ring.add()
    finally:
        ring.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8, help="in the end")
    parser.add_argument("--hold-s", type=float, default=9.0, help="seconds until the next worker is added")
    parser.add_argument("--step-s", type=float, default=0.2, help="a step's compute")
    parser.add_argument("--megabytes", type=float, default=4.0, help="of gradients, and of the model")
    parser.add_argument("--megabytes-per-s", type=float, default=20.0, help="of each worker's link")
    parser.add_argument("--syncs", nargs="+", default=list(SYNCS), choices=list(SYNCS))
    parser.add_argument("--out", type=Path, default=None, help="also write the figures as JSON")
    options = parser.parse_args()
    check_permitted()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()  # imported once, before the forks
    importlib.import_module("morph.elastic.optimizer")
    load, found = os.getloadavg()[0], {}
    network = HostNetwork(options.workers, options.megabytes_per_s * 1e6)
    for sync in options.syncs:
        network.open()
        try:
            found[sync] = measured(network, sync, options)
        finally:
            network.close()
    print(
        f"{options.megabytes:g} MB on links of {options.megabytes_per_s:g} MB/s, {options.step_s:g} s of compute; "
        f"{os.cpu_count()} cores, load {load:.1f} before, torch {torch.__version__}"
    )
    print(f"{'workers':>8}" + "".join(f"{sync:>10}" for sync in found) + "   steps/s of a worker (share under s-sgd)")
    for index in range(options.workers):
        print(f"{index + 1:>8}" + "".join(f"{one[index][0]:>10.2f} ({one[index][1]:.0%})" for one in found.values()))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
