"""Makes digests of a job's model and everything on which its export depends."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

import morph
from morph.cutting.trial_run.trial import example_batch
from morph.data.loader import varying_dims
from morph.jobs.files import OWN, JobFiles, file_of, is_installed, split_job
from morph.jobs.job import Job
from morph.jobs.snapshot import imported_names

_NOT_OF_THE_JOB = frozenset({
    *("_", "SHLVL", "PWD", "OLDPWD", "LINES", "COLUMNS", "TERM", "HOME", "PATH", "TMPDIR", "VIRTUAL_ENV", "SPT_NOENV"),
    *("CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "PYTHONBREAKPOINT", "TORCHINDUCTOR_CACHE_DIR"),
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"),
})  # fmt: skip
_NOT_OF_THE_JOB_PREFIXES = ("MORPH_", "PYTEST_", "RAY_", "SSH_", "XDG_")
"""Ignored variables: those of the terminal and the session, paths, and those that Morph, Ray and torch set."""
_THAT_CUT_OR_CHECK = ("cutting", "data", "jobs", "preflight", "tracing", "runtime/workloads", "cli/models")


def content_key(job_path: str, job: Job, files: JobFiles) -> str | None:
    """Return one digest of a job's code and data, versions of packages, and settings of this process.

    It contains no folder. None if the code is not known to the byte: the job imports a package that is neither
    installed nor among its files. ``job``: the job of that name, just loaded, before any of its code runs.
    """
    if not _imports_known_code(files):
        return None
    path, name = split_job(job_path)
    facts = {
        "job": [files.inside(path), name],
        "files": {inside: _digest(content) for inside, content in sorted(files.files.items())},
        "buckets": [list(job.buckets), {key: list(dims) for key, dims in varying_dims(job).items()}],
        "data": {
            key: [str(entry.dtype), list(entry.shape), _digest(entry.contiguous().flatten().view(torch.uint8).numpy())]
            for key, entry in example_batch(job).items()
        },
        "packages": _installed(),
        "versions": [torch.__version__, morph.__version__, sys.version, platform.machine(), _own_code()],
        "torch": [str(torch.get_default_dtype()), str(torch.get_default_device()), torch.cuda.is_available()],
        "environment": {
            name: value
            for name, value in os.environ.items()
            if name not in _NOT_OF_THE_JOB and not name.startswith(_NOT_OF_THE_JOB_PREFIXES)
        },
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def loaded(files: JobFiles) -> set[str]:
    """Return the modules of a job that this process has imported, by their path below the job's folder.

    A folder without ``__init__.py`` is not a module, because it has no code.
    """
    found = (files.inside(file) for module in list(sys.modules.values()) if (file := file_of(module)) is not None)
    return {inside for inside in found if inside is not None}


def _imports_known_code(files: JobFiles) -> bool:
    """Return whether each package that a job's files import is installed, or among the files."""
    read: set[str] = set()
    while waiting := {inside for inside in files.files if inside.endswith(".py")} - read:
        read |= waiting  # files that are found meanwhile are added
        names = {name[0] for inside in waiting for name in imported_names(files.files[inside])}
        places = {place for name in names - OWN if (place := _place(name)) is not None}
        if not all(files.inside(place) is not None or is_installed(Path(place), Path(place)) for place in places):
            return False
    return True


def _place(name: str) -> str | None:
    """Return the file of a package, or its first folder if it has no file."""
    module = sys.modules.get(name)
    if module is not None:
        return file_of(module) or next(iter(module.__dict__.get("__path__", ())), None)
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin in {"built-in", "frozen"}:
        return None
    return spec.origin or next(iter(spec.submodule_search_locations or ()), None)


def _installed() -> list[str]:
    """Return the names and versions of installed packages, as the names of their metadata folders."""
    folders = {Path(entry) for entry in sys.path if Path(entry).name in {"site-packages", "dist-packages"}}
    found = (entry for folder in folders if folder.is_dir() for entry in folder.iterdir())
    return sorted(entry.name for entry in found if entry.suffix in {".dist-info", ".egg-info"})


@cache
def _own_code() -> str:
    """Return a digest of Morph's own code of cutting and checking, which developers change without a new version."""
    own = Path(morph.__file__).parent
    files = sorted(file for folder in _THAT_CUT_OR_CHECK for file in (own / folder).rglob("*.py"))
    return _digest(b"".join(file.read_bytes() for file in files))


def _digest(content: object) -> str:
    return hashlib.sha256(memoryview(content)).hexdigest()  # type: ignore[arg-type]  # bytes, or an array of numpy's
