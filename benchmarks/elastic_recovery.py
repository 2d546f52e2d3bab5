"""How long an elastic ring pauses when workers are killed (as in Spotnik's figure 4).

    python -m benchmarks elastic_recovery --workers 16 --kills 20

Workers are forks of one process. A step sleeps for --step-s in place of computing, then sums 128 KiB of gradients
exactly. One, two or three workers are killed at once at a random moment (seeded); new ones join after the others have
continued. Prints, for each number of losses, quartiles and maximum of the time from the kill until every survivor has
completed a step without the dead workers, less a plain step; and the most control messages that a survivor sent.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from functools import partial
from itertools import pairwise
from typing import Annotated

from benchmarks.elastic_ring import Ring, import_before_forks, train_sum
from benchmarks.harness import Seed, head, machine, option, quartiles, row

NUM_VALUES = 32 * 1024
SETTLE_STEPS = (3, 6)


def lose(ring: Ring, count: int, chooser: random.Random) -> tuple[float, int]:
    """Kill some workers; return the seconds until every survivor continued, and the most messages that one sent."""
    sent = {worker.pid: worker.steps[-1].num_sent for worker in ring.workers}
    killed_s, found = ring.lose(count, chooser)
    return max(step.time_s for step, _ in found) - killed_s, max(step.num_sent - sent[pid] for step, pid in found)


def plain_step_s(ring: Ring) -> float:
    times = [step.time_s for step in ring.workers[0].steps[-4:]]
    return statistics.median(after - before for before, after in pairwise(times))


def main(
    workers: int = 16,
    kills: Annotated[int, option("for each number of losses at once")] = 20,
    together: Annotated[int, option("most workers killed at once")] = 3,
    step_s: Annotated[float, option("a step's compute")] = 0.05,
    silence_s: float = 10.0,
    seed: Seed = 0,
    limit_s: Annotated[float, option("stop after this time with the kills so far")] = 3600.0,
) -> None:
    import_before_forks()
    begin_s, told, chooser = time.monotonic(), machine(), random.Random(seed)
    found: dict[int, list[tuple[float, float, int]]] = {count: [] for count in range(1, together + 1)}
    with Ring(workers, partial(train_sum, step_s=step_s, num_values=NUM_VALUES), silence_s) as ring:
        for _ in range(kills):
            for count in found:
                if time.monotonic() - begin_s > limit_s:
                    break
                ring.settle(workers, chooser.randint(*SETTLE_STEPS))
                time.sleep(chooser.uniform(0.0, 2 * step_s))
                plain_s = plain_step_s(ring)
                pause_s, most = lose(ring, count, chooser)
                found[count].append((pause_s, plain_s, most))
                print(f"  {count} lost: {pause_s:.3f} s, of which a plain step {plain_s:.3f} s", file=sys.stderr)
                for _ in range(count):
                    ring.add()
    print(f"{workers} workers, {told}")
    head("lost at once | kills | lower quartile | median | upper quartile | worst | plain step | messages a worker")
    for count, pauses in found.items():
        if pauses:
            times = quartiles([max(0.0, pause_s - plain_s) for pause_s, plain_s, _ in pauses])
            plain_s = statistics.median(plain_s for _, plain_s, _ in pauses)
            cells = (f"{value:.3f}" for value in (*times, plain_s))
            row(count, len(pauses), *cells, max(most for _, _, most in pauses))
