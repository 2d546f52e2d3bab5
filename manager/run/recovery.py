"""The files that a run stores beside its checkpoints, so that another machine can resume it from their URL and its job.

``run/recovery.json`` below the checkpoint URL has the request, the values of profile, cluster and cloud file, the
trace, the identity of the run directory, and a digest of each file of the job's code. It has no code and no secrets:
the free text of a cluster file (``vms.environment.setup`` and ``packages``) is left out.

Nothing that is read from storage is executed or decides where credentials go. The job comes from this machine and must
be the one that the run began with; the user chooses the provider's VMs and what runs on them as root.
"""

from __future__ import annotations

import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from pydantic import Field, ValidationError, field_validator

from manager.run.checkpoint_location import no_checkpoint, stored_at
from manager.run.job_code import keep
from manager.run.prepared import Inputs
from manager.run.request import IfChanged, RunRequest, absolute_job, folder_of, kept_request
from manager.run_dir import (
    COMMAND,
    RECOVERED,
    RunDir,
    RunFacts,
    check_free,
    is_run,
    not_writable,
    read_facts,
    resuming,
    write_in_run_dir,
)
from morph.checkpoint.manifest import write_atomically
from morph.checkpoint.newest import find_whole
from morph.checkpoint.storage import reading, writing
from morph.checkpoint.versions import RECOVERY
from morph.contract.base import Value, first_problem
from morph.contract.cluster import ClusterConfig, ProvidedVms
from morph.contract.errors import ConfigError, JobError, RunDirError
from morph.contract.profile import Profile
from morph.jobs.files import JobFiles, split_job
from morph.jobs.snapshot import changed, collect, digests, pack

_FREE_TEXT = frozenset({"setup", "packages"})
"""Fields of ``vms.environment`` in which a user may have written a password or a token."""


class Recovery(Value):
    """All inputs of a run except its code. ``code``: the sha256 of each code file, by its name."""

    schema_version: int = Field(ge=1, le=1)
    facts: RunFacts
    command: RunRequest
    code: dict[str, str]
    profile: Profile
    cluster: ClusterConfig
    cloud: dict[str, Any] | None = Field(default=None, description="the content of the file that vms.cloud names")
    trace: str | None = Field(default=None, description="text of the trace file")

    @field_validator("code")
    @classmethod
    def _below(cls, code: dict[str, str]) -> dict[str, str]:
        for name in code:
            path = PurePosixPath(name)
            if not name or path.is_absolute() or ".." in path.parts:
                raise ValueError(f"{name!r} is not below the folder of the job's code")
        return code


def recovery_of(run: Inputs, facts: RunFacts, files: JobFiles) -> Recovery:
    """Gather the inputs of a run, without those that only this machine has; OSError if the trace is unreadable."""
    request, cluster = run.request, run.cluster
    given = cluster.model_dump(exclude={"job"}, exclude_unset=True)  # a job file names the job too
    for name in ("callbacks", "notify"):  # storage must not hold secrets, or choose what runs here
        given.pop(name, None)
    if isinstance(cluster.vms, ProvidedVms):
        written = {name: value for name, value in given["vms"].get("environment", {}).items() if name not in _FREE_TEXT}
        given["vms"]["environment"] = written
    path, name = split_job(request.job)
    job = f"{Path(path).name}:{name}"
    elsewhere = dict.fromkeys(("profile", "cluster", "trace", "checkpoint_url"))
    return Recovery(
        schema_version=1,
        facts=facts.model_copy(update={"job": job, "checkpoint_url": None}),
        command=request.model_copy(update={"job": job, "settings": (), **elsewhere}),
        code=digests(files.files),
        profile=run.profile,
        cluster=ClusterConfig.model_validate(given),
        cloud=None if run.cloud is None else run.cloud.described.model_dump(mode="json"),
        trace=None if request.trace is None else request.trace.read_text(encoding="utf-8"),
    )


def write_recovery(url: str, recovery: Recovery) -> None:
    """Store it atomically beside the checkpoints, replacing an older one; CheckpointError if storage refuses."""
    where = f"{url.rstrip('/')}/{RECOVERY}"
    with writing(where):
        write_atomically(where, recovery.model_dump_json(indent=1, exclude_unset=True).encode())


def read_recovery(url: str) -> Recovery:
    """Read what a run stored beside its checkpoints; CheckpointError if storage does not answer.

    RunDirError: nothing is stored there, or something that no run wrote.
    """
    where = f"{url.rstrip('/')}/{RECOVERY}"
    try:
        with reading(where):
            filesystem, path = fsspec.core.url_to_fs(where)
            filesystem.invalidate_cache()
            data = filesystem.cat_file(path)
        return Recovery.model_validate_json(data)
    except FileNotFoundError as error:
        raise RunDirError(
            "there is nothing to recover a run from",
            source=where,
            allowed="the directory of a run, or the URL of one's checkpoints",
        ) from error
    except ValidationError as error:
        field, problem, _ = first_problem(error)
        raise RunDirError(problem, source=where, field=field or None) from error


def recover(
    recovery: Recovery, url: str, job: str, run_dir: Path, cluster: Path | None, if_changed: IfChanged
) -> RunRequest:
    """Make a run directory like the run's own, from this machine's job; return the request that resumes the run.

    ``url``: where the run stored ``recovery``; it continues from the checkpoints there. ``job``: path/to/file.py:name,
    on this machine. ``run_dir``: new or empty; made atomically. ``cluster``: a file instead of the run's own.
    ``if_changed``: ACCEPT: resume with code that differs. JobError: there is no such job file, or its code differs.
    ConfigError: a cluster file must be given. RunDirError: the directory is not empty, or cannot be written.
    """
    check_free(run_dir)
    if is_run(run_dir):
        allowed = f"a new or empty directory; to go on with that run: {resuming(run_dir)}"
        raise RunDirError("is a run directory already", source=str(run_dir), field="--run-dir", allowed=allowed)
    if cluster is None and isinstance(recovery.cluster.vms, ProvidedVms):
        raise ConfigError(
            "is not given, and the run's VMs were a provider's: which VMs are paid for, what runs on them as root and "
            "where credentials go must not come from storage",
            field="--cluster",
            allowed=f"a cluster file (YAML); {url.rstrip('/')}/{RECOVERY} shows what the run had",
        )
    files = _same_files(recovery, job, if_changed)
    code = None if files is None else pack(job, files)
    known = {"job": absolute_job(job), "checkpoint_url": url, "code_sha256": code and code.sha256}
    facts = recovery.facts.model_copy(update=known)
    target = run_dir.resolve()
    # made under another name and then renamed, so that an incomplete directory never looks like a run
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    try:
        with RunDir(partial, facts):
            if code is not None:
                keep(partial, code)
            (partial / RECOVERED).mkdir()
            for name, text in _inputs(recovery).items():
                write_in_run_dir(partial / RECOVERED / name, text)
        partial.replace(target)
    except OSError as error:
        raise not_writable(target, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return recovery.command.model_copy(
        update={
            "job": absolute_job(job),
            "profile": target / RECOVERED / "profile.json",
            "cluster": target / RECOVERED / "cluster.yaml" if cluster is None else cluster,
            "trace": None if recovery.trace is None else target / RECOVERED / "trace.csv",
            "checkpoint_url": url,
            "settings": (),  # they are in the cluster file already, and are never taken from storage
        }
    )


def _inputs(recovery: Recovery) -> dict[str, str]:
    """Write the files that the request will name; JSON is YAML."""
    cluster = recovery.cluster.model_dump_json(indent=2, exclude_unset=True, exclude={"callbacks", "notify"})
    inputs = {"profile.json": recovery.profile.model_dump_json(indent=1), "cluster.yaml": cluster + "\n"}
    return inputs if recovery.trace is None else {**inputs, "trace.csv": recovery.trace}


def _same_files(recovery: Recovery, job: str, if_changed: IfChanged) -> JobFiles | None:
    """Return the job's files if they are as when the run began; None: they differ, and the user accepts that."""
    path = Path(split_job(job)[0])
    if not path.is_file():
        raise JobError("no such file", source=str(path), field="--job", allowed="path/to/file.py:name")
    now = collect(job)
    names = changed(recovery.code, now)
    if names and if_changed is not IfChanged.ACCEPT:
        raise JobError(
            "is not what the run began with, and no code is kept in storage",
            source=str(now.folder / names[0]),
            allowed=f"{recovery.command.job} as it was; or --if-changed accept, to go on with this code from the "
            "newest checkpoint",
        )
    if names:
        return None
    return JobFiles(now.folder, {name: (now.folder / name).read_bytes() for name in recovery.code})


def is_stored(source: str) -> bool:
    """Return whether the user named checkpoints and not a run directory."""
    return "://" in source or (not is_run(Path(source)) and (Path(source) / RECOVERY).is_file())


@contextmanager
def recovered(
    source: str, job: str | None, run_dir: Path | None, cluster: Path | None, if_changed: IfChanged
) -> Iterator[tuple[RunRequest, Path]]:
    """Make a run directory from what a run stored beside its checkpoints; yields the request and the directory.

    The directory is removed again if an error keeps the run from beginning while the context is open. A directory that
    the same command made earlier is used again. InputError: the stored values and the arguments are not enough to
    resume the run. CheckpointError: storage does not answer, or no checkpoint is complete.
    """
    stored = stored_at(source)
    recovery = read_recovery(stored.url)
    if job is None:
        known = recovery.command.job
        raise ConfigError("is not given", field="--job", allowed=f"path/to/file.py:name of this machine's {known}")
    made = run_dir or folder_of(recovery.profile, Path(f"{stored.url}/{RECOVERY}"))
    if is_run(made) and read_facts(made).checkpoint_url == stored.url:  # the same command, given again
        given = {"job": absolute_job(job), **({} if cluster is None else {"cluster": cluster})}
        yield kept_request(made).model_copy(update=given), made
        return
    manifest, _ = find_whole(stored.url)
    if manifest is None:
        raise no_checkpoint(stored)
    request = recover(recovery, stored.url, job, made, cluster, if_changed)
    print(f"the run of {stored.url} goes on in {made}, from version {manifest.version}", file=sys.stderr)
    try:
        yield request, made
    finally:
        if not (made / COMMAND).exists():
            shutil.rmtree(made, ignore_errors=True)
