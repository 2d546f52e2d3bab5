"""Checks of a job's training settings that need its cut model, but no weights: made before anything starts."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import Parameter

from morph.cutting import CutModel
from morph.cutting.trials.trial import run_users_code
from morph.job import Job
from morph.runtime.state.optimizer_state import build_optimizer, build_scheduler, group_numbers, scheduler_numbers
from morph.runtime.step.compiled import refuse_marked
from morph.runtime.workloads.evaluation import Evaluator

_FIELDS = (
    *(
        "batch_size",
        "seed",
        "accumulation",
        "precision",
        "boundary",
        "master_weights",
        "compile",
        "effective_loss_scaling",
        "clip_grad_norm",
    ),
    *("optimizer_device", "eval_every_steps", "eval_samples"),
)


def check_training(job: Job, model: CutModel) -> dict[str, str]:
    """Build each unit's optimizer and schedule without memory, and look at the evaluation data; returns the settings.

    Raises:
        JobError: an optimizer, a schedule or evaluation data that cannot be used.
    """
    found = settings(job, model)
    if job.compile:
        refuse_marked(model)
    if job.eval_data is not None:
        Evaluator(job, model, torch.device("cpu"))
    return found


def settings(job: Job, model: CutModel) -> dict[str, str]:
    """What a job trains with, as text by name: its fields, and numbers of each unit's optimizer and schedule.

    Raises:
        JobError: an optimizer or a schedule that cannot be used.
    """
    found = {name: repr(getattr(job, name)) for name in _FIELDS}
    for unit in model.units:
        if not unit.parameters:
            continue
        specs = {name: model.parameter_specs[name] for name in unit.parameters}
        parameters = {
            n: Parameter(torch.empty(shape, dtype=dtype, device="meta")) for n, (shape, dtype) in specs.items()
        }
        make = partial(build_optimizer, job.optimizer, parameters)
        optimizer = run_users_code(make, job, None, "optimizer")
        found[f"optimizer({unit.id})"] = type(optimizer).__name__
        groups = run_users_code(partial(group_numbers, optimizer), job, None, "optimizer")
        for index, group in enumerate(groups):
            found |= {f"optimizer({unit.id})[{index}][{key!r}]": repr(value) for key, value in group.items()}
        if job.lr_scheduler is not None:
            schedule = partial(build_scheduler, job.lr_scheduler, optimizer)
            numbers = scheduler_numbers(run_users_code(schedule, job, None, "lr_scheduler"))
            found |= {f"lr_scheduler({unit.id})[{key!r}]": repr(value) for key, value in numbers.items()}
    return found
