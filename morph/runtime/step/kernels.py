"""Restricts the kernels that torch may use: with exact sums, to those whose results have the same bits each time.

A gradient of one micro-batch enters the sum of every shape, and is computed again after a loss, so ``exact`` is only as
exact as the kernels. On request, torch uses deterministic kernels (``torch.use_deterministic_algorithms``), also in the
backward of flash and memory-efficient attention (``attention_backward.cu``), and refuses operations that have none.
cuDNN's attention has no deterministic backward, so it is switched off.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import torch

from morph.contract.errors import JobError, wrong_job
from morph.jobs.job import Accumulation

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_WORKSPACES = (":4096:8", ":16:8")
"""Workspaces with which cuBLAS gives the same bits each time (its documentation, "Results reproducibility")."""
_NONE_DETERMINISTIC = re.compile(r"^(\S+) does not have a deterministic implementation")


@dataclass(frozen=True)
class Kernels:
    """Settings of torch; ``determinism`` 2: use deterministic kernels, and refuse operations without one.

    ``cudnn_benchmark``: choose convolutions by speed; ``cudnn_attention``: allow cuDNN's kernels too.
    """

    determinism: int
    cudnn_benchmark: bool
    cudnn_attention: bool


def kernels_for(accumulation: Accumulation, now: Kernels) -> Kernels:
    """Return the settings for a job's sections; for ``fast``, the present ones."""
    if accumulation == "fast":
        return now
    return Kernels(determinism=2, cudnn_benchmark=False, cudnn_attention=False)


def kernels_now() -> Kernels:
    """Return the present settings."""
    return Kernels(
        determinism=torch.get_deterministic_debug_mode(),
        cudnn_benchmark=torch.backends.cudnn.benchmark,
        cudnn_attention=torch.backends.cuda.cudnn_sdp_enabled(),  # type: ignore[no-untyped-call] # torch ships no types
    )


def set_kernels(wanted: Kernels) -> None:
    """Apply the settings, for the whole process."""
    torch.set_deterministic_debug_mode(wanted.determinism)
    # otherwise there is a pass over every new tensor
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # set by a property
    torch.backends.cudnn.benchmark = wanted.cudnn_benchmark
    torch.backends.cuda.enable_cudnn_sdp(wanted.cudnn_attention)


def prepare_cublas() -> None:
    """Give cuBLAS a workspace for each stream, before CUDA starts. Raises JobError if the environment forbids that."""
    workspace = os.environ.setdefault(CUBLAS_VARIABLE, CUBLAS_WORKSPACES[0])
    if workspace not in CUBLAS_WORKSPACES:
        raise JobError(
            "products on a GPU would not have the same bits each time",
            source="environment",
            field=CUBLAS_VARIABLE,
            value=workspace,
            allowed=" or ".join(CUBLAS_WORKSPACES),
        )


def raise_if_refused(error: RuntimeError, first_line: str | None) -> None:
    """Raise a one-sentence JobError in place of torch's; ``first_line``: ``file:line`` of the section, if known."""
    refused = _NONE_DETERMINISTIC.match(str(error))
    if refused is not None:
        where = f", in the section that begins at {first_line}" if first_line else ""
        raise wrong_job(
            "accumulation",
            f"{refused.group(1)} has no deterministic kernel on this device{where}",
            "exact",
            "'fast', or another operation in the model",
        ) from error
