"""Checks of a job's training settings that need its cut model, but no weights: made before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from morph.cutting import CutModel
from morph.cutting.trial_run.trial import run_users_code
from morph.jobs.job import Job
from morph.runtime.state.optimizer_state import build_optimizer, build_scheduler, group_numbers, scheduler_numbers
from morph.runtime.step.compiled import refuse_marked
from morph.runtime.workloads.evaluation import Evaluator

_SMALL = 4
_FIELDS = (
    *(
        "batch_size",
        "micro_batch_size",
        "num_sections",
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
    found = settings(job, model) | _needs(job, model)
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
        found[f"optimizer({unit.id}) groups"] = str(len(optimizer.param_groups))
        found[f"lr_scheduler({unit.id})"] = "None"
        groups = run_users_code(partial(group_numbers, optimizer), job, None, "optimizer")
        for index, group in enumerate(groups):
            found |= {f"optimizer({unit.id})[{index}][{key!r}]": repr(value) for key, value in group.items()}
        if job.lr_scheduler is not None:
            schedule = partial(build_scheduler, job.lr_scheduler, optimizer)
            scheduler = run_users_code(schedule, job, None, "lr_scheduler")
            found[f"lr_scheduler({unit.id})"] = type(scheduler).__name__
            numbers = scheduler_numbers(scheduler)
            found |= {f"lr_scheduler({unit.id})[{key!r}]": repr(value) for key, value in numbers.items()}
    return found


def _needs(job: Job, model: CutModel) -> dict[str, str]:
    """Keys of the state without which each unit's optimizer cannot make its second step, tried on small parameters.

    An optimizer that does not run on those is left out.
    """
    found: dict[str, str] = {}
    for unit in model.units:
        shapes = [model.parameter_specs[name] for name in unit.parameters]
        small = [(tuple(min(size, _SMALL) for size in shape), dtype) for shape, dtype in shapes]
        make = partial(_stepped, job, unit.parameters, small)
        with torch.random.fork_rng(devices=[]), suppress(Exception):
            keys = sorted({key for entries in make().state.values() for key in entries}) if shapes else []
            found[f"optimizer({unit.id}) needs"] = ", ".join(key for key in keys if not _steps_without(make(), key))
    return found


def _stepped(job: Job, names: Sequence[str], specs: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> Optimizer:
    parameters = [Parameter(torch.ones(shape, dtype=dtype)) for shape, dtype in specs]
    optimizer = build_optimizer(job.optimizer, dict(zip(names, parameters, strict=True)))
    _step(optimizer)
    return optimizer


def _steps_without(optimizer: Optimizer, key: str) -> bool:
    for entries in optimizer.state.values():
        entries.pop(key, None)
    try:
        _step(optimizer)
    except Exception:
        return False
    return True


def _step(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
