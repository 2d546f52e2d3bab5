"""Makes a job from a Trainer of transformers: ``morph.hf.job(trainer)`` replaces ``trainer.train()``.

::

    def main():
        ...  # the script as it is
        return morph.hf.job(trainer)

``morph run script.py:main`` then calls ``main`` in every process. :data:`morph.trainers.arguments.ARGUMENTS` lists the
arguments of the Trainer, and how Morph treats each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Literal

from morph.jobs.job import Best, Job, OwnProgram, OwnSteps, ShortStep
from morph.losses import Loss, PerSample
from morph.trainers.arguments import GROUPED, check_arguments, check_methods, refusal

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import DataLoader
    from transformers import Trainer

PREDICTIONS, LABELS = "predictions", "label_ids"
STEP = "number of the step"
"""Name of the batch's entry that Morph replaces by the number of the step."""


def job(trainer: Trainer, **replaced: Any) -> Job:
    """Return a job that trains what ``trainer.train()`` would train.

    Loss, optimizer with its groups, schedule, collator and data sets are the Trainer's; subclasses may override
    ``compute_loss``, ``create_optimizer``, ``create_scheduler``, ``get_train_dataloader`` and ``get_eval_dataloader``.
    The model starts with the present weights of ``trainer.model``, so every process must make the same weights: call
    ``transformers.set_seed`` before a model with random weights is made.

    Args:
        trainer: A Trainer that has not trained yet.
        replaced: Fields of :class:`morph.Job` that replace those derived from the Trainer. With ``model``, a function
            that makes the model, the Trainer's own may be on the ``meta`` device, where it takes no memory.

    Raises:
        JobError: an argument cannot be honoured, or a field is not right; the message names the first one.
    """
    given = dict(replaced)

    def own_steps(num_steps_made: int, most_samples: int) -> OwnSteps | str:
        from morph.trainers.own_steps import own_steps as make

        return make(trainer, given, _job, num_steps(trainer), num_steps_made, most_samples)

    return replace(_job(trainer, **replaced), own_program=OwnProgram("trainer.train()", own_steps))


def _job(trainer: Trainer, **replaced: Any) -> Job:
    from morph.jobs.existing import WholeModel, order_of

    _check(trainer, replaced)
    _align_special_tokens(trainer, trainer.model)
    if "model" in replaced:
        replaced["model"] = _aligned(trainer, replaced["model"])
    args = trainer.args
    loader = trainer.get_train_dataloader()
    if "sampler" not in replaced:
        _check_order(loader, args)
    loss, epoch_end = _loss_of(trainer, loader)
    is_by_batch = isinstance(epoch_end, ShortStep)
    batch_size = args.train_batch_size * args.gradient_accumulation_steps
    if args.gradient_accumulation_steps == 1:  # one batch may hold the whole data set
        batch_size = min(batch_size, len(loader.dataset))
    fields: dict[str, Any] = {
        "name": _name(trainer),
        "model": WholeModel(trainer.model),
        "loss": loss,
        "dataset": lambda: loader.dataset,
        "collate_fn": partial(_collated_with_step, loader.collate_fn),
        "step_entry": None if "collate_fn" in replaced else STEP,
        "sampler": order_of(loader),
        "epoch_end": epoch_end,
        "optimizer": _optimizer_of(trainer),
        "lr_scheduler": _schedule_of(trainer),
        "batch_size": batch_size,
        "micro_batch_size": args.train_batch_size if is_by_batch else None,
        "seed": args.seed,
        "clip_grad_norm": args.max_grad_norm if args.max_grad_norm > 0 else math.inf,
        "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        "compile": bool(args.torch_compile),
        "data_workers": args.dataloader_num_workers,
    }
    fields |= _evaluation_of(trainer)
    lengths = _lengths_of(trainer, loader, fields.get("eval_data"), replaced)
    if lengths and is_by_batch and _has_loss_by_token(trainer, loader, lengths):
        allowed = "1, and a larger per_device_train_batch_size: the loss is a mean over the tokens of a batch"
        raise refusal("gradient_accumulation_steps", args.gradient_accumulation_steps, allowed)
    return Job(**{**fields, **lengths, **replaced})


def num_steps(trainer: Trainer) -> int:
    """Return how many steps ``trainer.train()`` would make: the schedule's length, and the value for ``--steps``."""
    args: Any = trainer.args
    return int(args.max_steps) if args.max_steps > 0 else math.ceil(args.num_train_epochs * _steps_per_epoch(trainer))


def _steps_per_epoch(trainer: Trainer) -> int:
    accumulated: int = trainer.args.gradient_accumulation_steps
    return max(1, math.ceil(len(trainer.get_train_dataloader()) / accumulated))


def _check(trainer: Trainer, replaced: Mapping[str, Any]) -> None:
    check_arguments(trainer.args)
    check_methods(trainer)
    if not hasattr(trainer.train_dataset, "__len__"):
        raise refusal("train_dataset", type(trainer.train_dataset), "a data set with a length and numbered items")
    if _has_no_numbers(trainer) and "model" not in replaced:
        raise refusal("model", "without numbers, on the meta device", "another argument of morph.hf.job: model=make")
    if any(parameter.device.type not in ("cpu", "meta") for parameter in trainer.model.parameters()):
        raise refusal("use_cpu", False, "True: each worker moves its sections to its device")
    if trainer.args.eval_strategy != "no":
        if isinstance(trainer.eval_dataset, Mapping):
            raise refusal("eval_dataset", "several data sets", "one data set")
        if getattr(trainer.args, "predict_with_generate", False):
            allowed = "False, or eval_strategy='no'; to generate while training, `sample` as another argument"
            raise refusal("predict_with_generate", True, allowed)


def _check_order(loader: DataLoader[Any], args: Any) -> None:
    """Refuse batches that are not the Trainer's, and an order that nobody but the Trainer's own loop can draw."""
    from torch.utils.data import BatchSampler, SequentialSampler

    from morph.data.seeding import own_generators

    batches: Any = loader.batch_sampler
    while hasattr(batches, "batch_sampler"):  # a wrapper of accelerate
        batches = batches.batch_sampler
    if type(batches) is not BatchSampler:
        allowed = "a DataLoader without a batch_sampler; its order, as a sampler"
        raise refusal("get_train_dataloader: batch_sampler", type(batches), allowed)
    if batches.batch_size != args.train_batch_size:
        raise refusal("get_train_dataloader: batch_size", batches.batch_size, f"{args.train_batch_size}, as in args")
    sampler = batches.sampler
    if hasattr(sampler, "set_epoch") or isinstance(sampler, SequentialSampler):
        return
    orders = []
    for seed in (0, 1):
        with own_generators(seed):
            orders.append(list(sampler))
    if orders[0] != orders[1]:
        allowed = f"one with a seed of its own and set_epoch; {GROUPED}"
        raise refusal("the sampler, which draws from the global generators,", type(sampler), allowed)


def _collated_with_step(collate: Any, samples: list[Any]) -> dict[str, Any]:
    """Return a batch that also has an entry for the number of the step."""
    import torch

    return {**collate(samples), STEP: torch.zeros(len(samples), dtype=torch.int64)}


@contextmanager
def _live(trainer: Any, model: Any, step: Any) -> Iterator[None]:
    """Let ``compute_loss`` read the Trainer's state as it is at a step, and its model; other reads are refused.

    ``step``: the number of the step, an int64 tensor without a dimension; None if it is not known.
    """
    from morph.trainers.live_state import Unknown, branches

    def unknown(name: str) -> Any:
        return Unknown(f"self.{name}", "self.state.global_step, self.state.epoch and self.state.max_steps")

    state = _State(trainer, step)
    held = {"state": state, "model": model, "model_wrapped": model, "is_in_train": True}
    held |= {name: unknown(name) for name in ("optimizer", "lr_scheduler", "control", "callback_handler")}
    before = {name: vars(trainer)[name] for name in held if name in vars(trainer)}
    vars(trainer).update(held)
    try:
        yield
    except Exception as error:
        if state.read and "DataDependent" in type(error).__name__:
            raise branches(state.read) from error
        raise
    finally:
        for name in held:
            vars(trainer).pop(name)
        vars(trainer).update(before)


class _State:
    """Stands for ``trainer.state`` within a step; attributes that it lacks are refused by their name."""

    def __init__(self, trainer: Trainer, step: Any) -> None:
        self._trainer, self._step = trainer, step
        self.read: dict[str, str] = {}
        """Lines that read what changes from step to step, by name."""
        self.is_local_process_zero = self.is_world_process_zero = True

    @property
    def max_steps(self) -> int:
        return num_steps(self._trainer)

    def __getattr__(self, name: str) -> Any:
        from morph.trainers.live_state import unknown, users_line

        if self._step is None or name not in ("global_step", "epoch"):
            raise unknown(f"self.state.{name}", "self.state.global_step, self.state.epoch and self.state.max_steps")
        self.read[f"self.state.{name}"] = users_line()
        if name == "global_step":
            return self._step
        num_batches, accumulated = (
            len(self._trainer.get_train_dataloader()),
            self._trainer.args.gradient_accumulation_steps,
        )
        steps = _steps_per_epoch(self._trainer)
        return self._step // steps + (self._step % steps * accumulated).double() / num_batches


def _align_special_tokens(trainer: Trainer, model: Any) -> None:
    """Give a model the tokenizer's ids of padding, beginning and end, as ``trainer.train()`` does first."""
    from transformers import PreTrainedTokenizerBase, ProcessorMixin, trainer_utils

    align = getattr(trainer_utils, "align_special_tokens", None)
    has_tokens = isinstance(trainer.processing_class, PreTrainedTokenizerBase | ProcessorMixin)
    if align is not None and has_tokens and hasattr(model, "config"):
        align(model, trainer.processing_class)


def _aligned(trainer: Trainer, make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    @wraps(make)
    def model() -> nn.Module:
        made = make()
        _align_special_tokens(trainer, made)
        return made

    return model


def _lengths_of(trainer: Any, loader: DataLoader[Any], eval_data: Any, replaced: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a job whose collator pads to the longest sample of each batch."""
    from morph.trainers.lengths import JobCall, fields_of_lengths

    others = [] if eval_data is None else [eval_data()]
    whole = [(loader.dataset, trainer.train_dataset), *((other, trainer.eval_dataset) for other in others)]
    name = trainer.args.length_column_name

    def column(data: Any) -> Any:
        given: Any = next((before for used, before in whole if used is data), None)
        return given[name] if name in (getattr(given, "column_names", None) or ()) else None

    source = JobCall("morph.hf.job(trainer", "data_collator", trainer.data_collator, column)
    return fields_of_lengths(loader, others, replaced, source)


def _has_loss_by_token(trainer: Any, loader: DataLoader[Any], fields: Mapping[str, Any]) -> bool:
    batch, length = loader.collate_fn([loader.dataset[0]]), fields["lengths"](loader.dataset)[0]
    labels = [batch[name] for name in trainer.label_names if name in batch]
    return any(label.dim() > 1 and label.shape[1] == length for label in labels)


def _name(trainer: Trainer) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", trainer.args.run_name or "").lstrip("._-")
    return name or type(trainer.model).__name__


def _evaluation_of(trainer: Trainer) -> dict[str, Any]:
    """Return the fields of a job that evaluates as the Trainer does, keeps the best version and stops early."""
    args: Any = trainer.args
    if args.eval_strategy == "no":
        return {}
    loader = trainer.get_eval_dataloader()
    fields: dict[str, Any] = {"eval_data": lambda: loader.dataset}
    if args.eval_strategy == "epoch":
        fields["eval_every_epochs"] = 1
    else:
        steps = args.eval_steps
        fields["eval_every_steps"] = int(steps) if steps >= 1 else math.ceil(steps * num_steps(trainer))
    if trainer.compute_metrics is not None:
        fields["eval_metrics"] = _metrics_of(trainer)
    callbacks = (
        callback for callback in trainer.callback_handler.callbacks if hasattr(callback, "early_stopping_patience")
    )
    stopping: Any = next(callbacks, None)
    if args.load_best_model_at_end or stopping is not None:
        fields["best"] = Best(
            metric=(args.metric_for_best_model or "loss").removeprefix("eval_"),
            mode="max" if args.greater_is_better else "min",
            patience=None if stopping is None else stopping.early_stopping_patience,
            min_delta=0.0 if stopping is None else stopping.early_stopping_threshold,
        )
    return fields


def _metrics_of(trainer: Any) -> Any:
    def metrics(values: dict[str, Any]) -> dict[str, float]:
        from transformers import EvalPrediction

        joined = {}
        for name in (PREDICTIONS, LABELS):
            parts = sorted((key for key in values if key.partition(".")[0] == name), key=lambda key: (len(key), key))
            joined[name] = values[name] if parts == [name] else tuple(values[key] for key in parts)
        result = trainer.compute_metrics(EvalPrediction(joined[PREDICTIONS], joined[LABELS]))
        return {name.removeprefix("eval_"): value for name, value in result.items()}

    return metrics


def _of_each_sample(trainer: Any, model: Any, outputs: Any, batch: Mapping[str, Tensor]) -> dict[str, PerSample]:
    """Return the input of ``compute_metrics``, taken from outputs and batch as ``Trainer.prediction_step`` does."""
    ignored = {"loss", *getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", ["past_key_values"])}
    named = isinstance(outputs, Mapping)
    logits: Any = tuple(v for k, v in outputs.items() if k not in ignored) if named else tuple(outputs[1:])
    labels: Any = tuple(batch[name] for name in trainer.label_names if name in batch)
    logits, labels = (parts[0] if len(parts) == 1 else parts for parts in (logits, labels))
    if trainer.preprocess_logits_for_metrics is not None:
        logits = trainer.preprocess_logits_for_metrics(logits, labels)
    samples = {}
    for name, value in ((PREDICTIONS, logits), (LABELS, labels)):
        for number, part in enumerate(value if isinstance(value, tuple | list) else (value,)):
            if not hasattr(part, "shape"):
                allowed = "a preprocess_logits_for_metrics that returns a tensor, or a tuple of tensors"
                raise refusal("compute_metrics", f"output of type {type(part).__name__}", allowed)
            samples[f"{name}.{number}" if isinstance(value, tuple | list) else name] = PerSample(part)
    return samples


def _loss_of(trainer: Any, loader: DataLoader[Any]) -> tuple[Any, Literal["short"] | ShortStep]:
    """Return the loss and ``Job.epoch_end``; a ``ShortStep``: the Trainer's batches must be micro-batches.

    The loss is a total and a weight if the Trainer counts items. Over accumulated batches the Trainer divides by the
    number of items in all of them, or takes the mean of their means; if a model accepts the number and ignores it, as
    BERT does for sequences, the Trainer adds up the means.
    """
    import torch

    accumulated = trainer.args.gradient_accumulation_steps
    by_items, factor = True, 1.0
    end: Literal["short"] | ShortStep = "short"
    if accumulated > 1:
        batch = dict(loader.collate_fn([loader.dataset[0]]))
        num_items = _num_items(trainer, batch)
        scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if scaled is None:
            accepted = trainer.model_accepts_loss_kwargs and num_items is not None
            scaled = accepted or trainer.compute_loss_func is not None
        by_items = num_items is not None and _uses_number_of_items(trainer, batch)
        factor = (1 if by_items else accumulated) if scaled else (1 / accumulated if by_items else 1)
        end = "short" if by_items else ShortStep(of_whole=scaled)
        if by_items and not scaled and len(loader) % accumulated:
            allowed = f"a divisor of the {len(loader)} batches of an epoch: the loss is divided by items and by batches"
            raise refusal("gradient_accumulation_steps", accumulated, allowed)

    has_metrics = trainer.args.eval_strategy != "no" and trainer.compute_metrics is not None

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
        batch = dict(batch)
        step = batch.pop(STEP, None)
        num_items = _num_items(trainer, batch) if by_items else None
        counted = None if num_items is None else num_items.clamp(min=1)
        with _live(trainer, model, None if step is None else step[0]):
            if has_metrics:
                mean, outputs = trainer.compute_loss(model, {**batch}, return_outputs=True, num_items_in_batch=counted)
            else:
                mean = trainer.compute_loss(model, {**batch}, num_items_in_batch=counted)
        result = mean * factor
        if num_items is not None and counted is not None:  # a mean over no items is not a number
            result = Loss(torch.where(num_items > 0, result * counted, 0.0), num_items)
        return (result, _of_each_sample(trainer, model, outputs, batch)) if has_metrics else result

    return loss, end


def _num_items(trainer: Any, batch: Mapping[str, Tensor]) -> Tensor | None:
    num_items: Tensor | None
    _, num_items = trainer.get_batch_samples(iter([batch]), 1, next(iter(batch.values())).device)
    return num_items


def _uses_number_of_items(trainer: Trainer, batch: dict[str, Tensor]) -> bool:
    """Whether the loss is divided by a given number of items: tried on shapes alone if possible, else with data."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from morph.jobs.existing import copied

    mask = batch.get("attention_mask")
    pairs = {} if mask is None else {"attention_mask": mask[:, None, None].bool().expand(-1, 1, mask.shape[1], -1)}
    shapes = FakeTensorMode(allow_non_fake_inputs=True)
    # models look at the values of a token mask, but not at those of a mask of token pairs
    for mode, changed in ((shapes, {}), (shapes, pairs), (None, {})):
        if mode is None and _has_no_numbers(trainer):
            break
        with mode or nullcontext():
            model = trainer.model if mode is None else copied(trainer.model, partial(torch.empty_like, device="cpu"))
            number = torch.ones((), requires_grad=True)
            try:
                with _live(trainer, model, torch.zeros((), dtype=torch.int64)):
                    loss = trainer.compute_loss(model, {**batch, **changed}, num_items_in_batch=number)
            except (RuntimeError, NotImplementedError):  # the model needs the values of its inputs
                if mode is None:
                    raise
                continue
            return torch.autograd.grad(loss, number, allow_unused=True)[0] is not None
    allowed = "1, and a larger per_device_train_batch_size: the model does not run without numbers"
    raise refusal("gradient_accumulation_steps", trainer.args.gradient_accumulation_steps, allowed)


def _has_no_numbers(trainer: Any) -> bool:
    return any(parameter.device.type == "meta" for parameter in trainer.model.parameters())


def _optimizer_of(trainer: Trainer) -> Any:
    from morph.jobs.existing import WholeModelOptimizer

    def optimizer(named: Any) -> Optimizer:
        whole = WholeModelOptimizer(trainer.model.named_parameters(), trainer.create_optimizer())
        return whole.optimizer(named)

    return optimizer


def _schedule_of(trainer: Trainer) -> Any:
    from morph.jobs.existing import WholeModelOptimizer

    if trainer.lr_scheduler is not None:
        return WholeModelOptimizer((), trainer.optimizer, trainer.lr_scheduler).scheduler
    length = num_steps(trainer)

    def schedule(optimizer: Optimizer) -> LRScheduler:
        trainer.lr_scheduler = None
        made: LRScheduler = trainer.create_scheduler(length, optimizer)
        trainer.lr_scheduler = None
        return made

    return schedule
