"""Defines what of a LightningModule and of Lightning's Trainer is honoured, and refuses everything else by its name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from morph.contract.errors import JobError
from morph.trainers.arguments import Rule

SOURCE = "morph.lightning.job"
PACKAGES = ("lightning.", "pytorch_lightning.", "lightning_fabric.")
PRECISIONS = {"32-true": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16"}
_STEPS = "the result of `morph.lightning.num_steps(trainer, loader)`: give it to `morph run` as `--steps`"
_ONE_DEVICE = "a job has the batches of a Trainer with one device, in every shape"
CALLBACKS = (
    *("ModelCheckpoint", "OnExceptionCheckpoint", "LearningRateMonitor", "DeviceStatsMonitor", "ThroughputMonitor"),
    *("ModelSummary", "RichModelSummary", "ProgressBar", "TQDMProgressBar", "RichProgressBar"),
)
"""Lightning's callbacks that do not change training: they are not run."""
_INSTEAD = {
    "EarlyStopping": "morph.lightning.job(..., best=morph.Best(patience=3))",
    "Timer": "`morph run --steps`",
    "GradientAccumulationScheduler": "a constant accumulate_grad_batches",
}


def _rules(how: Any, note: str, *names: str, allowed: tuple[object, ...] = ()) -> dict[str, Rule]:
    return dict.fromkeys(names, Rule(how, note, allowed))


TRAINER: Mapping[str, Rule] = {
    **_rules("honoured", "`batch_size` is the loader's times `accumulate_grad_batches`", "accumulate_grad_batches"),
    **_rules("honoured", "`clip_grad_norm`", "gradient_clip_val"),
    **_rules("honoured", "`clip_grad_norm`", "gradient_clip_algorithm", allowed=(None, "norm")),
    **_rules("honoured", "`precision`", "precision", allowed=tuple(PRECISIONS)),
    **_rules("honoured", "the order of samples", "limit_train_batches"),
    **_rules("honoured", _STEPS, "max_epochs", "max_steps"),
    **_rules("honoured", "those that `callbacks` lists below", "callbacks"),
    **_rules("no effect", "each worker moves its sections to its device", "accelerator"),
    **_rules("no effect", _ONE_DEVICE, "devices", "use_distributed_sampler", "sync_batchnorm"),
    **_rules("no effect", "nothing ends a run before its last step, except `best`", "min_epochs", "min_steps"),
    **_rules("no effect", "`trackers` in the job file, `morph status` and the run's page", "logger", "profiler"),
    **_rules("no effect", "the run's page and journal have every step", "log_every_n_steps", "barebones"),
    **_rules("no effect", "the run's page and journal have every step", "enable_progress_bar", "enable_model_summary"),
    **_rules("no effect", "the run's policy decides when to save", "enable_checkpointing", "default_root_dir"),
    **_rules("no effect", "nothing is uploaded", "model_registry", "enable_autolog_hparams"),
    **_rules("no effect", "`eval_every_steps` decides", "val_check_interval", "check_val_every_n_epoch"),
    **_rules("no effect", "evaluations are Morph's", "num_sanity_val_steps", "inference_mode"),
    **_rules("no effect", "there is only training", "limit_test_batches", "limit_predict_batches"),
    **_rules("no effect", "the loader is given", "reload_dataloaders_every_n_epochs"),
    **_rules("no effect", "with `accumulation='exact'` runs are deterministic", "deterministic", "benchmark"),
    **_rules("no effect", "a gradient that is not finite ends a run", "detect_anomaly"),
    **_rules("no effect", "those of precision are checked; others belong to several devices", "plugins"),
    **_rules("refused", "Morph deals sections to workers", "strategy"),
    **_rules("refused", _ONE_DEVICE, "num_nodes", allowed=(1,)),
    **_rules("refused", "`morph run --steps`", "max_time"),
    **_rules("refused", "`limit_train_batches`, and a loader without shuffling", "overfit_batches", allowed=(0,)),
    **_rules("refused", "`morph run --steps 1`", "fast_dev_run", allowed=(False,)),
    **_rules("refused", "`eval_samples`", "limit_val_batches", allowed=(1.0,)),
}
"""Rules by argument; a refused argument must have its default value, or one of those allowed."""


METHODS: Mapping[str, Rule] = {
    **_rules("honoured", "`loss`", "training_step", "forward", "automatic_optimization"),
    **_rules("honoured", "`optimizer` and `lr_scheduler`", "configure_optimizers"),
    **_rules("honoured", "its result is checked like `callbacks`", "configure_callbacks"),
    **_rules("honoured", "called once, with `fit`, in every process", "setup"),
    **_rules("no effect", "evaluations call `training_step`", "validation_step"),
    **_rules("no effect", "there is only training", "test_step", "predict_step", "teardown"),
    **_rules("no effect", "the loader is given", "train_dataloader", "test_dataloader", "predict_dataloader"),
    **_rules("no effect", "the loader is given", "val_dataloader"),
    **_rules("no effect", "call it in the script before the job is made", "prepare_data"),
    **_rules("no effect", "checkpoints are Morph's", "on_save_checkpoint", "on_load_checkpoint", "strict_loading"),
    **_rules("no effect", "values that `training_step` logs are metrics", "log", "log_dict", "print"),
    **_rules("no effect", "only the module itself and scripts call it", "freeze", "unfreeze", "save_hyperparameters"),
    **_rules("no effect", "only the module itself and scripts call it", "hparams", "hparams_initial", "to", "cpu"),
    **_rules("no effect", "only the module itself and scripts call it", "cuda", "type", "float", "half", "double"),
    **_rules("no effect", "only the module itself and scripts call it", "device", "dtype", "load_from_checkpoint"),
    **_rules("no effect", "only the module itself and scripts call it", "example_input_array", "to_onnx"),
    **_rules("no effect", "only the module itself and scripts call it", "to_torchscript", "to_tensorrt"),
}
"""Rules by the name of a method or property that a module overrides; ``on_test_*`` and ``on_predict_*`` have no effect,
and ``on_validation_*`` none if there is no evaluation.
"""


def lightning_class(module: Any) -> Any:
    """Return the LightningModule from which a module's class is derived."""
    for base in type(module).__mro__:
        if base.__name__ == "LightningModule" and base.__module__.startswith(PACKAGES):
            return base
    raise refusal("module", type(module).__name__, "a LightningModule")


def check_module(module: Any, *, evaluates: bool) -> None:
    """Check that a module overrides nothing that training (or validation) calls, but Morph does not."""
    base = lightning_class(module)
    if not module.automatic_optimization:
        raise refusal("automatic_optimization", False, "True; Morph calls the optimizer")
    bases = [kind for kind in base.__mro__ if kind.__module__.startswith(PACKAGES)]
    own = {name for kind in bases for name in vars(kind) if not name.startswith(("__", "CHECKPOINT_"))}
    for name in sorted(own):
        is_own = inspect.getattr_static(type(module), name) is not inspect.getattr_static(base, name)
        harmless = name in METHODS or name.startswith(("on_test_", "on_predict_"))
        harmless = harmless or (name.startswith("on_validation_") and not evaluates)
        if (is_own or name in vars(module)) and not harmless:
            allowed = "Lightning's own; what training does stands in training_step, and in what it calls"
            raise refusal(f"{type(module).__name__}.{name}", "overridden", allowed)


def check_trainer(trainer: Any, callbacks: Any, *, evaluates: bool) -> None:
    """Check that a Trainer's settings can be honoured; ``callbacks``: also the module's ``configure_callbacks``."""
    for callback in (*getattr(trainer, "callbacks", ()), *callbacks):
        kind = type(callback)
        known = kind.__module__.startswith(PACKAGES) and kind.__name__ in CALLBACKS
        if not known and f"{kind.__module__}." != "morph.spot.lightning.":
            instead = _INSTEAD.get(kind.__name__, "`callbacks` in the job file")
            raise refusal("callbacks", kind.__name__, f"{', '.join(CALLBACKS)}; instead of others: {instead}")
    if trainer is None:
        return
    loops = (trainer, getattr(trainer, "fit_loop", None), getattr(getattr(trainer, "fit_loop", 0), "epoch_loop", None))
    for part in loops:
        if not type(part).__module__.startswith(PACKAGES):
            raise refusal("trainer", type(part).__name__, "a Trainer of Lightning with Lightning's own loops")
    for name, parameter in inspect.signature(type(trainer).__init__).parameters.items():
        rule = TRAINER.get(name, Rule("refused", "Morph does not know this argument", (parameter.default,)))
        value = getattr(trainer, name, None)
        skipped = name == "self" or not rule.allowed or (name == "limit_val_batches" and not evaluates)
        if not skipped and value not in rule.allowed:
            note = f"; instead: {rule.note}" if rule.how == "refused" else ""
            raise refusal(name, value, f"{', '.join(map(repr, rule.allowed))}{note}")
    _check_device(trainer)


def _check_device(trainer: Any) -> None:
    strategy, plugin = type(trainer.strategy), type(trainer.precision_plugin)
    automatic = "DDPStrategy" if trainer.num_devices > 1 else "SingleDeviceStrategy"
    if strategy.__name__ != automatic or not strategy.__module__.startswith(PACKAGES):
        raise refusal("strategy", strategy.__name__, f"'auto': {TRAINER['strategy'].note}")
    if trainer.num_devices not in (1, trainer.accelerator.auto_device_count()):
        raise refusal("devices", trainer.num_devices, f"1, or 'auto': {_ONE_DEVICE}")
    mixed = trainer.precision != "32-true"
    if plugin.__name__ != ("MixedPrecision" if mixed else "Precision") or not plugin.__module__.startswith(PACKAGES):
        raise refusal("plugins", plugin.__name__, "the argument `precision`")
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None and scaler.state_dict() not in ({}, torch.amp.GradScaler("cpu").state_dict()):
        raise refusal("plugins", type(scaler).__name__, "the scaler that `precision='16-mixed'` makes")


def refusal(field: str, value: object, allowed: str) -> JobError:
    """Return the error that names what cannot be honoured."""
    shown = value if isinstance(value, int | float | str) else type(value).__name__
    return JobError("cannot be honoured", source=SOURCE, field=field, value=shown, allowed=allowed)
