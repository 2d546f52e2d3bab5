"""Runs one rehearsal from its plan to its figures, and cleans up."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import WorkerLost
from manager.controller.state.state import Phase
from manager.engine.local_vms.namespaces import HostNetwork
from manager.engine.local_vms.vm_fleet import VmFleet
from manager.engine.loop.driver import Observed, Observer
from manager.engine.machines.machines import Processes
from manager.journal.journal import Journal
from manager.journal.replay import trace_moment
from manager.rehearsal.device import FORGIVEN_S, EmulationOptions, emulated_device, known_units
from manager.rehearsal.measurements import Load, Measured, Rehearsal, Rehearsed
from manager.rehearsal.planning import Planned, hosts_of, plan_shape
from manager.rehearsal.spec import WARM_UP_STEPS, worker_name
from manager.run.session import TOO_FEW_LEFT, SessionSpec, run_session
from manager.run_dir import WORKERS_LOG, RunDir, RunFacts
from morph.checkpoint.manifest import complete_versions, read_manifest
from morph.contract.cluster import ClusterConfig, LocalVms, Policy
from morph.contract.emulation import EmulatedDevice, Slowdown
from morph.contract.errors import TrainingStopped
from morph.contract.pool import Pool
from morph.contract.trace import UNKNOWN, Trace, TraceEvent
from simulator.inputs.conditions import slow_workers
from simulator.inputs.node_types import of_pool_type
from simulator.inputs.transfer import bandwidth_bytes_per_s

HEARTBEAT_TIMEOUT_S = 30.0
NEVER_STEPS = 10**9


def rehearse(
    planned: Planned,
    run_dir: RunDir,
    observe: Observer = lambda _: None,
    *,
    temporary: bool = False,
) -> Rehearsed:
    """Run the plan; blocks. Only the run directory is left afterwards. TrainingStopped if it does not come to its end.

    The caller holds ``run_dir`` until this returns. ``temporary``: remove it if this process is killed.
    """
    measured, load = Measured(), Load(WARM_UP_STEPS, WARM_UP_STEPS + planned.spec.steps)
    _run(planned, run_dir, (measured, load, observe), temporary=temporary)
    return _rehearsed(planned, measured, load)


def rehearse_changes(
    planned: Planned,
    run_dir: RunDir,
    observe: Observer = lambda _: None,
    *,
    temporary: bool = False,
    attend: Callable[[VmFleet], Observer] | None = None,
) -> Rehearsal:
    """Rehearse while VMs come and go as in the trace; ``attend``: see ``run_session``.

    TrainingStopped: the run does not come to its end, or too few VMs are left for it.
    """
    measured, load = Measured(), Load(WARM_UP_STEPS, WARM_UP_STEPS + planned.spec.steps)
    changes = _Changes()
    _run(planned, run_dir, (measured, load, changes, observe), temporary=temporary, attend=attend)
    return Rehearsal(
        plans=tuple(
            _rehearsed(replace(planned, simulation=plan_shape(planned.spec, planned.profile, part.only)), part, load)
            for part in measured.by_plan()
        ),
        changes=tuple(changes.formed.values()),
        lost=tuple(changes.lost),
        num_left=_num_left(planned, run_dir),
    )


def digest_of(run_dir: RunDir) -> str:
    """Return sha256 of all parameters and optimizer states in a run's newest checkpoint."""
    manifest = read_manifest(run_dir.checkpoint_url, complete_versions(run_dir.checkpoint_url)[-1])
    lines = "".join(sorted(f"{entry.unit} {entry.sha256}\n" for entry in manifest.units))
    return hashlib.sha256(lines.encode()).hexdigest()


def _num_left(planned: Planned, run_dir: RunDir) -> int:
    assert planned.spec.trace is not None, "only a trace's VMs change"
    with Journal.open(run_dir.journal_path, read_only=True) as journal:
        return len(planned.spec.trace.events) - trace_moment(journal).num_played


class _Changes:
    """An observer of the driver that records which plans were formed, and which workers were lost."""

    def __init__(self) -> None:
        self.formed: dict[int, tuple[int, str, Pool]] = {}
        self.lost: list[str] = []
        self._types: dict[str, str] = {}

    def __call__(self, observed: Observed) -> None:
        state, event = observed.decision.state, observed.event
        if isinstance(event, WorkerLost) and event.worker in self._types:
            self.lost.append(self._types.pop(event.worker))
        self._types |= {worker: entry.facts.node_type for worker, entry in state.workers.items()}
        if state.reshape is not None and state.phase is Phase.TRAINING:
            plan = state.reshape.plan
            self.formed.setdefault(state.reshape.generation, (state.version, plan.shape, plan.pool))


def _run(
    planned: Planned,
    run_dir: RunDir,
    observers: Sequence[Observer],
    *,
    temporary: bool,
    attend: Callable[[VmFleet], Observer] | None = None,
) -> None:
    finish = run_session(_spec(planned, run_dir, temporary), run_dir, *observers, attend=attend)
    if finish.outcome == "stopped" and not finish.sentence.startswith(TOO_FEW_LEFT):
        raise KeyboardInterrupt
    if finish.outcome != "finished":
        raise TrainingStopped(finish.sentence)


def _rehearsed(planned: Planned, measured: Measured, load: Load) -> Rehearsed:
    optimizer_s, stage = {}, 0
    for kind in planned.simulation.kinds:
        optimizer_s[stage] = float(kind.outcome.costs.optimizer_ns[0]) / 1e9
        stage += kind.outcome.shape[0]
    return Rehearsed(
        planned=planned,
        mini_batches_s=measured.mini_batches_s,
        commit_s=measured.commit_s(optimizer_s),
        parts_s=measured.parts_s(),
        late_s=measured.late_s,
        busy_share=load.busy_share,
        others_share=load.others_share,
    )


def run_facts(planned: Planned) -> RunFacts:
    """Return the facts by which the run directory of a rehearsal is recognised."""
    job, plan = planned.profile.job, planned.plan
    return RunFacts(
        job=f"rehearsal of {job.name}",
        fingerprint=f"rehearsal of {job.fingerprint}",  # no run continues here, and no run is rehearsed over
        micro_batch_size=plan.micro_batch_size,
        batch_size=job.batch_size,
        num_sections=planned.profile.num_sections,
    )


def device_of(planned: Planned) -> EmulatedDevice:
    """Return the device that every worker of the rehearsal emulates."""
    spec, plan = planned.spec, planned.plan
    options = EmulationOptions(
        message_scale=planned.scales.message,
        state_scale=planned.scales.state,
        jitter_seed=spec.jitter_seed,
        slow=tuple(
            Slowdown(stage=stage, replica=replica, factor=factor) for stage, replica, factor in slow_workers(spec.slow)
        ),
        all_reduces_at_once=planned.simulation.costs.layout.rings_at_once,
        workers_per_node=spec.workers_per_host,
        memory_bytes=spec.memory_bytes,
        forgiven_s=FORGIVEN_S if spec.forgiven_s is None else spec.forgiven_s,
    )
    devices = {
        name: emulated_device(
            of_pool_type(planned.profile, name),
            plan.micro_batch_size,
            ring_sizes=range(2, spec.num_workers + 1),
            options=options,
        )
        for name in sorted({stage.node_type for plan in planned.plans.values() for stage in plan.stages})
    }
    device = next(iter(devices.values()))
    return device.model_copy(update={"node_types": devices}) if len(devices) > 1 else device


def _spec(planned: Planned, run_dir: RunDir, temporary: bool) -> SessionSpec:
    spec, profile = planned.spec, planned.profile
    trace, config = spec.trace, controller_config_of(planned)
    host_of: dict[str, int] = {}
    if trace is None:
        hosts = hosts_of(planned.plan)
        host_of = {worker_name(index): host for index, host in enumerate(hosts)}
        types = [planned.plan.stages[stage].node_type for stage, _ in planned.plan.places]
        trace = Trace(
            events=tuple(
                TraceEvent(time_s=0, event="add", node_id=worker, instance_type=node_type or UNKNOWN)
                for worker, node_type in zip(host_of, types, strict=True)
            )
        )
    return SessionSpec(
        job_path=f"rehearsal of {profile.job.name}",
        config=config,
        cluster=ClusterConfig(policy=config.policy, vms=LocalVms(node_types=dict.fromkeys(config.type_compute_s, 1))),
        trace=trace,
        patient_trace=True,
        num_sections=profile.num_sections,
        micro_batch_size=planned.plan.micro_batch_size,
        emulation=device_of(planned),
        machines=Processes(
            log_path=run_dir.path / WORKERS_LOG,
            remove_if_killed=run_dir.path.parent if temporary else None,
            network=_network(planned),
            host_of=host_of.__getitem__,
        ),
    )


def controller_config_of(planned: Planned) -> ControllerConfig:
    """Return a configuration for the rehearsal's plans; with a single plan, only the last checkpoint is saved."""
    units, trace = known_units(planned.profile), planned.spec.trace
    policy = Policy(
        checkpoint_every_steps=NEVER_STEPS if trace is None else None,
        redundancy="off" if trace is None else "auto",  # no VM is lost, and simulations of one shape have no followers
        heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
        takeover_patience_s=0,  # a rehearsal is never resumed
    )
    at_start = sum(event.event == "add" and event.time_s == 0 for event in trace.events) if trace is not None else 0
    return ControllerConfig(
        job=planned.profile.job.name,
        fingerprint=planned.plan.fingerprint,
        plans=planned.plans,
        units={unit.id: unit.sections for unit in units},
        unit_bytes={unit.id: unit.parameter_bytes for unit in units},
        num_steps=WARM_UP_STEPS + planned.spec.steps,
        policy=policy,
        expected_nodes=at_start or planned.plan.num_workers,
        section_compute_s=planned.profile.section_compute_s(planned.plan.micro_batch_size),
        type_compute_s={
            name: of_pool_type(planned.profile, name).section_compute_s(planned.plan.micro_batch_size)
            for name in sorted({name for pool in planned.plans for name in pool.types if name})
        },
    )


def _network(planned: Planned) -> HostNetwork | None:
    """Open separate hosts if the spec has them, with the profile's bandwidth after scaling."""
    if planned.spec.network == "loopback":
        return None
    scale = planned.scales.message / planned.scales.time
    bytes_per_s = bandwidth_bytes_per_s(planned.spec.profile.inter_node)
    return HostNetwork(1 + max(hosts_of(planned.plan)), bytes_per_s * scale)
