"""Checks that need the model itself, made before anything is started or written."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from morph.contract.profile import Profile


def check_job(job_path: str, profile: Profile) -> None:
    """Cut the job and hold it against the profile.

    Raises:
        JobError: a wrong job file.
        ExportError: a model that torch.export refuses.
        ProfileError: a profile of another model, or of another batch size.
    """
    import torch

    from morph.contract.errors import ProfileError
    from morph.cutting import cut, export_job
    from morph.job import load_job

    torch.set_num_threads(1)
    job = load_job(job_path)
    if job.batch_size != profile.job.batch_size:
        raise ProfileError(
            "was made for another global batch; calibrate again",
            source=job_path,
            field="batch_size",
            value=job.batch_size,
            allowed=str(profile.job.batch_size),
        )
    smallest = profile.micro_batch_sizes[0]
    model = cut(export_job(job), num_sections=profile.num_sections, micro_batch_size=smallest)
    if model.fingerprint != profile.job.fingerprint:
        raise ProfileError(
            "the profile belongs to another model; calibrate again",
            source=job_path,
            field="fingerprint",
            value=model.fingerprint[:12],
            allowed=profile.job.fingerprint[:12],
        )
