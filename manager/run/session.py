"""One session of a run: it opens machines, drives the controller over them, and ends everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from manager.controller.state.actions import Finish
from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import Event, ManagerResumed, Tick, WorkerLost
from manager.controller.state.state import ControllerState, Phase, initial_state
from manager.engine.local_vms.trace_replayer import TraceReplayer
from manager.engine.local_vms.vm_fleet import VmFleet
from manager.engine.loop.driver import Driver, Observed, Observer
from manager.engine.loop.event_queue import EventQueue, RunClock
from manager.engine.loop.lease import Lease
from manager.engine.loop.silence import heartbeat_wait_s
from manager.engine.machines.attachment import OrphanedRun, TakeoverFailed, forget_attachment, write_attachment
from manager.engine.machines.machines import Machines, Opening, OpenMachines
from manager.engine.machines.preemption import PreemptionServer
from manager.engine.machines.provider_machines import Providing
from manager.engine.machines.vm_sources import machines_of, provisioning_of, watch_joining, write_last_facts
from manager.engine.vms.budget import Before, Spending
from manager.engine.vms.provisioning import Provisioner
from manager.engine.vms.vm_registry import inherited
from manager.host.devices import cuda_devices, device_slots
from manager.host.signals import signals_blocked, stopping_on_signals
from manager.journal.journal import Journal, patiently
from manager.journal.records import OUTLIVES, TOOK_OVER, Fact, TraceMoment
from manager.journal.replay import trace_moment
from manager.report.condenser import Condenser
from manager.report.journal_reader import ledger_now
from manager.run_dir import DEVICES, RunDir
from morph.contract.cluster import ClusterConfig, LocalVms, ProvidedVms
from morph.contract.emulation import EmulatedDevice
from morph.contract.errors import ClusterError
from morph.contract.faults import Fault, SlowSpell
from morph.contract.messages import HandedCut, JobCode, WorkerSetup
from morph.contract.trace import Trace

STEPS_AFTER_TRACE = 3
TOO_FEW_LEFT = "too few VMs are left, and the trace brings no more"


def take_over(orphan: OrphanedRun, machines: Machines, replayer: TraceReplayer, driver: Driver) -> None:
    """Reach the workers, tell the trace's replayer which VMs are up, and tell the controller which workers live.

    The order matters: VMs must be known before the controller decides about them. New events wait in the event queue.
    As always, decisions are journalled before they are carried out: if this manager is killed here too, the next one
    takes over from the same journal, and repeats the actions that have no result.
    """
    workers, up = orphan.state.workers, machines.up()
    reached = machines.pool.attach([worker for worker, entry in workers.items() if entry.ready])
    living = tuple(worker for worker in reached if worker in orphan.appeared)  # the replayer reports the others
    events: list[Event] = [
        WorkerLost(worker=worker, cause="its VM was gone when the new manager took over")
        for worker, entry in workers.items()
        if not entry.ready and worker not in up
    ]
    if machines.provided is None:
        requested = {vm.name: vm.request for vm in inherited(orphan.state, orphan.vms).vms}
        replayer.resume(orphan.vms, orphan.appeared, requested)
    driver.tell(Fact(name=TOOK_OVER), *events, ManagerResumed(living=living))


@dataclass(frozen=True)
class SessionSpec:
    """A description of a run and its machines. All of it was checked before.

    ``stop_with_trace``: the run ends, saved and resumable, some steps after the trace's last event. ``patient_trace``:
    the trace's clock pauses while a VM boots or its worker warms up, so that the history does not depend on how fast
    this machine starts processes. ``emulation``: the workers take these times instead of training the job.
    ``machines``: where the workers run; None: as the cluster file says. ``providing``: opens the provider, if one
    brings the VMs. ``code``: the files from which every worker loads the job; None, in experiments: the files at
    ``job_path``. ``cut``: the cut model given to every worker; None: each worker exports the job. ``facts``: facts for
    the journal. ``played``: the position in the trace, in a session that follows a lost cluster. ``command``: the
    user's request; a manager that takes over must get the same one. ``variables``: environment variables for the
    workers only. ``lease``: the lease of the checkpoints, if others could write there.
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
    lease: Lease | None = None


def run_session(
    spec: SessionSpec,
    run_dir: RunDir,
    *observers: Observer,
    attend: Callable[[VmFleet], Observer] | None = None,
    orphan: OrphanedRun | None = None,
) -> Finish:
    """Run one session of a job to its end; blocks. The first SIGINT, SIGTERM or SIGHUP asks for a clean stop.

    The caller holds ``run_dir`` until this returns. ``observers``: called in turn after each decision. ``attend``:
    makes one more for experiments, which may request and revoke VMs. ``orphan``: a killed manager's run, to be
    continued with its own configuration instead of the spec's.
    ClusterError: Ray, or its replacement, does not start. ClusterLost: the session's machines are lost; nothing of the
    session is left running. TakeoverFailed: ``orphan`` cannot be continued; nothing of it is left running.
    CheckpointsTaken: another manager has taken over the checkpoints. KeyboardInterrupt: a second such signal arrived;
    even so, everything was ended.
    """
    ending = ExitStack()  # closes what was opened, in reverse
    session: Session | None = None
    try:
        session = Session(spec, run_dir, observers, orphan, ending)
        if attend is not None:
            session.observers.append(attend(session.replayer.fleet))
        with stopping_on_signals(session.driver.request_stop):
            if orphan is None:
                session.begin()
            else:
                take_over(orphan, session.machines, session.replayer, session.driver)
            session.start_vms()
            return session.driver.run()
    finally:
        with signals_blocked(session.hurry if session else lambda: None):
            ending.close()


class Session:
    """A session: opened when constructed, then begun or taken over, given its VMs, and driven to its end.

    ``ending``: closes everything that is opened here, even after an error. Other arguments: see ``run_session``.
    """

    def __init__(
        self,
        spec: SessionSpec,
        run_dir: RunDir,
        observers: Sequence[Observer],
        orphan: OrphanedRun | None,
        ending: ExitStack,
    ) -> None:
        self._spec, self._run_dir, self._orphan, self._ending = spec, run_dir, orphan, ending
        open_machines = spec.machines or machines_of(
            spec.cluster.vms, spec.providing, orphan, run_dir.path, spec.job_path
        )
        self._journal = ending.enter_context(patiently(lambda: Journal.open(run_dir.journal_path)))
        patiently(lambda: self._journal.condense(Condenser, orphan.state if orphan else None))
        last = self._journal.last_moment()
        self._clock = RunClock(orphan.attachment.epoch_s if orphan else None, last[1] if last else 0.0)
        self._event_queue = EventQueue(self._clock.now_s)
        ending.callback(write_last_facts, self._event_queue, self._journal)
        ending.callback(forget_attachment, run_dir)
        self._slots = _device_slots(spec, run_dir)
        self._stop_at: int | None = None
        self.machines = self._open(open_machines)
        moment = orphan.moment if orphan else spec.played
        types = spec.cluster.vms.node_types if isinstance(spec.cluster.vms, LocalVms) else ()
        self.replayer = TraceReplayer(self.machines.vms, spec.trace, self._event_queue, moment, types)
        ending.callback(self.replayer.close)
        self._provisioning = self._open_provisioning() if spec.config.target_nodes else None
        self.observers: list[Observer] = [self._run_clock, *observers, self._stop_when_hopeless]
        if spec.stop_with_trace:
            self.observers.append(self._stop_with_trace)
        provided = self.machines.provided
        self.driver = Driver(
            orphan.state if orphan else initial_state(spec.config),
            self._event_queue,
            self.machines.pool,
            self._journal,
            run_dir.checkpoint_url,
            self.observers,
            self._provisioning,
            provided.notices.left if provided else None,
            spec.lease,
        )
        by_provider = self._provisioning if provided else None
        folder, driver = self.machines.attachment.control_socket.parent, self.driver
        ending.callback(
            PreemptionServer(
                folder, lambda: driver.state.workers, self._event_queue, by_provider or self.replayer.fleet
            ).close
        )
        for fact in spec.facts:
            self._event_queue.put(fact)

    def begin(self) -> None:
        """Write the file with which another manager can take over."""
        spec, clock = self._spec, self._clock
        vms = spec.cluster.vms
        outlives_s = vms.lonely_s if isinstance(vms, ProvidedVms) else spec.config.policy.takeover_patience_s
        known = {"command": dict(spec.command), "epoch_s": clock.epoch_s}
        attachment = self.machines.attachment.model_copy(update=known)
        patiently(lambda: self._journal.append_config(clock.now_s(), spec.config))
        patiently(lambda: self._journal.append_fact(clock.now_s(), Fact(name=OUTLIVES, detail=str(outlives_s))))
        patiently(lambda: write_attachment(self._run_dir, attachment))
        if spec.played.num_played:
            self.replayer.resume((), ())

    def start_vms(self) -> None:
        """Let VMs come and go: as in the trace, as a provider brings them, or as they are requested."""
        self.machines.vms.settle()
        self.replayer.start()
        provided, provisioning = self.machines.provided, self._provisioning
        if provisioning is None:
            return
        if provided is not None:
            appeared = self._orphan.appeared if self._orphan else ()
            joining = watch_joining(provided, provisioning, self._event_queue, self.driver.state, appeared)
            self._ending.callback(joining.close)
        self._event_queue.put(Tick())  # without an event, the first VMs would not be requested

    def hurry(self) -> None:
        """While the session closes, stop waiting for VMs and processes that do not end; for a signal handler."""
        if self._provisioning is not None:
            self._provisioning.hurry()

    # ---- opening ----

    def _open(self, open_machines: OpenMachines) -> Machines:
        policy = self._spec.config.policy
        opening = Opening(
            event_queue=self._event_queue,
            make_setup=self._setup_of,
            heartbeat_timeout_s=policy.heartbeat_timeout_s,
            outage_timeout_s=policy.outage_timeout_s,
            patience_s=policy.takeover_patience_s,
            ending=self._ending,
            orphan=self._orphan,
        )
        try:
            return open_machines(opening)
        except ClusterError as error:
            if self._orphan is None:
                raise
            raise TakeoverFailed(str(error)) from error

    def _open_provisioning(self) -> Provisioner:
        vms, orphan = self._spec.cluster.vms, self._orphan
        before = None
        if vms.limits.budget_usd is not None:
            lives_on = orphan is not None
            ledger = ledger_now(self._run_dir.path, self._clock.now_s(), lives_on=lives_on)
            before = Before.of(ledger, lives_on=lives_on)
        spending = Spending(vms.limits, before=before)
        opened = provisioning_of(vms, self.machines, self.replayer.fleet, self._event_queue, spending, orphan)
        self._ending.callback(opened.close)
        return opened

    def _setup_of(self, worker: str) -> WorkerSetup:
        spec, attachment = self._spec, self.machines.attachment
        policy, vms = spec.config.policy, spec.cluster.vms
        return WorkerSetup(
            worker=worker,
            job_path=spec.job_path,
            fingerprint=spec.config.fingerprint,
            num_sections=spec.num_sections,
            micro_batch_size=spec.micro_batch_size,
            checkpoint_url=self._run_dir.checkpoint_url,
            lease=spec.lease.run if spec.lease else "",
            store_host=attachment.store_host,
            store_port=attachment.store_port,
            listen_host=self.machines.address_of(worker),
            secret=attachment.secret,
            device=vms.device,
            device_slots=self._slots,
            rings=vms.rings,
            links=vms.links,
            faults=spec.faults,
            slow_spells=spec.slow_spells,
            checkpoints=policy.rules.checkpoints,
            heartbeat_wait_s=heartbeat_wait_s(policy.heartbeat_timeout_s),
            emulation=spec.emulation,
            code=spec.code,
            cut=spec.cut,
            variables=dict(spec.variables),
            known_by=self._run_dir.facts.known_by,
        )

    # ---- observing ----

    def _run_clock(self, observed: Observed) -> None:
        state = observed.decision.state
        if self._spec.patient_trace and self._is_warming(state):
            self.replayer.stop_clock()
        elif state.phase is Phase.TRAINING:
            self.replayer.start_clock()

    def _stop_when_hopeless(self, observed: Observed) -> None:
        """End a run that waits for VMs that the trace will never bring."""
        state = observed.decision.state
        if state.config.target_nodes:
            return  # it keeps requesting VMs, as long as the policy allows
        waits = state.phase is Phase.WAITING and state.stop_reason is None
        if waits and self.replayer.finished and not self._is_warming(state):
            observed.request_stop(TOO_FEW_LEFT)

    def _stop_with_trace(self, observed: Observed) -> None:
        """End the run ``STEPS_AFTER_TRACE`` steps after the trace was played."""
        state = observed.decision.state
        if self._stop_at is None and self.replayer.finished and state.phase is Phase.TRAINING:
            self._stop_at = state.version + STEPS_AFTER_TRACE
        if self._stop_at is not None and state.version >= self._stop_at and state.stop_reason is None:
            observed.request_stop("the trace is over")

    def _is_warming(self, state: ControllerState) -> bool:
        """Return whether a VM boots or its worker warms up."""
        return self.replayer.fleet.booting or any(not worker.ready for worker in state.workers.values())


def with_resumed_trace(spec: SessionSpec, run_dir: RunDir) -> SessionSpec:
    """Return a spec that continues the trace from where it was when the cluster was lost, with the VMs of that time."""
    with Journal.open(run_dir.journal_path, read_only=True) as journal:
        moment = trace_moment(journal)
    up: set[str] = set()
    for event in spec.trace.events[: moment.num_played]:
        (up.add if event.event == "add" else up.discard)(event.node_id)
    config = spec.config
    if up and not config.target_nodes:
        config = config.model_copy(update={"expected_nodes": len(up)})
    return replace(spec, config=config, played=moment)


def _device_slots(spec: SessionSpec, run_dir: RunDir) -> tuple[str, ...]:
    """Return shares of this machine's CUDA devices, if local VMs use them: one for each VM of the plan."""
    vms = spec.cluster.vms
    if not isinstance(vms, LocalVms) or vms.device == "cpu" or spec.emulation is not None:
        return ()
    num_vms = max(spec.trace.max_nodes, vms.keep or vms.num_vms)
    return device_slots(cuda_devices(), num_vms, run_dir.path / DEVICES)
