"""What followers add to steps without losses: runs with and without them, in turn."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.emulated_pause.job import Job, Shape, make_run, stream_s
from benchmarks.harness import head, row
from benchmarks.runs import play
from manager.controller.state.actions import ReasonCode
from manager.controller.state.state import ControllerState
from manager.engine.loop.driver import Observed

WARM_UP_STEPS = 3
MANY_LOSSES_PER_VM_H = 1e5
"""Chosen so that sums are copied in steps of a second as in steps of minutes."""


@dataclass
class Stopwatch:
    """An observer of the driver that times each step once all followers are in step, and ends the run after some."""

    num_steps: int
    steps_s: list[float] = field(default_factory=list)
    state: ControllerState | None = None
    _last_s: float | None = None
    _num_warm: int = 0

    def __call__(self, observed: Observed) -> None:
        """Handle one observed decision."""
        state = self.state = observed.decision.state
        if observed.decision.reason.code is not ReasonCode.STEP_DECIDED or state.reshape is None:
            return
        follows = state.reshape.follows
        if not all(state.workers[follow.follower].holds.issuperset(follow.units) for follow in follows):
            return
        self._num_warm += 1
        if self._num_warm > WARM_UP_STEPS and self._last_s is not None and not state.saving.pending:
            self.steps_s.append(observed.time_s - self._last_s)
        self._last_s = observed.time_s
        if len(self.steps_s) == self.num_steps:
            observed.request_stop("enough steps")


def show_overhead(job: Job, shape: Shape, redundancies: list[str], steps: int, rounds: int, directory: Path) -> None:
    """Run each redundancy in turn, and print its step times compared with those of the first."""
    found: dict[str, list[float]] = {each: [] for each in redundancies}
    told: dict[str, str] = {}
    for turn in range(rounds):
        for each in redundancies:
            folder = directory / f"plain-{shape}-{each}-{turn}"
            folder.mkdir(parents=True)
            many = MANY_LOSSES_PER_VM_H if each == "salvage" else None
            subject, spec = make_run(replace(job, losses_per_vm_h=many), shape, folder, each)
            watch = Stopwatch(steps)
            finish, _ = play(subject, spec, folder / "run", watch)
            if len(watch.steps_s) < steps:
                raise SystemExit(f"{shape}, {each}: {finish.sentence}")
            found[each] += watch.steps_s
            assert watch.state is not None
            assert watch.state.reshape is not None
            assert spec.emulation is not None
            plan, order = watch.state.reshape.plan, watch.state.reshape
            followed = any(follow.units for follow in order.follows)
            bare_s = stream_s(spec.emulation, plan) if followed else 0.0
            every = order.copy_sums_every
            told[each] = f"the bare link takes {bare_s * 1e3:.0f} ms; " if followed else ""
            told[each] += f"sums copied every {every} of {plan.micro_batches_per_replica[0]}" if every else "no copies"
    base_s = statistics.median(found[redundancies[0]])
    print(f"\n== {shape}, steps without a loss, {rounds} x {steps} of each")
    head("redundancy | step, median ms | median deviation | beside the first | ms | what it does")
    for each, times_s in found.items():
        median_s = statistics.median(times_s)
        apart_s = statistics.median(abs(time_s - median_s) for time_s in times_s)
        cells = (f"{median_s * 1e3:.1f}", f"{apart_s * 1e3:.1f}", f"{median_s / base_s - 1:+.2%}")
        row(each, *cells, f"{(median_s - base_s) * 1e3:+.1f}", told[each])
