"""Step times of Morph's runtime, torch's own pipelines and DistributedDataParallel, on two processes.

    python -m benchmarks step_time --rounds 12 --steps 4

In every round each contender trains the same job from its first step: one step to warm up, then ``--steps`` timed
ones, in an order that is drawn anew. Prints medians, the ratio to the fastest peer of the same round, and checks that
all contenders report the same losses.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np

from benchmarks.harness import Seed, head, in_turns, load, machine, option, ratio, row, wall_s
from benchmarks.step_time.torch_side import TorchSide
from benchmarks.workers import Crew, cut_job, plan_by_hand
from morph.contract.plan import Plan, Schedule
from morph.cutting.cuts.cut_model import CutModel
from morph.jobs.job import load_job
from simulator.engine.pipeline import StageTimes, run_pipeline
from simulator.engine.schedules import fixed_order, stage_windows

JOB = Path(__file__).with_name("gpt_job.py")
LOSS_TOLERANCE = 1e-4
SLOPE = 2


@dataclass
class Contender:
    """One way to train; ``peers`` name the shape and discipline in which contenders are compared."""

    name: str
    peers: str
    is_torch: bool
    begin: Callable[[], None]
    run: Callable[[int], list[float]]
    step_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def take_turn(self, steps: int) -> float:
        """Train from the first step; return the seconds of one timed step."""
        self.begin()
        self.losses = self.run(1)
        return wall_s(lambda: self.losses.extend(self.run(steps))) / steps


def make_plan(model: CutModel, total: int, stages: int, replicas: int, schedule: Schedule, recompute: bool) -> Plan:
    """Return a plan with equal stages, assuming backwards of twice the forward and free messages."""
    count = total // replicas
    windows = stage_windows(schedule, stages, count, SLOPE if schedule == "varuna" else 1)
    again = [recompute and stage < stages - 1 for stage in range(stages)]
    if schedule == "varuna":
        unit = np.full(stages, 1_000_000, np.int64)
        times = StageTimes(unit, unit, 2 * unit, 0 * unit, 0 * unit, np.array(windows, np.int64), np.array(again))
        orders = run_pipeline(times, (count,), keep_orders=True).orders[0]
    else:
        orders = tuple(fixed_order(schedule, stage, stages, count, again[stage]) for stage in range(stages))
    return plan_by_hand(
        [len(model.sections) * stage // stages for stage in range(stages + 1)],
        replicas,
        {count: orders},
        num_micro_batches=total,
        windows=windows,
        recompute=again,
        schedule=schedule,
        m=model.micro_batch_size,
        fingerprint=model.fingerprint,
    )


def contenders(crews: dict[str, Crew], peer: TorchSide, model: CutModel, total: int) -> list[Contender]:
    found = []

    def of_torch(name: str, peers: str, kind: str) -> None:
        found.append(Contender(name, peers, True, partial(peer.begin, kind), peer.steps))

    def of_morph(
        name: str, peers: str, stages: int, replicas: int, schedule: Schedule = "varuna", recompute: bool = False
    ) -> None:
        plan = make_plan(model, total, stages, replicas, schedule, recompute)
        for kind, crew in crews.items():
            found.append(Contender(f"Morph {name}, {kind}", peers, False, partial(crew.begin, plan), crew.steps))

    one, two = "P=1 D=1", "P=1 D=2"
    of_torch("plain PyTorch loop", one, "plain")
    of_morph("1x1", one, 1, 1)
    of_torch("DistributedDataParallel, no_sync", two, "ddp")
    of_morph("1x2", two, 1, 2)
    for recompute in (False, True):
        peers = f"P=2 D=1, {'' if recompute else 'no '}recompute"
        more = "+checkpoint" if recompute else ""
        of_torch("torch ScheduleGPipe" + more, peers, "gpipe" + more)
        of_torch("torch Schedule1F1B" + more, peers, "1f1b" + more)
        schedules: tuple[Schedule, ...] = ("varuna", "1f1b", "gpipe")
        for schedule in schedules:
            of_morph(schedule, peers, 2, 1, schedule, recompute)
    return found


def report(found: list[Contender]) -> None:
    for peers in dict.fromkeys(contender.peers for contender in found):
        group = [contender for contender in found if contender.peers == peers]
        best = min((each for each in group if each.is_torch), key=lambda each: statistics.median(each.step_s))
        head(f"{peers} | step, median | least | ratio to {best.name}, median of rounds")
        for each in group:
            times = (f"{1e3 * value:.1f} ms" for value in (statistics.median(each.step_s), min(each.step_s)))
            row(each.name, *times, f"{ratio(each.step_s, best.step_s):.3f}")


def check_losses(found: list[Contender]) -> None:
    want = found[0].losses
    apart = max(abs(a - b) for contender in found for a, b in zip(contender.losses, want, strict=True))
    print(f"\nlosses of the first {len(want)} steps: {', '.join(f'{loss:.5f}' for loss in want)}")
    print(f"largest difference between contenders: {apart:.1e}")
    exact = {tuple(each.losses) for each in found if each.name.endswith("exact")}
    print(f"Morph's exact losses are the same bits in every shape and schedule: {len(exact) == 1}")
    if apart > LOSS_TOLERANCE or len(exact) != 1:
        raise SystemExit("the contenders do not do the same work")


def main(
    rounds: int = 12,
    steps: int = 4,
    only: Annotated[str, option("contenders whose shape or name has this text")] = "",
    seed: Seed = 0,
) -> None:
    print(machine())
    with tempfile.TemporaryDirectory() as directory:
        model, job = cut_job(f"{JOB}:exact"), load_job(f"{JOB}:exact")
        crews = {kind: Crew(f"{JOB}:{kind}", model, directory, 2) for kind in ("exact", "fast")}
        peer = TorchSide(f"{JOB}:exact")
        every = contenders(crews, peer, model, job.batch_size // model.micro_batch_size)
        found = {f"{one.peers} {one.name}": one for one in every if only in f"{one.peers} {one.name}"}
        ways = {name: partial(one.take_turn, steps) for name, one in found.items()}
        for name, times_s in in_turns(ways, rounds, shuffled=random.Random(seed)).items():
            found[name].step_s = times_s
        for crew in crews.values():
            crew.end()
        peer.end()
    print(f"{rounds} rounds of 1 + {steps} steps, load at the end {load():.1f}")
    report(list(found.values()))
    check_losses(list(found.values()))
