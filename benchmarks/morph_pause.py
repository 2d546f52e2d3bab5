"""Pause of a morph: from the kill of VMs to the next committed step, six workers, real compute.

    python -m benchmarks morph_pause --kills 24

The tiny job runs on six local VMs (2x3). Again and again, at a random moment (seeded), one or two of them
are killed with everything on them; a new VM follows, and when it has been taken in, the next kill. Prints
median, p95 and worst pause after kills and of planned morphs, and where the time went.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from benchmarks.harness import TINY_JOB, Seed, head, machine, option, row, worst_cases
from benchmarks.runs import play, specify, steady_vms, subject_of_job
from manager.controller.state.state import Phase
from manager.engine.local_vms.vm_fleet import VmFleet
from manager.engine.loop.driver import Observed
from manager.report.values import MorphRecord
from morph.contract.cluster import Policy
from simulator import plan, synthetic_profile

NUM_SECTIONS, M, NUM_VMS = 5, 2, 6
SHAPES = {6: (2, 3), 5: (5, 1), 4: (2, 2), 3: (3, 1), 2: (2, 1)}
STEPS_BETWEEN = (3, 12)


class Killer:
    """Kills VMs while the full group trains, some steps after it was formed."""

    def __init__(self, fleet: VmFleet, kills: int, together: int, seed: int) -> None:
        self._fleet, self._left, self._together = fleet, kills, together
        self._random = random.Random(seed)
        self._kill_at: int | None = None
        self._alive = [f"vm{index}" for index in range(NUM_VMS)]

    def __call__(self, observed: Observed) -> None:
        state = observed.decision.state
        if state.phase is not Phase.TRAINING or len(state.slots) < NUM_VMS:
            self._kill_at = None
            return
        if self._left == 0:
            observed.request_stop("enough kills")
            return
        if self._kill_at is None:
            self._kill_at = state.version + self._random.randint(*STEPS_BETWEEN)
        if state.version >= self._kill_at:
            self._kill_at = None
            count = self._random.randint(1, self._together)
            self._left -= 1
            # somewhere within the step that was just ordered
            time.sleep(self._random.uniform(0.0, 0.1))
            victims = self._random.sample(self._alive, count)
            self._fleet.revoke(*victims)
            for victim in victims:
                self._fleet.request(victim)


def show(title: str, morphs: Sequence[MorphRecord]) -> None:
    """Print the pause and its parts, ms."""
    parts = {
        "pause": [m.pause_ms for m in morphs if m.pause_ms is not None],
        "detect": [(m.detected_at_s - m.killed_at_s) * 1e3 for m in morphs if m.killed_at_s is not None],
        "agree": [(m.reformed_at_s - m.detected_at_s) * 1e3 for m in morphs if m.reformed_at_s is not None],
        "groups": [m.groups_s * 1e3 for m in morphs],
        "state": [m.state_s * 1e3 for m in morphs],
        "steps run again": [float(m.steps_redone) for m in morphs],
    }
    head(f"{title}, ms | median | p95 | worst | count")
    for name, values in parts.items():
        if values:
            row(name, *(f"{value:.1f}" for value in worst_cases(values)), len(values))


def main(
    kills: int = 24,
    together: Annotated[int, option("most VMs killed at once")] = 2,
    seed: Seed = 0,
    run_dir: Annotated[Path | None, option("keep the run's journal here")] = None,
) -> None:
    subject = subject_of_job(TINY_JOB, NUM_SECTIONS, M)
    profile = synthetic_profile(num_sections=NUM_SECTIONS, batch_size=subject.batch_size, micro_batch_sizes=(1, M))
    plans = {
        count: plan(profile, num_gpus=count, pipeline_depth=depth, num_replicas=replicas, micro_batch_size=M).best
        for count, (depth, replicas) in SHAPES.items()
    }
    spec, told = specify(subject, plans, Policy(checkpoint_every_steps=20), steady_vms(NUM_VMS)), machine()
    with tempfile.TemporaryDirectory() as directory:
        path = run_dir or Path(directory) / "run"
        _, report = play(subject, spec, path, attend=lambda fleet: Killer(fleet, kills, together, seed))
    step_ms = statistics.median(step.duration_s for step in report.steps) * 1e3
    print(f"{told}; {len(report.steps)} steps, median {step_ms:.0f} ms")
    show("after kills", [morph for morph in report.morphs if not morph.planned])
    show("planned", [morph for morph in report.morphs if morph.planned])
