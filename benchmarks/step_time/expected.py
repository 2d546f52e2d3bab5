"""Expected against measured mini-batch time with real compute, for the shapes that fit two cores.

    python -m benchmarks step_time.expected configs/jobs/gpt2_stdlib.py:job --rounds 5 --steps 4

Calibrates the job, asks the simulator for each shape with two compute slots (all workers share this machine), and
trains it with Morph's workers. All shapes take turns, in an order drawn anew in each round.

The speed of a shared machine varies: the same section, run alone, may take up to a sixth longer for minutes. So one
section is timed alone during calibration, and again before and after each turn, as a yardstick. The table has both
errors: as measured, and with the simulator's expectation scaled by the yardstick of that turn. Cores may differ, too,
so the yardstick on each core is printed at the start and at the end.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import torch
import typer

from benchmarks.harness import Seed, head, in_turns, load, machine, row, wall_s
from benchmarks.workers import Crew
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
    """One row: the simulated plan and the measured times."""

    name: str
    plan: Plan
    step_s: list[float] = field(default_factory=list)
    slowness: list[float] = field(default_factory=list)

    @property
    def error(self) -> float:
        """The relative error of the expectation."""
        return self.plan.expected.mini_batch_s / statistics.median(self.step_s) - 1

    @property
    def error_of_model(self) -> float:
        """The relative error at the machine's speed in each turn."""
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
        """Return the median wall time of a forward and backward."""
        return statistics.median(wall_s(self._bench.both) for _ in range(YARDSTICK_RUNS))

    def on_each_core(self) -> str:
        """Return in words the yardstick on each core that this process may use."""
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
        """Append the mean of a measurement before and one after the block."""
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
    head("shape | measured, median | spread | expected | error | machine slower by | error at that speed")
    for shape in measured:
        median_s = statistics.median(shape.step_s)
        apart = (max(shape.step_s) - min(shape.step_s)) / median_s
        expected_ms = shape.plan.expected.mini_batch_s * 1e3
        errors = (shape.error, statistics.median(shape.slowness) - 1, shape.error_of_model)
        cells = (f"{median_s * 1e3:.0f} ms", f"{apart:.0%}", f"{expected_ms:.0f} ms")
        row(shape.name, *cells, *(f"{value:+.1%}" for value in errors))
    for name, found in (
        ("error", [abs(shape.error) for shape in measured]),
        ("error at the machine's speed of each turn", [abs(shape.error_of_model) for shape in measured]),
    ):
        print(f"\n{name}: {statistics.mean(found):.1%} on average, {max(found):.1%} at worst")


def main(
    job_path: Annotated[str, typer.Argument(metavar="JOB", help="path/to/file.py:name")],
    rounds: int = 5,
    steps: int = 4,
    seed: Seed = 0,
) -> None:
    print(machine())
    torch.set_num_threads(1)
    yardstick = Yardstick(job_path)
    print(yardstick.on_each_core())
    at_calibration_s: list[float] = []
    with yardstick.beside(at_calibration_s):
        profile = calibrate(job_path)
    slower = ", ".join(f"{entry.num_busy} at once x{entry.factor:.2f}" for entry in profile.contention)
    print(f"calibrated; tasks beside each other: {slower or 'no slower'}; load {load():.1f}")
    measured = {shape.name: shape for shape in shapes(profile)}
    m = next(iter(measured.values())).plan.micro_batch_size
    model = cut(export_job(load_job(job_path)), num_sections=profile.num_sections, micro_batch_size=m)
    with tempfile.TemporaryDirectory() as directory:
        crew = Crew(job_path, model, directory, max(shape.plan.num_workers for shape in measured.values()))

        def turn(shape: Shape) -> None:
            crew.begin(shape.plan)
            crew.step()
            at_turn_s: list[float] = []
            with yardstick.beside(at_turn_s):
                shape.step_s.append(wall_s(lambda: crew.steps(steps)) / steps)
            shape.slowness.append(at_turn_s[0] / at_calibration_s[0])

        ways = {name: partial(turn, shape) for name, shape in measured.items()}
        in_turns(ways, rounds, shuffled=random.Random(seed))
        crew.end()
    print(yardstick.on_each_core())
    print(f"{rounds} rounds of 1 + {steps} steps, load at the end {load():.1f}")
    report(list(measured.values()))
