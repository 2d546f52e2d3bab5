"""What a run was asked for, with the content of all that it names: read, resolved, checked and planned."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from manager.accounting.spent import Prices, no_price, prices_of
from manager.controller.state.config import ControllerConfig, Offer
from manager.controller.state.events import NodeFacts
from manager.engine.loop.lease import Lease, this_process
from manager.engine.machines.machines import Processes
from manager.engine.machines.vm_sources import machines_of
from manager.run.checkpoint_location import check_storage, check_url
from manager.run.controller_config import constant_trace, controller_config
from manager.run.job_code import TrainedCode
from manager.run.markets import Cloud, check_listening, check_loopback, load_cloud
from manager.run.request import (
    SHORT_OPTIONS,
    IfChanged,
    RunRequest,
    absolute_job,
    absolute_url,
    folder_of,
    is_job_file,
    short_path,
)
from manager.run_dir import RunFacts, check_free, is_run, read_facts
from manager.trackers.alerts import check_notify
from manager.trackers.sinks import check_trackers
from morph.checkpoint.newest import find_whole
from morph.contract.base import Value
from morph.contract.cluster import ClusterConfig, JobFile, LocalVms
from morph.contract.errors import ConfigError
from morph.contract.kinds import mistaken
from morph.contract.pool import several_types
from morph.contract.profile import Profile, estimates, load_profile, other_device, other_links
from morph.contract.trace import Trace, load_trace
from morph.jobs.files import JobFiles, split_job
from morph.jobs.snapshot import collect
from morph.yaml_files import load_cluster, load_job_file
from simulator import PlanRequest


@dataclass(frozen=True)
class Inputs:
    """A run's request with all its files read and its paths resolved.

    ``request``: the request with the options of a job file, which may also be its cluster file (see ``in_file``).
    ``requested``: the request as given, to be stored; None: nothing is stored. ``job_files``: the job's files as they
    are now. ``trace``: None: the VMs come at the start. ``stop_with_trace``: see ``SessionSpec``.
    """

    request: RunRequest
    profile: Profile
    cluster: ClusterConfig
    run_dir: Path
    job_files: JobFiles
    cloud: Cloud | None = None
    trace: Trace | None = None
    in_file: bool = False
    requested: RunRequest | None = None
    stop_with_trace: bool = False

    @property
    def events(self) -> Trace:
        """The trace by which the VMs come and go."""
        return self.trace or constant_trace(self.cluster.vms)

    @property
    def places(self) -> dict[str, tuple[str, str]]:
        """The places where the planner's values are set, for errors."""
        source, by_option = str(self.request.cluster), {text.partition("=")[0] for text in self.request.settings}
        in_file = {name for name in SHORT_OPTIONS if self.in_file and f"job.{name}" not in by_option}
        return {
            "memory_bytes": (source, "vms.memory_bytes"),
            "host_memory_bytes": (source, "memory of the VMs' hosts, in bytes"),
            "micro_batch_size": (str(self.request.profile), "job.micro_batch_size"),
            **{
                name: (source, f"job.{name}") if name in in_file else ("", option)
                for name, option in SHORT_OPTIONS.items()
            },
        }

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that was read, except the job's code, which the run stores itself."""
        cloud = self.cloud.path if self.cloud is not None else None
        paths = (self.request.profile, self.request.cluster, cloud, self.request.trace)
        return tuple(path for path in paths if path is not None)

    @property
    def identity(self) -> dict[str, str]:
        """The settings that must be the same for a manager that takes over, by the user's names."""
        request = self.request
        return {
            "JOB": absolute_job(request.job),
            "--steps": str(request.steps),
            "--profile": _digest(self.profile),
            "--cluster": _digest(self.cluster),
            "--trace": _digest(self.events),
            "--timeline-step": str(request.timeline_step),
            "--schedule": request.schedule or "",
            "--recompute": str(request.recompute),
            "-P": str(request.pipeline_depth),
            "-D": str(request.num_replicas),
        }

    @property
    def vm_kind(self) -> NodeFacts:
        """The known facts about the VMs: those that they have in common."""
        return NodeFacts(provider="local") if self.cloud is None else self.cloud.vm_kind

    def config(self) -> ControllerConfig:
        """Plan, and build the controller's configuration; see ``controller_config``. Takes seconds for many VMs."""
        given = self.request
        requested = given.model_dump(include={"schedule", "recompute", "pipeline_depth", "num_replicas"})
        request = PlanRequest(**requested, micro_batch_size=self._kept_micro_batch_size())
        beyond = 0 if self.cloud is None else self.cloud.most_devices - 1
        vms, policy = self.cluster.vms, self.cluster.policy
        config = controller_config(
            self.profile, vms, policy, self.events, given.steps, request, offers=self.offers(), num_beyond=beyond
        )
        return config.model_copy(update={"timeline_step": given.timeline_step})

    def offers(self) -> tuple[Offer, ...]:
        """Return the GPU types that the cluster file, or a file that it names, gives to VMs; empty if all are alike."""
        vms = self.cluster.vms
        if isinstance(vms, LocalVms):
            return tuple(Offer(node_type=name, usd_per_h=vms.usd_per_h) for name in vms.node_types)
        return () if self.cloud is None else self.cloud.offers()

    def facts(self, planned: Callable[[], ControllerConfig]) -> RunFacts:
        """Return the identity of the run directory; plans only if the planner chooses m. Errors: see ``config``."""
        known = self.profile.job.micro_batch_size or self._kept_micro_batch_size()
        return RunFacts(
            job=self.request.job,
            fingerprint=self.profile.job.fingerprint,
            micro_batch_size=known or next(iter(planned().plans.values())).micro_batch_size,
            batch_size=self.profile.job.batch_size,
            num_sections=self.profile.num_sections,
            checkpoint_url=self.request.checkpoint_url,
        )

    def prices(self) -> Prices | None:
        """Return the command line's prices, for all VMs, else the provider's or cluster file's, for VMs without one.

        InputError: there is a price to compare with, but no price that is paid.
        """
        vms, given = self.cluster.vms, self.request
        on_demand = vms.on_demand_usd_per_h if given.on_demand_price is None else given.on_demand_price
        if given.price is not None:
            return prices_of(given.price, on_demand)
        price = self.cloud.price() if self.cloud is not None else None
        paid = vms.usd_per_h if price is None else price.usd_per_h
        prices = prices_of(paid, on_demand)
        if paid is None and prices is not None and self.cloud is None:
            raise no_price()
        return None if prices is None else prices.model_copy(update={"for_all": False})

    def _kept_micro_batch_size(self) -> int | None:
        """Return the m of a resumed run, if the planner chose it: m may not change during a run."""
        if self.profile.job.micro_batch_size is not None or not is_run(self.run_dir):
            return None
        kept = read_facts(self.run_dir)
        return kept.micro_batch_size if kept.fingerprint == self.profile.job.fingerprint else None


def _digest(value: Value) -> str:
    return hashlib.sha256(value.model_dump_json().encode()).hexdigest()[:16]


def read_inputs(request: RunRequest, run_dir: Path | None) -> Inputs:
    """Read a run's request, and check everything that can be checked without loading the job.

    Its paths are relative to the working directory. ``run_dir``: instead of the job's own. InputError: a file is wrong,
    or an option is missing.
    """
    if is_job_file(request.job):
        path = Path(request.job)
        inputs = resolve(request, path, load_job_file(path, request.settings), run_dir)
    else:
        inputs = _read_options(request, run_dir)
    step, source, vms = request.timeline_step, str(inputs.request.cluster), inputs.cluster.vms
    if step is not None and inputs.request.epochs is None and step >= inputs.request.steps:
        allowed = f"0 to {inputs.request.steps - 1}"
        raise ConfigError("is never run", field="--timeline-step", value=step, allowed=allowed)
    inputs.prices()
    trace = load_trace(request.trace).from_first_event().scaled(1 / request.trace_speed) if request.trace else None
    if inputs.cloud is not None:
        check_listening(inputs.cloud, source)
    if trace is not None and vms.keep is not None:
        raise ConfigError(
            "the trace determines which VMs come and go",
            source=source,
            field="vms.keep",
            value=vms.keep,
            allowed="vms.keep or --trace, not both",
        )
    return replace(inputs, trace=trace, requested=request)


def _read_options(request: RunRequest, run_dir: Path | None) -> Inputs:
    if not any(split_job(request.job)):
        problem = mistaken(Path(request.job), "is not a job")
        raise ConfigError(problem, source=request.job, allowed="path/to/file.py:name, or a job file (YAML)")
    if request.profile is None or request.cluster is None:
        missing = "--profile" if request.profile is None else "--cluster"
        made = {"--profile": "a file that `morph calibrate JOB -o FILE` wrote", "--cluster": "a cluster file (YAML)"}
        raise ConfigError(
            "is not given", field=missing, allowed=f"{made[missing]}, or a job file (YAML) in place of JOB"
        )
    profile, cluster = load_profile(request.profile), load_cluster(request.cluster, request.settings)
    url = request.checkpoint_url
    run_dir = run_dir or folder_of(profile, request.profile)
    complete = request.model_copy(update={"checkpoint_url": None if url is None else absolute_url(url)})
    return _with_cloud(complete, profile, cluster, run_dir, "--checkpoint-url")


def resolve(request: RunRequest, path: Path, file: JobFile, run_dir: Path | None = None) -> Inputs:
    """Resolve the paths in a job file against its folder; ``request`` has the other options.

    ConfigError: the code file does not exist, or the batch is not the profile's. ProfileError: the profile cannot be
    read.
    """
    folder, job = path.resolve().parent, file.job
    code, name = split_job(job.code)
    if job.arguments:
        name += "({})".format(", ".join(f"{key}={value!r}" for key, value in job.arguments.items()))
    if not (folder / code).is_file():
        raise ConfigError(
            "there is no such file", source=str(path), field="job.code", value=code, allowed=f"a file below {folder}"
        )
    profile = load_profile(folder / job.profile)
    if job.batch_size not in (None, profile.job.batch_size):
        raise ConfigError(
            "is not the profile's",
            source=str(path),
            field="job.batch_size",
            value=job.batch_size,
            allowed=str(profile.job.batch_size),
        )
    own_dir = short_path(folder / job.run_dir) if job.run_dir else None
    said = {
        name: getattr(job, name)
        for name in ("steps", "epochs", "schedule", "recompute", "pipeline_depth", "num_replicas")
    }
    url = None if job.checkpoint_url is None else absolute_url(job.checkpoint_url, folder)
    files = {"job": f"{(folder / code).resolve()}:{name}", "profile": folder / job.profile, "cluster": path}
    complete = request.model_copy(update={**said, **files, "checkpoint_url": url})
    run_dir = run_dir or own_dir or folder_of(profile, folder / job.profile)
    return replace(_with_cloud(complete, profile, file, run_dir, "job.checkpoint_url"), in_file=True)


def _with_cloud(request: RunRequest, profile: Profile, cluster: ClusterConfig, run_dir: Path, url_field: str) -> Inputs:
    """Read the cloud file if a provider brings the VMs; check that the VMs can reach manager and checkpoints."""
    assert request.cluster is not None
    source, url = str(request.cluster), request.checkpoint_url
    check_trackers(cluster.trackers, cluster.callbacks, source, request.cluster.resolve().parent)
    if cluster.notify is not None:
        check_notify(cluster.notify, source)
    if url is not None:
        check_url(url, source, url_field)
    cloud = load_cloud(cluster, request.cluster)
    if cloud is None:
        return Inputs(request, profile, cluster, run_dir, collect(request.job))
    cloud.market.check_job_name(profile.job.name, str(request.profile), "job.name")
    check_loopback(cloud, source)
    check_storage(cloud.vms, url, source, url_field)
    files = collect(request.job, cloud.vms.environment.files, source)
    return Inputs(request, profile, cluster, run_dir, files, cloud)


@dataclass(frozen=True)
class Prepared:
    """A run that may begin or continue.

    ``code``: the code on which it trains. ``facts``: the identity of its directory. ``planned``: plans shapes, at the
    first call. ``machines``: the process of the first session's workers, if it was begun. ``is_new``: whether the run
    has yet to begin. ``take_over``: take the checkpoints' storage over from another manager, which may still run.
    """

    inputs: Inputs
    code: TrainedCode
    facts: RunFacts
    planned: Callable[[], ControllerConfig]
    prices: Prices | None
    machines: Processes | None
    is_new: bool
    take_over: bool


@contextmanager
def prepared(
    inputs: Inputs,
    if_changed: IfChanged = IfChanged.REFUSE,
    *,
    doing: Callable[[str], None] = lambda _phase: None,
    take_over: bool = False,
) -> Iterator[Prepared]:
    """Check storage and the job, and plan; what is begun meanwhile ends with the context.

    A run that has begun may still live: its job is not loaded and no shape is planned before that is known.
    ``if_changed``: what to do if the job is not the one that the run began with. ``doing``: tells the user the next
    phase. InputError: the run cannot begin. CheckpointError: storage does not answer, and the run is new. In both cases
    nothing was started or written.
    """
    check_free(inputs.run_dir)
    is_new, url = not is_run(inputs.run_dir), inputs.request.checkpoint_url
    unpack = inputs.cloud is not None
    code = TrainedCode(inputs.request.job, inputs.profile, inputs.job_files, if_changed, doing, unpack=unpack)
    prices, machines = inputs.prices(), None
    with ExitStack() as ending:
        if is_new and url is not None:
            # this is first because the job takes longer, and because files left after a wrong key would be in the way
            if not take_over:
                Lease(url, this_process("", inputs.run_dir)).check_free()
            find_whole(url)
        if is_new:
            machines = _begin_machines(inputs, ending)
        if is_new or not inputs.profile.units:  # a job that cannot run leaves nothing behind
            code.check()
        if (num := inputs.request.epochs) is not None:
            steps = code.epochs(inputs.run_dir).steps_of(num)
            inputs = replace(inputs, request=inputs.request.model_copy(update={"steps": steps}))
        planned = cache(inputs.config)  # once, as planning for many VMs takes time; not if a run is taken over
        if is_new:
            _warn(inputs, planned())
        yield Prepared(inputs, code, inputs.facts(planned), planned, prices, machines, is_new, take_over)


def _begin_machines(inputs: Inputs, ending: ExitStack) -> Processes | None:
    """While the job is checked, let the process that forks local workers import the modules that they need."""
    vms = inputs.cluster.vms
    if isinstance(vms, LocalVms) and not vms.under_ray:
        machines = machines_of(vms, None, None, inputs.run_dir, inputs.identity["JOB"])
        assert isinstance(machines, Processes)
        with suppress(OSError):  # the session reports the error
            begun = machines.begin(inputs.cluster.policy.takeover_patience_s)
            ending.callback(begun.close)
            return replace(machines, begun=begun)
    return None


def _warn(inputs: Inputs, config: ControllerConfig) -> None:
    profile, vms = inputs.profile, inputs.cluster.vms
    links = other_links(profile, vms.links, vms.rings) if vms.device == "cuda" else ()
    types = several_types(config.type_compute_s)
    for sentence in (*estimates(profile), *other_device(profile, vms.device), *links, *([types] if types else [])):
        tell(f"warning: {sentence}")


def tell(sentence: str) -> None:
    """Tell the user something about the run, on standard error."""
    print(sentence, file=sys.stderr)
