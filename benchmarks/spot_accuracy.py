"""The spot-cluster simulator against real runs: real processes, messages and kills, with emulated devices.

Each trace is run for real, then simulated. The run's journal provides when VMs came, had notices and went, the
    durations of a worker's setup, of forming groups, of giving up and of the manager's round, and how much slower than
    planned steps were because all workers share this machine; everything else is simulated. Prints the steps done, and
    for each part of the VMs' time its difference as a share of the whole. python -m benchmarks spot_accuracy --seeds
    0,1,2 --seconds 320
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from benchmarks.harness import machine, numbers, option
from benchmarks.runs import MANY_STEPS, play, specify, subject_of_profile
from manager.accounting.account import TimeUse
from manager.controller.state.events import EVENT, Event, NodeAppeared, NoticeGiven, WorkerAnswered, WorkerLost
from manager.engine.machines.machines import Processes
from manager.journal.journal import Journal
from manager.journal.records import VM_KILLED, DecisionRecord, Fact
from manager.rehearsal.device import EmulationOptions, emulated_device
from manager.report.journal_reader import report_in
from manager.report.values import RunReport
from manager.simulation.spot.cluster import SpotCluster
from manager.simulation.spot.job import Durations, SpotJob
from morph.contract.cluster import Policy
from morph.contract.messages import Prepared, Reshaped, WorkerReady
from morph.contract.plan import by_pool
from morph.contract.trace import Trace
from simulator import PlanRequest, plan_table, spot_model, synthetic_profile

NUM_SECTIONS = 8
MOST_VMS = 6
NUM_MICRO_BATCHES = 12
FORWARD_S = 0.012
PARAMETER_BYTES = 1_000_000
DEVICE_BYTES = 80_000_000
REAL_STATE_BYTES = 256 * 1024
LINK_BYTES_PER_S = 1e9
NOTICE_S = 8.0
NUM_LOSSES = 45
"""Number of VMs in a trace if all were always present."""
POLICY = Policy(checkpoint_every_steps=10, heartbeat_timeout_s=20.0)


PROFILE = synthetic_profile(
    num_sections=NUM_SECTIONS,
    forward_s=FORWARD_S,
    overhead_s=0.0001,
    batch_size=NUM_MICRO_BATCHES,
    micro_batch_sizes=(1,),
    parameter_bytes=PARAMETER_BYTES,
    boundary_bytes_per_sample=16_384,
)
"""Eight sections of 36 ms a micro-batch, twelve micro-batches a step."""


SUBJECT = subject_of_profile("spot accuracy", PROFILE, 1)


def make_job(durations: Durations) -> SpotJob:
    """Return the job, which needs at least two devices."""
    return SpotJob(
        name=SUBJECT.job_path,
        batch_size=NUM_MICRO_BATCHES,
        plans=plan_table(PROFILE, MOST_VMS, PlanRequest(memory_bytes=DEVICE_BYTES)),
        units=dict(SUBJECT.units),
        unit_bytes=dict(SUBJECT.unit_bytes),
        durations=durations,
        policy=POLICY,
    )


@dataclass(frozen=True)
class Happened:
    """The events in a real run's journal: its report, and when VMs appeared and were killed (seconds of its clock).

    ``noticed``: for each notice its time, its VM, and the seconds until the VM's end.
    """

    report: RunReport
    told: tuple[tuple[float, Event | DecisionRecord | Fact], ...]
    appeared_s: dict[str, float]
    killed_s: dict[str, float]
    noticed: tuple[tuple[float, str, float], ...]
    over_s: float
    num_expected: int

    @property
    def num_changes(self) -> int:
        """The number of VMs that came after the start, or went."""
        first_s = min(self.appeared_s.values())
        return len(self.killed_s) + sum(time_s > first_s + 5 for time_s in self.appeared_s.values())


def run_for_real(trace: Trace, kept: Path) -> None:
    """Run a trace to its end, and keep the run's journal."""
    state_scale = REAL_STATE_BYTES / sum(section.parameter_bytes for section in PROFILE.sections)
    options = EmulationOptions(state_scale=state_scale, message_scale=0.25)
    with tempfile.TemporaryDirectory(prefix="morph-spot-") as folder:
        spec = specify(
            SUBJECT,
            {pool.num_gpus: plan for pool, plan in by_pool(make_job(Durations()).plans)},
            POLICY,
            trace,
            config={"job": SUBJECT.job_path},
            stop_with_trace=True,
            emulation=emulated_device(PROFILE, 1, range(2, MOST_VMS + 1), options),
            machines=Processes(log_path=Path(folder) / "workers.log"),
        )
        play(SUBJECT, spec, Path(folder) / "run")
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(folder) / "run" / "journal.sqlite", kept)


def read(kept: Path, num_expected: int) -> Happened:
    """Read the events of a run."""
    with Journal.open(kept, read_only=True) as journal:
        entries = tuple(journal.read())
    kinds: dict[str, Callable[[str], Event | DecisionRecord | Fact]] = {
        "event": EVENT.validate_json,
        "decision": DecisionRecord.model_validate_json,
        "fact": Fact.model_validate_json,
    }
    told = [(entry.time_s, kinds[entry.kind](entry.payload_json)) for entry in entries if entry.kind in kinds]
    appeared_s = {one.node: time_s for time_s, one in told if isinstance(one, NodeAppeared)}
    killed_s = {str(one.worker): time_s for time_s, one in told if isinstance(one, Fact) and one.name == VM_KILLED}
    noticed = tuple((time_s, one.worker, one.lead_s) for time_s, one in told if isinstance(one, NoticeGiven))
    over_s = max(*appeared_s.values(), *killed_s.values())
    return Happened(report_in(kept, str(kept)), tuple(told), appeared_s, killed_s, noticed, over_s, num_expected)


def measured(happened: Happened) -> Durations:
    """Return median durations of everything but steps from a run's journal, and how slow the host is."""
    setup, noticed, groups, aborts = [], [], [], []
    aborting_s = None
    for time_s, one in happened.told:
        match one:
            case DecisionRecord(phase="aborting") if aborting_s is None:
                aborting_s = time_s
            case DecisionRecord(phase="reshaping") if aborting_s is not None:
                aborts.append(time_s - aborting_s)
                aborting_s = None
            case WorkerLost(worker=worker) if worker in happened.killed_s:
                noticed.append(time_s - happened.killed_s[worker])
            case WorkerAnswered(worker=worker, answer=WorkerReady()):
                setup.append(time_s - happened.appeared_s[worker])
            case WorkerAnswered(answer=Reshaped(groups_s=groups_s)):
                groups.append(groups_s)
    order_s, slowness = rounds(happened)
    return Durations(
        noticed_s=max(0.0, statistics.median(noticed)),
        aborted_s=statistics.median(aborts),
        groups_s=statistics.median(groups),
        setup_s=statistics.median(setup),
        order_s=order_s,
        slowness=slowness,
        link_bytes_per_s=LINK_BYTES_PER_S,
        copy_bytes_per_s=1e9,
        storage_bytes_per_s=1e8,
        manifest_s=0.05,
    )


def rounds(happened: Happened) -> tuple[float, float]:
    """Return the mean time between two steps of a shape (seconds), and the mean ratio of steps to planned steps."""
    between, steps = [], []
    planned_s, done_s, slowest_s = 0.0, None, 0.0
    for time_s, one in happened.told:
        if isinstance(one, WorkerAnswered) and isinstance(one.answer, Prepared):
            slowest_s = max(slowest_s, one.answer.times.step_s)
        if not isinstance(one, DecisionRecord):
            continue
        if one.reshape is not None:
            planned_s, done_s = one.reshape.plan.expected.mini_batch_s, None
        elif one.phase != "training":
            done_s = None
        elif one.reason.code == "step_decided":
            if done_s is not None:
                between.append(time_s - done_s - slowest_s)
                steps.append((slowest_s, planned_s))
            done_s = time_s
        if one.reason.code in ("step_decided", "step_started"):
            slowest_s = 0.0
    return statistics.mean(between), sum(took for took, _ in steps) / sum(planned for _, planned in steps)


def simulate(happened: Happened, durations: Durations) -> SpotCluster:
    """Play the same VMs in virtual time."""
    start_s = min(happened.appeared_s.values())
    cluster = SpotCluster(make_job(durations), num_steps=MANY_STEPS, num_expected=happened.num_expected)
    names: dict[str, str] = {}

    def come(vm: str) -> tuple[()]:
        names[vm] = cluster.vm_came()
        return ()

    def go(vm: str) -> tuple[()]:
        if vm in names:
            cluster.vm_taken(names[vm])
        return ()

    def notice(vm: str, lead_s: float) -> tuple[()]:
        if vm in names:
            cluster.vm_noticed(names[vm], lead_s)
        return ()

    for vm, time_s in happened.appeared_s.items():
        cluster.after(time_s - start_s, partial(come, vm))
    for vm, time_s in happened.killed_s.items():
        cluster.after(time_s - start_s, partial(go, vm))
    for time_s, vm, lead_s in happened.noticed:
        cluster.after(time_s - start_s, partial(notice, vm, lead_s))
    cluster.play(happened.over_s - start_s)
    return cluster


def version_at(happened: Happened, until_s: float) -> int:
    """Return the version that a run had decided by then."""
    versions = [one.version for time_s, one in happened.told if isinstance(one, DecisionRecord) and time_s <= until_s]
    return versions[-1] if versions else 0


def compare(happened: Happened, durations: Durations) -> tuple[float, dict[TimeUse, float]]:
    """Return the relative error of the simulated steps, and each part's difference as a share of the whole."""
    cluster = simulate(happened, durations)
    real, steps = happened.report.account, version_at(happened, happened.over_s)
    simulated = cluster.account
    apart = {part: simulated.share(part) - real.share(part) for part in TimeUse}
    return cluster.state.version / steps - 1, apart


def draw(seed: int, seconds: float) -> Trace:
    """Draw a trace with single and bulk losses, half of them with notices."""
    model = spot_model(
        MOST_VMS,
        losses_per_vm_h=3600 * NUM_LOSSES / seconds / MOST_VMS,
        bulk_share=0.3,
        replacement_s=seconds / 25,
        initial=5,
        least=1,
        noticed=0.5,
        notice_s=NOTICE_S,
    )
    return model.draw(seed, seconds)


def main(
    seeds: str = "0,1,2",
    seconds: float = 320.0,
    journals: Annotated[Path | None, option("keep them here; what is there is not run again")] = None,
) -> None:
    print(machine())
    with tempfile.TemporaryDirectory(prefix="morph-spot-") as folder:
        for seed in numbers(seeds):
            trace, kept = draw(seed, seconds), (journals or Path(folder)) / f"trace-{seed}.sqlite"
            if not kept.exists():
                run_for_real(trace, kept)
            happened = read(kept, sum(event.time_s == 0 for event in trace.events))
            durations = measured(happened)
            off, apart = compare(happened, durations)
            worst = max(apart, key=lambda part: abs(apart[part]))
            parts = ", ".join(f"{part.value} {share:+.1%}" for part, share in apart.items() if abs(share) > 5e-4)
            print("measured:", json.dumps(durations.model_dump(exclude_none=True)))
            print(
                f"trace {seed}: {happened.num_changes} changes, {len(happened.noticed)} notices, "
                f"{version_at(happened, happened.over_s)} steps; simulated {off:+.1%}; "
                f"worst part {worst.value} {apart[worst]:+.1%} of the whole ({parts})",
                flush=True,
            )
