"""A managed job from its profile, cluster and trace to its end: checked, run or taken over, shown."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from morph.cli.run_code import IfChanged, RunCode
from morph.contract.errors import ConfigError

if TYPE_CHECKING:
    from manager.controller.actions import Finish
    from manager.controller.config import ControllerConfig
    from manager.engine.driver import Observed, Observer
    from manager.engine.session import RunSpec
    from manager.report.prices import Prices
    from manager.report.values import RunReport
    from manager.run_dir import RunDir
    from morph.cli.provided import Cloud
    from morph.contract.base import Value
    from morph.contract.cluster import ClusterConfig
    from morph.contract.messages import Fault, JobCode
    from morph.contract.plan import Schedule
    from morph.contract.profile import Profile
    from morph.contract.trace import Trace
    from morph.job_files import JobFiles


class View(Protocol):
    """Shows a run that goes on from a version."""

    def __call__(self, version: int, *, takes_over: bool) -> AbstractContextManager[Observer]:
        """Show it while the block runs; yields the driver's observer."""


def managed_run(
    job_path: str,
    profile: Profile,
    cluster: ClusterConfig,
    trace: Trace | None,
    *,
    steps: int,
    run_dir: Path,
    plain: bool,
    faults: tuple[Fault, ...] = (),
    stop_with_trace: bool = False,
    recompute: bool | None = None,
    schedule: Schedule | None = None,
    pipeline_depth: int | None = None,
    num_replicas: int | None = None,
    timeline_step: int | None = None,
    as_json: bool = False,
    prices: Prices | None = None,
    page: bool = False,
    checkpoint_url: str | None = None,
    cloud: Cloud | None = None,
    job_files: JobFiles | None = None,
    if_changed: IfChanged = IfChanged.REFUSE,
    keep: Callable[[Path], None] = lambda _: None,
) -> tuple[Finish, RunReport]:
    """Check everything, then run a job on its VMs to its end, showing it live; returns the end and the report.

    A run whose VMs live is gone on with, or one that is in use refused, before the job is loaded. ``keep`` is given the
    run directory once it is known that the run begins. ``job_files``: as they are now; absent: what the job imports.

    Raises:
        InputError: before anything is started or written.
        TrainingStopped: when the cluster or training fails.
    """
    from manager.dashboard.server import serving
    from manager.engine.again import Again, until_it_ends
    from manager.engine.job_code import collect
    from manager.engine.session import RunSpec, gone_on_with_trace, run_session
    from manager.journal.patience import LIMIT_S, patiently
    from manager.preparation import constant_trace, controller_config, newest_checkpoint
    from manager.providers.run_name import name_of, write_name
    from manager.report.live import LiveRun
    from manager.report.reading import read_ledger, read_report
    from manager.run_dir import RunDir, RunFacts, check_free, is_run
    from morph.cli.run_view import run_view

    check_free(run_dir)
    wait = partial(patiently, limit_s=LIMIT_S if is_run(run_dir) else 0.0)  # for its disk, where the run goes on
    trained = RunCode(job_path, profile, job_files or collect(job_path), if_changed, unpack=cloud is not None)
    if not is_run(run_dir) or not profile.units:  # a job that cannot run leaves nothing behind
        trained.check()
    events = trace or constant_trace(cluster.vms)
    configure = partial(
        controller_config,
        profile,
        cluster.vms,
        cluster.policy,
        events,
        steps,
        recompute=recompute,
        schedule=schedule,
        pipeline_depth=pipeline_depth,
        num_replicas=num_replicas,
        micro_batch_size=_kept_micro_batch_size(run_dir, profile),
        timeline_step=timeline_step,
        num_beyond=0 if cloud is None else cloud.most_devices - 1,
    )
    draft = configure(None)
    facts = RunFacts(
        job=job_path,
        fingerprint=profile.job.fingerprint,
        micro_batch_size=next(iter(draft.plans.values())).micro_batch_size,
        batch_size=profile.job.batch_size,
        num_sections=profile.num_sections,
        checkpoint_url=checkpoint_url,
    )
    spec = RunSpec(
        job_path=str(_absolute(job_path)),
        config=draft,
        cluster=cluster,
        trace=events,
        num_sections=profile.num_sections,
        micro_batch_size=facts.micro_batch_size,
        faults=faults,
        stop_with_trace=stop_with_trace,
        patient_trace=stop_with_trace,
        variables=_variables(cluster.vms.pass_variables),
        command=_asked_for(job_path, draft, cluster, events)
        | {"--schedule": schedule or "", "-P": str(pipeline_depth), "-D": str(num_replicas)},
    )

    def on(code: JobCode) -> RunSpec:
        command = {**spec.command, "the job's code": code.sha256}
        return replace(spec, code=code, facts=trained.facts(code), command=command)

    @contextmanager
    def view(version: int, *, takes_over: bool) -> Iterator[Observer]:
        live = LiveRun(
            profile.job.name,
            None if stop_with_trace else steps,
            profile.job.batch_size,
            prices,
            version=version,
            ledger=read_ledger(opened.path),
            takes_over=takes_over,
        )
        page_of = serving(live, opened.path) if page else nullcontext()
        with page_of, run_view(live, plain=plain, as_json=as_json) as show:

            def observe(observed: Observed) -> None:
                again(observed)
                show(observed)

            yield observe

    code: JobCode | None = None

    def session(number: int) -> Finish:
        nonlocal code
        finish = None if number else _gone_on_with(on(trained.of(opened)), opened, view)
        if finish is not None:
            return finish
        checkpoint = newest_checkpoint(opened.checkpoint_url)
        version = checkpoint.version if checkpoint else 0
        again.begin_at(version)
        if not number:
            _check_steps(steps, version, run_dir)
        if code is None:
            code = wait(lambda: trained.begin(opened))
            wait(lambda: keep(opened.path))
        begun = replace(on(code), config=configure(checkpoint))
        if again.has_run:
            begun = gone_on_with_trace(begun, opened)
        if cloud is not None:
            name = name_of(opened.path, profile.job.name)
            name = name.model_copy(update={"num_starts": name.num_starts + 1})
            wait(partial(write_name, opened.path, name))
            print(f"VMs of this run are known as {name.run} (job {name.job})", file=sys.stderr)
            begun = replace(begun, config=begun.config.model_copy(update={"requests": name.requests}))
        with view(version, takes_over=False) as observer:
            return run_session(begun, opened, observer)

    again = Again(cluster.policy.give_up_after_s)
    with RunDir(run_dir, facts) as opened:
        name = name_of(opened.path, profile.job.name)
        if cloud is not None:
            wait(partial(write_name, opened.path, name))  # the provider marks VMs with it: it must find them again
            spec = replace(spec, providing=cloud.providing(name, opened.path))
        finish = until_it_ends(session, again, lambda sentence: print(sentence, file=sys.stderr))
        return finish, read_report(opened.path)


def _gone_on_with(spec: RunSpec, run_dir: RunDir, view: View) -> Finish | None:
    """Take over a run whose manager was killed; None: there is none that lives, which is said if there was one."""
    from manager.engine.attachment import NothingLives, find_living
    from manager.engine.session import run_session

    try:
        found = find_living(run_dir, dict(spec.command))
        if found is None:
            return None
        num_vms = len(found.vms) or len(found.state.workers)
        print(
            f"{num_vms} VMs of this run live: going on with them at version {found.state.version}",
            file=sys.stderr,
        )
        with view(found.state.version, takes_over=True) as observer:
            return run_session(replace(spec, config=found.state.config), run_dir, observer, found=found)
    except NothingLives as error:
        print(f"this run cannot be taken over: {error}; going on from its newest checkpoint", file=sys.stderr)
        return None


def _asked_for(job_path: str, config: ControllerConfig, cluster: ClusterConfig, trace: Trace) -> dict[str, str]:
    """What a run is started with, by the user's names: a manager that takes over must be asked for the same."""

    def digest(value: Value) -> str:
        return sha256(value.model_dump_json().encode()).hexdigest()[:16]

    return {
        "JOB": str(_absolute(job_path)),
        "--steps": str(config.num_steps),
        "--cluster": digest(cluster),
        "--trace": digest(trace),
        "--timeline-step": str(config.timeline_step),
        "the plans": digest(config),
    }


def _kept_micro_batch_size(run_dir: Path, profile: Profile) -> int | None:
    """The m of a run that goes on, where it is the planner's to choose: it may not change in a run."""
    from manager.run_dir import is_run, read_facts

    if profile.job.micro_batch_size is not None or not is_run(run_dir):
        return None
    kept = read_facts(run_dir)
    return kept.micro_batch_size if kept.fingerprint == profile.job.fingerprint else None


def _check_steps(steps: int, version: int, run_dir: Path) -> None:
    from morph.contract.errors import RunDirError

    if version >= steps:
        raise RunDirError(
            "has reached that step already",
            source=str(run_dir),
            field="--steps",
            value=steps,
            allowed=f"above {version}",
        )


def _absolute(job_path: str) -> str:
    path, _, name = job_path.rpartition(":")
    return f"{Path(path).resolve()}:{name}"


def _variables(names: Sequence[str]) -> dict[str, str]:
    """Those of this environment that workers are to get.

    Raises:
        ConfigError: one is not set.
    """
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ConfigError("is not set in this environment", field="vms.pass_variables", value=missing[0])
    return {name: os.environ[name] for name in names}
