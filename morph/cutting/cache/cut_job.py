"""Load a job and cut its model, from what was kept of it where that is surely the same.

Nothing but JSON is read, and it can name no code but torch's own operations. What is not surely the same, damaged or
not this user's is made again without a word; a model that the form does not hold is exported each time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from morph.cutting.cache.entry import Entry, read_entry, write_entry
from morph.cutting.cache.key import job_facts, job_key, loaded
from morph.cutting.cache.values import CannotKeep
from morph.cutting.exporting.exported import ExportedJob, GraphJob, InitialState
from morph.cutting.sections.section import CutModel
from morph.cutting.source.reads import Reads
from morph.jobs.files import held
from morph.jobs.job import Job, load_job
from morph.user_cache import cache_folder, keep, read_kept

_FOLDER = "cuts"
_CHECKS = "checks"
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RuntimeError)


@dataclass(frozen=True)
class CutJob:
    """A job with its cut model and what that starts from."""

    job: Job
    model: CutModel
    initial: InitialState


class LoadedJob:
    """A job file that was loaded, and what stands for it where its cut models are kept.

    Args:
        job_path: path/to/file.py:name.

    Raises:
        JobError: see ``load_job``.
    """

    def __init__(self, job_path: str) -> None:
        self._files = held(Path(job_path.rpartition(":")[0]))
        self._reads = Reads()
        with self._reads:
            self.job = load_job(job_path)
        self._facts = None if self._reads.found else job_facts(job_path, self.job)
        self._known = set(self._files.files) if self._files is not None else set()

    def export(self) -> ExportedJob:
        """See ``export_job``."""
        from morph.cutting.exporting.export import export_job

        with self._reads:
            exported = export_job(self.job)
        if self._reads.found or (self._files is not None and not loaded(self._files) <= self._known):
            self._facts = None
        return exported

    def kept(self, num_sections: int | None, micro_batch_size: int, fingerprint: str | None) -> Entry | None:
        """Return what was kept of this cut; of a model with this fingerprint, if one is given."""
        if self._facts is None:
            return None
        content = read_kept(*self._place(os.environ, num_sections, micro_batch_size))
        with contextlib.suppress(*_UNREADABLE):
            entry = read_entry(content) if content is not None else None
            if entry is not None and entry.model.micro_batch_size == micro_batch_size:
                return entry if fingerprint in {None, entry.model.fingerprint} else None
        return None

    def findings(self, about: str) -> bytes | None:
        """Return what was kept of a check of this job. ``about``: what else the check depends on."""
        return read_kept(*self._of_check(about)) if self._facts is not None else None

    def keep_findings(self, about: str, content: bytes) -> None:
        """Keep what a check of this job found, for ``findings``."""
        if self._facts is not None:
            keep(*self._of_check(about), content)

    def _of_check(self, about: str) -> tuple[Path, str]:
        assert self._facts is not None
        key = hashlib.sha256(f"{job_key(self._facts, os.environ)} {about}".encode()).hexdigest()
        return cache_folder() / _CHECKS, f"{key}.json"

    def keep(
        self,
        exported: ExportedJob,
        model: CutModel,
        asked: Sequence[int | None],
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Keep what was exported by this and cut, under each number of sections that gives the same.

        Args:
            exported: What ``export`` returned.
            model: The same, cut.
            asked: K, or None where that chose it.
            environment: Of the processes that may read it.
        """
        if self._facts is None or not isinstance(exported, GraphJob):
            return
        with contextlib.suppress(CannotKeep):
            content = write_entry(exported, model)
            for num_sections in asked:
                keep(*self._place(environment, num_sections, model.micro_batch_size), content)

    def keep_for_workers(
        self,
        exported: ExportedJob,
        model: CutModel,
        micro_batch_sizes: Sequence[int],
        environment: Mapping[str, str],
    ) -> None:
        """Keep the same cut for each m that a plan may have, for processes with this environment."""
        from morph.cutting.cuts.cut_model import cut

        num_sections = len(model.sections)
        for m in micro_batch_sizes if self._facts is not None and isinstance(exported, GraphJob) else ():
            known = model.micro_batch_size == m
            fixed = model if known else cut(exported, num_sections=num_sections, micro_batch_size=m)
            self.keep(exported, fixed, [num_sections], environment)

    def _place(
        self, environment: Mapping[str, str], num_sections: int | None, micro_batch_size: int
    ) -> tuple[Path, str]:
        assert self._facts is not None
        key = job_key(self._facts, environment)
        return cache_folder() / _FOLDER, f"{key}-{num_sections}-{micro_batch_size}.json"


def load_and_cut(
    job_path: str, *, num_sections: int | None, micro_batch_size: int, fingerprint: str | None = None
) -> CutJob:
    """Load a job, and read its cut model; export and cut it, and keep that, where there is none to read.

    Args:
        job_path: path/to/file.py:name.
        num_sections: K; None chooses it.
        micro_batch_size: m.
        fingerprint: What is kept of another one is not read.

    Raises:
        InputError: as ``load_job``, ``export_job`` and ``cut``.
    """
    loaded_job = LoadedJob(job_path)
    entry = loaded_job.kept(num_sections, micro_batch_size, fingerprint)
    if entry is not None:
        return CutJob(loaded_job.job, entry.model, entry.initial)
    from morph.cutting.cuts.cut_model import cut

    exported = loaded_job.export()
    model = cut(exported, num_sections=num_sections, micro_batch_size=micro_batch_size)
    loaded_job.keep(exported, model, [*{num_sections, len(model.sections)}])
    return CutJob(loaded_job.job, model, exported.initial_state)
