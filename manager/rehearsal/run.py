"""Runs one rehearsal from its plan to its figures, and cleans up."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from manager.controller.state.config import ControllerConfig
from manager.engine.local_vms.namespaces import HostNetwork
from manager.engine.loop.driver import Observed, Observer
from manager.engine.machines.machines import Processes
from manager.rehearsal.device import FORGIVEN_S, EmulationOptions, emulated_device, known_units
from manager.rehearsal.measurements import WARM_UP_STEPS, Load, Measured
from manager.rehearsal.planning import Planned, hosts_of
from manager.rehearsal.spec import worker_name
from manager.run.preparation import section_compute_s
from manager.run.session import RunSpec, run_session
from manager.run_dir import WORKERS_LOG, RunDir, RunFacts
from morph.contract.cluster import ClusterConfig, LocalVms, Policy
from morph.contract.emulation import EmulatedDevice, Slowdown
from morph.contract.errors import TrainingStopped
from morph.contract.trace import UNKNOWN, Trace, TraceEvent
from simulator.inputs.conditions import of_pool_type, slow_workers
from simulator.inputs.transfer import bandwidth_bytes_per_s

# The result of a rehearsal, beside the simulator's expectation.


BUSY_SHARE_AT_MOST = 0.85
OTHERS_SHARE_AT_MOST = 0.25


@dataclass(frozen=True)
class Rehearsed:
    """The result of a rehearsal. Times are as measured, stretched by ``planned.scales.time``.

    Attributes:
        planned: The rehearsal that was run.
        mini_batches_s: The time of every step that counts.
        commit_s: The real manager's measured round trip; it replaces the profile's in ``expected_s``.
        parts_s: Seconds per worker and step by kind of work.
        late_s: The longest delay of a task on the host.
        busy_share: The busy share of this machine's cores while the steps that count ran.
        others_share: Likewise, the share that other work than the rehearsal took.
    """

    planned: Planned
    mini_batches_s: tuple[float, ...]
    commit_s: float
    parts_s: dict[str, float]
    late_s: float
    busy_share: float
    others_share: float

    @property
    def measured_s(self) -> float:
        """The median mini-batch time; with jitter the mean, as in the simulator's result."""
        average = statistics.median if self.planned.spec.jitter_seed is None else statistics.mean
        return average(self.mini_batches_s)

    @property
    def expected_s(self) -> float:
        """The simulated mini-batch time; with jitter the mean over the same draws that were run."""
        simulation = self.planned.simulation
        expected_s = simulation.expected.mini_batch_s
        if simulation.jitter is not None:
            expected_s = statistics.mean(simulation.jitter.draws_s[WARM_UP_STEPS:])
        return expected_s + self.commit_s - self.planned.profile.commit.median_s

    @property
    def host_too_busy(self) -> bool:
        """Whether this machine's cores were so busy that they limited the measured times."""
        return self.busy_share > BUSY_SHARE_AT_MOST or self.others_share > OTHERS_SHARE_AT_MOST

    @property
    def error(self) -> float:
        """The simulator's error as a share of the measured time; above 0: it expects more."""
        return self.expected_s / self.measured_s - 1


HEARTBEAT_TIMEOUT_S = 30.0
NEVER_STEPS = 10**9


def rehearse(
    planned: Planned,
    run_dir: RunDir,
    observe: Observer = lambda _: None,
    *,
    temporary: bool = False,
) -> Rehearsed:
    """Run the plan; blocks. Only the run directory is left afterwards.

    Args:
        planned: The result of ``plan_rehearsal``.
        run_dir: Opened, and held by the caller until this returns.
        observe: Called after each decision.
        temporary: Remove the run directory if this process is killed.

    Raises:
        TrainingStopped: the plan cannot be run to its end.
    """
    measured, load = Measured(), Load(WARM_UP_STEPS, WARM_UP_STEPS + planned.spec.steps)
    spec = _run_spec(planned, run_dir, temporary)
    finish = run_session(spec, run_dir, _all_of((measured, load, observe)))
    if finish.outcome == "stopped":
        raise KeyboardInterrupt
    if finish.outcome == "failed":
        raise TrainingStopped(finish.sentence)
    first_stage_optimizer_s = float(planned.simulation.costs.optimizer_ns[0]) / 1e9
    return Rehearsed(
        planned=planned,
        mini_batches_s=measured.mini_batches_s,
        commit_s=max(0.0, measured.turn_s - first_stage_optimizer_s),
        parts_s=measured.parts_s(),
        late_s=measured.late_s,
        busy_share=load.busy_share,
        others_share=load.others_share,
    )


def run_facts(planned: Planned) -> RunFacts:
    """Return the identity that the run directory of a rehearsal belongs to."""
    job, plan = planned.profile.job, planned.plan
    return RunFacts(
        job=f"rehearsal of {job.name}",
        fingerprint=job.fingerprint,
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
        for name in sorted({stage.node_type for stage in plan.stages})
    }
    device = next(iter(devices.values()))
    return device.model_copy(update={"node_types": devices}) if len(devices) > 1 else device


def _run_spec(planned: Planned, run_dir: RunDir, temporary: bool) -> RunSpec:
    spec, profile = planned.spec, planned.profile
    workers = [worker_name(index) for index in range(spec.num_workers)]
    types = [planned.plan.stages[stage].node_type for stage, _ in planned.plan.places]
    config = controller_config_of(planned)
    return RunSpec(
        job_path=f"rehearsal of {profile.job.name}",
        config=config,
        cluster=ClusterConfig(policy=config.policy, vms=LocalVms(node_types=dict.fromkeys(filter(None, types), 1))),
        trace=Trace(
            events=tuple(
                TraceEvent(time_s=0, event="add", node_id=worker, instance_type=node_type or UNKNOWN)
                for worker, node_type in zip(workers, types, strict=True)
            )
        ),
        num_sections=profile.num_sections,
        micro_batch_size=planned.plan.micro_batch_size,
        emulation=device_of(planned),
        machines=Processes(
            log_path=run_dir.path / WORKERS_LOG,
            remove_if_killed=run_dir.path.parent if temporary else None,
            network=_network(planned),
            host_of=dict(zip(workers, hosts_of(planned.plan), strict=True)).__getitem__,
        ),
    )


def controller_config_of(planned: Planned) -> ControllerConfig:
    """Return a configuration with one shape, its number of workers, and only the last checkpoint."""
    units = known_units(planned.profile)
    return ControllerConfig(
        job=planned.profile.job.name,
        fingerprint=planned.plan.fingerprint,
        plans={planned.plan.pool: planned.plan},
        units={unit.id: unit.sections for unit in units},
        unit_bytes={unit.id: unit.parameter_bytes for unit in units},
        num_steps=WARM_UP_STEPS + planned.spec.steps,
        policy=Policy(
            checkpoint_every_steps=NEVER_STEPS,
            heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
            takeover_patience_s=0,  # a rehearsal is never resumed
        ),
        expected_nodes=planned.plan.num_workers,
        section_compute_s=section_compute_s(planned.profile, planned.plan.micro_batch_size),
        type_compute_s={
            name: section_compute_s(of_pool_type(planned.profile, name), planned.plan.micro_batch_size)
            for name in planned.plan.pool.types
            if name
        },
    )


def _network(planned: Planned) -> HostNetwork | None:
    """Open separate hosts if the spec has them, with the profile's bandwidth after scaling."""
    if planned.spec.network == "loopback":
        return None
    scale = planned.scales.message / planned.scales.time
    bytes_per_s = bandwidth_bytes_per_s(planned.spec.profile.inter_node)
    return HostNetwork(1 + max(hosts_of(planned.plan)), bytes_per_s * scale)


def _all_of(observers: Sequence[Observer]) -> Observer:
    def observe(observed: Observed) -> None:
        for observer in observers:
            observer(observed)

    return observe
