"""A managed job from its request to its end: checked, run or taken over."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache, partial

from manager.controller.state.actions import Finish
from manager.controller.state.config import ControllerConfig
from manager.engine.loop.driver import Observed, Observer
from manager.engine.run import attachment, session
from manager.engine.run.again import Again, until_it_ends
from manager.engine.run.machines import OpenMachines, Processes
from manager.engine.run.vm_sources import machines_of
from manager.history.run_history import RunHistory
from manager.host.handed_on import variables
from manager.journal.journal import LIMIT_S, patiently
from manager.providers.interface.run_name import name_of, write_name
from manager.report.live import LiveRun
from manager.report.reading import read_ledger, read_report
from manager.report.values import RunReport
from manager.run.code import CheckJob, RunCode
from manager.run.preparation import starting_from
from manager.run.prepared import PreparedRun
from manager.run.recovery import recovery_of, write_recovery
from manager.run.request import IfChanged, keep_request
from manager.run_dir import RunDir, check_free, is_run
from morph.checkpoint.newest import find_whole, newest_whole
from morph.checkpoint.storage import bounded
from morph.contract.checkpoint import Manifest
from morph.contract.cluster import LocalVms
from morph.contract.errors import CheckpointDamaged, CheckpointError, ClusterLost, RunDirError
from morph.contract.messages import JobCode
from morph.words import counted

Show = Callable[[LiveRun], AbstractContextManager[Observer]]
"""Shows a run while the block runs; yields the driver's observer."""


def managed_run(
    run: PreparedRun, check_job: CheckJob, show: Show, if_changed: IfChanged = IfChanged.REFUSE
) -> tuple[Finish, RunReport]:
    """Check everything, then run a job on its VMs to its end; returns the end and the report.

    A run whose VMs live is gone on with, or one that is in use refused, before the job is loaded. The request is kept
    in the run directory once it is known that the run begins.

    Args:
        run: What to run.
        check_job: Loads the job and holds it against the profile.
        show: Shows the run while it goes on.
        if_changed: What to do where the job is not what the run began with.

    Raises:
        InputError: before anything is started or written.
        CheckpointError: the same, where storage has no answer for a run that is about to begin.
        TrainingStopped: when the cluster or training fails.
    """
    with ExitStack() as ending:
        return _managed_run(run, check_job, show, if_changed, ending)


def _managed_run(
    run: PreparedRun, check_job: CheckJob, show: Show, if_changed: IfChanged, ending: ExitStack
) -> tuple[Finish, RunReport]:
    check_free(run.run_dir)
    wait = partial(patiently, limit_s=LIMIT_S if is_run(run.run_dir) else 0.0)  # for its disk, where the run goes on
    steps, profile, cloud, prices = run.request.steps, run.profile, run.cloud, run.prices()
    trained = RunCode(run.request.job, profile, run.job_files, if_changed, check_job, unpack=cloud is not None)
    if not is_run(run.run_dir) and run.request.checkpoint_url is not None:
        find_whole(run.request.checkpoint_url)  # first: the job takes longer, and what a wrong key leaves is in the way
    begun = [] if is_run(run.run_dir) else _begin_machines(run, ending)
    if not is_run(run.run_dir) or not profile.units:  # a job that cannot run leaves nothing behind
        trained.check()
    planned = cache(run.config)  # once, for many VMs take their time, and not where a run is taken over
    if not is_run(run.run_dir):
        planned()
    facts, providing = run.facts(planned), None

    def command(code: JobCode) -> dict[str, str]:
        return {**run.identity, "the job's code": code.sha256}

    def on(code: JobCode, config: ControllerConfig) -> session.RunSpec:
        return session.RunSpec(
            job_path=run.identity["JOB"],
            config=config,
            cluster=run.cluster,
            trace=run.events,
            num_sections=profile.num_sections,
            micro_batch_size=facts.micro_batch_size,
            stop_with_trace=run.stop_with_trace,
            patient_trace=run.stop_with_trace,
            providing=providing,
            code=code,
            machines=begun.pop() if begun else None,
            facts=trained.facts(code),
            command=command(code),
            variables=variables(run.cluster.vms.pass_variables),
        )

    @contextmanager
    def view(version: int, *, takes_over: bool = False) -> Iterator[Observer]:
        num_steps, ledger = None if run.stop_with_trace else steps, read_ledger(opened.path)
        live = LiveRun(profile.job.name, num_steps, profile.job.batch_size, prices)
        live.version, live.ledger, live.takes_over = version, ledger, takes_over
        with show(live) as shown:

            def observe(observed: Observed) -> None:
                again(observed)
                shown(observed)

            yield observe

    def gone_on_with() -> Finish | None:
        """Take over a run whose manager was killed; None: none lives, which is said if there was one."""
        began_with = trained.of(opened)
        try:
            found = attachment.find_living(opened, command(began_with))
            if found is None:
                return None
            version, num_vms = found.state.version, len(found.vms) or len(found.state.workers)
            history.take_in(opened.path)
            them = "it" if num_vms == 1 else "them"
            living = f"{counted(num_vms, 'VM')} of this run live{'s' * (num_vms == 1)}"
            _tell(f"{living}: going on with {them} at version {version}")
            with view(version, takes_over=True) as observer:
                return session.run_session(on(began_with, found.state.config), opened, observer, found=found)
        except attachment.NothingLives as error:
            _tell(f"this run cannot be taken over: {error}; going on from its newest checkpoint")
            return None

    code: JobCode | None = None

    def restored() -> Manifest | None:
        """Find what the run goes on from by its files' sizes; a worker that loads it finds what is wrong inside."""
        try:
            manifest, passed_over = newest_whole(opened.checkpoint_url)
        except CheckpointDamaged:
            raise
        except CheckpointError as error:
            if again.has_run:  # storage that went away may come back
                raise ClusterLost(str(error)) from error
            raise
        for sentence in passed_over:
            _tell(sentence)
        return manifest

    def one_session(number: int) -> Finish:
        nonlocal code
        finish = None if number else gone_on_with()
        if finish is not None:
            return finish
        history.take_in(opened.path)
        checkpoint = restored()
        version = checkpoint.version if checkpoint else 0
        again.begin_at(version)
        if not number and version >= steps:
            where, allowed = str(run.run_dir), f"above {version}, given to morph run"
            raise RunDirError(
                "has reached that step already", source=where, field="--steps", value=steps, allowed=allowed
            )
        if code is None:
            code = wait(lambda: trained.begin(opened))
            if run.asked is not None:
                wait(partial(keep_request, opened.path, run.asked, run.files))
                _leave_recovery(run, opened, trained)
        begun = on(code, starting_from(planned(), checkpoint, history.expected(run.vm_kind)))
        if again.has_run:
            begun = session.gone_on_with_trace(begun, opened)
        if cloud is not None:
            name = name_of(opened.path, profile.job.name)
            name = name.model_copy(update={"num_starts": name.num_starts + 1})
            wait(partial(write_name, opened.path, name))
            _tell(f"VMs of this run are known as {name.run} (job {name.job})")
            begun = replace(begun, config=begun.config.model_copy(update={"requests": name.requests}))
        with view(version) as observer:
            return session.run_session(begun, opened, observer)

    again, history = Again(run.cluster.policy.give_up_after_s), RunHistory(_tell)
    with RunDir(run.run_dir, facts) as opened:
        if cloud is not None:
            name = name_of(opened.path, profile.job.name)
            wait(partial(write_name, opened.path, name))  # the provider marks VMs with it: it must find them again
            providing = cloud.providing(name, opened.path)
        try:
            return until_it_ends(one_session, again, _tell), read_report(opened.path)
        finally:
            history.take_in(opened.path)


def _begin_machines(run: PreparedRun, ending: ExitStack) -> list[OpenMachines]:
    """Let the process that local workers are forked from import what they need, while the job is checked."""
    vms = run.cluster.vms
    if not isinstance(vms, LocalVms) or vms.under_ray:
        return []
    machines = machines_of(vms, None, None, run.run_dir, run.identity["JOB"])
    assert isinstance(machines, Processes)
    with suppress(OSError):  # the session says what is wrong
        begun = machines.begin(run.cluster.policy.takeover_patience_s)
        ending.callback(begun.close)
        return [replace(machines, begun=begun)]
    return []


def _leave_recovery(run: PreparedRun, opened: RunDir, trained: RunCode) -> None:
    """Put beside the checkpoints what the run could be gone on with elsewhere; it runs without that too."""
    limit_s = run.cluster.policy.rules.checkpoints.file_limit_s(0)
    try:
        recovery = recovery_of(run, opened.facts, trained.files)
        bounded(partial(write_recovery, opened.checkpoint_url, recovery), limit_s, "storage")
    except (CheckpointError, OSError) as error:
        _tell(f"note: {error}; the run can be gone on with in {opened.path}, but not from its checkpoints alone")


def _tell(sentence: str) -> None:
    print(sentence, file=sys.stderr)
