"""Trains a prepared run to its end: one session after another, the first with VMs that still live."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from manager.controller.state.actions import Finish
from manager.controller.state.config import ControllerConfig
from manager.controller.steps.recovery import PAUSES
from manager.engine.loop.driver import Observed, Observer
from manager.engine.loop.lease import Lease, run_name, this_process
from manager.engine.machines import attachment
from manager.engine.machines.attachment import OrphanedRun, TakeoverFailed
from manager.engine.machines.provider_machines import Providing
from manager.history.vm_history import VmHistory
from manager.host.environment import variables
from manager.host.signals import stopping_on_signals
from manager.journal.journal import LIMIT_S, patiently
from manager.providers.interface.provider import name_of, write_name
from manager.report.condenser import condense_all
from manager.report.journal_reader import read_ledger, read_report
from manager.report.live import LiveRun
from manager.report.values import RunReport
from manager.run.controller_config import starting_from
from manager.run.prepared import Prepared, tell
from manager.run.recovery import recovery_of, write_recovery
from manager.run.request import keep_request
from manager.run.session import SessionSpec, run_session, with_resumed_trace
from manager.run_dir import RunDir
from manager.trackers.alerts import webhook_variables
from manager.trackers.process import Watching
from manager.trackers.supervisor import LIMIT_OF_A_CALL_S, LIMIT_OF_A_SAMPLE_S, Watchers
from morph.checkpoint.newest import newest_whole
from morph.checkpoint.storage import bounded
from morph.contract.checkpoint import Manifest
from morph.contract.errors import CheckpointDamaged, CheckpointError, ClusterError, ClusterLost, RunFinished
from morph.contract.messages import JobCode
from morph.contract.waits import Backoff
from morph.words import counted

RESTS = Backoff(first_s=60.0, most_s=3600.0)
"""Rests without VMs, after consecutive sessions whose VMs achieved nothing."""

Show = Callable[[LiveRun], AbstractContextManager[Observer]]
"""Shows a run while the context is open; yields the driver's observer."""


def train(run: Prepared, show: Show, *, forever: bool = False) -> tuple[Finish, RunReport]:
    """Train to the run's end, in as many sessions as that takes; blocks.

    A session is the work of one group of VMs and workers, from their start to their end. Another one follows, after
    growing pauses and up to a limit, if the machines were lost or the run rests without VMs. ``forever``: another
    manager follows this one, unless the user or a limit ends the run.
    TrainingStopped: training failed. ClusterError: the cluster never came up, or the limit is reached.
    """
    policy = run.inputs.cluster.policy
    restarts = Restarts(policy.give_up_after_s, tell, rest_at_most_s=policy.rules.wait.vms_patience_s)
    history, finish = VmHistory(tell), None
    with ExitStack() as ending, RunDir(run.inputs.run_dir, run.facts) as opened:
        lease = _leased(run, opened, ending)
        sessions = _Sessions(run, opened, lease, history, restarts)
        try:
            with Watchers(_watching(run, opened, forever=forever), tell):
                while finish is None:
                    try:
                        spec, orphan = sessions.next()
                        with show(_live(run, opened, spec, orphan)) as observer:
                            end: Finish | ClusterError = run_session(spec, opened, restarts, observer, orphan=orphan)
                    except TakeoverFailed as error:
                        tell(f"this run cannot be taken over: {error}; going on from its newest checkpoint")
                        continue
                    except ClusterError as error:
                        end = error
                    finish = restarts.after(end)
            return finish, read_report(opened.path)
        finally:
            history.take_in(opened.path)


def _leased(run: Prepared, opened: RunDir, ending: ExitStack) -> Lease | None:
    """Lease the storage of the checkpoints, unless it is in the run directory, which is locked."""
    url = opened.facts.checkpoint_url
    if url is None:
        return None
    lease = Lease(url, this_process(run_name(opened.path), opened.path))
    ending.callback(lease.close)
    try:
        before = lease.take(by_force=run.take_over)
    except CheckpointError as error:
        if run.is_new:
            raise
        tell(f"{error}; it is tried again before a checkpoint is written")
    else:
        if before is not None:
            tell(f"the checkpoints at {url} are taken over from {before}, which stops when it next looks there")
    return lease


def _watching(run: Prepared, opened: RunDir, *, forever: bool) -> tuple[Watching, ...]:
    """Return the run's helpers: trackers, samples, alerts and callbacks."""
    request, cluster = run.inputs.request, run.inputs.cluster
    folder = Path() if request.cluster is None else request.cluster.resolve().parent
    common: dict[str, object] = {
        "run_dir": opened.path.resolve(),
        "journal": opened.journal_path.resolve(),
        "checkpoint_url": opened.checkpoint_url,
        "job": run.inputs.profile.job.name,
        "prices": run.prices,
        "limit_s": LIMIT_OF_A_CALL_S,
        "budget_usd": cluster.vms.limits.budget_usd,
        "forever": forever,
    }
    kinds: list[dict[str, object]] = [{"kind": tracker} for tracker in cluster.trackers]
    if cluster.samples:  # it reads checkpoints, as workers do
        known = variables(cluster.vms.pass_variables)
        kinds.append({"kind": "samples", "limit_s": LIMIT_OF_A_SAMPLE_S, "variables": known})
    if cluster.notify is not None:
        kinds.append({"kind": "notify", "notify": cluster.notify, "variables": webhook_variables(cluster.notify)})
    kinds += [
        {"kind": "callback", "target": str(folder / target), "number": number}
        for number, target in enumerate(cluster.callbacks)
    ]
    return tuple(Watching.model_validate(common | kind) for kind in kinds)


def _live(run: Prepared, opened: RunDir, spec: SessionSpec, orphan: OrphanedRun | None) -> LiveRun:
    """Return what is known of the run at the beginning of a session."""
    inputs = run.inputs
    live = LiveRun(
        inputs.profile.job.name,
        None if inputs.stop_with_trace else inputs.request.steps,
        inputs.profile.job.batch_size,
        run.prices,
    )
    live.version = spec.config.initial_version if orphan is None else orphan.state.version
    live.fold.ledger, live.takes_over = read_ledger(opened.path), orphan is not None
    return live


class _Sessions:
    """Describes a run's sessions: the first goes on with what still lives, any other from the newest checkpoint."""

    def __init__(
        self, run: Prepared, opened: RunDir, lease: Lease | None, history: VmHistory, restarts: Restarts
    ) -> None:
        self._run, self._opened, self._lease = run, opened, lease
        self._history, self._restarts = history, restarts
        self._wait = partial(patiently, limit_s=0.0 if run.is_new else LIMIT_S)  # a resumed run waits for its disk
        self._has_looked = False
        self._code: JobCode | None = None
        self._machines = run.machines
        self._providing: Providing | None = None
        cloud = run.inputs.cloud
        if cloud is not None:
            known_as = name_of(opened.path, run.inputs.profile.job.name)
            self._wait(partial(write_name, opened.path, known_as))  # the provider tags VMs with it, to find them
            self._providing = cloud.providing(known_as, opened.path)

    def next(self) -> tuple[SessionSpec, OrphanedRun | None]:
        """Describe the next session, with the run that it takes over, if one lives whose manager was killed.

        The job is loaded, and the request stored in the run directory, once it is certain that no such run lives.
        TakeoverFailed: one was found but cannot be continued; the next call describes the session in its place.
        ClusterLost: storage, which answered before, does not.
        """
        if not self._has_looked:
            self._has_looked = True
            code = self._run.code.of(self._opened)
            if (orphan := attachment.find_living(self._opened, self._command(code))) is not None:
                self._history.take_in(self._opened.path)
                num_vms = len(orphan.vms) or len(orphan.state.workers)
                lives, them = ("lives", "it") if num_vms == 1 else ("live", "them")
                of_run = f"{counted(num_vms, 'VM')} of this run {lives}"
                tell(f"{of_run}: going on with {them} at version {orphan.state.version}")
                return self._spec(code, orphan.state.config), orphan
        return self._from_newest_checkpoint(), None

    def _from_newest_checkpoint(self) -> SessionSpec:
        run, opened, has_run = self._run.inputs, self._opened, self._restarts.has_run
        if not has_run and not self._run.is_new:
            self._wait(partial(condense_all, opened.journal_path, tell))
        self._history.take_in(opened.path)
        checkpoint = self._newest_checkpoint()
        version = checkpoint.version if checkpoint else 0
        self._restarts.begin_at(version)
        if not has_run and version >= run.request.steps:
            where, allowed = str(run.run_dir), f"above {version}, given to morph run"
            raise RunFinished(
                "has reached that step already", source=where, field="--steps", value=run.request.steps, allowed=allowed
            )
        if self._code is None:
            self._code = self._wait(lambda: self._run.code.begin(opened))
            if run.requested is not None:
                self._wait(partial(keep_request, opened.path, run.requested, run.files))
                self._leave_recovery()
        config = starting_from(self._run.planned(), checkpoint, self._history.expected(run.vm_kind))
        spec = self._spec(self._code, config)
        if has_run:
            spec = with_resumed_trace(spec, opened)
        if run.cloud is not None:
            name = name_of(opened.path, run.profile.job.name)
            name = name.model_copy(update={"num_starts": name.num_starts + 1})
            self._wait(partial(write_name, opened.path, name))
            tell(f"VMs of this run are known as {name.run} (job {name.job})")
            spec = replace(spec, config=spec.config.model_copy(update={"requests": name.requests}))
        return spec

    def _newest_checkpoint(self) -> Manifest | None:
        """Find the checkpoint to resume from, checking only file sizes; workers that load it find other damage."""
        try:
            manifest, passed_over = newest_whole(self._opened.checkpoint_url)
        except CheckpointError as error:
            if self._restarts.has_run and not isinstance(error, CheckpointDamaged):  # storage may come back
                raise ClusterLost(str(error)) from error
            raise
        for sentence in passed_over:
            tell(sentence)
        return manifest

    def _leave_recovery(self) -> None:
        """Store beside the checkpoints what another machine needs to resume the run; it continues if that fails."""
        run, opened = self._run.inputs, self._opened
        limit_s = run.cluster.policy.rules.checkpoints.file_limit_s(0)
        try:
            recovery = recovery_of(run, opened.facts, self._run.code.files)
            bounded(partial(write_recovery, opened.checkpoint_url, recovery), limit_s, "storage")
        except (CheckpointError, OSError) as error:
            tell(f"note: {error}; the run can be resumed in {opened.path}, but not from its checkpoints alone")

    def _spec(self, code: JobCode, config: ControllerConfig) -> SessionSpec:
        run, machines = self._run.inputs, self._machines
        self._machines = None  # those that were begun are for one session
        return SessionSpec(
            job_path=run.identity["JOB"],
            config=config,
            cluster=run.cluster,
            trace=run.events,
            num_sections=run.profile.num_sections,
            micro_batch_size=self._run.facts.micro_batch_size,
            stop_with_trace=run.stop_with_trace,
            patient_trace=run.stop_with_trace,
            providing=self._providing,
            code=code,
            cut=self._run.code.cut,
            machines=machines,
            facts=self._run.code.facts(code),
            command=self._command(code),
            variables=variables(run.cluster.vms.pass_variables),
            lease=self._lease,
        )

    def _command(self, code: JobCode) -> dict[str, str]:
        return {**self._run.inputs.identity, "the job's code": code.sha256}


class Restarts:
    """Decides after each session whether another follows, and waits for it. It observes every session.

    ``give_up_after_s``: the run ends if no step is decided for this time after the cluster was lost. ``tell``: called
    with a sentence when a cluster is lost or the run rests. ``clock``: monotonic, in seconds. ``rest_at_most_s``: the
    longest rest without VMs of a run that decides no step. ``has_run``: whether a session has decided anything yet.
    """

    def __init__(
        self,
        give_up_after_s: float,
        tell: Callable[[str], None] = lambda _sentence: None,
        clock: Callable[[], float] = time.monotonic,
        rest_at_most_s: float = 0.0,
    ) -> None:
        self._give_up_after_s, self._tell, self._rest_at_most_s = give_up_after_s, tell, rest_at_most_s
        self._resting_since_s: float | None = None
        self._num_rests = 0
        self._clock = clock
        self._since_s: float | None = None
        self._num_tries = 0
        self._version: int | None = None
        self._stopping = False
        self._goes_on = self.has_run = False

    def begin_at(self, version: int) -> None:
        """Record that a session begins at this version; above 0 a cluster was up before, so a lost one is replaced."""
        self._goes_on = version > 0

    def __call__(self, observed: Observed) -> None:
        """Record a decision; a new step resets the count of attempts."""
        self.has_run = True
        state = observed.decision.state
        version = state.version
        if state.failing is None or not state.failing.final:  # a final error stops the run as well
            self._stopping = state.stop_reason is not None
        if self._version is not None and version > self._version:
            self._since_s, self._num_tries = None, 0
            self._resting_since_s, self._num_rests, self._goes_on = None, 0, True
        self._version = version

    def after(self, end: Finish | ClusterError) -> Finish | None:
        """Wait until the next session is due; return how the run ends if none follows, or a signal asks for a stop.

        ClusterError: ``end`` itself, if the run never had a cluster or was stopping anyway; or that the limit is
        reached.
        """
        if isinstance(end, ClusterError):
            pause_s = self._pause_s(end)
            when = f"in {pause_s:g} s" if pause_s else "at once"
            self._tell(f"{end}; the run goes on from its newest checkpoint {when}")
        else:
            rest_s = self._rest_s() if end.rests else None
            if rest_s is None:
                return end
            pause_s = rest_s
            self._tell(f"{end.sentence}; the run rests without VMs, and tries again in {pause_s:g} s")
        requested = _wait(pause_s)
        if requested is None:
            return None
        return Finish(outcome="stopped", sentence=f"{requested} before the run had a cluster again")

    def _rest_s(self) -> float | None:
        """Return how long to rest without VMs; None: the run never decided a step, or has rested long enough."""
        now_s = self._clock()
        since_s = self._resting_since_s = now_s if self._resting_since_s is None else self._resting_since_s
        if not self._goes_on or now_s >= since_s + self._rest_at_most_s:
            return None
        self._num_rests += 1
        self._version = None
        return RESTS.pause_s(self._num_rests - 1)

    def _pause_s(self, error: ClusterError) -> float:
        """Return how long to wait before the next attempt; the first follows at once."""
        never_up = not (self._num_tries or self._goes_on or isinstance(error, ClusterLost))
        if self._stopping or never_up:
            raise error
        now_s = self._clock()
        self._since_s = now_s if self._since_s is None else self._since_s
        if now_s >= self._since_s + self._give_up_after_s:
            limit = f"{self._give_up_after_s:g} s (policy.give_up_after_s of the cluster file)"
            raise ClusterError(
                f"{error}; no step was decided for {limit}; the same command continues from the newest checkpoint"
            ) from error
        pause_s = PAUSES.pause_s(self._num_tries - 1) if self._num_tries else 0.0
        self._num_tries += 1
        self._version = None  # the next session may begin at an earlier one
        return pause_s


def _wait(pause_s: float) -> str | None:
    requested: list[str] = []
    stop = threading.Event()

    def note(reason: str) -> None:
        requested.append(reason)
        stop.set()

    with stopping_on_signals(note):
        stop.wait(pause_s)
    return requested[0] if requested else None
