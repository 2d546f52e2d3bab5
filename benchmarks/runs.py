"""Managed runs of experiments, from an emulated profile or a real job: what to run, and running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manager.controller.state.actions import Finish
from manager.controller.state.config import ControllerConfig
from manager.engine.local_vms.vm_fleet import VmFleet
from manager.engine.loop.driver import Observer
from manager.rehearsal.device import known_units
from manager.report.journal_reader import read_report
from manager.report.values import RunReport
from manager.run.session import SessionSpec, run_session
from manager.run_dir import RunDir, RunFacts
from morph.contract.cluster import ClusterConfig, Policy
from morph.contract.plan import Plan
from morph.contract.profile import Profile
from morph.contract.trace import Trace, TraceEvent
from morph.cutting import cut, export_job
from morph.jobs.job import load_job

MANY_STEPS = 10**9


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The job that is trained. ``unit_bytes``: bytes of state, by unit."""

    job_path: str
    fingerprint: str
    batch_size: int
    m: int
    num_sections: int
    units: Mapping[str, tuple[int, ...]]
    unit_bytes: Mapping[str, int]


def subject_of_profile(name: str, profile: Profile, m: int, state_copies: int = 3) -> Subject:
    """Return an emulated job whose state has ``state_copies`` times the bytes of its parameters."""
    units = known_units(profile)
    return Subject(
        job_path=name,
        fingerprint=profile.job.fingerprint,
        batch_size=profile.job.batch_size,
        m=m,
        num_sections=profile.num_sections,
        units={unit.id: unit.sections for unit in units},
        unit_bytes={unit.id: state_copies * unit.parameter_bytes for unit in units},
    )


def subject_of_job(job_path: str, num_sections: int | None = None, m: int | None = None) -> Subject:
    """Return a real job, cut into so many sections; defaults are the job's own values."""
    job = load_job(job_path)
    m = m or job.micro_batch_size or 1
    model = cut(export_job(job), num_sections=num_sections or job.num_sections, micro_batch_size=m)
    path, _, name = job_path.partition(":")
    return Subject(
        job_path=f"{Path(path).resolve()}:{name}",
        fingerprint=model.fingerprint,
        batch_size=job.batch_size,
        m=m,
        num_sections=len(model.sections),
        units={unit.id: unit.sections for unit in model.units},
        unit_bytes={unit.id: 1 for unit in model.units},
    )


def steady_vms(num: int) -> Trace:
    """Return a trace of so many VMs from the beginning, which only the experiment takes away."""
    return Trace(events=tuple(TraceEvent(time_s=0, event="add", node_id=f"vm{index}") for index in range(num)))


def specify(
    subject: Subject,
    plans: Mapping[int, Plan],
    policy: Policy,
    trace: Trace,
    *,
    config: Mapping[str, Any] | None = None,
    cluster: Mapping[str, Any] | None = None,
    **more: Any,
) -> SessionSpec:
    """Return what to run.

    Args:
        subject: The job that is trained.
        plans: Plans by number of VMs.
        policy: The manager's policy.
        trace: When VMs come and go.
        config: Further fields of the controller's configuration.
        cluster: Further fields of the cluster file.
        more: Further fields of ``SessionSpec``.
    """
    known: dict[str, Any] = {
        "fingerprint": subject.fingerprint,
        "plans": {count: plan.model_copy(update={"fingerprint": subject.fingerprint}) for count, plan in plans.items()},
        "units": dict(subject.units),
        "unit_bytes": dict(subject.unit_bytes),
        "num_steps": MANY_STEPS,
        "policy": policy,
        "expected_nodes": sum(event.time_s == 0 for event in trace.events) or 1,
    }
    return SessionSpec(
        job_path=subject.job_path,
        config=ControllerConfig(**{**known, **(config or {})}),
        cluster=ClusterConfig(policy=policy, **(cluster or {})),
        trace=trace,
        num_sections=subject.num_sections,
        micro_batch_size=subject.m,
        **more,
    )


def play(
    subject: Subject,
    spec: SessionSpec,
    path: Path,
    watch: Observer = lambda _: None,
    attend: Callable[[VmFleet], Observer] | None = None,
) -> tuple[Finish, RunReport]:
    """Run to the end, with the journal in a new folder; ``attend`` makes the observer that kills and requests VMs."""
    facts = RunFacts(
        job=subject.job_path,
        fingerprint=subject.fingerprint,
        micro_batch_size=subject.m,
        batch_size=subject.batch_size,
        num_sections=subject.num_sections,
    )
    with RunDir(path, facts) as run_dir:
        finish = run_session(spec, run_dir, watch, attend=attend)
        return finish, read_report(run_dir.path)
