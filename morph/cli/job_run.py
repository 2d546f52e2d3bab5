"""From a job file to what ``morph run`` needs, everything checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from morph.cli.kept_command import RunCommand
    from morph.cli.provided import Cloud
    from morph.contract.cluster import ClusterConfig
    from morph.contract.job_file import JobFile
    from morph.contract.plan import Schedule
    from morph.contract.profile import Profile
    from morph.job_files import JobFiles


IN_THE_FILE = (
    "profile",
    "cluster",
    "steps",
    "run_dir",
    "checkpoint_url",
    "schedule",
    "recompute",
    "pipeline_depth",
    "num_replicas",
)
_SHORT = {"pipeline_depth": "-P", "num_replicas": "-D"}


@dataclass(frozen=True)
class JobRun:
    """What a run is asked for, read and with its paths resolved.

    ``cluster_path``: where the cluster stands; with ``in_file`` it is a job file, which has everything. ``job_files``:
    as they are now.
    """

    code: str
    profile_path: Path
    profile: Profile
    cluster_path: Path
    cluster: ClusterConfig
    steps: int
    run_dir: Path
    schedule: Schedule | None
    recompute: bool | None
    pipeline_depth: int | None = None
    num_replicas: int | None = None
    in_file: bool = False
    checkpoint_url: str | None = None
    cloud: Cloud | None = None
    job_files: JobFiles | None = None

    @property
    def places(self) -> dict[str, tuple[str, str]]:
        """Where the values that the planner is given stand, for errors."""
        source = str(self.cluster_path)
        return {
            "memory_bytes": (source, "vms.memory_bytes"),
            "micro_batch_size": (str(self.profile_path), "job.micro_batch_size"),
            **{name: (source, f"job.{name}") if self.in_file else ("", option) for name, option in _SHORT.items()},
        }

    def files(self, trace: Path | None) -> tuple[Path, ...]:
        """Every file that it was read from, the trace included; the run keeps its code itself."""
        more = (self.cloud.path if self.cloud is not None else None, trace)
        return (self.profile_path, self.cluster_path, *(path for path in more if path is not None))


def check_given(job: str, given: Collection[str]) -> None:
    """See that no option stands beside a job file that has it.

    Args:
        job: path/to/file.py:name, or a job file.
        given: Names of the parameters that the user gave.

    Raises:
        ConfigError: one does.
    """
    from morph.contract.errors import ConfigError

    if not job.endswith((".yaml", ".yml")):
        return
    for name in IN_THE_FILE:
        if name in given:
            option = _SHORT.get(name, "--" + name.replace("_", "-"))
            raise ConfigError("stands in the job file", field=option, allowed=f"without it, as {job} says")


def asked_for(command: RunCommand, run_dir: Path | None) -> JobRun:
    """Gather what a run is asked for: by options, or in a job file instead of them.

    Args:
        command: What ``morph run`` was given.
        run_dir: Instead of the job's own.

    Raises:
        InputError: a file is wrong, or an option is missing.
    """
    from morph.cli.cluster_file import load_cluster, load_job_file
    from morph.contract.errors import ConfigError
    from morph.contract.profile import load_profile

    if command.is_job_file:
        path = Path(command.job)
        run = resolve(path, load_job_file(path))
        return run if run_dir is None else replace(run, run_dir=run_dir)
    if command.profile is None or command.cluster is None:
        missing = "--profile" if command.profile is None else "--cluster"
        raise ConfigError("is not given", field=missing, allowed="a file, or a job file (YAML) instead of JOB")
    measured = load_profile(command.profile)
    run = JobRun(
        code=command.job,
        profile_path=command.profile,
        profile=measured,
        cluster_path=command.cluster,
        cluster=load_cluster(command.cluster),
        steps=command.steps,
        run_dir=run_dir or _folder_of(measured, command.profile),
        schedule=command.schedule,
        recompute=command.recompute,
        pipeline_depth=command.pipeline_depth,
        num_replicas=command.num_replicas,
        checkpoint_url=_absolute_url(command.checkpoint_url, Path()),
    )
    return _with_cloud(run, str(command.cluster), "--checkpoint-url")


def _folder_of(profile: Profile, path: Path) -> Path:
    """The run directory where none is given; a profile may come from elsewhere, and names nothing outside of runs."""
    from morph.contract.errors import ProfileError

    name = profile.job.name
    if not name.strip() or name.startswith(".") or any(sign in name for sign in "/\\\0"):
        raise ProfileError(
            "cannot be the name of a folder below runs",
            source=str(path),
            field="job.name",
            value=name,
            allowed="a plain name, or --run-dir (run_dir in a job file)",
        )
    return Path("runs") / name


def resolve(path: Path, file: JobFile) -> JobRun:
    """Resolve what a job file names against its folder.

    Raises:
        ConfigError: the code file is not there, or the batch is another one.
        ProfileError: the profile cannot be read.
    """
    from morph.contract.errors import ConfigError
    from morph.contract.profile import load_profile

    folder = path.resolve().parent
    code, _, name = file.job.code.rpartition(":")
    if not (folder / code).is_file():
        raise ConfigError(
            "there is no such file", source=str(path), field="job.code", value=code, allowed=f"a file below {folder}"
        )
    profile_path = folder / file.job.profile
    profile = load_profile(profile_path)
    if file.job.batch_size not in (None, profile.job.batch_size):
        raise ConfigError(
            "is not the profile's",
            source=str(path),
            field="job.batch_size",
            value=file.job.batch_size,
            allowed=str(profile.job.batch_size),
        )
    run = JobRun(
        code=f"{(folder / code).resolve()}:{name}",
        profile_path=profile_path,
        profile=profile,
        cluster_path=path,
        in_file=True,
        cluster=file,
        steps=file.job.steps,
        run_dir=folder / file.job.run_dir if file.job.run_dir else _folder_of(profile, profile_path),
        schedule=file.job.schedule,
        recompute=file.job.recompute,
        pipeline_depth=file.job.pipeline_depth,
        num_replicas=file.job.num_replicas,
        checkpoint_url=_absolute_url(file.job.checkpoint_url, folder),
    )
    return _with_cloud(run, str(path), "job.checkpoint_url")


def _with_cloud(run: JobRun, source: str, field: str) -> JobRun:
    """Read what the run's VMs need beside it, where a provider brings them; check that they reach the checkpoints.

    Raises:
        ConfigError: a file is wrong or missing, or the checkpoints are out of reach.
    """
    from manager.engine.job_code import collect
    from morph.cli.provided import check_storage, check_url, load_cloud

    if run.checkpoint_url is not None:
        check_url(run.checkpoint_url, source, field)
    cloud = load_cloud(run.cluster, run.cluster_path)
    if cloud is None:
        return replace(run, job_files=collect(run.code))
    check_storage(cloud.vms, run.checkpoint_url, source, field)
    files = collect(run.code, cloud.vms.environment.files, str(run.cluster_path))
    return replace(run, cloud=cloud, job_files=files)


def _absolute_url(url: str | None, folder: Path) -> str | None:
    """Return a path from a file's folder; a URL as it is."""
    return url if url is None or "://" in url else str((folder / url).resolve())


def check_job_file(path: Path, file: JobFile) -> str:
    """Check everything that a run checks before it starts; returns what would run, as a sentence.

    Raises:
        InputError: what is wrong.
    """
    from manager.preparation import constant_trace, controller_config
    from morph.cli.checks import check_device, check_job
    from morph.cli.errors import places

    run = resolve(path, file)
    check_device(file, str(path))
    assert run.job_files is not None
    with places(run.places):
        with run.job_files.in_use():
            check_job(run.code, run.profile)
        config = controller_config(
            run.profile,
            file.vms,
            file.policy,
            constant_trace(file.vms),
            file.job.steps,
            None,
            schedule=file.job.schedule,
            recompute=file.job.recompute,
            pipeline_depth=file.job.pipeline_depth,
            num_replicas=file.job.num_replicas,
        )
    largest = max(config.plans)
    plan = config.plans[largest]
    return (
        f"{run.profile.job.name} fits its profile; {file.job.steps} steps, with {largest} workers in shape "
        f"{plan.shape}, with {config.fewest_workers} at least"
    )
