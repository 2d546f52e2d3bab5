"""Which schedule bears slow and jittery links: real processes and messages, sleeps instead of computing.

    python -m benchmarks.emulated_links --stages 4 --micro-batches 16 --rounds 3
    python -m benchmarks.emulated_links --stages 8 --micro-batches 32 --rounds 3

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

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from functools import partial

import torch

from benchmarks.emulated_links.cases import LINKS, LOOPBACK, WAYS, Case, Link, Way, expected_s
from benchmarks.emulated_links.stage_process import StageProcess
from benchmarks.step_time.remote import Remote, call_all
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
    begin_s = time.perf_counter()
    call_all(stages, "run")
    return time.perf_counter() - begin_s


def message_time_s(stages: list[Remote], case: Case) -> float:
    """A message's own time on links that hold nothing back: one micro-batch from end to end, less its sleeps."""
    alone = Case(case.num_stages, 1, case.message_bytes, case.unit_s)
    way = Way("alone", "1f1b")
    sleeps_s = case.num_stages * 3 * case.unit_s
    rest_s = [one_batch(stages, way, alone) - sleeps_s for _ in range(9)]
    return max(0.0, statistics.median(rest_s) / (2 * (case.num_stages - 1)))


def measure(options: argparse.Namespace) -> tuple[list[Result], float]:
    store = StoreHost(LOOPBACK)
    stages = [Remote(partial(StageProcess, stage, options.stages, store.port())) for stage in range(options.stages)]
    unit_s = options.unit_ms / 1e3
    plain = Case(options.stages, options.micro_batches, options.message_bytes, unit_s)
    base_s = message_time_s(stages, plain)
    results = [
        Result(
            way,
            link,
            Case(
                options.stages,
                options.micro_batches,
                options.message_bytes,
                unit_s,
                link.latency * unit_s,
                link.jitter * unit_s,
            ),
        )
        for link in LINKS
        for way in WAYS
    ]
    for round_index in range(options.rounds):
        for result in results:
            case = Case(**{**vars(result.case), "seed": round_index})
            result.took_s.append(one_batch(stages, result.way, case))
        print(f"round {round_index + 1} of {options.rounds} done", file=sys.stderr)
    for stage in stages:
        stage.end()
    return results, base_s


def report(results: list[Result], base_s: float) -> None:
    print("\nTime of one mini-batch over N * 4x, median (expected by the engine), and ratio to the best of torch's")
    print("| | " + " | ".join(link.name for link in LINKS) + " |\n|---|" + "---|" * len(LINKS))
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
        print(f"| {way.name} | " + " | ".join(cells) + " |")
    for link in LINKS:
        errors = [
            abs(statistics.median(r.took_s) / expected_s(r.way, r.case, base_s) - 1)
            for r in results
            if r.link is link and not r.way.torchs
        ]
        mean, worst = statistics.mean(errors), max(errors)
        print(f"{link.name}: Morph's runs differ from the engine by {mean:.1%} on average, {worst:.1%} at worst")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--unit-ms", type=float, default=20.0, help="x")
    parser.add_argument("--message-bytes", type=int, default=1 << 20)
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    results, base_s = measure(options)
    print(
        f"P={options.stages}, N={options.micro_batches}, x={options.unit_ms:g} ms, {options.message_bytes} bytes, "
        f"{options.rounds} rounds; a message alone takes {base_s * 1e3:.2f} ms; load {os.getloadavg()[0]:.1f}"
    )
    report(results, base_s)


if __name__ == "__main__":
    main()
