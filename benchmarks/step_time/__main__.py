"""Step time of Morph's runtime beside torch's own pipelines and DistributedDataParallel, on two processes.

    python benchmarks/step_time --rounds 12 --steps 4

In every round each contender trains the same job from its first step: one step to warm up, then ``--steps`` timed
ones, in an order that is drawn anew. Prints medians, the ratio to the fastest peer of the same round, and checks that
all contenders report the same losses.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from morph_side import MorphSide, Shape, cut_job
from torch_side import TorchSide

JOB = Path(__file__).with_name("gpt_job.py")
LOSS_TOLERANCE = 1e-4


@dataclass
class Contender:
    """One way to train; ``peers`` name the shape and discipline in which contenders are compared."""

    name: str
    peers: str
    morph: bool
    begin: Callable[[], None]
    run: Callable[[int], list[float]]
    step_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def contenders(exact: MorphSide, fast: MorphSide, peer: TorchSide) -> list[Contender]:
    found = []

    def of_torch(name: str, peers: str, kind: str) -> None:
        found.append(Contender(name, peers, False, lambda: peer.begin(kind), peer.steps))

    def of_morph(name: str, peers: str, shape: Shape) -> None:
        for side, accumulation in ((exact, "exact"), (fast, "fast")):
            begin = lambda side=side: side.begin(shape)  # noqa: E731
            found.append(Contender(f"Morph {name}, {accumulation}", peers, True, begin, side.steps))

    one, replicas = "P=1 D=1", "P=1 D=2"
    of_torch("plain PyTorch loop", one, "plain")
    of_morph("1x1", one, Shape(1, 1))
    of_torch("DistributedDataParallel, no_sync", replicas, "ddp")
    of_morph("1x2", replicas, Shape(1, 2))
    for recompute in (False, True):
        peers = f"P=2 D=1, {'' if recompute else 'no '}recompute"
        option = "+checkpoint" if recompute else ""
        of_torch("torch ScheduleGPipe" + option, peers, "gpipe" + option)
        of_torch("torch Schedule1F1B" + option, peers, "1f1b" + option)
        of_morph("varuna", peers, Shape(2, 1, "varuna", recompute))
        of_morph("1f1b", peers, Shape(2, 1, "1f1b", recompute))
        of_morph("gpipe", peers, Shape(2, 1, "gpipe", recompute))
    return found


def take_turn(contender: Contender, steps: int) -> None:
    contender.begin()
    losses = contender.run(1)
    begin_s = time.perf_counter()
    losses += contender.run(steps)
    contender.step_s.append((time.perf_counter() - begin_s) / steps)
    contender.losses = losses


def report(found: list[Contender]) -> None:
    for peers in dict.fromkeys(contender.peers for contender in found):
        group = [contender for contender in found if contender.peers == peers]
        best = min((contender for contender in group if not contender.morph), key=lambda c: statistics.median(c.step_s))
        print(f"\n| {peers} | step, median | least | ratio to {best.name}, median of rounds |\n|---|---|---|---|")
        for contender in group:
            ratio = statistics.median(a / b for a, b in zip(contender.step_s, best.step_s, strict=True))
            median_ms, least_ms = statistics.median(contender.step_s) * 1e3, min(contender.step_s) * 1e3
            print(f"| {contender.name} | {median_ms:.1f} ms | {least_ms:.1f} ms | {ratio:.3f} |")


def check_losses(found: list[Contender]) -> None:
    want = found[0].losses
    apart = max(abs(a - b) for contender in found for a, b in zip(contender.losses, want, strict=True))
    print(f"\nlosses of the first {len(want)} steps: {', '.join(f'{loss:.5f}' for loss in want)}")
    print(f"largest difference between contenders: {apart:.1e}")
    exact = {tuple(c.losses) for c in found if c.morph and c.name.endswith("exact")}
    print(f"Morph's exact losses are the same bits in every shape and schedule: {len(exact) == 1}")
    if apart > LOSS_TOLERANCE or len(exact) != 1:
        raise SystemExit("the contenders do not do the same work")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", default="", help="contenders whose shape or name has this text")
    parser.add_argument("--seed", type=int, default=0, help="of the order of turns")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, {platform.machine()}")
    with tempfile.TemporaryDirectory() as directory:
        model = cut_job(f"{JOB}:exact")
        exact, fast = (MorphSide(f"{JOB}:{name}", model, directory) for name in ("exact", "fast"))
        peer = TorchSide(f"{JOB}:exact")
        found = [one for one in contenders(exact, fast, peer) if options.only in f"{one.peers} {one.name}"]
        turns = random.Random(options.seed)
        for round_index in range(options.rounds):
            for contender in turns.sample(found, len(found)):
                take_turn(contender, options.steps)
            print(f"round {round_index + 1} of {options.rounds} done", file=sys.stderr)
        for side in (exact, fast, peer):
            side.end()
    print(f"{options.rounds} rounds of 1 + {options.steps} steps, load at the end {os.getloadavg()[0]:.1f}")
    report(found)
    check_losses(found)


if __name__ == "__main__":
    main()
