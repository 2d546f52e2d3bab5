"""What a run was asked for, with the content of all that it names: read, resolved, checked, and the job's code kept."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from manager.accounting.spent import Prices, no_price, prices_of
from manager.controller.state.config import ControllerConfig, Offer
from manager.controller.state.events import NodeFacts
from manager.journal.records import Fact
from manager.run.checkpoint_location import check_storage, check_url
from manager.run.controller_config import constant_trace, controller_config
from manager.run.markets import Cloud, check_listening, check_loopback, load_cloud
from manager.run.request import (
    SHORT_OPTIONS,
    IfChanged,
    RunRequest,
    absolute_job,
    absolute_url,
    folder_of,
    short_path,
)
from manager.run_dir import CODE, RunDir, RunFacts, is_run, not_writable, read_facts, write_in_run_dir
from manager.trackers.alerts import check_notify
from manager.trackers.sinks import check_trackers
from morph.contract.base import Value
from morph.contract.cluster import ClusterConfig, JobFile, LocalVms
from morph.contract.errors import ConfigError, JobError, RunDirError
from morph.contract.job_facts import Epochs
from morph.contract.kinds import mistaken
from morph.contract.messages import HandedCut, JobCode
from morph.contract.profile import Profile, load_profile
from morph.contract.trace import Trace, load_trace
from morph.jobs.changes import changes, told
from morph.jobs.files import JobFiles, split_job
from morph.jobs.snapshot import changed, collect, digests, files_of, from_elsewhere, pack
from morph.yaml_files import load_cluster, load_job_file
from simulator import PlanRequest

if TYPE_CHECKING:
    from morph.preflight.job_check import CheckedJob

_CUT = ".cut"
SAME_JOB = "; for the same job under another name: --if-changed accept"


@dataclass(frozen=True)
class PreparedRun:
    """A run's request with all its files read and its paths resolved.

    ``request``: the request with the options of a job file, which may also be its cluster file (see ``in_file``).
    ``requested``: the request as given, to be stored; None: nothing is stored. ``job_files``: the job's files as they
    are now. ``trace``: None: the VMs come at the start. ``stop_with_trace``: see :class:`manager.run.session.RunSpec`.
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

    def in_steps(self, epochs: Epochs) -> PreparedRun:
        """Return the same inputs with their length in steps, if it was requested in epochs."""
        num = self.request.epochs
        if num is None:
            return self
        return replace(self, request=self.request.model_copy(update={"steps": epochs.steps_of(num)}))

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

    def check_device(self) -> None:
        """Refuse a device of local VMs that this machine lacks; ConfigError names the cluster file."""
        if isinstance(self.cluster.vms, LocalVms) and self.cluster.vms.device == "cuda":
            from morph.runtime.device.devices import usable_device

            usable_device("cuda", source=str(self.request.cluster))

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


def prepare(request: RunRequest, run_dir: Path | None) -> PreparedRun:
    """Read a run's request, and check everything that can be checked without loading the job.

    Its paths are relative to the working directory. ``run_dir``: instead of the job's own. InputError: a file is wrong,
    or an option is missing.
    """
    run = _read(request, run_dir)
    step, source, vms = request.timeline_step, str(run.request.cluster), run.cluster.vms
    if step is not None and run.request.epochs is None and step >= run.request.steps:
        allowed = f"0 to {run.request.steps - 1}"
        raise ConfigError("is never run", field="--timeline-step", value=step, allowed=allowed)
    run.prices()
    trace = load_trace(request.trace).from_first_event().scaled(1 / request.trace_speed) if request.trace else None
    if run.cloud is not None:
        check_listening(run.cloud, source)
    if trace is not None and vms.keep is not None:
        raise ConfigError(
            "the trace determines which VMs come and go",
            source=source,
            field="vms.keep",
            value=vms.keep,
            allowed="vms.keep or --trace, not both",
        )
    return replace(run, trace=trace, requested=request)


def _read(request: RunRequest, run_dir: Path | None) -> PreparedRun:
    if request.is_job_file:
        path = Path(request.job)
        return resolve(request, path, load_job_file(path, request.settings), run_dir)
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


def resolve(request: RunRequest, path: Path, file: JobFile, run_dir: Path | None = None) -> PreparedRun:
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


def _with_cloud(
    request: RunRequest, profile: Profile, cluster: ClusterConfig, run_dir: Path, url_field: str
) -> PreparedRun:
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
        return PreparedRun(request, profile, cluster, run_dir, collect(request.job))
    cloud.market.check_job_name(profile.job.name, str(request.profile), "job.name")
    check_loopback(cloud, source)
    check_storage(cloud.vms, url, source, url_field)
    files = collect(request.job, cloud.vms.environment.files, source)
    return PreparedRun(request, profile, cluster, run_dir, files, cloud)


class RunCode:
    """The code of a run, from the files on disk now and the copy in the run directory.

    ``job_path``: path/to/file.py:name, a job that must fit ``profile``. ``files``: its files as they are now;
    ``if_changed``: what to do if they differ from those with which the run began. ``doing``: tells the
    user the next phase. ``unpack``: whether the run's workers do not see this machine's folders.
    """

    def __init__(
        self,
        job_path: str,
        profile: Profile,
        files: JobFiles,
        if_changed: IfChanged,
        doing: Callable[[str], None],
        *,
        unpack: bool,
    ) -> None:
        self._job_path = job_path
        self._profile = profile
        self._files = files
        self._if_changed = if_changed
        self._doing = doing
        self._unpack = unpack
        self._changed: list[str] = []
        self._checked: CheckedJob | None = None
        self._kept: JobCode | None = None
        self._accepted = ""
        self.cut: HandedCut | None = None
        """The cut that workers get; known once the run's code is settled."""

    def check(self) -> None:
        """Check the job, which loads torch, and name code that the snapshot lacks; InputError if it does not fit."""
        before = set(sys.modules)
        self._doing("checking the job: loading PyTorch, cutting the model, comparing it with the plain one")
        from morph.preflight.job_check import check_job

        with self._files.in_use():
            self._checked = check_job(self._job_path, self._profile)
            elsewhere = from_elsewhere(self._files, before)
        self._doing("planning shapes")
        if elsewhere:
            print(
                f"note: the run keeps a copy of the code in {self._files.folder}, but the job also imports "
                f"{', '.join(elsewhere)}: do not change that while the run lives",
                file=sys.stderr,
            )

    def epochs(self, run_dir: Path) -> Epochs:
        """Return how a run's first epochs divide into steps; InputError if the run is new and its job is not valid."""
        known = read_facts(run_dir).known_by.epochs if is_run(run_dir) else None
        if known is None:
            if self._checked is None:
                self.check()
            assert self._checked is not None
            known = self._checked.facts.epochs
        assert known is not None, "the check of a job tells its epochs"
        return known

    def of(self, run_dir: RunDir) -> JobCode:
        """Return the code of a run, as far as it is known without loading the job.

        RunDirError: the stored code is damaged, or was changed since then and the user has not said what to do.
        """
        sha256 = run_dir.facts.code_sha256
        if sha256 is None:
            return pack(self._job_path, self._files, unpack=self._unpack)
        code = kept(run_dir.path, sha256, self._job_path, unpack=self._unpack)
        self.cut = kept_cut(run_dir.path, sha256)
        began = JobFiles(self._files.folder, files_of(code))
        self._changed = changed(digests(began.files), self._files)
        if self._changed and self._if_changed is IfChanged.REFUSE and run_dir.other_job is not None:
            raise run_dir.belongs_to_another(SAME_JOB)
        if self._changed and self._if_changed is IfChanged.REFUSE:
            raise RunDirError(
                "was changed since the run began",
                source=str(self._files.folder / self._changed[0]),
                allowed="as it was; --if-changed keep, to go on with the code that the run began with; "
                "--if-changed accept, to go on with the changed code from the newest checkpoint; or another --run-dir",
            )
        if self._changed and self._if_changed is IfChanged.ACCEPT:
            return pack(self._job_path, self._files, unpack=self._unpack)
        if self._changed:
            print(
                f"going on with the code that the run began with, without what was changed: {self._names}",
                file=sys.stderr,
            )
        self._files, self._kept = began, code
        return code

    def begin(self, run_dir: RunDir) -> JobCode:
        """Check the job, unless it was checked before, and store the code of the run from now on.

        InputError: the job is not valid, is another job, or its settings or data differ from those with which the run
        began. RunDirError: the directory cannot be written.
        """
        if self._checked is None:
            self.check()
        assert self._checked is not None
        began, known = run_dir.facts, self._checked.facts
        differing = list(changes(known, began.known_by))
        for change in differing:
            refusal, why = change.refusal(self._job_path), change.cannot_apply
            if why is None and self._if_changed is IfChanged.ACCEPT:
                continue
            if self._if_changed is not IfChanged.ACCEPT and run_dir.other_job is not None:
                raise run_dir.belongs_to_another(SAME_JOB)
            allowed = refusal.allowed if why else f"{refusal.allowed}; or --if-changed accept"
            message = why if why and self._if_changed is IfChanged.ACCEPT else refusal.message
            raise JobError(
                message, source=refusal.source, field=refusal.field, value=refusal.value, allowed=allowed
            ) from None
        known = known.joined(began.known_by)
        self._tell_accepted(told(differing), known.settings)
        code = self._kept or pack(self._job_path, self._files, unpack=self._unpack)
        with self._files.in_use():
            self.cut = self._checked.cut(began.micro_batch_size)
        keep(run_dir.path, code, self.cut)
        if (code.sha256, known) != (began.code_sha256, began.known_by):
            run_dir.begin_with(began.model_copy(update={"code_sha256": code.sha256, "known_by": known}))
        self._checked = None  # this frees the exported model
        return code

    def _tell_accepted(self, differing: str, settings: Mapping[str, str]) -> None:
        """Say on standard error which changes apply from now on, and which settings stay as saved."""
        if self._if_changed is not IfChanged.ACCEPT or not (differing or self._changed):
            return
        stays = ["weights", "optimizer state", "step counts"]
        if settings.get("effective_loss_scaling", "None") != "None" and "effective_loss_scaling" not in differing:
            stays.append("loss scale")
        schedule = any(name.startswith("lr_scheduler(") and value != "None" for name, value in settings.items())
        where = "; the schedule continues as if it had applied from the beginning" if schedule else ""
        self._accepted = (
            f"{differing or 'no setting differs'}; applies from the next step on{where}; as saved: {', '.join(stays)}"
        )
        files = f"changed code: {self._names}; " if self._changed else ""
        print(f"going on with what was changed: {files}{self._accepted}", file=sys.stderr)

    def facts(self, code: JobCode) -> tuple[Fact, ...]:
        """Return the journal's facts about the code."""
        facts = [Fact(name="job_code", detail=f"sha256 {code.sha256}: {', '.join(sorted(self._files.files))}")]
        if self._changed:
            name = "changed_code_accepted" if self._if_changed is IfChanged.ACCEPT else "changed_code_ignored"
            facts.append(Fact(name=name, detail=self._names))
        if self._accepted:
            facts.append(Fact(name="changed_job_accepted", detail=self._accepted))
        return tuple(facts)

    @property
    def files(self) -> JobFiles:
        """The code of the run, once it has begun."""
        return self._files

    @property
    def _names(self) -> str:
        return ", ".join(self._changed)


def keep(run_dir: Path, code: JobCode, cut: HandedCut | None = None) -> None:
    """Store the code in the run directory under its digest, atomically and readable only by the user.

    The cut is stored beside it, for a manager that takes over and gives it to new workers. RunDirError if that fails.
    """
    path = run_dir / CODE / f"{code.sha256}.zip"
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise not_writable(path.parent, error) from error
    write_in_run_dir(path, code.archive)
    if cut is not None:
        write_in_run_dir(path.with_suffix(_CUT), cut.content)


def kept(run_dir: Path, sha256: str, job_path: str, *, unpack: bool = False) -> JobCode:
    """Read the code with which a run began, as that of this job; RunDirError if it is missing or damaged."""
    path = run_dir / CODE / f"{sha256}.zip"
    try:
        archive = path.read_bytes()
    except OSError as error:
        raise RunDirError(f"cannot be read: {error.strerror}", source=str(path)) from error
    if hashlib.sha256(archive).hexdigest() != sha256:
        raise RunDirError("is damaged: its digest is not its name", source=str(path))
    code, name = split_job(job_path)
    file = Path(code).resolve()
    return JobCode(
        job_path=f"{file.name}:{name}", folder=str(file.parent), sha256=sha256, archive=archive, unpack=unpack
    )


def kept_cut(run_dir: Path, code_sha256: str) -> HandedCut | None:
    """Read the cut stored beside this code, or None if there is none. A worker detects a damaged cut."""
    with suppress(OSError):
        content = (run_dir / CODE / f"{code_sha256}{_CUT}").read_bytes()
        return HandedCut(sha256=hashlib.sha256(content).hexdigest(), content=content)
    return None
