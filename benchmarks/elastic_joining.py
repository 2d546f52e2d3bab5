"""How long workers of an elastic ring pause when another one joins, which receives its state during their steps.

    python -m benchmarks elastic_joining --megabytes 256 --joins 5

Workers are forks of one process. A step sleeps for --step-s in place of computing; AdamW trains a model of --megabytes.
Then a worker joins. Prints quartiles and maximum of the others' longest step at that time, less a plain step, and the
time until the joiner trained.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Annotated

import torch

from benchmarks.elastic_ring import Ring, Told, import_before_forks, train_sum
from benchmarks.harness import head, machine, option, quartiles, row

NUM_AFTER = 4


def longest_beyond(steps: Sequence[Told], since: int) -> tuple[float, float]:
    """Return by how much the longest step from an index on exceeds a plain one, and the seconds of a plain step."""
    times = [after.time_s - before.time_s for before, after in pairwise(steps)]
    plain = max(statistics.median(times[2:since]), statistics.median(times[-NUM_AFTER:]))
    return max(times[since - 1 :]) - plain, plain


def main(
    workers: int = 2,
    megabytes: Annotated[int, option("of parameters; AdamW's state is twice that again")] = 64,
    joins: int = 5,
    step_s: Annotated[float, option("a step's compute")] = 1.0,
) -> None:
    import_before_forks()
    print(f"{workers} workers, one joins; 3 x {megabytes} MB of state, {step_s} s a step; {machine()}")
    found: list[tuple[float, float, float]] = []
    train = partial(train_sum, step_s=step_s, num_values=megabytes * 2**18, make=torch.optim.AdamW, accumulation="fast")
    for _ in range(joins):
        with Ring(workers, train, 30.0) as ring:
            ring.settle(workers, 6)
            since, begin_s = [len(worker.steps) for worker in ring.workers], time.time()
            ring.add()
            ring.settle(workers + 1, NUM_AFTER + 2)
            came_s = next(step.time_s for step in ring.workers[0].steps if step.num_workers > workers) - begin_s
            pairs = zip(ring.workers, since, strict=False)
            found.append((*max(longest_beyond(worker.steps, first) for worker, first in pairs), came_s))
    pauses_s, plain_s, came_in_s = zip(*found, strict=True)
    head("joins | lower quartile | median | upper quartile | worst | plain step | until it trains")
    times = (*quartiles(pauses_s), statistics.median(plain_s), statistics.median(came_in_s))
    row(joins, *(f"{value:.3f}" for value in times))
