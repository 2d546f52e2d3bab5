"""What a job says about applying gradients, as each parameter unit needs it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from morph.contract.decided import LossScale
from morph.jobs.job import Job
from morph.runtime.state.optimizer_state import MakeScheduler


@dataclass(frozen=True)
class UpdateRules:
    """See the fields of the same names in ``Job``.

    ``loss_scale`` is the one of version 0. ``optimizer_in_host_memory``: the optimizer works on a copy of the
    parameters in host memory, which is copied to the device after each step. ``master_weights``: likewise on fp32
    copies of parameters that have fewer bits. ``code``: digest of the job's code.
    """

    make_scheduler: MakeScheduler | None = None
    clip_grad_norm: float | None = None
    loss_scale: LossScale | None = None
    optimizer_in_host_memory: bool = False
    master_weights: bool = False
    code: str = ""


def update_rules(job: Job, device: torch.device, code: str = "") -> UpdateRules:
    """The rules of a job, with this digest of its code, on one kind of device."""
    scaling, scale = job.effective_loss_scaling, None
    if scaling is not None:
        _, bits = math.frexp(scaling.initial)
        scale = LossScale(exponent=bits - 1, growth_steps=scaling.growth_steps)
    return UpdateRules(
        make_scheduler=job.lr_scheduler,
        clip_grad_norm=job.clip_grad_norm,
        loss_scale=scale,
        optimizer_in_host_memory=job.optimizer_device == "cpu" and device.type != "cpu",
        master_weights=job.master_weights,
        code=code,
    )
