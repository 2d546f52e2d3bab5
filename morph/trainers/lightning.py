"""A job from a LightningModule with automatic optimization (``lightning`` or ``pytorch_lightning``).

::

    def job():
        return morph.lightning.job(module, train_loader, trainer=Trainer(gradient_clip_val=1.0))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from morph.contract.errors import JobError
from morph.jobs.existing import WholeModel, WholeModelOptimizer, order_of
from morph.jobs.job import Job
from morph.losses import Loss
from morph.runtime.state.optimizer_state import is_elementwise
from morph.trainers.lengths import Source, fields_of_lengths

SOURCE = "morph.lightning.job"
PRECISIONS = {"32-true": "fp32", "32": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16"}
NEVER_CALLED = (
    *("backward", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "configure_gradient_clipping"),
    *("transfer_batch_to_device", "configure_model", "configure_sharded_model", "manual_backward"),
)
"""Methods of a module that Morph does not run, besides those that begin with ``on_``."""
_HARMLESS = ("on_save_checkpoint", "on_load_checkpoint")


def job(module: Any, loader: Any, eval_loader: Any = None, *, trainer: Any = None, **replaced: Any) -> Job:
    """Return a job that trains a module as ``trainer.fit(module, loader)`` would.

    The module starts with its present weights, so every process must make the same weights: seed before it is made.

    Args:
        module: A LightningModule; its ``training_step`` returns the loss.
        loader: A DataLoader of the training data.
        eval_loader: A DataLoader of the evaluation data; ``eval_every_steps`` is then a further argument.
        trainer: A Trainer; only its settings of clipping, accumulation and precision are used.
        replaced: Fields of :class:`morph.Job` that replace those derived from the other arguments.

    Raises:
        JobError: a setting cannot be honoured, or a field is not right; the message names it.
    """
    _check(module, loader, trainer)
    whole = _optimizer_of(module)
    accumulated = getattr(trainer, "accumulate_grad_batches", 1)
    batch_size = loader.batch_size * accumulated
    precision = str(getattr(trainer, "precision", "32-true"))
    fields: dict[str, Any] = {
        "name": type(module).__name__,
        "model": WholeModel(module),
        "loss": _loss,
        "dataset": lambda: loader.dataset,
        "collate_fn": loader.collate_fn,
        "sampler": order_of(loader, batch_size),
        "optimizer": partial(_optimizer, whole, PRECISIONS[precision] != "fp16", accumulated > 1),
        "lr_scheduler": whole.scheduler if whole.has_scheduler else None,
        "batch_size": batch_size,
        "clip_grad_norm": getattr(trainer, "gradient_clip_val", None) or None,
        "precision": PRECISIONS[precision],
        "data_workers": loader.num_workers,
    }
    if eval_loader is not None:
        fields["eval_data"] = lambda: eval_loader.dataset
    others = [] if eval_loader is None else [eval_loader.dataset]
    source = Source("morph.lightning.job(module, loader", "loader.collate_fn", loader.collate_fn)
    return Job(**{**fields, **fields_of_lengths(loader, others, replaced, source), **replaced})


def _check(module: Any, loader: Any, trainer: Any) -> None:
    if not module.automatic_optimization:
        raise _refusal("automatic_optimization", False, "True; Morph calls the optimizer")
    lightning = next(base for base in type(module).__mro__ if base.__name__ == "LightningModule")
    for name in dir(type(module)):
        is_hook = name in NEVER_CALLED or (name.startswith("on_") and name not in _HARMLESS)
        if is_hook and getattr(type(module), name) is not getattr(lightning, name, None):
            raise _refusal(f"{type(module).__name__}.{name}", "a method of its own", "training_step, and what it calls")
    if loader.batch_size is None or not hasattr(loader.dataset, "__len__"):
        raise _refusal("loader", type(loader.dataset).__name__, "a loader of batches of a data set with a length")
    precision = str(getattr(trainer, "precision", "32-true"))
    if precision not in PRECISIONS:
        raise _refusal("precision", precision, ", ".join(map(repr, PRECISIONS)))
    if getattr(trainer, "gradient_clip_algorithm", None) not in (None, "norm"):
        raise _refusal("gradient_clip_algorithm", trainer.gradient_clip_algorithm, "'norm'")


def _refusal(field: str, value: object, allowed: str) -> JobError:
    shown = value if isinstance(value, int | float | str) else type(value).__name__
    return JobError("cannot be honoured", source=SOURCE, field=field, value=shown, allowed=allowed)


def _optimizer_of(module: Any) -> WholeModelOptimizer:
    """Return the optimizer and the schedule that ``configure_optimizers`` returns."""
    made = module.configure_optimizers()
    schedules: Sequence[Any] = ()
    if isinstance(made, tuple) and len(made) == 2 and all(isinstance(part, list) for part in made):
        made, schedules = made
    if isinstance(made, list | tuple) and len(made) == 1:
        made = made[0]
    if isinstance(made, Mapping):
        schedules, made = [made["lr_scheduler"]] if "lr_scheduler" in made else [], made["optimizer"]
    if not isinstance(made, torch.optim.Optimizer):
        raise _refusal("configure_optimizers", made, "one optimizer, and at most one schedule")
    if len(schedules) > 1:
        raise _refusal("configure_optimizers", f"{len(schedules)} schedules", "at most one schedule")
    schedule: Any = schedules[0] if schedules else None
    if isinstance(schedule, Mapping):
        each = (schedule.get("interval", "epoch"), schedule.get("frequency", 1))
        schedule = schedule["scheduler"]
    else:
        each = ("epoch", 1)
    if schedule is not None and each != ("step", 1):
        allowed = '{"scheduler": schedule, "interval": "step"}: Morph steps schedules with the optimizer'
        raise _refusal("configure_optimizers", f"a schedule by {each[1]} {each[0]}", allowed)
    return WholeModelOptimizer(module.named_parameters(), made, schedule)


def _optimizer(
    whole: WholeModelOptimizer, with_closure: bool, accumulates: bool, named: Iterable[tuple[str, Parameter]]
) -> Optimizer:
    def step(optimizer: Optimizer, _closure: None = None) -> None:
        _step_with_closure(optimizer, accumulates)

    made = whole.optimizer(named)
    if with_closure and not is_elementwise(made):
        vars(made)["step"] = MethodType(step, made)
    return made


def _step_with_closure(optimizer: Optimizer, accumulates: bool) -> None:
    """Make a step as Lightning does, where a closure computes the gradients: hooks, and what the optimizer does before
    it calls the closure, see no gradients, or those of earlier accumulated batches alone.
    """
    gradients = [(p, p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    earlier = [torch.zeros_like(gradient) if accumulates else None for _, gradient in gradients]
    calls: list[None] = []

    def closure() -> None:
        for (parameter, gradient), before in zip(gradients, earlier, strict=True):
            if before is not None and not calls and (parameter.grad is not before or before._version):
                allowed = "1: a hook, or the optimizer's step, changes the gradients of earlier batches alone"
                raise _refusal("accumulate_grad_batches", "more than 1", allowed)
            parameter.grad = gradient
        calls.append(None)

    for (parameter, _), before in zip(gradients, earlier, strict=True):
        parameter.grad = before
    type(optimizer).step(optimizer, closure)  # type: ignore[arg-type] # torch's closures return the loss
    if len(calls) != 1:
        name, shown = f"{type(optimizer).__name__}.step", f"calls its closure {len(calls)} times"
        raise _refusal(name, shown, "an optimizer that computes gradients once per step")


def _loss(model: Any, batch: Any) -> Any:
    """Return the loss of ``training_step``; the tensors that it logs become metrics."""
    metrics: dict[str, Tensor] = {}

    def log(name: str, value: Any, *_: Any, **__: Any) -> None:
        if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point():
            metrics[name] = value.detach().reshape(())

    def log_dict(values: Mapping[str, Any], *_: Any, **__: Any) -> None:
        for name, value in values.items():
            log(name, value)

    vars(model).update(log=log, log_dict=log_dict)
    try:
        result = model.training_step(batch, 0)
    finally:
        vars(model).pop("log")
        vars(model).pop("log_dict")
    loss: Tensor | Loss = result["loss"] if isinstance(result, Mapping) else result
    metrics.pop("loss", None)
    return (loss, metrics) if metrics else loss
