"""Expected against measured mini-batch time with real compute, for the shapes that fit two cores.

    python benchmarks/step_time/expected.py configs/jobs/gpt2_stdlib.py:job --rounds 5 --steps 4

Calibrates the job, asks the simulator for each shape with two compute slots (all workers share this machine), and
trains it with Morph's workers. All shapes take turns, in an order drawn anew in each round.

A shared machine is not equally fast from one minute to the next: the same section, alone, with nothing beside it, takes
up to a sixth longer for minutes. So one section is timed beside the calibration and again before and after each turn,
alone: the yardstick. The table has both errors: as measured, and with what the simulator expects stretched by what the
yardstick says of the machine at that turn. Cores need not be equally fast either: the yardstick on each of them is
printed at the start and at the end.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from morph_side import MorphSide

from calibrate import calibrate
from calibrate.computing.subject import load_subject
from calibrate.timing.bench import Bench
from morph.contract.plan import Plan, Schedule
from morph.contract.profile import Profile
from morph.cutting import cut, export_job
from morph.jobs.job import load_job
from simulator import simulate

NUM_CORES = 2
YARDSTICK_RUNS = 25


@dataclass
class Shape:
    """One row: what was asked of the simulator, and what was measured."""

    name: str
    plan: Plan
    step_s: list[float] = field(default_factory=list)
    slowness: list[float] = field(default_factory=list)

    @property
    def error(self) -> float:
        """Expected over measured, less one."""
        return self.plan.expected.mini_batch_s / statistics.median(self.step_s) - 1

    @property
    def error_of_model(self) -> float:
        """The same at the speed that the machine had in each turn."""
        turns = zip(self.slowness, self.step_s, strict=True)
        return statistics.median(self.plan.expected.mini_batch_s * slow / step_s for slow, step_s in turns) - 1


class Yardstick:
    """One section of the job, run alone in this process."""

    def __init__(self, job_path: str) -> None:
        subject = load_subject(job_path, torch.device("cpu"))
        assert subject.job.micro_batch_size is not None, "the job leaves m open"
        self._bench: Bench = subject.benches(subject.cut(subject.job.micro_batch_size))[0]
        self.measure_s()

    def measure_s(self) -> float:
        """Wall time of a forward and backward: the median of some."""
        samples_s = []
        for _ in range(YARDSTICK_RUNS):
            begin_s = time.perf_counter()
            self._bench.both()
            samples_s.append(time.perf_counter() - begin_s)
        return statistics.median(samples_s)

    def on_each_core(self) -> str:
        """In words: the same on each core that this process may use."""
        allowed = os.sched_getaffinity(0)
        found_ms = []
        try:
            for core in sorted(allowed):
                os.sched_setaffinity(0, {core})
                found_ms.append(self.measure_s() * 1e3)
        finally:
            os.sched_setaffinity(0, allowed)
        return "one section alone, core by core: " + ", ".join(f"{core_ms:.1f} ms" for core_ms in found_ms)

    @contextmanager
    def beside(self, measured_s: list[float]) -> Iterator[None]:
        """Append the mean of a measurement before and one behind."""
        before_s = self.measure_s()
        yield
        measured_s.append((before_s + self.measure_s()) / 2)


def shapes(profile: Profile) -> Iterator[Shape]:
    def plan(num_stages: int, num_replicas: int, schedule: Schedule = "varuna", *, recompute: bool = True) -> Plan:
        return simulate(
            profile,
            num_stages=num_stages,
            num_replicas=num_replicas,
            schedule=schedule,
            recompute=recompute,
            compute_slots=NUM_CORES,
        ).plan

    yield Shape("1x1", plan(1, 1))
    yield Shape("1x2", plan(1, 2))
    yield Shape("2x2", plan(2, 2))
    schedules: tuple[Schedule, ...] = ("varuna", "1f1b", "gpipe")
    for schedule in schedules:
        yield Shape(f"2x1 {schedule}", plan(2, 1, schedule))
        yield Shape(f"2x1 {schedule}, no recompute", plan(2, 1, schedule, recompute=False))


def report(measured: list[Shape]) -> None:
    print("\n| shape | measured, median | spread | expected | error | machine slower by | error at that speed |")
    print("|---|---|---|---|---|---|---|")
    for shape in measured:
        median_s = statistics.median(shape.step_s)
        spread = (max(shape.step_s) - min(shape.step_s)) / median_s
        expected_ms = shape.plan.expected.mini_batch_s * 1e3
        slower = statistics.median(shape.slowness) - 1
        print(
            f"| {shape.name} | {median_s * 1e3:.0f} ms | {spread:.0%} | {expected_ms:.0f} ms | {shape.error:+.1%} "
            f"| {slower:+.1%} | {shape.error_of_model:+.1%} |"
        )
    for name, errors in (
        ("error", [abs(shape.error) for shape in measured]),
        ("error at the machine's speed of each turn", [abs(shape.error_of_model) for shape in measured]),
    ):
        print(f"\n{name}: {statistics.mean(errors):.1%} on average, {max(errors):.1%} at worst")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", help="path/to/file.py:name")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0, help="of the order of turns")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    torch.set_num_threads(1)
    yardstick = Yardstick(options.job)
    print(yardstick.on_each_core())
    at_calibration_s: list[float] = []
    with yardstick.beside(at_calibration_s):
        profile = calibrate(options.job)
    slower = ", ".join(f"{entry.num_busy} at once x{entry.factor:.2f}" for entry in profile.contention)
    print(f"calibrated; tasks beside each other: {slower or 'no slower'}; load {os.getloadavg()[0]:.1f}")
    job = load_job(options.job)
    measured = list(shapes(profile))
    model = cut(export_job(job), num_sections=profile.num_sections, micro_batch_size=measured[0].plan.micro_batch_size)
    with tempfile.TemporaryDirectory() as directory:
        side = MorphSide(options.job, model, directory, max(shape.plan.num_workers for shape in measured))
        turns = random.Random(options.seed)
        for round_index in range(options.rounds):
            for shape in turns.sample(measured, len(measured)):
                side.begin_plan(shape.plan)
                side.steps(1)
                at_turn_s: list[float] = []
                with yardstick.beside(at_turn_s):
                    begin_s = time.perf_counter()
                    side.steps(options.steps)
                    shape.step_s.append((time.perf_counter() - begin_s) / options.steps)
                shape.slowness.append(at_turn_s[0] / at_calibration_s[0])
            print(f"round {round_index + 1} of {options.rounds} done", file=sys.stderr)
        side.end()
    print(yardstick.on_each_core())
    print(f"{options.rounds} rounds of 1 + {options.steps} steps, load at the end {os.getloadavg()[0]:.1f}")
    report(measured)


if __name__ == "__main__":
    main()
