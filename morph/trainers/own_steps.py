"""Makes some of a Trainer's own steps, on a copy of it with the first samples, for the comparison with Morph's."""

from __future__ import annotations

import copy
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Subset

from morph.data.seeding import own_generators
from morph.jobs.existing import copied
from morph.jobs.job import Job, OwnSteps

if TYPE_CHECKING:
    from transformers import Trainer

OF_THE_PROGRAM = frozenset({"model", "loss", "dataset", "collate_fn", "sampler", "optimizer", "lr_scheduler"}) | {
    *("batch_size", "seed", "clip_grad_norm", "precision", "master_weights", "loss_scaling", "step_entry")
}
"""Fields of a job without which it trains as the Trainer does."""
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
OF_EVALUATIONS = (
    "eval_data",
    "eval_every_steps",
    "eval_every_epochs",
    "eval_samples",
    "eval_metrics",
    "best",
    "sample",
)


def own_steps(
    trainer: Trainer,
    replaced: Mapping[str, Any],
    make_job: Callable[..., Job],
    length: int,
    num_steps: int,
    most_samples: int,
) -> OwnSteps | str:
    """Make steps as ``OwnProgram.run`` describes; ``length``: the number of steps of ``trainer.train()``."""
    own = sorted(OF_THE_PROGRAM & replaced.keys())
    if own:
        return f"`{own[0]}` was given to morph.hf.job"
    if trainer.args.fp16:
        return "fp16 needs a GPU"
    if any(tensor.device.type == "meta" for tensor in trainer.model.parameters()):
        return "the Trainer's model has no numbers"
    batch, accumulated = _sizes(trainer.args, most_samples)
    whole, available = batch * accumulated, len(trainer.train_dataset)
    left = available % whole  # the last step is as short as that of the Trainer's epochs
    num_samples = min(available, (num_steps - (left > 0)) * whole + left)
    changed = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated}
    changed["max_steps"] = max(length, num_steps)
    given = {name: value for name, value in replaced.items() if name not in OF_EVALUATIONS}
    m = given.get("micro_batch_size")
    if m is not None and whole % m:
        given["micro_batch_size"] = batch  # the comparison's step is smaller than the job's
    with quietly():
        job = make_job(_copy(trainer, num_samples, changed), **given)
        twin = _copy(trainer, num_samples, changed)
        losses = _train(twin, num_steps)
    weights = {name: value.detach() for name, value in twin.model.named_parameters() if value.requires_grad}
    return OwnSteps(job, tuple(losses), weights)


def _sizes(args: Any, most_samples: int) -> tuple[int, int]:
    """Return the Trainer's batch, or a smaller one that still accumulates if the Trainer does."""
    accumulated = args.gradient_accumulation_steps
    if args.train_batch_size * accumulated > most_samples:
        accumulated = min(accumulated, 2)
    batch = max(1, min(args.train_batch_size, most_samples // accumulated))
    return batch, accumulated


def _copy(trainer: Any, num_samples: int, changed: Mapping[str, Any]) -> Any:
    """Return a copy of a Trainer that trains the first samples, without callbacks, evaluations and dropout."""
    from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, TrainerControl, TrainerState

    twin = copy.copy(trainer)
    shared = {"accelerator", "callback_handler", "train_dataset", "eval_dataset", "processing_class", "data_collator"}
    memo: dict[int, Any] = {id(vars(trainer)[name]): vars(trainer)[name] for name in shared if name in vars(trainer)}
    memo |= {id(trainer): twin}
    model = copied(trainer.model, memo=memo)
    memo[id(trainer.model)] = model
    if trainer.optimizer is not None:
        _copy_optimizer(trainer.optimizer, memo)
    for name, value in vars(trainer).items():
        vars(twin)[name] = copy.deepcopy(value, memo)
    for name, value in changed.items():
        setattr(twin.args, name, value)
    quiet = {"eval_strategy": "no", "save_strategy": "no", "logging_strategy": "no", "load_best_model_at_end": False}
    for name, value in {**quiet, "disable_tqdm": True, "torch_compile": False}.items():
        setattr(twin.args, name, value)
    twin._train_batch_size = twin.args.train_batch_size  # which the Trainer keeps from its construction on
    data = trainer.train_dataset
    twin.train_dataset = (
        data.select(range(num_samples)) if hasattr(data, "select") else Subset(data, range(num_samples))
    )
    twin.create_accelerator_and_postprocess()
    given = (twin.model, twin.processing_class, twin.optimizer, twin.lr_scheduler)
    twin.callback_handler = CallbackHandler([DefaultFlowCallback()], *given)
    twin.model_init = None  # it made the model already
    twin.state, twin.control = TrainerState(), TrainerControl()
    turn_off_dropout(twin.model)
    return twin


def _copy_optimizer(whole: Optimizer, memo: dict[int, Any]) -> None:
    """Add a copy with all attributes to the memo; ``deepcopy`` alone keeps groups and state only."""
    memo[id(whole)] = made = object.__new__(type(whole))
    for name, value in vars(whole).items():
        if name != "step":  # a schedule wraps it, to count the original's steps
            vars(made)[name] = copy.deepcopy(value, memo)


def turn_off_dropout(model: nn.Module) -> None:
    """Set every probability of dropout to 0, in the modules and in their configurations."""
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, _DROPOUT):
            module.p = 0.0
        for held in (module, getattr(module, "config", None)):
            if held is None or id(held) in seen:
                continue
            seen.add(id(held))
            for name, value in vars(held).items():
                if "drop" in name and isinstance(value, float):
                    setattr(held, name, 0.0)


def _train(twin: Any, num_steps: int) -> list[float]:
    """Call ``train()``, and return the losses of its first steps, after which it ends."""
    from transformers import TrainerCallback

    losses = [0.0]
    step = twin.training_step

    def training_step(*given: Any, **named: Any) -> torch.Tensor:
        loss: torch.Tensor = step(*given, **named)
        losses[-1] += float(loss)
        return loss

    class Ends(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            control.should_training_stop |= state.global_step >= num_steps
            losses.append(0.0)

    twin.training_step = training_step
    twin.callback_handler.add_callback(Ends())
    twin.train()
    return losses[:num_steps]


@contextmanager
def quietly() -> Iterator[Callable[[int], None]]:
    """Keep what a program prints, warns of and draws from what runs around it; yields a function that seeds."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with own_generators(0) as seed_all, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                yield seed_all
    finally:
        logging.disable(before)
