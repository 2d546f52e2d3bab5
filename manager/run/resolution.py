"""Reads and checks all inputs of a run, from the options of ``morph run`` or from a job file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from manager.run.cloud import Cloud, check_listening, check_loopback, check_storage, check_url
from manager.run.inputs import PreparedRun
from manager.run.markets import market_of
from manager.run.request import RunRequest, absolute_url, folder_of, short_path
from manager.trackers.alerts import check_notify
from manager.trackers.sinks import check_trackers
from morph.contract.cluster import ClusterConfig, JobFile, LocalVms
from morph.contract.errors import ConfigError
from morph.contract.profile import Profile, load_profile
from morph.contract.trace import load_trace
from morph.jobs.files import split_job
from morph.jobs.snapshot import collect
from morph.yaml_files import load_cluster, load_job_file, load_yaml


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
        raise ConfigError(
            "is not a job", field="JOB", value=request.job, allowed="path/to/file.py:name, or a job file (YAML)"
        )
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


def load_cloud(cluster: ClusterConfig, source: Path) -> Cloud | None:
    """Read the cloud file that a cluster file names; None: its VMs are local."""
    vms = cluster.vms
    if isinstance(vms, LocalVms):
        return None
    path = source.resolve().parent / vms.cloud
    market = market_of(vms.market)
    market.check(str(source))  # before anything starts
    return Cloud(vms, path, load_yaml(path, market.described))
