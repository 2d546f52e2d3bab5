"""Loads a job and cuts its model, or uses a cached cut, named by a digest of everything on which cuts depend."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path

import torch

import morph
from morph.contract.errors import JobError
from morph.contract.messages import MOST_CUT_BYTES, HandedCut
from morph.cutting.cache.artefact import CannotKeep, Entry, read_entry, write_entry
from morph.cutting.deferred_init.weight_files import require_files
from morph.cutting.exporting.exported_job import ExportedJob, InitialState
from morph.cutting.sections.section import CutModel
from morph.cutting.source.reads import Reads
from morph.cutting.trial_run.trial import example_batch
from morph.data.loader import short_sizes, varying_dims
from morph.jobs.files import OWN, JobFiles, file_of, held, is_installed, split_job
from morph.jobs.job import Job, load_job
from morph.jobs.snapshot import imported_names
from morph.user_cache import cache_folder, keep, read_kept

log = logging.getLogger(__name__)
_NOT_OF_THE_JOB = frozenset({
    *("_", "SHLVL", "PWD", "OLDPWD", "LINES", "COLUMNS", "TERM", "HOME", "PATH", "TMPDIR", "VIRTUAL_ENV", "SPT_NOENV"),
    *("CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "PYTHONBREAKPOINT", "TORCHINDUCTOR_CACHE_DIR"),
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"),
})  # fmt: skip
_NOT_OF_THE_JOB_PREFIXES = ("MORPH_", "PYTEST_", "RAY_", "SSH_", "XDG_")
"""Ignored variables: those of the terminal and the session, paths, and those that Morph, Ray and torch set."""
_THAT_CUT_OR_CHECK = ("cutting", "data", "jobs", "preflight", "tracing", "runtime/workloads")


@dataclass(frozen=True)
class CutJob:
    """A job with its cut model and initial values."""

    job: Job
    model: CutModel
    initial: InitialState


class LoadedJob:
    """A loaded job file, and its cuts."""

    def __init__(self, job_path: str) -> None:
        self._folder = _folder_of(job_path)
        self._files = held(Path(split_job(job_path)[0]))
        self._reads = Reads()
        with self._reads:
            self.job = load_job(job_path)
        self._key: str | None = None
        """The digest of everything on which cuts depend; None if some of that is unknown."""
        if self._files is not None and not self._reads.found:
            self._key = content_key(job_path, self.job, self._files)
        self._known = set(self._files.files) if self._files is not None else set()
        self._initial: InitialState | None = None

    @cached_property
    def exported(self) -> ExportedJob:
        """The exported job (see ``export_job``); it is exported once, when it is first needed."""
        from morph.cutting.exporting.export import export_job

        with self._reads:
            exported = export_job(self.job)
        if self._reads.found or (self._files is not None and not loaded(self._files) <= self._known):
            self._key = None
        return exported

    @property
    def initial(self) -> InitialState:
        """The initial values of the model, whatever its cut."""
        return self._initial or self.exported.initial_state

    def cut(self, num_sections: int | None, micro_batch_size: int) -> CutJob:
        """Return this cut from the cache, or make it and cache it. ``num_sections``: K; None: K is chosen."""
        entry, _ = self._kept(num_sections, micro_batch_size)
        if entry is not None:
            self._initial = entry.initial
            return CutJob(self.job, entry.model, entry.initial)
        model = self._made(num_sections, micro_batch_size)
        with suppress(CannotKeep):
            self._keep(write_entry(self.exported, model, self._folder), model, num_sections)
        return CutJob(self.job, model, self.exported.initial_state)

    def handed(self, num_sections: int, micro_batch_size: int) -> HandedCut:
        """Return this cut in the form that workers are sent. Raises CannotKeep if that form cannot hold it."""
        entry, content = self._kept(num_sections, micro_batch_size)
        if entry is None:
            model = self._made(num_sections, micro_batch_size)
            content = write_entry(self.exported, model, self._folder)
            self._keep(content, model, num_sections)
        if len(content) > MOST_CUT_BYTES:
            raise CannotKeep(f"{len(content)} bytes, more than {MOST_CUT_BYTES}")
        return HandedCut(sha256=hashlib.sha256(content).hexdigest(), content=content)

    def findings(self, about: str) -> bytes | None:
        """Return the cached findings of a check of this job. ``about``: other inputs of the check."""
        return read_kept(*self._of_check(about)) if self._key is not None else None

    def keep_findings(self, about: str, content: bytes) -> None:
        """Cache the findings of a check of this job, for ``findings``."""
        if self._key is not None:
            keep(*self._of_check(about), content)

    def _of_check(self, about: str) -> tuple[Path, str]:
        return cache_folder() / "checks", hashlib.sha256(f"{self._key} {about}".encode()).hexdigest() + ".json"

    def _made(self, num_sections: int | None, micro_batch_size: int) -> CutModel:
        from morph.cutting.cuts.cut_model import cut

        exported, fewer = self.exported, short_sizes(self.job, micro_batch_size)
        return cut(exported, num_sections=num_sections, micro_batch_size=micro_batch_size, fewer=fewer)

    def _kept(self, num_sections: int | None, micro_batch_size: int) -> tuple[Entry | None, bytes]:
        content = read_kept(*self._place(num_sections, micro_batch_size)) if self._key is not None else None
        if content is not None:
            with suppress(ValueError):
                entry = read_entry(content, self._folder)
                sizes = entry.model.micro_batch_size, tuple(entry.model.by_samples)
                if sizes == (micro_batch_size, short_sizes(self.job, micro_batch_size)):
                    return entry, content
        return None, b""

    def _keep(self, content: bytes, model: CutModel, num_sections: int | None) -> None:
        """Cache the cut under each number of sections that gives it: the requested one, and its own."""
        if self._key is not None:
            for number in {num_sections, len(model.sections)}:
                keep(*self._place(number, model.micro_batch_size), content)

    def _place(self, num_sections: int | None, micro_batch_size: int) -> tuple[Path, str]:
        return cache_folder() / "cuts", f"{self._key}-{num_sections}-{micro_batch_size}"


def load_and_cut(
    job_path: str, *, num_sections: int | None, micro_batch_size: int, handed: HandedCut | None = None
) -> CutJob:
    """Load a job with the manager's cut of its model, if ``handed``, else with a cached or a new cut.

    Raises InputError as ``load_job``, ``export_job`` and ``cut`` do, or if the manager's cut is damaged.
    """
    if handed is not None:
        if hashlib.sha256(handed.content).hexdigest() != handed.sha256:
            raise JobError("has a damaged cut from the manager: its digest differs", source=job_path)
        try:
            entry = read_entry(handed.content, _folder_of(job_path))
            require_files(entry.tape)
            return CutJob(load_job(job_path), entry.model, entry.initial)
        except ValueError as error:
            log.warning("this worker exports the job itself, because the manager's cut cannot be used: %s", error)
    return LoadedJob(job_path).cut(num_sections, micro_batch_size)


def _folder_of(job_path: str) -> str:
    return str(Path(split_job(job_path)[0]).resolve().parent)


def content_key(job_path: str, job: Job, files: JobFiles) -> str | None:
    """Return a digest of a job's code and data, versions of packages, and settings of this process.

    None if some of the code is unknown. ``job``: has just been loaded, and none of its code has run since.
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
    """Return the modules of a job that this process has imported, by their path below the job's folder."""
    places = (files.inside(file) for module in list(sys.modules.values()) if (file := file_of(module)) is not None)
    return {inside for inside in places if inside is not None}


def _imports_known_code(files: JobFiles) -> bool:
    """Return whether each package that a job's files import is installed, or is among the files."""
    read: set[str] = set()
    while waiting := {inside for inside in files.files if inside.endswith(".py")} - read:
        read |= waiting  # finding packages may add files
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
    entries = (entry for folder in folders if folder.is_dir() for entry in folder.iterdir())
    return sorted(entry.name for entry in entries if entry.suffix in {".dist-info", ".egg-info"})


@cache
def _own_code() -> str:
    """Return a digest of Morph's own code for cutting and checking, which developers change without a new version."""
    own = Path(morph.__file__).parent
    files = sorted(file for folder in _THAT_CUT_OR_CHECK for file in (own / folder).rglob("*.py"))
    return _digest(b"".join(file.read_bytes() for file in files))


def _digest(content: object) -> str:
    return hashlib.sha256(memoryview(content)).hexdigest()  # type: ignore[arg-type]  # bytes, or an array of numpy's
