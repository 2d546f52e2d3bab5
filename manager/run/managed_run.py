"""Runs a managed job from its request to its end: checks it, then runs it or takes its run over."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from manager.controller.state.actions import Finish
from manager.controller.state.config import ControllerConfig
from manager.engine.loop.driver import Observed, Observer
from manager.engine.loop.lease import Lease, run_name, this_process
from manager.engine.machines import attachment
from manager.engine.machines.machines import OpenMachines, Processes
from manager.engine.machines.provider_machines import Providing
from manager.engine.machines.vm_sources import machines_of
from manager.history.run_history import RunHistory
from manager.host.environment import variables
from manager.journal.journal import LIMIT_S, patiently
from manager.providers.interface.provider import name_of, write_name
from manager.report.condenser import condense_all
from manager.report.journal_reader import read_ledger, read_report
from manager.report.live import LiveRun
from manager.report.values import RunReport
from manager.run import session
from manager.run.controller_config import starting_from
from manager.run.job_code import TrainedCode
from manager.run.prepared import PreparedRun
from manager.run.recovery import recovery_of, write_recovery
from manager.run.request import IfChanged, keep_request
from manager.run.session import Restarts, run_until_it_ends
from manager.run_dir import RunDir, check_free, is_run
from manager.trackers.alerts import webhook_variables
from manager.trackers.process import Watching
from manager.trackers.supervisor import LIMIT_OF_A_CALL_S, LIMIT_OF_A_SAMPLE_S, Watchers
from morph.checkpoint.newest import find_whole, newest_whole
from morph.checkpoint.storage import bounded
from morph.contract.checkpoint import Manifest
from morph.contract.cluster import LocalVms
from morph.contract.errors import CheckpointDamaged, CheckpointError, ClusterLost, RunFinished
from morph.contract.messages import JobCode
from morph.contract.pool import several_types
from morph.contract.profile import estimates, other_device, other_links
from morph.words import counted

Show = Callable[[LiveRun], AbstractContextManager[Observer]]
"""Shows a run while the context is open; yields the driver's observer."""


class ManagedRun:
    """One run under this manager. It is checked and planned when it is made; ``train`` does the rest.

    Storage and the job are checked and shapes planned at once, unless ``train`` must first look for a run that may
    still live. A run that is in use is refused. ``if_changed``: what to do if the job is not the one that the run began
    with. ``doing``: tells the user the next phase of the checks. ``take_over``: take the checkpoints' storage over from
    another manager, which may still run. ``forever``: another manager follows this one, unless the user or a limit ends
    it.
    InputError: the run cannot begin. CheckpointError: storage does not answer, and the run is new. In both cases
    nothing was started or written.
    """

    def __init__(
        self,
        run: PreparedRun,
        show: Show,
        if_changed: IfChanged = IfChanged.REFUSE,
        *,
        doing: Callable[[str], None] = lambda _phase: None,
        take_over: bool = False,
        forever: bool = False,
    ) -> None:
        check_free(run.run_dir)
        self._run, self._show, self._by_force, self._forever = run, show, take_over, forever
        self._lease: Lease | None = None
        self._is_new = not is_run(run.run_dir)
        self._wait = partial(patiently, limit_s=0.0 if self._is_new else LIMIT_S)  # a resumed run waits for its disk
        unpack = run.cloud is not None
        self._trained = TrainedCode(run.request.job, run.profile, run.job_files, if_changed, doing, unpack=unpack)
        self._prices = run.prices()
        policy = run.cluster.policy
        self._restarts = Restarts(policy.give_up_after_s, rest_at_most_s=policy.rules.wait.vms_patience_s)
        self._history = RunHistory(_tell)
        self._providing: Providing | None = None
        self._code: JobCode | None = None
        self._machines: list[OpenMachines] = []
        with ExitStack() as ending:
            self._check(ending)
            self._ending = ending.pop_all()

    def _check(self, ending: ExitStack) -> None:
        run = self._run
        if self._is_new and run.request.checkpoint_url is not None:
            # this is first because the job takes longer, and because files left after a wrong key would be in the way
            if not self._by_force:
                Lease(run.request.checkpoint_url, this_process("", run.run_dir)).check_free()
            find_whole(run.request.checkpoint_url)
        if self._is_new:
            self._machines = _begin_machines(run, ending)
        if self._is_new or not run.profile.units:  # a job that cannot run leaves nothing behind
            self._trained.check()
        if run.request.epochs is not None:
            self._run = run = run.in_steps(self._trained.epochs(run.run_dir))
        self._planned = cache(run.config)  # once, as planning for many VMs takes time; not if a run is taken over
        if self._is_new:
            vms = run.cluster.vms
            links = other_links(run.profile, vms.links, vms.rings) if vms.device == "cuda" else ()
            for sentence in (*estimates(run.profile), *other_device(run.profile, vms.device), *links):
                _tell(f"warning: {sentence}")
            if sentence := several_types(self._planned().type_compute_s):
                _tell(f"warning: {sentence}")
        self._facts = run.facts(self._planned)

    def train(self) -> tuple[Finish, RunReport]:
        """Train to the run's end, in as many sessions as that takes; to be called once.

        A session is the work of one group of VMs and workers, from their start to their end; another follows if the
        machines are lost. A run whose VMs live is taken over, before the job is loaded. The request is stored in the
        run directory once it is certain that the run begins. TrainingStopped: the cluster or training failed.
        """
        cloud, name = self._run.cloud, self._run.profile.job.name
        with self._ending, RunDir(self._run.run_dir, self._facts) as opened:
            self._take_lease(opened)
            if cloud is not None:
                known_as = name_of(opened.path, name)
                self._wait(partial(write_name, opened.path, known_as))  # the provider tags VMs with it, to find them
                self._providing = cloud.providing(known_as, opened.path)
            try:
                with Watchers(self._watching(opened), _tell):
                    finish = run_until_it_ends(partial(self._session, opened), self._restarts, _tell)
                return finish, read_report(opened.path)
            finally:
                self._history.take_in(opened.path)

    def _take_lease(self, opened: RunDir) -> None:
        """Lease the storage of the checkpoints, unless it is in the run directory, which is locked."""
        url = opened.facts.checkpoint_url
        if url is None:
            return
        self._lease = Lease(url, this_process(run_name(opened.path), opened.path))
        self._ending.callback(self._lease.close)
        try:
            before = self._lease.take(by_force=self._by_force)
        except CheckpointError as error:
            if self._is_new:
                raise
            _tell(f"{error}; it is tried again before a checkpoint is written")
        else:
            if before is not None:
                _tell(f"the checkpoints at {url} are taken over from {before}, which stops when it next looks there")

    def _watching(self, opened: RunDir) -> tuple[Watching, ...]:
        run = self._run
        folder = Path() if run.request.cluster is None else run.request.cluster.resolve().parent
        common: dict[str, object] = {
            "run_dir": opened.path.resolve(),
            "journal": opened.journal_path.resolve(),
            "checkpoint_url": opened.checkpoint_url,
            "job": run.profile.job.name,
            "prices": self._prices,
            "limit_s": LIMIT_OF_A_CALL_S,
        }
        kinds: list[dict[str, object]] = [{"kind": tracker} for tracker in run.cluster.trackers]
        if run.cluster.samples:  # it reads checkpoints, as workers do
            known = variables(run.cluster.vms.pass_variables)
            kinds.append({"kind": "samples", "limit_s": LIMIT_OF_A_SAMPLE_S, "variables": known})
        if run.cluster.notify is not None:
            known = webhook_variables(run.cluster.notify)
            budget_usd = run.cluster.vms.limits.budget_usd
            kinds.append(
                {
                    "kind": "notify",
                    "notify": run.cluster.notify,
                    "budget_usd": budget_usd,
                    "forever": self._forever,
                    "variables": known,
                }
            )
        targets: list[dict[str, object]] = [
            {"kind": "callback", "target": str(folder / target), "number": number}
            for number, target in enumerate(run.cluster.callbacks)
        ]
        return tuple(Watching.model_validate(common | one) for one in (*kinds, *targets))

    def _take_over(self, opened: RunDir) -> Finish | None:
        """Take over a run whose manager was killed; None: no such run lives. A message says so if there was one."""
        began_with = self._trained.of(opened)
        try:
            living_run = attachment.find_living(opened, self._command(began_with))
            if living_run is None:
                return None
            version, num_vms = living_run.state.version, len(living_run.vms) or len(living_run.state.workers)
            self._history.take_in(opened.path)
            them = "it" if num_vms == 1 else "them"
            living = f"{counted(num_vms, 'VM')} of this run live{'s' * (num_vms == 1)}"
            _tell(f"{living}: going on with {them} at version {version}")
            with self._view(opened, version, takes_over=True) as observer:
                spec = self._spec(began_with, living_run.state.config)
                return session.run_session(spec, opened, observer, found=living_run)
        except attachment.TakeoverFailed as error:
            _tell(f"this run cannot be taken over: {error}; going on from its newest checkpoint")
            return None

    def _session(self, opened: RunDir, number: int) -> Finish:
        """Run one session: the first one with what still lives, any other from the newest checkpoint."""
        if not number and (finish := self._take_over(opened)) is not None:
            return finish
        run = self._run
        if not number and not self._is_new:
            self._wait(partial(condense_all, opened.journal_path, _tell))
        self._history.take_in(opened.path)
        checkpoint = self._newest_checkpoint(opened)
        version = checkpoint.version if checkpoint else 0
        self._restarts.begin_at(version)
        if not number and version >= run.request.steps:
            where, allowed = str(run.run_dir), f"above {version}, given to morph run"
            raise RunFinished(
                "has reached that step already", source=where, field="--steps", value=run.request.steps, allowed=allowed
            )
        if self._code is None:
            self._code = self._wait(lambda: self._trained.begin(opened))
            if run.requested is not None:
                self._wait(partial(keep_request, opened.path, run.requested, run.files))
                _leave_recovery(run, opened, self._trained)
        config = starting_from(self._planned(), checkpoint, self._history.expected(run.vm_kind))
        spec = self._spec(self._code, config)
        if self._restarts.has_run:
            spec = session.with_resumed_trace(spec, opened)
        if run.cloud is not None:
            name = name_of(opened.path, run.profile.job.name)
            name = name.model_copy(update={"num_starts": name.num_starts + 1})
            self._wait(partial(write_name, opened.path, name))
            _tell(f"VMs of this run are known as {name.run} (job {name.job})")
            spec = replace(spec, config=spec.config.model_copy(update={"requests": name.requests}))
        with self._view(opened, version) as observer:
            return session.run_session(spec, opened, observer)

    def _newest_checkpoint(self, opened: RunDir) -> Manifest | None:
        """Find the checkpoint to resume from, checking only file sizes; workers that load it find other damage."""
        try:
            manifest, passed_over = newest_whole(opened.checkpoint_url)
        except CheckpointDamaged:
            raise
        except CheckpointError as error:
            if self._restarts.has_run:  # storage that failed may come back
                raise ClusterLost(str(error)) from error
            raise
        for sentence in passed_over:
            _tell(sentence)
        return manifest

    def _spec(self, code: JobCode, config: ControllerConfig) -> session.RunSpec:
        run = self._run
        return session.RunSpec(
            job_path=run.identity["JOB"],
            config=config,
            cluster=run.cluster,
            trace=run.events,
            num_sections=run.profile.num_sections,
            micro_batch_size=self._facts.micro_batch_size,
            stop_with_trace=run.stop_with_trace,
            patient_trace=run.stop_with_trace,
            providing=self._providing,
            code=code,
            cut=self._trained.cut,
            machines=self._machines.pop() if self._machines else None,
            facts=self._trained.facts(code),
            command=self._command(code),
            variables=variables(run.cluster.vms.pass_variables),
            lease=self._lease,
        )

    def _command(self, code: JobCode) -> dict[str, str]:
        return {**self._run.identity, "the job's code": code.sha256}

    @contextmanager
    def _view(self, opened: RunDir, version: int, *, takes_over: bool = False) -> Iterator[Observer]:
        """Show a session while the context is open; yields the driver's observer."""
        run = self._run
        num_steps = None if run.stop_with_trace else run.request.steps
        live = LiveRun(run.profile.job.name, num_steps, run.profile.job.batch_size, self._prices)
        live.version, live.fold.ledger, live.takes_over = version, read_ledger(opened.path), takes_over
        with self._show(live) as shown:

            def observe(observed: Observed) -> None:
                self._restarts(observed)
                shown(observed)

            yield observe


def _begin_machines(run: PreparedRun, ending: ExitStack) -> list[OpenMachines]:
    """While the job is checked, let the process that forks local workers import the modules that they need."""
    vms = run.cluster.vms
    if not isinstance(vms, LocalVms) or vms.under_ray:
        return []
    machines = machines_of(vms, None, None, run.run_dir, run.identity["JOB"])
    assert isinstance(machines, Processes)
    with suppress(OSError):  # the session reports the error
        begun = machines.begin(run.cluster.policy.takeover_patience_s)
        ending.callback(begun.close)
        return [replace(machines, begun=begun)]
    return []


def _leave_recovery(run: PreparedRun, opened: RunDir, trained: TrainedCode) -> None:
    """Store beside the checkpoints what another machine needs to resume the run; the run continues if that fails."""
    limit_s = run.cluster.policy.rules.checkpoints.file_limit_s(0)
    try:
        recovery = recovery_of(run, opened.facts, trained.files)
        bounded(partial(write_recovery, opened.checkpoint_url, recovery), limit_s, "storage")
    except (CheckpointError, OSError) as error:
        _tell(f"note: {error}; the run can be resumed in {opened.path}, but not from its checkpoints alone")


def _tell(sentence: str) -> None:
    print(sentence, file=sys.stderr)
