"""Checks that need the model itself, made before anything is started or written."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from morph.contract.cluster import ClusterConfig
    from morph.contract.errors import ProfileError
    from morph.contract.job_facts import JobFacts
    from morph.contract.profile import Profile
    from morph.cutting.cache.cut_job import LoadedJob
    from morph.jobs.job import Job


def check_device(cluster: ClusterConfig, source: str) -> None:
    """Refuse a device that this machine lacks, where VMs share its devices, or a library that their TLS wants.

    Raises:
        ConfigError: naming the cluster file.
    """
    from morph.contract.cluster import LocalVms
    from morph.contract.errors import ConfigError

    if cluster.vms.tls and find_spec("cryptography") is None:
        raise ConfigError(
            "certificates need a library that is not installed",
            source=source,
            field="vms.tls",
            value=True,
            allowed="pip install -e '.[tls]' in the clone of Morph, or false",
        )
    if isinstance(cluster.vms, LocalVms) and cluster.vms.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(
                "this machine has no such device", source=source, field="vms.device", value="cuda", allowed="cpu"
            )


def check_job(job_path: str, profile: Profile) -> JobFacts:
    """Cut the job and hold it against the profile; returns by what it is known. Its cuts are kept for workers.

    What was found is kept too: a job that is the same to the byte, with the same data and profile, is not tried again.

    Raises:
        JobError: a wrong job file, or one with an unhandled dependency between sections.
        ExportError: a model that torch.export refuses, or whose sections do not compute what it does by itself.
        ProfileError: a profile of another model, or of another batch size.
    """
    import torch

    from manager.run.job_snapshot import from_elsewhere
    from morph.contract.job_facts import JobFacts
    from morph.cutting.cache.cut_job import LoadedJob
    from morph.data.fingerprint import data_facts
    from morph.jobs.files import held
    from morph.preflight.checks import users_code

    before = set(sys.modules)
    torch.set_num_threads(1)
    with users_code(job_path):
        loaded = LoadedJob(job_path)
    job = loaded.job
    if job.batch_size != profile.job.batch_size:
        allowed = f"batch_size={profile.job.batch_size}"
        raise _other_profile(job, profile, job_path, "the profile is of another batch_size", job.batch_size, allowed)
    about = _about(job, profile)
    found = _read_findings(loaded.findings(about)) if about else None
    if found is None:
        with users_code(job_path):
            found = _look_at(loaded, profile, job_path)
        files = held(Path(job_path.rpartition(":")[0]))
        if about and found.lasting and files is not None and not from_elsewhere(files, before):
            loaded.keep_findings(about, json.dumps(asdict(found)).encode())
    for note in found.notes:
        print(note, file=sys.stderr)
    return JobFacts(data=data_facts(job), settings=found.settings)


def _other_profile(
    job: Job, profile: Profile, job_path: str, what: str, value: object = None, allowed: str = ""
) -> ProfileError:
    """Say that a profile does not fit the job, and whose it is."""
    from morph.contract.errors import ProfileError

    if profile.job.name != job.name:
        what, value, allowed = f"the profile is of another job, {profile.job.name!r}", job.name, ""
    again = f"a profile of this job, as it is now: morph calibrate {job_path} -o FILE"
    return ProfileError(
        what, source=job_path, field="--profile", value=value, allowed=f"{allowed}; or {again}" if allowed else again
    )


@dataclass(frozen=True)
class _Findings:
    """What a look at a job found: sentences for its user, and settings by which it is known.

    ``lasting``: it would be found again.
    """

    notes: tuple[str, ...]
    settings: dict[str, str]
    lasting: bool


def _about(job: Job, profile: Profile) -> str | None:
    """What findings depend on besides the job's code; None where its data cannot be read."""
    from morph.contract.errors import JobError
    from morph.contract.job_facts import JobFacts
    from morph.data.fingerprint import data_facts

    try:
        data = JobFacts(data=data_facts(job))
    except JobError:
        return None  # the look says what is wrong
    cut = [str(profile.num_sections), str(profile.micro_batch_sizes), profile.model_dump_json(include={"job", "units"})]
    return sha256(" ".join([data.model_dump_json(), *cut]).encode()).hexdigest()


def _read_findings(content: bytes | None) -> _Findings | None:
    with suppress(ValueError, TypeError):
        return _Findings(**json.loads(content)) if content is not None else None
    return None


def _look_at(loaded: LoadedJob, profile: Profile, job_path: str) -> _Findings:
    from calibrate.timing.environment import available_bytes
    from manager.host.handed_on import handed_on
    from morph.cutting import cut
    from morph.preflight.checks import TRIED_BEFORE_RUNS, CheckedJob, Effort, check

    job, exported = loaded.job, loaded.export()
    model = cut(exported, num_sections=profile.num_sections, micro_batch_size=profile.micro_batch_sizes[0])
    if model.fingerprint != profile.job.fingerprint:
        raise _other_profile(job, profile, job_path, "the profile is of another model")
    units = {unit.id: unit.sections for unit in model.units}
    known = {unit.id: unit.sections for unit in profile.units}
    if units != known:
        shown, allowed = (", ".join(sorted(names)) or "none" for names in (units, known))
        raise _other_profile(job, profile, job_path, "the profile is of other parameter units", shown, allowed)
    effort = Effort(memory_bytes=available_bytes(), most_parameters=TRIED_BEFORE_RUNS)
    report = check(CheckedJob(job_path, job, exported, model), effort)
    loaded.keep_for_workers(exported, model, profile.micro_batch_sizes, handed_on(os.environ))
    lasting = report.compared is not None and report.compared.how != "none"
    return _Findings((*report.warnings, *report.notes), report.settings, lasting)
