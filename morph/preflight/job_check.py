"""The check that a run makes of its job: cuts it, compares it with the profile, and keeps what was found."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch

from morph.contract.errors import JobError, ProfileError
from morph.contract.job_facts import JobFacts
from morph.contract.messages import HandedCut
from morph.contract.profile import Profile
from morph.cutting.cache.artefact import CannotKeep
from morph.cutting.cache.cut_job import LoadedJob
from morph.data.loader import ROWS_S, data_facts, order_of
from morph.jobs.files import held, split_job
from morph.jobs.job import Job
from morph.jobs.snapshot import from_elsewhere
from morph.machine import available_bytes
from morph.preflight.checks import TRIED_BEFORE_RUNS, CutJob, Effort, check, users_code


@dataclass(frozen=True)
class CheckedJob:
    """The facts that identify a job, and ``cut``, which makes the workers' cut for a micro-batch size."""

    facts: JobFacts
    cut: Callable[[int], HandedCut | None]


def check_job(job_path: str, profile: Profile) -> CheckedJob:
    """Cut the job and compare it with the profile; findings are kept for the same job, data and profile.

    Raises JobError, ExportError, or ProfileError if the profile is of another model or batch size.
    """
    before = set(sys.modules)
    torch.set_num_threads(1)
    with users_code(job_path):
        loaded = LoadedJob(job_path)
    job = loaded.job
    if job.batch_size != profile.job.batch_size:
        allowed = f"batch_size={profile.job.batch_size}"
        raise _other_profile(
            job, profile, job_path, "the profile was measured with another batch_size", job.batch_size, allowed
        )
    about = _about(job, profile)
    findings = _read_findings(loaded.findings(about)) if about else None
    if findings is None:
        with users_code(job_path):
            findings = _look_at(loaded, profile, job_path)
        files = held(Path(split_job(job_path)[0]))
        if about and findings.lasting and files is not None and not from_elsewhere(files, before):
            loaded.keep_findings(about, json.dumps(asdict(findings)).encode())
    for note in findings.notes:
        print(note, file=sys.stderr)
    facts = JobFacts(data=data_facts(job, ROWS_S), settings=findings.settings, epochs=order_of(job).epochs)
    return CheckedJob(facts, partial(_cut_for_workers, loaded, job_path, profile.num_sections))


def _cut_for_workers(loaded: LoadedJob, job_path: str, num_sections: int, micro_batch_size: int) -> HandedCut | None:
    try:
        with users_code(job_path):
            return loaded.handed(num_sections, micro_batch_size)
    except CannotKeep as reason:
        print(
            f"note: workers start more slowly, because each must export the model itself: it contains {reason}, which "
            "Morph cannot store with the cuts. Training is the same",
            file=sys.stderr,
        )
        return None


def _other_profile(
    job: Job, profile: Profile, job_path: str, what: str, value: object = None, allowed: str = ""
) -> ProfileError:
    """Return an error that says that a profile does not fit the job, and to which job it belongs."""
    if profile.job.name != job.name:
        what, value, allowed = f"the profile belongs to another job, {profile.job.name!r}", job.name, ""
    again = f"a profile of this job, as it is now: morph calibrate {job_path} -o FILE"
    return ProfileError(
        what, source=job_path, field="--profile", value=value, allowed=f"{allowed}; or {again}" if allowed else again
    )


@dataclass(frozen=True)
class _Findings:
    """Sentences for the user, and the settings of the check; ``lasting``: another would find the same."""

    notes: tuple[str, ...]
    settings: dict[str, str]
    lasting: bool


def _about(job: Job, profile: Profile) -> str | None:
    """Return the inputs of the findings besides the job's code; None if its data cannot be read."""
    try:
        data = JobFacts(data=data_facts(job))
    except JobError:
        return None  # the check itself reports the error
    cut = [str(profile.num_sections), str(profile.micro_batch_sizes), profile.model_dump_json(include={"job", "units"})]
    return sha256(" ".join([data.model_dump_json(), *cut]).encode()).hexdigest()


def _read_findings(content: bytes | None) -> _Findings | None:
    with suppress(ValueError, TypeError):
        return _Findings(**json.loads(content)) if content is not None else None
    return None


def _look_at(loaded: LoadedJob, profile: Profile, job_path: str) -> _Findings:
    job, exported = loaded.job, loaded.exported
    model = loaded.cut(profile.num_sections, profile.micro_batch_sizes[0]).model
    if model.fingerprint != profile.job.fingerprint:
        raise _other_profile(job, profile, job_path, "the profile belongs to another model")
    units = {unit.id: unit.sections for unit in model.units}
    known = {unit.id: unit.sections for unit in profile.units}
    if units != known:
        shown, allowed = (", ".join(sorted(names)) or "none" for names in (units, known))
        raise _other_profile(job, profile, job_path, "the profile has other parameter units", shown, allowed)
    effort = Effort(memory_bytes=available_bytes(), most_parameters=TRIED_BEFORE_RUNS)
    report = check(CutJob(job_path, job, exported, model), effort)
    lasting = report.compared is not None and report.compared.how != "none"
    return _Findings((*report.warnings, *report.notes), report.settings, lasting)
