"""Pause of a morph: from the kill of VMs to the next committed step, six workers, real compute.

    python benchmarks/morph_pause.py --kills 24

The tiny job runs on six local VMs (2x3). Again and again, at a random moment (seeded), one or two of them
are killed with everything on them; a new VM follows, and when it has been taken in, the next kill. Prints
median, p95 and worst pause after kills and of planned morphs, and where the time went.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

from manager.controller.state.config import ControllerConfig
from manager.controller.state.state import Phase
from manager.engine.local_vms.vm_fleet import VmFleet
from manager.engine.loop.driver import Observed, Observer
from manager.engine.run.session import RunSpec, run_session
from manager.report.reading import read_report
from manager.report.values import MorphRecord
from manager.run_dir import RunDir, RunFacts
from morph.contract.cluster import ClusterConfig, Policy
from morph.contract.plan import Plan
from morph.contract.trace import Trace, TraceEvent
from morph.cutting import cut, export_job
from morph.jobs.job import load_job
from simulator import plan, synthetic_profile

JOB = "configs/jobs/tiny_gpt.py:job"
NUM_SECTIONS, MICRO_BATCH_SIZE, NUM_VMS = 5, 2, 6
SHAPES = {6: "2x3", 5: "5x1", 4: "2x2", 3: "3x1", 2: "2x1"}
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


def make_spec() -> tuple[RunSpec, RunFacts]:
    """The tiny job on six VMs that stay until the killer comes."""
    job = load_job(JOB)
    model = cut(export_job(job), num_sections=NUM_SECTIONS, micro_batch_size=MICRO_BATCH_SIZE)
    sizes = (1, MICRO_BATCH_SIZE)
    profile = synthetic_profile(num_sections=NUM_SECTIONS, batch_size=job.batch_size, micro_batch_sizes=sizes)

    def of(count: int, shape: str) -> Plan:
        depth, replicas = map(int, shape.split("x"))
        best = plan(
            profile,
            num_gpus=count,
            pipeline_depth=depth,
            num_replicas=replicas,
            micro_batch_size=MICRO_BATCH_SIZE,
        ).best
        return best.model_copy(update={"fingerprint": model.fingerprint})

    policy = Policy(checkpoint_every_steps=20)
    config = ControllerConfig(
        fingerprint=model.fingerprint,
        plans={count: of(count, shape) for count, shape in SHAPES.items()},
        units={unit.id: unit.sections for unit in model.units},
        unit_bytes={unit.id: 1 for unit in model.units},
        num_steps=1_000_000,
        policy=policy,
        expected_nodes=NUM_VMS,
    )
    trace = Trace(events=tuple(TraceEvent(time_s=0, event="add", node_id=f"vm{i}") for i in range(NUM_VMS)))
    facts = RunFacts(
        job=JOB,
        fingerprint=model.fingerprint,
        micro_batch_size=MICRO_BATCH_SIZE,
        batch_size=job.batch_size,
        num_sections=NUM_SECTIONS,
    )
    absolute = f"{Path(JOB.partition(':')[0]).resolve()}:job"
    return RunSpec(absolute, config, ClusterConfig(policy=policy), trace, NUM_SECTIONS, MICRO_BATCH_SIZE), facts


def quantiles(values: list[float]) -> dict[str, float]:
    """Median, 95th percentile (nearest rank) and worst."""
    ordered = sorted(values)
    rank = max(0, -(-95 * len(ordered) // 100) - 1)
    return {"median": statistics.median(ordered), "p95": ordered[rank], "worst": ordered[-1], "count": len(ordered)}


def summary(morphs: list[MorphRecord]) -> dict[str, dict[str, float]]:
    """Quantiles of the pause and of its parts, ms."""
    parts = {
        "pause_ms": [m.pause_ms for m in morphs if m.pause_ms is not None],
        "detect_ms": [(m.detected_at_s - m.killed_at_s) * 1e3 for m in morphs if m.killed_at_s is not None],
        "agree_ms": [(m.reformed_at_s - m.detected_at_s) * 1e3 for m in morphs if m.reformed_at_s is not None],
        "groups_ms": [m.groups_s * 1e3 for m in morphs],
        "state_ms": [m.state_s * 1e3 for m in morphs],
        "steps_redone": [float(m.steps_redone) for m in morphs],
    }
    return {name: quantiles(values) for name, values in parts.items() if values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--together", type=int, default=2, help="most VMs killed at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="also write the figures as JSON")
    parser.add_argument("--run-dir", type=Path, default=None, help="keep the run's journal here")
    options = parser.parse_args()
    spec, facts = make_spec()

    def attend(fleet: VmFleet) -> Observer:
        return Killer(fleet, options.kills, options.together, options.seed)

    load = os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory() as directory,
        RunDir(options.run_dir or Path(directory) / "run", facts) as run_dir,
    ):
        run_session(spec, run_dir, lambda _: None, attend)
        report = read_report(run_dir.path)
    forced = [morph for morph in report.morphs if not morph.planned]
    planned = [morph for morph in report.morphs if morph.planned]
    step_ms = statistics.median(step.duration_s for step in report.steps) * 1e3
    figures = {
        "conditions": {"cores": os.cpu_count(), "load_before": load, "steps": len(report.steps), "step_ms": step_ms},
        "after_kills": summary(forced),
        "planned": summary(planned) if planned else {},
    }
    text = json.dumps(figures, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
