"""Throughput per worker as workers are added on slow links: s-sgd, ad-psgd and auto (as in Spotnik's figure 6).

    python -m benchmarks elastic_network --workers 8 --hold-s 9

Each worker is a fork of this process in a network namespace of its own, whose link has --megabytes-per-s in each
direction (tbf; Linux, root, iproute2). A step is a sleep of --step-s in place of compute, then the gradients or the
model of --megabytes. One worker begins, and another one joins after every --hold-s seconds. Prints, for each number of
workers, the steps per second of a worker from its second step with that many on (median over workers), and the share
of them that was done under s-sgd.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Annotated

from benchmarks.elastic_ring import Ring, import_before_forks, train_sum
from benchmarks.harness import head, machine, option, row, words
from manager.engine.local_vms.namespaces import HostNetwork, check_permitted, enter
from morph.elastic.invitation import LISTEN

NAMESPACE = "BENCHMARK_NAMESPACE"
SYNCS = ("s-sgd", "ad-psgd", "auto")


def rates(ring: Ring, num_workers: int) -> tuple[float, float]:
    """Return a worker's median steps per second with so many workers, and the share of steps under s-sgd."""
    found, under_s_sgd = [], list[bool]()
    for worker in ring.workers:
        steps = [step for step in worker.steps if step.num_workers == num_workers][1:]
        if len(steps) > 1:
            found.append((len(steps) - 1) / (steps[-1].time_s - steps[0].time_s))
        under_s_sgd += [step.sync == "s-sgd" for step in steps]
    return statistics.median(found), sum(under_s_sgd) / len(under_s_sgd)


def main(
    workers: Annotated[int, option("in the end")] = 8,
    hold_s: Annotated[float, option("seconds until the next worker is added")] = 9.0,
    step_s: Annotated[float, option("a step's compute")] = 0.2,
    megabytes: Annotated[float, option("of gradients, and of the model")] = 4.0,
    megabytes_per_s: Annotated[float, option("of each worker's link")] = 20.0,
    syncs: str = "s-sgd,ad-psgd,auto",
) -> None:
    check_permitted()
    import_before_forks()
    told, network = machine(), HostNetwork(workers, megabytes_per_s * 1e6)

    def own(number: int) -> dict[str, str]:
        return {LISTEN: network.address(number), NAMESPACE: network.namespace(number)}

    def measured(sync: str) -> list[tuple[float, float]]:
        """Return rate and share for each number of workers."""

        def train(lane: Connection) -> None:
            enter(os.environ[NAMESPACE])
            train_sum(lane, step_s, round(megabytes * 1e6 / 4), accumulation="fast", sync=sync)

        found = []
        with Ring(1, train, 30.0, own) as ring:
            for num_workers in range(1, workers + 1):
                ring.settle(num_workers, 2)
                until_s = time.monotonic() + hold_s
                ring.watch(lambda: time.monotonic() > until_s, "time to pass")  # noqa: B023 # called here
                found.append(rates(ring, num_workers))
                print(f"  {sync}, {num_workers}: {found[-1][0]:.2f} steps/s", file=sys.stderr)
                if num_workers < workers:
                    ring.add()
        return found

    found = {}
    for sync in words(syncs, SYNCS):
        network.open()
        try:
            found[sync] = measured(sync)
        finally:
            network.close()
    print(f"{megabytes:g} MB on links of {megabytes_per_s:g} MB/s, {step_s:g} s of compute; {told}")
    print("steps/s of a worker (share under s-sgd)")
    head("workers | " + " | ".join(found))
    for index in range(workers):
        row(index + 1, *(f"{each[index][0]:.2f} ({each[index][1]:.0%})" for each in found.values()))
