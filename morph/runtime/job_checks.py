"""Checks of a job's training settings that need its cut model, but no weights: made before anything starts."""

from __future__ import annotations

import torch
from torch.nn import Parameter

from morph.cutting import CutModel
from morph.job import Job
from morph.runtime.evaluation import Evaluator
from morph.runtime.optimizer_state import build_optimizer, build_scheduler, group_numbers


def check_training(job: Job, model: CutModel) -> None:
    """Build each unit's optimizer and schedule without memory, and look at the evaluation data.

    Raises:
        JobError: an optimizer, a schedule or evaluation data that cannot be used.
    """
    for unit in model.units:
        specs = {name: model.parameter_specs[name] for name in unit.parameters}
        parameters = {
            n: Parameter(torch.empty(shape, dtype=dtype, device="meta")) for n, (shape, dtype) in specs.items()
        }
        optimizer = build_optimizer(job.optimizer, parameters)
        group_numbers(optimizer)
        if job.lr_scheduler is not None:
            build_scheduler(job.lr_scheduler, optimizer)
    if job.eval_data is not None:
        Evaluator(job, model, torch.device("cpu"))
