"""Loads a job and cuts its model, or uses an earlier cut of the same content.

A cut is kept for its user under a digest of everything on which it depends; a run gives the cut to its workers, which
then load no exporter. If the stored form cannot hold a model, each worker exports it.
"""

from __future__ import annotations

import hashlib
import logging
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from morph.contract.errors import JobError
from morph.contract.messages import MOST_CUT_BYTES, HandedCut
from morph.cutting.cache.artefact import CannotKeep, Entry, read_entry, write_entry
from morph.cutting.cache.key import content_key, loaded
from morph.cutting.deferred_init.weight_files import require_files
from morph.cutting.exporting.exported_job import ExportedJob, InitialState
from morph.cutting.sections.section import CutModel
from morph.cutting.source.reads import Reads
from morph.data.loader import short_sizes
from morph.jobs.files import held, split_job
from morph.jobs.job import Job, load_job
from morph.user_cache import cache_folder, keep, read_kept

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CutJob:
    """A job with its cut model and initial values."""

    job: Job
    model: CutModel
    initial: InitialState


class LoadedJob:
    """A job file that was loaded, and its cuts."""

    def __init__(self, job_path: str) -> None:
        self._folder = _folder_of(job_path)
        self._files = held(Path(split_job(job_path)[0]))
        self._reads = Reads()
        with self._reads:
            self.job = load_job(job_path)
        self._key: str | None = None
        """The digest of everything on which cuts depend; None if that is not known to the byte."""
        if self._files is not None and not self._reads.found:
            self._key = content_key(job_path, self.job, self._files)
        self._known = set(self._files.files) if self._files is not None else set()
        self._initial: InitialState | None = None

    @cached_property
    def exported(self) -> ExportedJob:
        """The exported job, which is exported once; see ``export_job``."""
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
        """Return this cut: the kept cut, or a new one, which is then kept. ``num_sections``: K; None chooses it."""
        entry, _ = self._kept(num_sections, micro_batch_size)
        if entry is not None:
            self._initial = entry.initial
            return CutJob(self.job, entry.model, entry.initial)
        model = self._made(num_sections, micro_batch_size)
        with suppress(CannotKeep):
            self._keep(write_entry(self.exported, model, self._folder), model, num_sections)
        return CutJob(self.job, model, self.exported.initial_state)

    def handed(self, num_sections: int, micro_batch_size: int) -> HandedCut:
        """Return this cut for workers, wherever they are.

        Raises CannotKeep if the stored form cannot hold the model, so that each worker exports it.
        """
        entry, content = self._kept(num_sections, micro_batch_size)
        if entry is None:
            model = self._made(num_sections, micro_batch_size)
            content = write_entry(self.exported, model, self._folder)
            self._keep(content, model, num_sections)
        if len(content) > MOST_CUT_BYTES:
            raise CannotKeep(f"{len(content)} bytes, more than {MOST_CUT_BYTES}")
        return HandedCut(sha256=hashlib.sha256(content).hexdigest(), content=content)

    def findings(self, about: str) -> bytes | None:
        """Return the kept findings of a check of this job. ``about``: other inputs of the check."""
        return read_kept(*self._of_check(about)) if self._key is not None else None

    def keep_findings(self, about: str, content: bytes) -> None:
        """Keep the findings of a check of this job, for ``findings``."""
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
        """Keep the cut under each number of sections that gives the same cut."""
        if self._key is not None:
            for number in {num_sections, len(model.sections)}:
                keep(*self._place(number, model.micro_batch_size), content)

    def _place(self, num_sections: int | None, micro_batch_size: int) -> tuple[Path, str]:
        return cache_folder() / "cuts", f"{self._key}-{num_sections}-{micro_batch_size}"


def load_and_cut(
    job_path: str, *, num_sections: int | None, micro_batch_size: int, handed: HandedCut | None = None
) -> CutJob:
    """Load a job, and use the given cut of its model; without one, use the kept cut or a new one.

    ``handed``: the manager's cut. A cut of another version of torch is reported in one line and not used. Raises
    InputError as in ``load_job``, ``export_job`` and ``cut``; or the given cut is damaged.
    """
    if handed is not None:
        if hashlib.sha256(handed.content).hexdigest() != handed.sha256:
            raise JobError("has a cut that is not the manager's: its digest differs", source=job_path)
        try:
            entry = read_entry(handed.content, _folder_of(job_path))
            require_files(entry.tape)
            return CutJob(load_job(job_path), entry.model, entry.initial)
        except ValueError as error:
            log.warning("this worker exports the job itself, because the manager's cut cannot be used: %s", error)
    return LoadedJob(job_path).cut(num_sections, micro_batch_size)


def _folder_of(job_path: str) -> str:
    return str(Path(split_job(job_path)[0]).resolve().parent)
