"""Checks that need the model itself, made before anything is started or written."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from morph.contract.cluster import ClusterConfig
    from morph.contract.errors import ProfileError
    from morph.contract.job_file import JobFacts
    from morph.contract.profile import Profile
    from morph.cutting import ExportedJob
    from morph.cutting.cache.cut_job import LoadedJob
    from morph.jobs.job import Job
if TYPE_CHECKING:
    import torch

    from morph.cutting import CutModel, ExportedJob
    from morph.jobs.job import Job
    from morph.preflight.plain_comparison import Agreement


def compare_once(
    job: Job,
    exported: ExportedJob,
    model: CutModel,
    *,
    quick: bool = False,
    steps: bool = True,
    device: torch.device | None = None,
) -> Agreement:
    """Compare, unless this user did already; see ``morph.preflight.plain_comparison``.

    Args:
        job: The job.
        exported: The exported job.
        model: The job as it is cut.
        quick: Leave alone what takes more than some seconds.
        steps: Compare weights after the optimizer's steps too.
        device: Where to run; None: this machine's processor.

    Raises:
        ExportError: the sections do not compute what the plain model does.
        JobError: the plain model fails on real samples; or the optimizer fails, or works differently for each unit
            alone.
    """
    import torch

    from morph.preflight.comparison_cache import agreement_key, keep_agreement, kept_agreement
    from morph.preflight.plain_comparison import PATIENT_FLOPS, QUICK_FLOPS, Limits, compare_with_plain
    from morph.runtime.workloads.job_workload import settings
    from morph.user_cache import cache_folder

    place = device or torch.device("cpu")
    folder = cache_folder()
    key = agreement_key(job, exported, model.fingerprint, place, settings(job, model))
    kept = kept_agreement(folder, key)
    if kept is not None:
        return kept
    flops = QUICK_FLOPS if quick else PATIENT_FLOPS
    limits = Limits(_available_bytes(place), flops, place, shorten=not quick, steps=steps)
    found = compare_with_plain(job, exported, len(model.sections), limits)
    if found.how != "none" and (
        found.num_steps or (steps and not quick)
    ):  # what another command may do better is not kept
        keep_agreement(folder, key, found)
    return found


def agreement_note(found: Agreement) -> str:
    """Say in one sentence what was compared."""
    if found.how == "none":
        return f"loss, gradients and weights were not compared with the plain model: {found.reason}"
    what = "the plain model's" if found.how == "whole" else "the plain model's, both with fewer equal blocks"
    apart = "are equal to" if found.largest == 0 else f"are within {found.largest:.0e} of"
    compared = f"loss, every gradient and the weights after {found.num_steps} steps"
    text = f"{compared if found.num_steps else 'loss and every gradient'} {apart} {what}"
    text += f" ({found.num_seeds} x {found.num_samples} samples)" + (f": {found.reason}" if found.reason else "")
    return text if found.num_steps else f"{text}; weights after steps were not compared: {found.no_steps}"


def _available_bytes(device: torch.device) -> int:
    import psutil
    import torch

    from calibrate.timing.environment import machine_memory_bytes

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(int(psutil.virtual_memory().available), machine_memory_bytes() - int(psutil.Process().memory_info().rss))


TRIED_ONCE = 200_000_000
"""Parameters of the largest model that is run on two samples where a job is looked at: some seconds."""
TRIED_BEFORE_RUNS = 20_000_000
"""The same where a run may have to be taken over."""


@contextmanager
def users_code(job_path: str) -> Iterator[None]:
    """Around code that imports or exports a job: the process does not end in it, and a refusal stays one line.

    torch logs and prints whole graphs when it refuses a model. So standard error is held back until the block ends,
    and forgotten when an ``ExportError`` ends it, which says what a user needs of it.

    Raises:
        JobError: when the job's code ends the process.
    """
    from morph.contract.errors import ExportError, JobError

    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    held = io.StringIO()
    try:
        with redirect_stderr(held):
            yield
    except ExportError:
        held = io.StringIO()
        raise
    except SystemExit as error:
        raise JobError(
            "its code ends the process", source=job_path, value=f"exit({error.code!r})", allowed="code that returns"
        ) from error
    finally:
        logging.disable(before)
        sys.stderr.write(held.getvalue())


def warn_of_loss(job: Job, num_parameters: int, most_parameters: int) -> None:
    """Tell on standard error if the loss is not the mean over samples that it is taken for.

    Args:
        job: Its model is built and run, without gradients, on some samples.
        num_parameters: Elements of the model.
        most_parameters: A larger model is not tried.
    """
    for sentence in _warnings_of_loss(job, num_parameters, most_parameters):
        print(sentence, file=sys.stderr)


def _warnings_of_loss(job: Job, num_parameters: int, most_parameters: int) -> tuple[str, ...]:
    from morph.preflight.mean_loss import loss_warnings

    found = loss_warnings(job) if num_parameters <= most_parameters else ()
    return tuple(f"warning: {sentence}" for sentence in found)


def check_device(cluster: ClusterConfig, source: str) -> None:
    """Refuse a device that this machine lacks, where VMs share its devices.

    Raises:
        ConfigError: naming the cluster file.
    """
    from morph.contract.cluster import LocalVms
    from morph.contract.errors import ConfigError

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
    from morph.contract.job_file import JobFacts
    from morph.cutting.cache.cut_job import LoadedJob
    from morph.data.fingerprint import data_facts
    from morph.jobs.files import held

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
    from morph.contract.job_file import JobFacts
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
    from manager.host.handed_on import handed_on
    from morph.cutting import cut
    from morph.cutting.cuts.report import num_elements
    from morph.preflight.data_check import check_data
    from morph.runtime.workloads.job_workload import check_training

    job, exported = loaded.job, loaded.export()
    model = cut(exported, num_sections=profile.num_sections, micro_batch_size=profile.micro_batch_sizes[0])
    if model.fingerprint != profile.job.fingerprint:
        raise _other_profile(job, profile, job_path, "the profile is of another model")
    units = {unit.id: unit.sections for unit in model.units}
    known = {unit.id: unit.sections for unit in profile.units}
    if units != known:
        shown, allowed = (", ".join(sorted(names)) or "none" for names in (units, known))
        raise _other_profile(job, profile, job_path, "the profile is of other parameter units", shown, allowed)
    settings = check_training(job, model)
    check_data(job)
    notes = list(_warnings_of_loss(job, num_elements(model), TRIED_BEFORE_RUNS))
    of_dependencies = refuse_dependencies(job, exported, job_path, profile.num_sections, profile.micro_batch_sizes[0])
    compared = compare_once(job, exported, model)
    if compared.how != "whole" or not compared.num_steps:
        notes.append(f"note: {agreement_note(compared)}")
    notes += of_dependencies
    loaded.keep_for_workers(exported, model, profile.micro_batch_sizes, handed_on(os.environ))
    return _Findings(tuple(notes), settings, compared.how != "none")


def refuse_dependencies(
    job: Job, exported: ExportedJob, job_path: str, num_sections: int, micro_batch_size: int
) -> list[str]:
    """Refuse a job whose optimizer mixes parameter units (``morph trace-deps``); returns notes.

    Raises:
        JobError: naming the line of the first violation.
    """
    from morph.tracing import check_dependencies, require_no_violation

    report = check_dependencies(job, num_sections=num_sections, micro_batch_size=micro_batch_size, exported=exported)
    require_no_violation(report, job_path)
    return [f"note: {note}" for note in report.notes]
