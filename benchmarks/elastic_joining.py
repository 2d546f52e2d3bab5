"""How long workers of an elastic ring stand still when another one joins: its state comes before, or with it.

    python benchmarks/elastic_joining.py --megabytes 256 --joins 5

Workers are forks of one process. A step is a sleep of --step-s in place of compute; AdamW trains a model of
--megabytes. Then a worker joins. Prints the longest step of the others around that less a plain step, quartiles
and worst: once where the joiner follows the others' steps before it is let in, once where it gets its state then.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import statistics
import sys
import time
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection

import numpy as np
import torch
from elastic_recovery import Ring, StepTold
from torch import Tensor, nn

import morph.elastic
from morph.elastic.meeting import Sponsor
from morph.elastic.session import Session

NUM_AFTER = 4


def train(lane: Connection, step_s: float, num_values: int, follows: bool) -> None:
    """One worker, as in elastic_recovery, with a larger state; ``follows``: joiners get it in the background."""
    torch.set_num_threads(1)
    if not follows:

        def all_at_once(_: Session, sponsor: Sponsor) -> bool:
            sponsor.ready(follows=False)
            return False

        Session._follow = all_at_once  # type: ignore[method-assign]
    model = nn.Linear(num_values, 1, bias=False)
    optimizer = morph.elastic.Optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model, accumulation="fast")
    membership = optimizer._session.membership
    lane.send(tuple(membership.address)[:2])

    def loss(_: object) -> Tensor:
        time.sleep(step_s)
        found: Tensor = model.weight.square().sum()
        return found

    while True:
        optimizer.step(loss)
        lane.send((time.time(), optimizer.num_steps, optimizer.num_workers, membership.num_sent))


def longest_beyond(steps: list[StepTold], since: int, num_after: int) -> tuple[float, float]:
    """Return the longest step from an index on beyond a plain one, and that: of two medians, before and after."""
    times = [after[0] - before[0] for before, after in pairwise(steps)]
    plain = max(statistics.median(times[2:since]), statistics.median(times[-num_after:]))
    return max(times[since - 1 :]) - plain, plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=64, help="of parameters; AdamW's state is twice that again")
    parser.add_argument("--joins", type=int, default=5)
    parser.add_argument("--ways", nargs="+", default=["before", "with"], choices=["before", "with"])
    parser.add_argument("--step-s", type=float, default=1.0, help="a step's compute")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    warm = torch.zeros(1, requires_grad=True)
    torch.optim.AdamW([warm]).step()
    importlib.import_module("morph.elastic.optimizer")
    load = os.getloadavg()[0]
    print(f"{options.workers} workers, one joins; 3 x {options.megabytes} MB of state, {options.step_s} s a step")
    print(f"{os.cpu_count()} cores, load {load:.1f} before, torch {torch.__version__}")
    print(f"{'state':>20}{'joins':>7}{'q1':>9}{'median':>9}{'q3':>9}{'worst':>9}{'plain step':>12}{'to come in':>12}")
    for follows in [way == "before" for way in options.ways]:
        found: list[tuple[float, float, float]] = []
        for _ in range(options.joins):
            work = partial(train, num_values=options.megabytes * 2**18, follows=follows)
            ring = Ring(options.workers, options.step_s, 30.0, work)
            try:
                ring.settle(options.workers, 6)
                since, begin_s = [len(worker.steps) for worker in ring.workers], time.time()
                ring.add()
                ring.settle(options.workers + 1, NUM_AFTER + 2)
                came_s = next(step[0] for step in ring.workers[0].steps if step[2] > options.workers) - begin_s
                pauses = [
                    longest_beyond(worker.steps, first, NUM_AFTER)
                    for worker, first in zip(ring.workers, since, strict=False)
                ]
                found.append((*max(pauses), came_s))
            finally:
                ring.close()
        first, middle, third = np.percentile([one[0] for one in found], (25, 50, 75))
        times = "".join(f"{value:9.3f}" for value in (first, middle, third, max(one[0] for one in found)))
        plain, came_s = (statistics.median(one[index] for one in found) for index in (1, 2))
        what = "before it comes in" if follows else "when it comes in"
        print(f"{what:>20}{len(found):>7}{times}{plain:12.3f}{came_s:12.3f}")


if __name__ == "__main__":
    main()
