"""A job from a LightningModule with automatic optimization (``lightning`` or ``pytorch_lightning``).

::

    def job():
        return morph.lightning.job(module, train_loader, trainer=Trainer(gradient_clip_val=1.0))

``morph.trainers.lightning_rules`` lists what of modules and of Trainers is honoured.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from dis import get_instructions
from functools import partial
from itertools import islice
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from morph.contract.errors import JobError
from morph.cutting.source.locate import definition_line
from morph.jobs.existing import WholeModel, WholeModelOptimizer, order_of
from morph.jobs.job import Job, OwnProgram, OwnSteps, ShortStep
from morph.losses import Loss
from morph.runtime.state.optimizer_state import is_elementwise
from morph.trainers.lengths import JobCall, fields_of_lengths
from morph.trainers.lightning_rules import (
    PRECISIONS,
    SOURCE,
    check_module,
    check_trainer,
    lightning_class,
    refusal,
)
from morph.trainers.live_state import Unknown, branches, unknown, users_line

STEP = "number of the step"
"""Name of the batch's entry that Morph replaces by the number of the step."""


def job(module: Any, loader: Any, eval_loader: Any = None, *, trainer: Any = None, **replaced: Any) -> Job:
    """Return a job that trains a module as ``trainer.fit(module, loader)`` would.

    The module starts with its present weights, so every process must make the same weights: seed before it is made.

    Args:
        module: A LightningModule; its ``training_step`` returns the loss.
        eval_loader: For evaluations; ``eval_every_steps`` is then a further argument.
        trainer: A Trainer, whose settings are honoured or refused.
        replaced: Fields of :class:`morph.Job` that replace those derived from the other arguments.

    Raises:
        JobError: a setting cannot be honoured, or a field is not right; the message names it.
    """
    given = dict(replaced)

    def run(num_steps_made: int, most_samples: int) -> OwnSteps | str:
        from morph.trainers.lightning_steps import own_steps

        return own_steps(module, loader, trainer, given, _job, num_steps_made, most_samples)

    made = _job(module, loader, trainer, eval_loader, **replaced)
    return replace(made, own_program=OwnProgram("Trainer.fit", run))


def _job(module: Any, loader: Any, trainer: Any, eval_loader: Any = None, **replaced: Any) -> Job:
    evaluates = eval_loader is not None or type(module).val_dataloader is not lightning_class(module).val_dataloader
    check_module(module, evaluates=evaluates)
    if not isinstance(loader, DataLoader) or loader.batch_size is None or not hasattr(loader.dataset, "__len__"):
        shown = type(getattr(loader, "dataset", loader)).__name__
        raise refusal("loader", shown, "a DataLoader with a batch_size, of a data set with a length")
    check_trainer(trainer, (), evaluates=evaluates)
    length = _Length.of(trainer, loader)
    with _attached(module, _StandIn(length, 0, 0)):
        module.setup("fit")
        callbacks = module.configure_callbacks()
        whole = _optimizer_of(module)
    check_trainer(None, callbacks if isinstance(callbacks, Sequence) else [callbacks], evaluates=evaluates)
    # the last step of an epoch may have fewer batches, one of them short, and is divided by the number of a whole step
    num_samples = min(len(loader.sampler), length.num_batches * loader.batch_size)  # type: ignore[arg-type] # it has one
    is_by_batch = length.accumulated > 1 and num_samples % (loader.batch_size * length.accumulated) > 0
    batch_size = loader.batch_size * length.accumulated
    if length.accumulated == 1:  # one batch may hold the whole data set
        batch_size = min(batch_size, num_samples)
    precision = PRECISIONS[getattr(trainer, "precision", "32-true")]
    fields: dict[str, Any] = {
        "name": type(module).__name__,
        "model": WholeModel(module),
        "loss": partial(_loss, length),
        "dataset": lambda: loader.dataset,
        "collate_fn": partial(_collated_with_step, loader.collate_fn),
        "step_entry": None if "collate_fn" in replaced else STEP,
        "sampler": _Order(loader, length),
        "epoch_end": ShortStep(of_whole=True) if is_by_batch else "short",
        "optimizer": partial(_optimizer, whole, precision != "fp16", length.accumulated > 1),
        "lr_scheduler": whole.scheduler if whole.has_scheduler else None,
        "batch_size": batch_size,
        "micro_batch_size": loader.batch_size if is_by_batch else None,
        "clip_grad_norm": getattr(trainer, "gradient_clip_val", None) or None,
        "precision": precision,
        "data_workers": loader.num_workers,
    }
    if eval_loader is not None:
        fields["eval_data"] = lambda: eval_loader.dataset
    others = [] if eval_loader is None else [eval_loader.dataset]
    source = JobCall("morph.lightning.job(module, loader", "loader.collate_fn", loader.collate_fn)
    return Job(**{**fields, **fields_of_lengths(loader, others, replaced, source), **replaced})


def num_steps(trainer: Any, loader: Any) -> int:
    """Return how many steps ``trainer.fit(module, loader)`` would make: the value for ``--steps``.

    Raises JobError if it would train for ever.
    """
    count = _Length.of(trainer, loader).num_steps
    if math.isinf(count):
        raise refusal("max_epochs", -1, "a number of epochs, or max_steps")
    return int(count)


class _Order:
    """The order in which a loader reads samples, as ``Job.sampler``; generators of its own begin where they are now.

    Lightning stops at the last batch and does not let the sampler draw what it draws at its end.
    """

    def __init__(self, loader: DataLoader[Any], length: _Length) -> None:
        self._loader, self._num_batches = loader, length.num_batches
        self._list = order_of(loader)
        given = (loader.generator, getattr(loader.sampler, "generator", None))
        self._generators = list({id(one): one for one in given if one is not None}.values())
        self._states = [[one.get_state() for one in self._generators]]
        """Of the generators, when each epoch begins."""

    def __call__(self, dataset: Any, seed: int, epoch: int) -> list[int]:
        if not self._generators:
            return self._list(dataset, seed, epoch)[: self._num_batches * (self._loader.batch_size or 1)]
        loader = self._loader
        numbers: Any = range(len(dataset))
        for listed in range(min(epoch, len(self._states) - 1), epoch + 1):
            for generator, state in zip(self._generators, self._states[listed], strict=True):
                generator.set_state(state)
            batches = DataLoader(
                numbers, batch_sampler=loader.batch_sampler, collate_fn=list, generator=loader.generator
            )
            found = [number for batch in islice(batches, self._num_batches) for number in batch]
            self._states[listed + 1 :] = [[each.get_state() for each in self._generators]]
        return found


@dataclass(frozen=True)
class _Length:
    """How long ``Trainer.fit`` trains. ``num_batches``: batches of an epoch. ``accumulated``: batches of a step."""

    trainer: Any
    num_batches: int
    accumulated: int

    @classmethod
    def of(cls, trainer: Any, loader: DataLoader[Any]) -> _Length:
        limit = getattr(trainer, "limit_train_batches", 1.0)
        num_batches = min(len(loader), limit) if isinstance(limit, int) else int(len(loader) * limit)
        return cls(trainer, num_batches, getattr(trainer, "accumulate_grad_batches", 1))

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch; the last one may have fewer batches."""
        return math.ceil(self.num_batches / self.accumulated)

    @property
    def num_steps(self) -> float:
        max_steps = self.trainer.max_steps if self.trainer.max_steps != -1 else math.inf
        epochs = self.trainer.max_epochs
        if epochs is None:
            epochs = 1000 if math.isinf(max_steps) else -1
        return max_steps if epochs == -1 else min(max_steps, self.steps_per_epoch * max(epochs, 1))


class _StandIn:
    """Stands for the Trainer to which Lightning attaches a module; other attributes are refused by their name.

    The counters ``global_step`` and ``current_epoch`` are tensors without a dimension within a step.
    """

    def __init__(self, length: _Length, global_step: Any, current_epoch: Any) -> None:
        self._length, self._counters = length, {"global_step": global_step, "current_epoch": current_epoch}
        self.read: dict[str, str] = {}
        self.is_global_zero, self.global_rank, self.local_rank = True, 0, 0
        self.world_size, self.num_nodes, self.num_devices = 1, 1, 1
        self.logger, self.progress_bar_callback = None, None
        self.loggers: list[Any] = []
        self.accumulate_grad_batches, self.num_training_batches = length.accumulated, length.num_batches
        if length.trainer is not None:
            self.max_steps, self.max_epochs = length.trainer.max_steps, length.trainer.max_epochs
            self.estimated_stepping_batches = length.num_steps

    def __getattr__(self, name: str) -> Any:
        if name not in self._counters:
            allowed = "counters, max_steps, max_epochs and estimated_stepping_batches of the Trainer; or trainer=..."
            raise unknown(f"self.trainer.{name}", allowed)
        self.read[f"self.{name}"] = users_line()
        return self._counters[name]


@contextmanager
def _attached(module: Any, trainer: _StandIn, **methods: Any) -> Iterator[None]:
    """Attach a module, and those within it, to a Trainer, with some methods replaced."""
    kind = lightning_class(module)
    parts = [part for part in module.modules() if isinstance(part, kind)]
    module.trainer = trainer  # attaches direct children too
    try:
        for part in parts:
            vars(part).update(methods)
        yield
    finally:
        module.trainer = None
        for part in parts:
            for name in methods:
                vars(part).pop(name, None)


def _collated_with_step(collate: Any, samples: list[Any]) -> dict[str, Any]:
    """Return a batch beside an entry for the number of the step; the batch's own entries keep their names."""
    return {"": collate(samples), STEP: torch.zeros(len(samples), dtype=torch.int64)}


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
        raise refusal("configure_optimizers", made, "one optimizer, and at most one schedule")
    if len(schedules) > 1:
        raise refusal("configure_optimizers", f"{len(schedules)} schedules", "at most one schedule")
    schedule: Any = schedules[0] if schedules else None
    if isinstance(schedule, Mapping):
        each = (schedule.get("interval", "epoch"), schedule.get("frequency", 1))
        schedule = schedule["scheduler"]
    else:
        each = ("epoch", 1)
    if schedule is not None and each != ("step", 1):
        allowed = '{"scheduler": schedule, "interval": "step"}: Morph steps schedules with the optimizer'
        raise refusal("configure_optimizers", f"a schedule by {each[1]} {each[0]}", allowed)
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
                raise refusal("accumulate_grad_batches", "more than 1", allowed)
            parameter.grad = gradient
        calls.append(None)

    for (parameter, _), before in zip(gradients, earlier, strict=True):
        parameter.grad = before
    type(optimizer).step(optimizer, closure)  # type: ignore[arg-type] # torch's closures return the loss
    if len(calls) != 1:
        name, shown = f"{type(optimizer).__name__}.step", f"calls its closure {len(calls)} times"
        raise refusal(name, shown, "an optimizer that computes gradients once per step")


def _loss(length: _Length, model: Any, batch: Any) -> Any:
    """Return the loss of ``training_step``; the tensors that it logs become metrics.

    Evaluations log the same ones, so that a prefix "train" would be wrong there.
    """
    metrics: dict[str, Tensor] = {}

    def log(name: str, value: Any, *_: Any, **__: Any) -> None:
        if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point():
            own = name.removeprefix("train").lstrip("_/") if name.startswith(("train_", "train/")) else name
            metrics[own or name] = value.detach().reshape(())

    def log_dict(values: Mapping[str, Any], *_: Any, **__: Any) -> None:
        for name, value in values.items():
            log(name, value)

    def optimizers(*_: Any, **__: Any) -> Any:
        raise unknown("self.optimizers()", "configure_optimizers; Morph logs learning rates by itself")

    step: Any = Unknown("the step", "collate_fn and step_entry as morph.lightning.job sets them")
    index: Any = step
    if isinstance(batch, Mapping) and STEP in batch:
        step, batch = batch[STEP][0], batch[""]
        index = step % length.steps_per_epoch
        if length.accumulated > 1:
            index = Unknown("batch_idx", "accumulate_grad_batches=1, or self.global_step")
    epoch = step // length.steps_per_epoch if isinstance(step, Tensor) else step
    trainer = _StandIn(length, step, epoch)
    methods = {"log": log, "log_dict": log_dict, "optimizers": optimizers, "lr_schedulers": optimizers}
    with _attached(model, trainer, **methods):
        try:
            result = model.training_step(*_arguments(model.training_step, batch, index, trainer))
        except Exception as error:
            if trainer.read and "DataDependent" in type(error).__name__:
                raise branches(trainer.read) from error
            raise
    if result is None:
        allowed = "a loss for every batch: multiply it by 0, or leave the samples out of the data set"
        raise JobError("returns None", source=SOURCE, field=f"{type(model).__name__}.training_step", allowed=allowed)
    loss: Tensor | Loss = result["loss"] if isinstance(result, Mapping) else result
    metrics.pop("loss", None)
    return (loss, metrics) if metrics else loss


def _arguments(training_step: Any, batch: Any, index: Any, trainer: _StandIn) -> tuple[Any, ...]:
    """Return the arguments of ``training_step``, which need not take the number of the batch."""
    function = inspect.unwrap(training_step)
    taken = inspect.getfullargspec(function)
    names = taken.args[1:]
    if "dataloader_iter" in names:
        raise refusal("training_step", "dataloader_iter", "(self, batch, batch_idx)")
    if len(names) < 2 and "batch_idx" not in names and taken.varargs is None:
        return (batch,)
    used = {read.argval for read in get_instructions(function) if read.opname.startswith("LOAD_FAST")}
    if used & {*names[1:], taken.varargs}:
        trainer.read["batch_idx"] = definition_line(function)
    return batch, index
