"""Managed runs of emulated devices as plain processes, with a test's rules, faults and observers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from manager.controller.state.config import ControllerConfig
from manager.engine.local_vms.vm_fleet import VmFleet
from manager.engine.loop.driver import Observed, Observer
from manager.engine.machines.machines import OpenMachines, Processes
from manager.rehearsal.device import EmulationOptions, emulated_device, known_units
from manager.run.session import SessionSpec, run_session
from manager.run_dir import RunDir, RunFacts
from morph.checkpoint.manifest import complete_versions, read_manifest
from morph.contract.cluster import ClusterConfig, LocalVms, Policy
from morph.contract.faults import SlowSpell
from morph.contract.plan import Plan
from morph.contract.profile import Profile
from simulator import plan
from tests.system.harness import constant_vms, facts_of
from tests.waiting import START_S

M = 2


def shape(profile: Profile, stages: int, replicas: int) -> Plan:
    gpus = stages * replicas
    return plan(profile, num_gpus=gpus, pipeline_depth=stages, num_replicas=replicas, micro_batch_size=M).best


def emulated_run(
    profile: Profile, plans: Mapping[int, Plan], num_vms: int, num_steps: int, options: EmulationOptions
) -> tuple[SessionSpec, RunFacts]:
    """Return a run of a profile on emulated devices with default policy and machines; ``plans[G]`` is for G workers."""
    units, m = known_units(profile), next(iter(plans.values())).micro_batch_size
    config = ControllerConfig(
        fingerprint=profile.job.fingerprint,
        plans=dict(plans),
        units={unit.id: unit.sections for unit in units},
        unit_bytes={unit.id: unit.parameter_bytes for unit in units},
        num_steps=num_steps,
        policy=Policy(),
        expected_nodes=num_vms,
        section_compute_s=profile.section_compute_s(m),
    )
    spec = SessionSpec(
        job_path="emulated",
        config=config,
        cluster=ClusterConfig(),
        trace=constant_vms(num_vms),
        num_sections=profile.num_sections,
        micro_batch_size=m,
        emulation=emulated_device(profile, m, range(2, 9), options),
    )
    return spec, facts_of(spec, profile.job.batch_size)


@dataclass
class Emulated:
    """A run; ``plans`` are for as many workers as each needs. Without ``machines`` its VMs are plain processes."""

    profile: Profile
    plans: Sequence[Plan]
    num_steps: int
    num_vms: int
    policy: Policy = field(default_factory=lambda: Policy(checkpoint_every_steps=100_000))
    observers: Sequence[Observer] = ()
    attend: Callable[[VmFleet], Observer] | None = None
    spells: tuple[SlowSpell, ...] = ()
    machines: OpenMachines | None = None
    under_ray: bool = False
    lines: list[str] = field(default_factory=list)

    def run(self, directory: Path) -> tuple[dict[str, str], int]:
        """Run it to its end; return the sha256 of every unit's final state, and the version."""
        options = EmulationOptions()
        spec, facts = emulated_run(
            self.profile, {best.num_workers: best for best in self.plans}, self.num_vms, self.num_steps, options
        )
        policy = self.policy.model_copy(update={"start_patience_s": START_S})
        spec = replace(
            spec,
            config=spec.config.model_copy(update={"policy": policy}),
            cluster=ClusterConfig(vms=LocalVms(launcher="ray"), policy=policy),
            machines=None if self.under_ray else self.machines or Processes(directory.parent / f"{directory.name}.log"),
            slow_spells=self.spells,
        )
        with RunDir(directory, facts) as opened:
            finish = run_session(spec, opened, self._observe, attend=self.attend)
            print("\n".join(self.lines))  # pytest shows this when the test fails
            assert finish.outcome != "failed", finish.sentence
            manifest = read_manifest(opened.checkpoint_url, complete_versions(opened.checkpoint_url)[-1])
        return {entry.unit: entry.sha256 for entry in manifest.units}, manifest.version

    def _observe(self, observed: Observed) -> None:
        state, reason = observed.decision.state, observed.decision.reason
        line = f"{observed.time_s:.2f} v{state.version} {state.phase} {observed.event.kind}: {reason.sentence}"
        self.lines.append(line)
        for observer in self.observers:
            observer(observed)
