"""A run's request, stored in its directory (``command.json``): the directory alone suffices to resume the run."""

from __future__ import annotations

import os
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from manager.run_dir import COMMAND, write_in_run_dir
from morph.contract.base import Value, read_json
from morph.contract.errors import ConfigError, ProfileError, RunDirError
from morph.contract.plan import Schedule
from morph.jobs.files import split_job

if TYPE_CHECKING:
    from morph.contract.profile import Profile

SHORT_OPTIONS = {"pipeline_depth": "-P", "num_replicas": "-D"}
"""Options of ``morph run`` that bound the shape, by their keys in a job file."""


class IfChanged(StrEnum):
    """What to do if the job is not the one that its run began with."""

    REFUSE = "refuse"
    KEEP = "keep"
    ACCEPT = "accept"


class RunRequest(Value):
    """The options of ``morph run`` that determine the run, by their names on the command line. None: not given.

    A job file sets some of these options; ``job`` is then that file, until it is read.
    """

    job: str = Field(description="path/to/file.py:name, or a job file")
    profile: Path | None = None
    cluster: Path | None = None
    steps: int = Field(ge=1)
    epochs: int | None = Field(default=None, ge=1, description="passes over the data set, in place of ``steps``")
    checkpoint_url: str | None = None
    trace: Path | None = None
    trace_speed: float = Field(default=1.0, gt=0)
    schedule: Schedule | None = None
    timeline_step: int | None = Field(default=None, ge=0)
    recompute: bool | None = None
    pipeline_depth: int | None = Field(default=None, ge=1)
    num_replicas: int | None = Field(default=None, ge=1)
    price: float | None = Field(default=None, ge=0)
    on_demand_price: float | None = Field(default=None, ge=0)
    settings: tuple[str, ...] = Field(default=(), description="KEY=VALUE each, overriding the YAML file")

    def absolute(self) -> RunRequest:
        """Return the same request, valid from any working directory."""
        paths = {"profile": self.profile, "cluster": self.cluster, "trace": self.trace}
        resolved: dict[str, object] = {field: path.resolve() for field, path in paths.items() if path is not None}
        if self.checkpoint_url is not None:
            resolved["checkpoint_url"] = absolute_url(self.checkpoint_url)
        job = str(Path(self.job).resolve()) if is_job_file(self.job) else absolute_job(self.job)
        return self.model_copy(update={"job": job, **resolved})


class KeptRequest(Value):
    """``inputs``: sha256 of each file that the request names, by its absolute path."""

    schema_version: int = Field(default=1, ge=1, le=1)
    command: RunRequest
    inputs: dict[Path, str]


def keep_request(run_dir: Path, request: RunRequest, files: tuple[Path, ...]) -> None:
    """Write a run's request, as given, atomically, replacing an older one; RunDirError if that is not possible.

    The caller holds ``run_dir``. Paths are made absolute. ``files``: all files that the request names.
    """
    kept = KeptRequest(command=request.absolute(), inputs={path.resolve(): _digest(path) for path in files})
    write_in_run_dir(run_dir / COMMAND, kept.model_dump_json(indent=2) + "\n")


def kept_request(run_dir: Path) -> RunRequest:
    """Read a run's request, and check that the files that it names are unchanged.

    RunDirError: there is no request, or it cannot be read. ConfigError: a file is missing or was changed.
    """
    path = run_dir / COMMAND
    if not path.exists():
        raise RunDirError(
            f"has no {COMMAND}, so the command that started it is not known",
            source=str(run_dir),
            allowed="the morph run command that it was started with",
        )
    kept = read_json(path, KeptRequest, RunDirError)
    for file, digest in kept.inputs.items():
        try:
            same = _digest(file) == digest
        except OSError as error:
            raise ConfigError(
                f"cannot be read any more: {error.strerror}",
                source=str(file),
                allowed=f"the file that {run_dir} was started with; for another one: morph run --run-dir",
            ) from error
        if not same:
            raise ConfigError(
                "was changed since the run was started",
                source=str(file),
                allowed=f"as it was; to go on in {run_dir} with the changed one: the morph run command again",
            )
    return kept.command


def run_dir_of(request: RunRequest, run_dir: Path | None) -> Path | None:
    """Return the directory of a requested run, reading no more of its files than necessary.

    Paths in the request are relative to the working directory. ``run_dir``: a directory instead of the job's own. None:
    something is missing; ``prepare`` reports it. InputError: a file is wrong.
    """
    if run_dir is not None:
        return run_dir
    from morph.contract.profile import load_profile
    from morph.yaml_files import load_job_file

    if is_job_file(request.job):
        path = Path(request.job)
        folder, job = path.resolve().parent, load_job_file(path, request.settings).job
        if job.run_dir:
            return short_path(folder / job.run_dir)
        return folder_of(load_profile(folder / job.profile), folder / job.profile)
    return None if request.profile is None else folder_of(load_profile(request.profile), request.profile)


def short_path(path: Path) -> Path:
    """Return a path as a user would type it: relative to the working directory if it is below, and without ``..``."""
    path = Path(os.path.normpath(path))
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def folder_of(profile: Profile, path: Path) -> Path:
    """Return the run directory if the user gives none; a profile from elsewhere must name no folder outside of runs."""
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


def is_job_file(job: str) -> bool:
    """Return whether a job is named by a job file, not as path/to/file.py:name."""
    return job.endswith((".yaml", ".yml"))


def absolute_job(job: str) -> str:
    """Return path/to/file.py:name, valid from any working directory."""
    path, name = split_job(job)
    return f"{Path(path).resolve()}:{name}"


def absolute_url(url: str, folder: Path = Path()) -> str:
    """Return a path relative to a folder as an absolute path; a URL unchanged."""
    return url if "://" in url else str((folder / url).resolve())


def _digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()
