"""Managed runs of the tiny job with real worker processes, and the uninterrupted run that each must equal."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path

from filelock import FileLock

from manager.controller.state.config import ControllerConfig
from manager.engine.local_vms.vm_fleet import VmFleet
from manager.engine.loop.driver import Observed, Observer
from manager.engine.machines.machines import OpenMachines
from manager.run.session import SessionSpec, run_session
from manager.run_dir import RunDir, RunFacts
from morph.checkpoint.manifest import complete_versions, read_manifest
from morph.contract.checkpoint import Manifest
from morph.contract.cluster import ClusterConfig, LocalVms, Policy
from morph.contract.faults import Fault, SlowSpell
from morph.contract.messages import HandedCut, WorkerSetup
from morph.contract.plan import PipelineKind, Plan, Schedule
from morph.contract.profile import Profile
from morph.contract.rules import Rules, StutterRules
from morph.contract.trace import Trace, TraceEvent
from morph.cutting.cache.cut_job import LoadedJob, load_and_cut
from morph.jobs.files import imported_once
from morph.jobs.snapshot import collect, pack
from morph.runtime.process.single import run_single
from simulator import plan, synthetic_profile
from tests.waiting import BOUND_S, PATIENCE, START_S
from tests.worker_setup import SETUP

JOB = f"{Path(__file__).resolve().parents[2] / 'configs/jobs/tiny_gpt.py'}:job"
MICRO_BATCH_SIZE = 2
NUM_SECTIONS = 5
SHARED_STEPS = 70
"""Enough for nearly all runs of the tests."""


def plan_of(
    profile: Profile, shape: str, micro_batch_size: int, schedule: Schedule = "varuna", *, recompute: bool = True
) -> Plan:
    depth, replicas = map(int, shape.split("x"))
    return plan(
        profile,
        num_gpus=depth * replicas,
        pipeline_depth=depth,
        num_replicas=replicas,
        micro_batch_size=micro_batch_size,
        schedule=schedule,
        recompute=recompute,
    ).best


def together(plans: Sequence[Plan]) -> Plan:
    """Combine the pipelines of several plans in one, whose deeper pipelines get more micro-batches."""
    num_micro_batches, depths = plans[0].num_micro_batches, [plan.pipeline_depth for plan in plans]
    replicas = [kind for kind, plan in enumerate(plans) for _ in range(plan.num_replicas)]
    weights = list(accumulate((depths[kind] for kind in replicas), initial=0))
    ends = [num_micro_batches * weight // weights[-1] for weight in weights]
    counts = [after - before for before, after in pairwise(ends)]
    kinds = tuple(
        PipelineKind(
            num_stages=plan.pipeline_depth,
            micro_batches=tuple(count for of, count in zip(replicas, counts, strict=True) if of == kind),
        )
        for kind, plan in enumerate(plans)
    )
    orders = {
        count: tuple(plan.order_of(stage, count) for plan in plans for stage in range(len(plan.stages)))
        for count in set(counts)
    }
    return plans[0].model_copy(
        update={
            "num_replicas": len(replicas),
            "stages": tuple(stage for plan in plans for stage in plan.stages),
            "kinds": kinds,
            "orders": orders,
        }
    )


@dataclass(frozen=True)
class TinyJob:
    """The facts of the tiny job for a controller's configuration."""

    fingerprint: str
    batch_size: int
    units: dict[str, tuple[int, ...]]
    num_sections: int = NUM_SECTIONS
    micro_batch_size: int = MICRO_BATCH_SIZE

    def plan(self, shape: str, schedule: Schedule = "varuna", *, recompute: bool = True) -> Plan:
        """Return a plan of this job for ``"PxD"``, or ``"PxD+PxD"`` for unequal pipelines."""
        if "+" in shape:
            kinds = [self.plan(one, schedule, recompute=recompute) for one in shape.split("+")]
            return together(kinds)
        profile = synthetic_profile(
            num_sections=self.num_sections, batch_size=self.batch_size, micro_batch_sizes=(1, MICRO_BATCH_SIZE)
        )
        best = plan_of(profile, shape, self.micro_batch_size, schedule, recompute=recompute)
        return best.model_copy(update={"fingerprint": self.fingerprint})


def load_tiny_job(
    num_sections: int = NUM_SECTIONS,
    micro_batch_size: int = MICRO_BATCH_SIZE,
    job_path: str = JOB,
    handed: HandedCut | None = None,
) -> TinyJob:
    with imported_once(job_path):
        found = load_and_cut(job_path, num_sections=num_sections, micro_batch_size=micro_batch_size, handed=handed)
    units = {unit.id: unit.sections for unit in found.model.units}
    return TinyJob(found.model.fingerprint, found.job.batch_size, units, num_sections, micro_batch_size)


@cache
def cut_for_workers(
    job_path: str, num_sections: int = NUM_SECTIONS, micro_batch_size: int = MICRO_BATCH_SIZE
) -> HandedCut:
    """Return the cut that ``morph run`` hands to a job's workers."""
    with imported_once(job_path):
        return LoadedJob(job_path).handed(num_sections, micro_batch_size)


def setup_of_tiny_job(fingerprint: str, **fields: object) -> WorkerSetup:
    """Return the setup of a worker of the tiny job, cut in this process, without a cluster."""
    known = {"job_path": JOB, "num_sections": NUM_SECTIONS, "micro_batch_size": MICRO_BATCH_SIZE}
    return SETUP.model_copy(update={"fingerprint": fingerprint, **known, **fields})


@dataclass(frozen=True)
class Outcome:
    """The end of a managed run, and its decisions."""

    outcome: str
    manifest: Manifest
    history: tuple[str, ...]
    shapes: tuple[str, ...]

    def digests(self) -> dict[str, str]:
        """The sha256 of every unit's final parameters and optimizer state."""
        return {entry.unit: entry.sha256 for entry in self.manifest.units}


def constant_vms(count: int) -> Trace:
    """Return a trace of ``count`` VMs, vm0 and so on, that never loses any."""
    return Trace(events=tuple(TraceEvent(time_s=0, event="add", node_id=f"vm{index}") for index in range(count)))


def facts_of(spec: SessionSpec, batch_size: int) -> RunFacts:
    return RunFacts(
        job=spec.job_path,
        fingerprint=spec.config.fingerprint,
        micro_batch_size=spec.micro_batch_size,
        batch_size=batch_size,
        num_sections=spec.num_sections,
    )


def managed(
    job: TinyJob,
    run_dir: Path,
    *,
    shapes: dict[int, str],
    trace: Trace,
    num_steps: int,
    faults: tuple[Fault, ...] = (),
    checkpoint_every: int = 4,
    initial: Manifest | None = None,
    observe: Callable[[Observed], None] | None = None,
    attend: Callable[[VmFleet], Observer] | None = None,
    vms: LocalVms | None = None,
    slow_spells: tuple[SlowSpell, ...] = (),
    stutter: StutterRules = StutterRules(),  # noqa: B008 (frozen)
    heartbeat_timeout_s: float = 5.0 * PATIENCE,
    job_path: str = JOB,
    machines: OpenMachines | None = None,
    redundancy: str = "auto",
) -> Outcome:
    """Run the tiny job; ``shapes[G]`` is the shape for G workers."""
    vms = vms or LocalVms()
    policy = Policy(checkpoint_every_steps=checkpoint_every, start_patience_s=START_S, rules=Rules(stutter=stutter))
    policy = policy.model_copy(update={"heartbeat_timeout_s": heartbeat_timeout_s, "redundancy": redundancy})
    config = ControllerConfig(
        fingerprint=job.fingerprint,
        plans={count: job.plan(shape) for count, shape in shapes.items()},
        units=job.units,
        unit_bytes=dict.fromkeys(job.units, 1),
        num_steps=num_steps,
        policy=policy,
        initial_version=initial.version if initial else 0,
        initial_checkpoint=initial,
        expected_nodes=vms.keep or sum(event.time_s == 0 for event in trace.events),
        target_nodes=vms.keep or 0,
    )
    cluster = ClusterConfig(vms=vms, policy=policy)
    spec = SessionSpec(job_path, config, cluster, trace, NUM_SECTIONS, MICRO_BATCH_SIZE, faults, slow_spells)
    spec = replace(spec, machines=machines, code=pack(job_path, collect(job_path)), cut=cut_for_workers(job_path))
    history: list[str] = []
    formed: list[str] = []

    def remember(observed: Observed) -> None:
        state, reason = observed.decision.state, observed.decision.reason
        history.append(
            f"{observed.time_s:.3f} {observed.event.kind} -> {state.phase} v{state.version} {reason.sentence}"
        )
        if state.plan is not None and (not formed or formed[-1] != state.plan.shape):
            formed.append(state.plan.shape)
        if observe is not None:
            observe(observed)

    with RunDir(run_dir, facts_of(spec, job.batch_size)) as opened:
        finish = run_session(spec, opened, remember, attend=attend)
        print("\n".join(history))  # pytest shows this when the test fails
        newest = complete_versions(opened.checkpoint_url)[-1]
        return Outcome(finish.outcome, read_manifest(opened.checkpoint_url, newest), tuple(history), tuple(formed))


def uninterrupted(steps: int, directory: Path, num_sections: int = NUM_SECTIONS) -> dict[str, str]:
    """Return the sha256 of every unit after ``steps`` steps on one worker without a cluster.

    All processes that run these tests share one such run, which is only repeated if it was too short.
    """
    kept = Path(os.environ["MORPH_DATA_DIR"]) / f"uninterrupted-{num_sections}.json"
    with FileLock(kept.with_suffix(".lock"), timeout=BOUND_S):
        known = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else []
        if len(known) <= steps:
            most, url = max(steps, SHARED_STEPS), str(directory)
            given = {"num_sections": num_sections, "micro_batch_size": MICRO_BATCH_SIZE}
            run_single(JOB, steps=most, checkpoint_url=url, save_each=True, **given)
            saved = (read_manifest(url, version) for version in range(1, most + 1))
            known = [{}, *({entry.unit: entry.sha256 for entry in manifest.units} for manifest in saved)]
            kept.write_text(json.dumps(known), encoding="utf-8")
        found: dict[str, str] = known[steps]
        return found
