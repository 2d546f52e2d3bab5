"""Before a job trains: its sections are compared with the plain model, once, and the result is kept for this user."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
        JobError: the plain model fails on real samples; or the optimizer fails, or is another one for each unit alone.
    """
    import torch

    from morph.preflight.comparison_cache import agreement_key, keep_agreement, kept_agreement
    from morph.preflight.plain_comparison import PATIENT_FLOPS, QUICK_FLOPS, Limits, compare_with_plain
    from morph.runtime.workloads.job_checks import settings
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
