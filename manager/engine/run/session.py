"""One managed run from nothing to nothing: cluster up, controller driven, everything ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from manager.controller.state.actions import Finish
from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import Event, ManagerResumed, Tick, WorkerLost
from manager.controller.state.state import ControllerState, Phase, initial_state
from manager.engine.local_vms.trace_replayer import TraceReplayer
from manager.engine.local_vms.vm_fleet import VmFleet
from manager.engine.loop.driver import Driver, Observed, Observer
from manager.engine.loop.event_queue import EventQueue
from manager.engine.loop.silence import heartbeat_wait_s
from manager.engine.run.attachment import Found, NothingLives, forget_attachment, write_attachment
from manager.engine.run.machines import Machines, Opening, OpenMachines
from manager.engine.run.preempting import Preempting
from manager.engine.run.provided import Providing
from manager.engine.run.vm_sources import machines_of, provisioning_of, watch_joining, write_last_facts
from manager.engine.vms.spending import Spending, before_now
from manager.engine.vms.vm_registry import inherited
from manager.host.clock import RunClock
from manager.host.devices import cuda_devices, device_slots
from manager.host.signals import deaf_to_signals, stopping_on_signals
from manager.journal.journal import Journal, patiently
from manager.journal.records import CLUSTER_LOST, OUTLIVES, TOOK_OVER, Fact, TraceMoment
from manager.journal.replay import trace_moment
from manager.run_dir import RunDir
from morph.contract.cluster import ClusterConfig, LocalVms, ProvidedVms
from morph.contract.emulation import EmulatedDevice
from morph.contract.errors import ClusterError, ClusterLost
from morph.contract.faults import Fault, SlowSpell
from morph.contract.messages import HandedCut, JobCode, WorkerSetup
from morph.contract.trace import Trace


def take_over(found: Found, machines: Machines, replayer: TraceReplayer, driver: Driver) -> None:
    """Reach the workers, tell the trace's replayer which VMs are up, and the controller who lives.

    In this order: what the controller decides of its VMs finds them known. What is new to it waits in the event_queue.
    What is decided is written down before it is done, as ever: should this manager be killed here too, the next one
    takes over from the same journal, and repeats what is not answered.
    """
    workers, up = found.state.workers, machines.up()
    reached = machines.pool.attach([worker for worker, entry in workers.items() if entry.ready])
    living = tuple(worker for worker in reached if worker in found.appeared)  # of the rest the replayer tells
    events: list[Event] = [
        WorkerLost(worker=worker, cause="its VM was gone when the new manager took over")
        for worker, entry in workers.items()
        if not entry.ready and worker not in up
    ]
    if machines.provided is None:
        asked = {vm.name: vm.request for vm in inherited(found.state, found.vms).vms}
        replayer.resume(found.vms, found.appeared, asked)
    driver.tell(Fact(name=TOOK_OVER), *events, ManagerResumed(living=living))


STEPS_AFTER_TRACE = 3


@dataclass(frozen=True)
class RunSpec:
    """What to run and on what. Everything in it was checked before.

    ``stop_with_trace``: end, saved and resumable, some steps after the trace's last event.
    ``patient_trace``: the trace's clock stands while a VM boots or its worker warms up, so that the history does
    not depend on how fast this machine starts processes.
    ``emulation``: the workers take these times instead of training the job. ``machines``: where the workers run;
    absent: as the cluster file says. ``providing``: opens the provider, where one brings the VMs. ``code``: the files
    that every worker loads the job from; absent, in experiments: whatever lies at ``job_path``. ``cut``: the cut
    model that every worker is handed; absent: each exports the job. ``facts``: for the journal. ``played``: where the
    trace stands, in a session that follows one whose cluster was lost. ``command``: what the user asked for; who takes
    over must be asked for the same. ``variables``: of the environment, for the workers' alone.
    """

    job_path: str
    config: ControllerConfig
    cluster: ClusterConfig
    trace: Trace
    num_sections: int
    micro_batch_size: int
    faults: tuple[Fault, ...] = ()
    slow_spells: tuple[SlowSpell, ...] = ()
    stop_with_trace: bool = False
    patient_trace: bool = False
    emulation: EmulatedDevice | None = None
    machines: OpenMachines | None = None
    providing: Providing | None = None
    code: JobCode | None = None
    cut: HandedCut | None = None
    facts: tuple[Fact, ...] = ()
    played: TraceMoment = field(default_factory=TraceMoment)
    command: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)


def run_session(
    spec: RunSpec,
    run_dir: RunDir,
    observer: Observer,
    attend: Callable[[VmFleet], Observer] | None = None,
    found: Found | None = None,
) -> Finish:
    """Run a job to its end on local VMs; blocks. The first SIGINT, SIGTERM or SIGHUP asks for a clean stop.

    Args:
        spec: What to run.
        run_dir: Opened, and held by the caller until this returns.
        observer: Called after each decision.
        attend: Makes one more observer that may ask for VMs and revoke them: for experiments.
        found: What a manager that was killed left: it is gone on with. Its configuration counts, not the spec's.

    Raises:
        ClusterError: when Ray, or what else the workers run under, does not start.
        ClusterLost: what the session stood on is gone; nothing of it is left.
        NothingLives: what was found cannot be gone on with after all; nothing of it is left.
        KeyboardInterrupt: on a second such signal; everything is ended all the same.
    """
    ending = ExitStack()  # closes what was opened, in reverse
    try:
        open_machines = spec.machines or machines_of(
            spec.cluster.vms, spec.providing, found, run_dir.path, spec.job_path
        )
        journal = ending.enter_context(patiently(lambda: Journal.open(run_dir.journal_path)))
        clock = _clock(journal, found)
        event_queue = EventQueue(clock.now_s)
        ending.callback(write_last_facts, event_queue, journal)
        ending.callback(forget_attachment, run_dir)
        policy, slots = spec.config.policy, _device_slots(spec, run_dir)
        opening = Opening(
            event_queue=event_queue,
            make_setup=lambda worker: _setup(spec, run_dir, machines, slots, worker),
            heartbeat_timeout_s=policy.heartbeat_timeout_s,
            outage_timeout_s=policy.outage_timeout_s,
            patience_s=policy.takeover_patience_s,
            ending=ending,
            found=found,
        )
        machines = _opened(open_machines, opening)
        replayer = TraceReplayer(machines.vms, spec.trace, event_queue, found.moment if found else spec.played)
        ending.callback(replayer.close)
        observers = [lambda observed: _run_clock(observed, replayer, patient=spec.patient_trace), observer]
        provisioning = None
        if spec.config.target_nodes:
            limits = spec.cluster.vms.limits
            before = None
            if limits.budget_usd is not None:
                before = before_now(run_dir.path, clock.now_s(), lives_on=found is not None)
            spending = Spending(limits, before=before)
            provisioning = provisioning_of(spec.cluster.vms, machines, replayer.fleet, event_queue, spending, found)
            ending.callback(provisioning.close)
        driver = Driver(
            found.state if found else initial_state(spec.config),
            event_queue,
            machines.pool,
            journal,
            run_dir.checkpoint_url,
            observers,
            provisioning,
            machines.provided.notices.left if machines.provided else None,
        )
        taker = provisioning if machines.provided is not None and provisioning is not None else replayer.fleet
        folder = machines.attachment.control_socket.parent
        ending.callback(Preempting(folder, lambda: driver.state.workers, event_queue, taker).close)
        observers.append(lambda observed: _stop_when_hopeless(observed, replayer))
        if spec.stop_with_trace:
            observers.append(_StopWithTrace(replayer))
        if attend is not None:
            observers.append(attend(replayer.fleet))
        for fact in spec.facts:
            event_queue.put(fact)
        with stopping_on_signals(driver.request_stop):
            if found is None:
                patiently(lambda: journal.append_config(clock.now_s(), spec.config))
                outlives = Fact(name=OUTLIVES, detail=str(_outlives_s(spec)))
                patiently(lambda: journal.append_fact(clock.now_s(), outlives))
                known = {"command": dict(spec.command), "epoch_s": clock.epoch_s}
                patiently(lambda: write_attachment(run_dir, machines.attachment.model_copy(update=known)))
                if spec.played.num_played:
                    replayer.resume((), ())
            else:
                take_over(found, machines, replayer, driver)
            machines.vms.settle()
            replayer.start()
            if machines.provided is not None and provisioning is not None:
                appeared = found.appeared if found else ()
                ending.callback(
                    watch_joining(machines.provided, provisioning, event_queue, driver.state, appeared).close
                )
            if provisioning is not None:
                event_queue.put(Tick())  # without an event nobody asks for the first VMs
            return _driven(driver, event_queue)
    finally:
        with deaf_to_signals():
            ending.close()


def gone_on_with_trace(spec: RunSpec, run_dir: RunDir) -> RunSpec:
    """Return what goes on where the trace stood when the last session's cluster was lost, with the VMs of then."""
    with Journal.open(run_dir.journal_path, read_only=True) as journal:
        moment = trace_moment(journal)
    up: set[str] = set()
    for event in spec.trace.events[: moment.num_played]:
        (up.add if event.event == "add" else up.discard)(event.node_id)
    config = spec.config
    if up and not config.target_nodes:
        config = config.model_copy(update={"expected_nodes": len(up)})
    return replace(spec, config=config, played=moment)


def _driven(driver: Driver, event_queue: EventQueue) -> Finish:
    try:
        return driver.run()
    except ClusterLost as error:
        event_queue.put(Fact(name=CLUSTER_LOST, detail=str(error)))
        raise


def _clock(journal: Journal, found: Found | None) -> RunClock:
    last = journal.last_line()
    return RunClock(found.attachment.epoch_s if found else None, last.time_s if last else 0.0)


def _outlives_s(spec: RunSpec) -> float:
    """How long VMs live without a manager."""
    vms = spec.cluster.vms
    return vms.lonely_s if isinstance(vms, ProvidedVms) else spec.config.policy.takeover_patience_s


def _opened(open_machines: OpenMachines, opening: Opening) -> Machines:
    try:
        return open_machines(opening)
    except ClusterError as error:
        if opening.found is None:
            raise
        raise NothingLives(str(error)) from error


def _run_clock(observed: Observed, replayer: TraceReplayer, *, patient: bool) -> None:
    state = observed.decision.state
    if patient and _warming(state, replayer):
        replayer.stop_clock()
    elif state.phase is Phase.TRAINING:
        replayer.start_clock()


def _stop_when_hopeless(observed: Observed, replayer: TraceReplayer) -> None:
    """End a run that waits for VMs which the trace will never bring, instead of letting it wait for ever."""
    state = observed.decision.state
    if state.config.target_nodes:
        return  # it goes on asking, for as long as the policy lets it
    if (
        state.phase is Phase.WAITING
        and replayer.finished
        and not _warming(state, replayer)
        and state.stop_reason is None
    ):
        observed.request_stop("too few VMs are left, and the trace brings no more")


def _warming(state: ControllerState, replayer: TraceReplayer) -> bool:
    """Whether a VM boots or its worker warms up."""
    return replayer.fleet.booting or any(not worker.ready for worker in state.workers.values())


class _StopWithTrace:
    """Asks for the end ``STEPS_AFTER_TRACE`` steps after the trace was played."""

    def __init__(self, replayer: TraceReplayer) -> None:
        self._replayer = replayer
        self._stop_at: int | None = None

    def __call__(self, observed: Observed) -> None:
        state = observed.decision.state
        if self._stop_at is None and self._replayer.finished and state.phase is Phase.TRAINING:
            self._stop_at = state.version + STEPS_AFTER_TRACE
        if self._stop_at is not None and state.version >= self._stop_at and state.stop_reason is None:
            observed.request_stop("the trace is over")


def _device_slots(spec: RunSpec, run_dir: RunDir) -> tuple[str, ...]:
    """Shares of this machine's CUDA devices, where local VMs compute on them; as many as VMs were planned with."""
    vms = spec.cluster.vms
    if not isinstance(vms, LocalVms) or vms.device == "cpu" or spec.emulation is not None:
        return ()
    num_vms = max(spec.trace.max_nodes, vms.keep or vms.num_vms)
    return device_slots(cuda_devices(), num_vms, run_dir.path / "devices")


def _setup(spec: RunSpec, run_dir: RunDir, machines: Machines, slots: tuple[str, ...], worker: str) -> WorkerSetup:
    return WorkerSetup(
        worker=worker,
        job_path=spec.job_path,
        fingerprint=spec.config.fingerprint,
        num_sections=spec.num_sections,
        micro_batch_size=spec.micro_batch_size,
        checkpoint_url=run_dir.checkpoint_url,
        store_host=machines.attachment.store_host,
        store_port=machines.attachment.store_port,
        listen_host=machines.address_of(worker),
        secret=machines.attachment.secret,
        device=spec.cluster.vms.device,
        device_slots=slots,
        rings=spec.cluster.vms.rings,
        links=spec.cluster.vms.links,
        faults=spec.faults,
        slow_spells=spec.slow_spells,
        checkpoints=spec.config.policy.rules.checkpoints,
        heartbeat_wait_s=heartbeat_wait_s(spec.config.policy.heartbeat_timeout_s),
        emulation=spec.emulation,
        code=spec.code,
        cut=spec.cut,
        variables=dict(spec.variables),
        known_by=run_dir.facts.known_by,
    )
