"""Which schedule bears slow and jittery links: real processes and messages, sleeps instead of computing.

    python -m benchmarks emulated_links --stages 4 --micro-batches 16 --rounds 3
    python -m benchmarks emulated_links --stages 8 --micro-batches 32 --rounds 3

The question of Varuna's Table 5. Every stage sleeps x for a forward and for a recompute and 2x for a backward, and
sends boundary tensors of real size over gloo; on top of that each message is held back by its link: a fixed latency,
with jitter also an exponential extra from a seeded generator (the same draws for every contender). Messages of a link
overlap and keep their order. Contenders take turns: Morph's executor with its own rules (window slopes 1, 2 and 4) and
with GPipe's and 1F1B's orders, and torch.distributed.pipelining's ScheduleGPipe and Schedule1F1B, whose sends are held
back by the same links and never make their sender wait.

Printed is the time of one mini-batch over N * 4x, and beside it what the simulator's engine expects for the same task
times and the mean latency.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated

from benchmarks.emulated_links.cases import LINKS, WAYS, Case, Link, Way, expected_s
from benchmarks.emulated_links.stage_process import StageProcess
from benchmarks.harness import LOOPBACK, head, machine, option, row, wall_s
from benchmarks.remote import Remote, call_all, end_all
from morph.runtime.groups.store import StoreHost


@dataclass
class Result:
    way: Way
    link: Link
    case: Case
    took_s: list[float] = field(default_factory=list)


def one_batch(stages: list[Remote], way: Way, case: Case) -> float:
    """Seconds from the start to the end of the slowest stage."""
    call_all(stages, "prepare", way, case)
    return wall_s(partial(call_all, stages, "run"))


def message_time_s(stages: list[Remote], case: Case) -> float:
    """A message's own time on links that hold nothing back: one micro-batch from end to end, less its sleeps."""
    alone, way = replace(case, num_micro_batches=1), Way("alone", "1f1b")
    sleeps_s = case.num_stages * 3 * case.unit_s
    rest_s = [one_batch(stages, way, alone) - sleeps_s for _ in range(9)]
    return max(0.0, statistics.median(rest_s) / (2 * (case.num_stages - 1)))


def report(results: list[Result], base_s: float) -> None:
    print("\nTime of one mini-batch over N * 4x, median (expected by the engine), and ratio to the best of torch's")
    head(" | " + " | ".join(link.name for link in LINKS))
    found = {(result.way, result.link): result for result in results}
    for way in WAYS:
        cells = []
        for link in LINKS:
            result = found[way, link]
            median_s = statistics.median(result.took_s)
            best_s = min(statistics.median(found[peer, link].took_s) for peer in WAYS if peer.torchs)
            share = median_s / result.case.ideal_s
            expected = expected_s(way, result.case, base_s) / result.case.ideal_s
            cells.append(f"{share:.3f} ({expected:.3f}) {median_s / best_s:.2f}")
        row(way.name, *cells)
    for link in LINKS:
        errors = [
            abs(statistics.median(r.took_s) / expected_s(r.way, r.case, base_s) - 1)
            for r in results
            if r.link is link and not r.way.torchs
        ]
        mean, worst = statistics.mean(errors), max(errors)
        print(f"{link.name}: Morph's runs differ from the engine by {mean:.1%} on average, {worst:.1%} at worst")


def main(
    stages: int = 4,
    micro_batches: int = 16,
    rounds: int = 3,
    unit_ms: Annotated[float, option("x")] = 20.0,
    message_bytes: int = 1 << 20,
) -> None:
    print(machine())
    store, x_s = StoreHost(LOOPBACK), unit_ms / 1e3
    processes = [Remote(partial(StageProcess, stage, stages, store.port())) for stage in range(stages)]
    plain = Case(stages, micro_batches, message_bytes, x_s)
    base_s = message_time_s(processes, plain)
    results = [
        Result(way, link, replace(plain, latency_s=link.latency * x_s, jitter_s=link.jitter * x_s))
        for link in LINKS
        for way in WAYS
    ]
    for number in range(rounds):
        for result in results:
            result.took_s.append(one_batch(processes, result.way, replace(result.case, seed=number)))
        print(f"round {number + 1} of {rounds} done", file=sys.stderr)
    end_all(processes)
    print(
        f"P={stages}, N={micro_batches}, x={unit_ms:g} ms, {message_bytes} bytes, {rounds} rounds; "
        f"a message alone takes {base_s * 1e3:.2f} ms; {machine()} at the end"
    )
    report(results, base_s)
