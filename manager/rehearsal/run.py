"""One rehearsal from its plan to its figures, cleaned up after itself."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from manager.controller.config import ControllerConfig
from manager.engine.driver import Observed, Observer
from manager.engine.machines import Processes
from manager.engine.namespaces import HostNetwork, check_permitted
from manager.engine.session import RunSpec, run_session
from manager.rehearsal.device import FORGIVEN_S, EmulationOptions, emulated_device, known_units, stretched
from manager.rehearsal.measured import WARM_UP_STEPS, Measured
from manager.rehearsal.scales import Scales, choose_scales
from manager.rehearsal.spec import MAX_MINI_BATCH_S, RehearsalSpec, worker_name
from manager.run_dir import RunDir, RunFacts
from morph.contract.cluster import ClusterConfig, Policy
from morph.contract.errors import PlanError, TrainingStopped
from morph.contract.plan import Plan
from morph.contract.profile import LinkProfile, Profile
from morph.contract.trace import Trace, TraceEvent
from simulator import Simulation, simulate

HEARTBEAT_TIMEOUT_S = 30.0
ORDER_TIMEOUT_S = 600.0
NEVER_STEPS = 10**9


@dataclass(frozen=True)
class Planned:
    """A rehearsal that was checked and planned: nothing is started yet.

    ``profile`` is stretched by ``scales.time``; ``simulation`` is of it, with the commit that the profile has.
    """

    spec: RehearsalSpec
    scales: Scales
    profile: Profile
    simulation: Simulation

    @property
    def plan(self) -> Plan:
        """The plan to run."""
        return self.simulation.plan


@dataclass(frozen=True)
class Rehearsed:
    """What came of it. Times are as they were measured, stretched by ``planned.scales.time``.

    Attributes:
        planned: What was run.
        mini_batches_s: Of every step that counts.
        commit_s: The real manager's round trip, as measured; it takes the place of the profile's in ``expected_s``.
        parts_s: Seconds per worker and step by kind of work.
        late_s: The most by which the host was late with a task.
        busy_share: Of this machine's cores, while the steps that count ran.
    """

    planned: Planned
    mini_batches_s: tuple[float, ...]
    commit_s: float
    parts_s: dict[str, float]
    late_s: float
    busy_share: float

    @property
    def measured_s(self) -> float:
        """Median mini-batch time; with jitter the mean, as the simulator's answer is then."""
        average = statistics.median if self.planned.spec.jitter_seed is None else statistics.mean
        return average(self.mini_batches_s)

    @property
    def expected_s(self) -> float:
        """The simulated mini-batch time, under jitter the mean over the very draws that were run."""
        simulation = self.planned.simulation
        expected_s = simulation.expected.mini_batch_s
        if simulation.jitter is not None:
            expected_s = statistics.mean(simulation.jitter.draws_s[WARM_UP_STEPS:])
        return expected_s + self.commit_s - self.planned.profile.commit.median_s

    @property
    def error(self) -> float:
        """By which share of the measured time the simulator is off; above 0: it expects more."""
        return self.expected_s / self.measured_s - 1


def plan_rehearsal(spec: RehearsalSpec) -> Planned:
    """Check and plan.

    Raises:
        InputError: naming what is wrong.
    """
    spec.check()
    if spec.network == "namespaces":
        check_permitted()
    unstretched = plan_shape(spec, spec.profile).plan
    scales = choose_scales(spec, unstretched, os.cpu_count() or 1)
    profile = stretched(spec.profile, scales.time)
    simulation = plan_shape(spec, profile)
    if simulation.expected.mini_batch_s > MAX_MINI_BATCH_S:
        raise PlanError(
            f"a mini-batch would take {simulation.expected.mini_batch_s:.0f} s",
            field="time_scale",
            value=scales.time,
            allowed=f"at most {scales.time * MAX_MINI_BATCH_S / simulation.expected.mini_batch_s:.2g} here",
        )
    return Planned(spec, scales, profile, simulation)


def plan_shape(spec: RehearsalSpec, profile: Profile) -> Simulation:
    """Simulate the rehearsal's shape on this profile."""
    return simulate(
        profile,
        num_stages=spec.num_stages,
        boundaries=spec.boundaries,
        num_replicas=spec.num_replicas,
        micro_batch_size=spec.micro_batch_size,
        schedule=spec.schedule,
        window_slope=spec.window_slope,
        num_gpus_per_node=spec.workers_per_host if spec.workers_per_host > 1 else None,
        share_links=spec.network == "namespaces",
        slow={slow.stage if slow.replica is None else (slow.stage, slow.replica): slow.factor for slow in spec.slow},
        jitter_seed=spec.jitter_seed,
        num_draws=WARM_UP_STEPS + spec.steps,
    )


def rehearse(
    planned: Planned,
    run_dir: RunDir,
    observe: Observer = lambda _: None,
    *,
    temporary: bool = False,
) -> Rehearsed:
    """Run the plan; blocks. Nothing is left but the run directory.

    Args:
        planned: What ``plan_rehearsal`` returned.
        run_dir: Opened, and held by the caller until this returns.
        observe: Called after each decision.
        temporary: The run directory is to be removed should this process be killed.

    Raises:
        TrainingStopped: when it cannot be run to its end.
    """
    measured, load = Measured(), _Load(WARM_UP_STEPS)
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
        busy_share=load.share,
    )


def run_facts(planned: Planned) -> RunFacts:
    """What the run directory of a rehearsal belongs to."""
    job, plan = planned.profile.job, planned.plan
    return RunFacts(
        job=f"rehearsal of {job.name}",
        fingerprint=job.fingerprint,
        micro_batch_size=plan.micro_batch_size,
        batch_size=job.batch_size,
        num_sections=planned.profile.num_sections,
    )


def hosts_of(plan: Plan) -> list[int]:
    """Host of each worker, in the order in which the controller gives them stages: by stage, then replica."""
    if not plan.placement:
        return list(range(plan.num_workers))
    return [
        plan.placement[replica][stage] for stage in range(plan.pipeline_depth) for replica in range(plan.num_replicas)
    ]


def bandwidth_bytes_per_s(link: LinkProfile) -> float:
    """Of a link: by the two largest messages that were measured, in the slower direction."""

    def of(times: Sequence[tuple[int, float]]) -> float:
        small, large = (*sorted(times)[-2:],) if len(times) > 1 else ((0, 0.0), times[0])
        return (large[0] - small[0]) / max(1e-9, large[1] - small[1])

    return min(
        of([(entry.size_bytes, entry.time.median_s) for entry in times]) for times in (link.activation, link.gradient)
    )


def _run_spec(planned: Planned, run_dir: RunDir, temporary: bool) -> RunSpec:
    spec, plan, profile = planned.spec, planned.plan, planned.profile
    workers = [worker_name(index) for index in range(spec.num_workers)]
    device = emulated_device(
        profile,
        plan.micro_batch_size,
        ring_sizes=range(2, spec.num_workers + 1),
        options=EmulationOptions(
            message_scale=planned.scales.message,
            state_scale=planned.scales.state,
            jitter_seed=spec.jitter_seed,
            slow=spec.slow,
            all_reduces_at_once=planned.simulation.costs.layout.rings_at_once,
            workers_per_node=spec.workers_per_host,
            memory_bytes=spec.memory_bytes,
            forgiven_s=FORGIVEN_S if spec.forgiven_s is None else spec.forgiven_s,
        ),
    )
    policy = Policy(
        checkpoint_every_steps=NEVER_STEPS,
        heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
        order_timeout_s=ORDER_TIMEOUT_S,
    )
    units = known_units(profile)
    config = ControllerConfig(
        job=profile.job.name,
        fingerprint=plan.fingerprint,
        plans={spec.num_workers: plan},
        units={unit.id: unit.sections for unit in units},
        unit_bytes={unit.id: unit.parameter_bytes for unit in units},
        num_steps=WARM_UP_STEPS + spec.steps,
        policy=policy,
        expected_nodes=spec.num_workers,
    )
    network = None
    if spec.network == "namespaces":
        scale = planned.scales.message / planned.scales.time
        network = HostNetwork(1 + max(hosts_of(plan)), bandwidth_bytes_per_s(spec.profile.inter_node) * scale)
    return RunSpec(
        job_path=f"rehearsal of {profile.job.name}",
        config=config,
        cluster=ClusterConfig(policy=policy),
        trace=Trace(events=tuple(TraceEvent(time_s=0, event="add", node_id=worker) for worker in workers)),
        num_sections=profile.num_sections,
        micro_batch_size=plan.micro_batch_size,
        emulation=device,
        machines=Processes(
            log_path=run_dir.path / "workers.log",
            remove_if_killed=run_dir.path.parent if temporary else None,
            network=network,
            host_of=dict(zip(workers, hosts_of(plan), strict=True)).__getitem__,
        ),
    )


def _all_of(observers: Sequence[Observer]) -> Observer:
    def observe(observed: Observed) -> None:
        for observer in observers:
            observer(observed)

    return observe


class _Load:
    """An observer that tells how busy this machine's cores were from a version on until the last decision."""

    def __init__(self, from_version: int) -> None:
        self._from_version = from_version
        self._before: tuple[float, float] | None = None
        self.share = 0.0

    def __call__(self, observed: Observed) -> None:
        """Look at the counters when a step is decided."""
        version = observed.decision.state.version
        if version < self._from_version:
            return
        self._from_version = version + 1
        busy_s, all_s = _cpu_times_s()
        if self._before is None:
            self._before = (busy_s, all_s)
        elif all_s > self._before[1]:
            self.share = (busy_s - self._before[0]) / (all_s - self._before[1])


def _cpu_times_s() -> tuple[float, float]:
    times = psutil.cpu_times()
    total_s = float(sum(times[:8]))  # guest time is part of user time
    return total_s - times.idle - getattr(times, "iowait", 0.0), total_s
