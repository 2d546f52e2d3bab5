"""Before a job trains: its sections are compared with the plain model, once, and the result is kept for this user."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from morph.cutting import CutModel, ExportedJob
    from morph.job import Job
    from morph.tracing.agreement import Agreement


def compare_once(
    job: Job,
    exported: ExportedJob,
    model: CutModel,
    *,
    quick: bool = False,
    device: torch.device | None = None,
) -> Agreement:
    """Compare, unless this user did already; see ``morph.tracing.agreement``.

    Args:
        job: The job.
        exported: The exported job.
        model: The job as it is cut.
        quick: Leave alone what takes more than some seconds.
        device: Where to run; None: this machine's processor.

    Raises:
        ExportError: the sections do not compute what the plain model does.
        JobError: the plain model fails on real samples.
    """
    import torch

    from morph.tracing.agreement import PATIENT_FLOPS, QUICK_FLOPS, Limits, compare_with_plain
    from morph.tracing.kept_agreements import agreement_key, keep_agreement, kept_agreement
    from morph.user_cache import cache_folder

    place = device or torch.device("cpu")
    folder = cache_folder()
    key = agreement_key(job, exported, model.fingerprint, place)
    kept = kept_agreement(folder, key)
    if kept is not None:
        return kept
    limits = Limits(_available_bytes(place), QUICK_FLOPS if quick else PATIENT_FLOPS, place, shorten=not quick)
    found = compare_with_plain(job, exported, len(model.sections), limits)
    if found.how != "none":
        keep_agreement(folder, key, found)
    return found


def agreement_note(found: Agreement) -> str:
    """Say in one sentence what was compared."""
    if found.how == "none":
        return f"loss and gradients were not compared with the plain model: {found.reason}"
    what = "the plain model's" if found.how == "whole" else "the plain model's, both with fewer equal blocks"
    apart = "are equal to" if found.largest == 0 else f"are within {found.largest:.0e} of"
    text = f"loss and every gradient {apart} {what} ({found.num_seeds} x {found.num_samples} samples)"
    return text if found.reason is None else f"{text}: {found.reason}"


def _available_bytes(device: torch.device) -> int:
    import psutil
    import torch

    from calibrate.timing.environment import machine_memory_bytes

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(int(psutil.virtual_memory().available), machine_memory_bytes() - int(psutil.Process().memory_info().rss))
