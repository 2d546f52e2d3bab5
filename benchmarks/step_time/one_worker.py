"""Processor time of a step on one worker, with fast and with exact sums, beside a plain loop.

    python -m benchmarks step_time.one_worker --rounds 20 --steps 3

Each contender has a process of its own, all on one core, and trains the same job from its first step. In each round
every contender runs ``--steps`` more, in an order that is drawn anew, and says how much processor time its process
took, all threads together. Prints medians with their range, ratios to the loop in the same round, and the largest
difference between the losses.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Annotated

from benchmarks.device_speed.training import PlainLoop
from benchmarks.harness import Seed, cpu_s, head, in_turns, load, machine, option, row, spread
from benchmarks.remote import InThisProcess, Remote, call, end_all
from benchmarks.step_time.__main__ import JOB, LOSS_TOLERANCE
from benchmarks.workers import Crew, cut_job
from morph.cutting.exporting.export import export_job
from morph.jobs.job import load_job
from morph.runtime.process.single import single_plan

LOOP = "plain loop"


class Contender:
    """A way to train, made by ``make`` in a process that stays on one core."""

    def __init__(self, core: int, make: Callable[[], PlainLoop | Crew]) -> None:
        os.sched_setaffinity(0, {core})
        self._made, self._losses = make(), list[float]()

    def turn(self, num_steps: int) -> float:
        """Run so many steps; returns the processor seconds of one."""

        def run() -> None:
            for _ in range(num_steps):
                self._losses.append(float(self._made.step()))

        return cpu_s(run) / num_steps

    def losses(self) -> list[float]:
        """Return the losses of all steps so far."""
        return self._losses


def loop_of(job_path: str) -> PlainLoop:
    """A plain loop that begins with the weights that Morph draws for the job."""
    loop = PlainLoop(job_path, "cpu")
    initial = export_job(loop.job).initial_parameters
    loop.model.load_state_dict({name: initial[name] for name in initial})
    return loop


def worker_on(job_path: str, folder: str) -> Crew:
    """One worker in this process, at shape 1x1."""
    job, model = load_job(job_path), cut_job(job_path)
    m = model.micro_batch_size
    crew = Crew(job_path, model, folder, make=InThisProcess)
    crew.begin(single_plan(model.fingerprint, len(model.sections), m, job.batch_size // m))
    return crew


def report(step_s: dict[str, list[float]], losses: dict[str, list[float]]) -> None:
    head("| processor time of a step: median (lowest to highest) | of the loop's, median (lowest to highest)")
    for name, took_s in step_s.items():
        beside = [one / other for one, other in zip(took_s, step_s[LOOP], strict=True)]
        row(name, spread(took_s, "ms", 1, 1e3), spread(beside, "", 3))
    want = losses[LOOP]
    apart = max(abs(a - b) for found in losses.values() for a, b in zip(found, want, strict=True))
    print(f"\nlargest difference of a loss over {len(want)} steps: {apart:.1e}")
    if apart > LOSS_TOLERANCE:
        raise SystemExit("the contenders do not do the same work")


def main(
    rounds: int = 20,
    steps: Annotated[int, option("of each contender in a round")] = 3,
    core: Annotated[int, option("that all of them run on")] = 0,
    seed: Seed = 0,
) -> None:
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        makes: dict[str, Callable[[], PlainLoop | Crew]] = {
            LOOP: partial(loop_of, f"{JOB}:fast"),
            "Morph, fast": partial(worker_on, f"{JOB}:fast", folder),
            "Morph, exact": partial(worker_on, f"{JOB}:exact", folder),
        }
        ways = {name: Remote(partial(Contender, core, make)) for name, make in makes.items()}
        turns = {name: partial(call, way, "turn", steps) for name, way in ways.items()}
        step_s = in_turns(turns, rounds, warm_up=1, shuffled=random.Random(seed))
        losses = {name: call(way, "losses") for name, way in ways.items()}
        end_all(list(ways.values()))
    print(f"{rounds} rounds of {steps} steps, load at the end {load():.1f}")
    report(step_s, losses)
