"""Managed runs on plain processes whose planned changes pre-copy units, on emulated devices or with the tiny job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from manager.controller.state.actions import SendPreCopy
from manager.controller.state.config import ControllerConfig
from manager.engine.local_vms.vm_fleet import VmFleet
from manager.engine.loop.driver import Observed, Observer
from manager.engine.machines.machines import Processes
from manager.rehearsal.device import EmulationOptions
from manager.report.journal_reader import read_report
from manager.report.values import RunReport
from manager.run.session import SessionSpec, run_session
from manager.run_dir import RunDir, RunFacts
from morph.checkpoint.manifest import complete_versions, read_manifest
from morph.contract.cluster import ClusterConfig, Policy
from morph.contract.faults import Fault
from morph.contract.plan import Plan
from morph.contract.profile import Profile
from morph.contract.rules import PreCopyRules, Rules
from morph.jobs.snapshot import collect, pack
from simulator import synthetic_profile
from tests.system.emulated import emulated_run
from tests.system.harness import (
    JOB,
    MICRO_BATCH_SIZE,
    NUM_SECTIONS,
    constant_vms,
    cut_for_workers,
    facts_of,
    load_tiny_job,
    plan_of,
)
from tests.waiting import START_S

M = 4
PROFILE = synthetic_profile(
    num_sections=4, forward_s=0.001, batch_size=32, micro_batch_size=M, parameter_bytes=400_000, tied=True
)
ALWAYS = PreCopyRules(when="always", patience_s=20.0)


@dataclass(frozen=True)
class Ran:
    weights: dict[str, str]
    version: int
    report: RunReport
    turns: list[Observed]

    def kinds(self) -> list[set[str]]:
        """Return, for every generation, the kinds of sources from which units came."""
        orders = {
            turn.decision.state.generation: turn.decision.state.reshape
            for turn in self.turns
            if turn.decision.state.reshape is not None
        }
        return [{source.kind for source in order.sources} for order in orders.values()]

    def sent_ahead(self) -> int:
        """Return the number of pre-copy orders."""
        actions = [action for turn in self.turns for action in turn.decision.actions]
        return sum(isinstance(action, SendPreCopy) and bool(action.order.moves) for action in actions)


@dataclass(frozen=True)
class Case:
    """A run. ``shapes[G]`` is the shape for G workers; ``attend`` makes an observer that disturbs the run."""

    shapes: Mapping[int, str]
    num_vms: int
    steps: int
    attend: Callable[[VmFleet], Observer] | None = None
    faults: tuple[Fault, ...] = ()

    @property
    def policy(self) -> Policy:
        """The run's policy, without followers, which would have all units before a pre-copy."""
        rules = Rules(ahead=ALWAYS)
        return Policy(checkpoint_every_steps=1000, start_patience_s=START_S, rules=rules, redundancy="off")


def best(profile: Profile, shape: str) -> Plan:
    """Return the plan of the profile for "PxD"."""
    return plan_of(profile, shape, M)


def emulated(case: Case, log_path: Path, profile: Profile = PROFILE) -> tuple[SessionSpec, RunFacts]:
    """Return the case on emulated devices that take the profile's times."""
    plans = {count: best(profile, shape) for count, shape in case.shapes.items()}
    spec, facts = emulated_run(profile, plans, case.num_vms, case.steps, EmulationOptions())
    spec = replace(
        spec,
        config=spec.config.model_copy(update={"policy": case.policy}),
        cluster=ClusterConfig(policy=case.policy),
        faults=case.faults,
        machines=Processes(log_path),
    )
    return spec, facts


def real(case: Case, log_path: Path) -> tuple[SessionSpec, RunFacts]:
    job = load_tiny_job()
    config = ControllerConfig(
        fingerprint=job.fingerprint,
        plans={count: job.plan(shape) for count, shape in case.shapes.items()},
        units=job.units,
        unit_bytes=dict.fromkeys(job.units, 1),
        num_steps=case.steps,
        policy=case.policy,
        expected_nodes=case.num_vms,
    )
    spec = SessionSpec(
        job_path=JOB,
        config=config,
        cluster=ClusterConfig(policy=config.policy),
        trace=constant_vms(case.num_vms),
        num_sections=NUM_SECTIONS,
        micro_batch_size=MICRO_BATCH_SIZE,
        faults=case.faults,
        machines=Processes(log_path, job_path=JOB),
        code=pack(JOB, collect(JOB)),
        cut=cut_for_workers(JOB),
    )
    return spec, facts_of(spec, job.batch_size)


def run(directory: Path, make: Callable[[Case, Path], tuple[SessionSpec, RunFacts]], case: Case) -> Ran:
    """Run to the end, or until an observer stops the run; every decision is printed if the test fails."""
    directory.mkdir(exist_ok=True)
    spec, facts = make(case, directory / "workers.log")
    turns: list[Observed] = []
    with RunDir(directory / "run", facts) as opened:
        finish = run_session(spec, opened, turns.append, attend=case.attend)
        for turn in turns:
            state = turn.decision.state
            print(f"{turn.time_s:.3f} v{state.version} {turn.event.kind} -> {turn.decision.reason.sentence}")
        assert finish.outcome in ("stopped", "finished"), finish.sentence
        manifest = read_manifest(opened.checkpoint_url, complete_versions(opened.checkpoint_url)[-1])
        report = read_report(opened.path)
    assert finish.outcome == "stopped" or manifest.version == case.steps
    return Ran({entry.unit: entry.sha256 for entry in manifest.units}, manifest.version, report, turns)
