"""Makes some of the steps of Lightning's ``Trainer.fit``, on copies with the first samples, for the comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, Subset

from morph.jobs.existing import copied
from morph.jobs.job import Job, OwnSteps
from morph.trainers.lightning_rules import lightning_class
from morph.trainers.own_steps import OF_EVALUATIONS, OF_THE_PROGRAM, quietly, turn_off_dropout

OF_THE_TRAINER = (
    *("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "precision", "max_epochs"),
    "max_steps",
)


def own_steps(
    module: Any,
    loader: DataLoader[Any],
    trainer: Any,
    replaced: Mapping[str, Any],
    make_job: Callable[..., Job],
    num_steps: int,
    most_samples: int,
) -> OwnSteps | str:
    """Make steps as ``OwnProgram.run`` describes; ``replaced``: fields given to ``morph.lightning.job``."""
    own = sorted(OF_THE_PROGRAM & replaced.keys())
    if own:
        return f"`{own[0]}` was given to morph.lightning.job"
    if any(tensor.device.type == "meta" for tensor in module.parameters()):
        return "the module has no numbers"
    settings = {name: getattr(trainer, name) for name in OF_THE_TRAINER if trainer is not None}
    if settings.get("precision") == "16-mixed":
        return "fp16 needs a GPU"
    accumulated = settings.get("accumulate_grad_batches", 1)
    assert loader.batch_size is not None, "morph.lightning.job refuses a loader without it"
    if loader.batch_size * accumulated > most_samples:
        accumulated = settings["accumulate_grad_batches"] = min(accumulated, 2)
    batch_size = max(1, min(loader.batch_size, most_samples // accumulated))
    given = {name: value for name, value in replaced.items() if name not in (*OF_EVALUATIONS, "micro_batch_size")}
    limit = getattr(trainer, "limit_train_batches", 1.0)
    settings["limit_train_batches"] = limit if isinstance(limit, int) else 1.0
    with quietly() as seed_all:
        for ends_short in (True, False):
            data = _first(loader, batch_size, accumulated, ends_short=ends_short)
            job = make_job(_copy(module), data(), _trainer(module, trainer, settings), **given)
            seed_all(0)
            if job.lengths is None or accumulated == 1:  # else a short step would have to hold the loop's own batches
                break
        twin = _copy(module)
        losses = _fit(twin, data(), partial(_trainer, module, trainer, settings), num_steps)
    weights = {name: value.detach() for name, value in twin.named_parameters() if value.requires_grad}
    return OwnSteps(job, tuple(losses), weights)


def _copy(module: Any) -> Any:
    twin: Any = copied(module)
    turn_off_dropout(twin)
    vars(twin)["configure_callbacks"] = list  # they log or save
    vars(twin)["prepare_data"] = lambda: None  # it may download what the loader has already
    return twin


def _first(loader: DataLoader[Any], batch_size: int, accumulated: int, *, ends_short: bool) -> Callable[[], Any]:
    """Return a function that makes a loader of the first samples: epochs of two steps, the second one short."""
    step = batch_size * accumulated
    left = step // 2 + (batch_size // 2 if batch_size > 1 and step // 2 % batch_size == 0 else 0)
    num_samples = step + (left if ends_short and left else step)
    data = Subset(loader.dataset, range(min(num_samples, len(loader.dataset))))  # type: ignore[arg-type] # it has one
    state = None if loader.generator is None else loader.generator.get_state()
    shuffles = state is not None and isinstance(loader.sampler, RandomSampler)

    def make() -> DataLoader[Any]:
        generator = None if state is None else torch.Generator().set_state(state)
        given = {"collate_fn": loader.collate_fn, "generator": generator}
        drop_last = loader.drop_last and len(data) >= step
        return DataLoader(data, batch_size, shuffles, drop_last=drop_last, **given)  # type: ignore[arg-type] # those of torch

    return make


def _trainer(module: Any, trainer: Any, settings: Mapping[str, Any], *callbacks: Any) -> Any:
    kind = _part(module, "Trainer") if trainer is None else type(trainer)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    where = {"accelerator": "cpu", "devices": 1, "limit_val_batches": 0, "num_sanity_val_steps": 0}
    return kind(**{"max_epochs": -1, **settings, **quiet, **where}, callbacks=list(callbacks))


def _part(module: Any, name: str) -> Any:
    """Return a class of the Lightning that a module is derived from: ``lightning.pytorch`` or ``pytorch_lightning``."""
    return getattr(import_module(lightning_class(module).__module__.partition(".core.")[0]), name)


def _fit(twin: Any, loader: Any, trainer: Callable[..., Any], num_steps: int) -> list[float]:
    """Call ``fit``, and return the losses of its first steps, after which it ends: means over a step's batches."""
    losses: list[list[float]] = [[]]

    def on_train_batch_end(fitting: Any, _module: Any, outputs: Any, *_: Any) -> None:
        losses[-1].append(float(outputs["loss"]) * fitting.accumulate_grad_batches)
        if fitting.global_step >= len(losses):
            fitting.should_stop = len(losses) == num_steps
            losses.append([])

    trainer(_part(twin, "callbacks").LambdaCallback(on_train_batch_end=on_train_batch_end)).fit(twin, loader)
    return [sum(step) / len(step) for step in losses[:num_steps] if step]
