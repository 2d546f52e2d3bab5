"""Defines how Morph treats each argument, method and callback of a Trainer: honoured, without effect here, or refused.

What the tables do not list, for example in a newer transformers, is refused if it was changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, Literal

from morph.contract.errors import JobError

SOURCE = "morph.hf.job"
OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "adafactor", "sgd", "adagrad", "rmsprop")
SCHEDULES = (
    *("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"),
    *("cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay"),
)
GROUPED = "`sampler=morph.data.order.grouped(lengths, batch_size)` as another argument of morph.hf.job"
_BATCH = "`batch_size` is `per_device_train_batch_size` times `gradient_accumulation_steps`, in every shape"
_TRACKERS = "`trackers` in the job file, `morph status` and the run's page"
_STEPS = "the length of the schedule; give the length of the run to `morph run`, as `--steps` or `--epochs`"
OF_EVALUATIONS = ("evaluate", "evaluation_loop", "prediction_loop", "prediction_step", "_evaluate")
"""Methods that may be overridden if the Trainer does not evaluate while it trains."""
CALLBACKS = (
    *("DefaultFlowCallback", "ProgressCallback", "NotebookProgressCallback", "PrinterCallback", "SpotCallback"),
    *("AzureMLCallback", "ClearMLCallback", "CodeCarbonCallback", "CometCallback", "DVCLiveCallback"),
    *("DagsHubCallback", "FlyteCallback", "KubeflowCallback", "MLflowCallback", "NeptuneCallback", "SwanLabCallback"),
    *("TensorBoardCallback", "TrackioCallback", "WandbCallback"),
)
"""Callbacks of transformers and of Morph that do not change training; they are not run."""
_CALLBACK_PACKAGES = ("transformers.", "morph.spot.")
COMPARED: tuple[Mapping[str, object], ...] = (
    {"learning_rate": 3e-3, "weight_decay": 0.3, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-3},
    {"optim": "sgd", "max_grad_norm": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 2, "seed": 5},
    {"optim": "rmsprop", "optim_args": "momentum=0.5", "max_grad_norm": 0, "data_seed": 3},
    {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0}, "num_train_epochs": 2},
    {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "label_smoothing_factor": 0.1},
    {"optim": "adagrad", "train_sampling_strategy": "sequential", "dataloader_drop_last": True, "max_steps": 9},
    {"optim": "adafactor", "lr_scheduler_type": "inverse_sqrt", "label_names": ["labels"]},
    {"bf16": True, "remove_unused_columns": False},
)
"""Arguments with which losses and weights were compared by step with ``trainer.train()``: a test does so for each."""


@dataclass(frozen=True)
class Rule:
    """How one argument is treated; a refused one must have its default value.

    ``note``: the job's field that it sets, or why it has no effect; ``allowed``: the only values, else ``instead``.
    """

    how: Literal["honoured", "no effect", "refused"]
    note: str
    allowed: tuple[object, ...] = ()
    instead: str = ""


def _honoured(note: str, *allowed: object) -> Rule:
    return Rule("honoured", note, allowed)


def _no_effect(note: str, *names: str) -> dict[str, Rule]:
    return dict.fromkeys(names, Rule("no effect", note))


def _refused(note: str, *names: str) -> dict[str, Rule]:
    return dict.fromkeys(names, Rule("refused", note))


ARGUMENTS: Mapping[str, Rule] = {
    "per_device_train_batch_size": _honoured(_BATCH),
    "gradient_accumulation_steps": _honoured(_BATCH),
    "num_train_epochs": _honoured(_STEPS),
    "max_steps": _honoured(_STEPS),
    "learning_rate": _honoured("`optimizer`"),
    "weight_decay": _honoured("`optimizer`, for the parameters to which the Trainer applies it"),
    "adam_beta1": _honoured("`optimizer`"),
    "adam_beta2": _honoured("`optimizer`"),
    "adam_epsilon": _honoured("`optimizer`"),
    "optim": _honoured("`optimizer`", *OPTIMIZERS),
    "optim_args": _honoured("`optimizer`"),
    "lr_scheduler_type": _honoured("`lr_scheduler`", *SCHEDULES),
    "lr_scheduler_kwargs": _honoured("`lr_scheduler`"),
    "warmup_steps": _honoured("`lr_scheduler`"),
    "warmup_ratio": _honoured("`lr_scheduler`"),
    "max_grad_norm": _honoured("`clip_grad_norm`; 0 clips nothing"),
    "label_smoothing_factor": _honoured("`loss`"),
    "label_names": _honoured("`loss`"),
    "bf16": _honoured("`precision`"),
    "fp16": _honoured("`precision`, with the scaler's defaults"),
    "torch_compile": _honoured("`compile`: each section is compiled"),
    "torch_compile_backend": _honoured("`compile`", None, "inductor"),
    "torch_compile_mode": _honoured("`compile`", None, "default"),
    "seed": _honoured("`seed`: dropout and collators draw other random numbers than in a Trainer"),
    "data_seed": _honoured("the order of samples"),
    "train_sampling_strategy": Rule("honoured", "the order of samples", ("random", "sequential"), GROUPED),
    "length_column_name": _honoured("`lengths`"),
    "remove_unused_columns": _honoured("`dataset`"),
    "dataloader_num_workers": _honoured("`data_workers`"),
    "dataloader_drop_last": _honoured(
        "True: an incomplete last batch of an epoch is dropped; False: the next epoch's samples complete it"
    ),
    "eval_strategy": _honoured("`eval_every_steps` or `eval_every_epochs`"),
    "eval_steps": _honoured("`eval_every_steps`"),
    "load_best_model_at_end": _honoured("`best`; `morph export --best` writes it"),
    "metric_for_best_model": _honoured("`best`"),
    "greater_is_better": _honoured("`best`"),
    "run_name": _honoured("`name`; without it, the class of the model"),
    **_no_effect("nothing is written there", "output_dir"),
    **_no_effect("the plan decides what is recomputed", "activation_checkpointing", "gradient_checkpointing"),
    **_no_effect(
        "the plan decides what is recomputed", "activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"
    ),
    **_no_effect(_TRACKERS, "report_to", "project"),
    **_no_effect("the run's page and journal have every step", "logging_strategy", "logging_steps"),
    **_no_effect("the run's page and journal have every step", "logging_first_step", "logging_dir"),
    **_no_effect("the run's page and journal have every step", "log_on_each_node", "logging_nan_inf_filter"),
    **_no_effect("the run's page and journal have every step", "log_level", "log_level_replica", "disable_tqdm"),
    **_no_effect("the run's policy decides when to save", "save_strategy", "save_steps", "save_total_limit"),
    **_no_effect("the run's policy decides when to save", "save_on_each_node", "enable_jit_checkpoint"),
    **_no_effect("every checkpoint of Morph has the optimizer's state, and is safetensors", "save_only_model"),
    **_no_effect("every checkpoint of Morph has the optimizer's state, and is safetensors", "save_safetensors"),
    **_no_effect("`morph run` continues a run by itself", "resume_from_checkpoint", "ignore_data_skip"),
    **_no_effect("`morph run` continues a run by itself", "overwrite_output_dir"),
    **_no_effect("`morph run` continues a run by itself", "restore_callback_states_from_checkpoint"),
    **_no_effect("read by the script, not by the Trainer", "do_train", "do_eval", "do_predict"),
    **_no_effect("with `accumulation='exact'` runs are deterministic", "full_determinism"),
    **_no_effect("evaluations use micro-batches of the same size as training", "per_device_eval_batch_size"),
    **_no_effect("Morph's data workers decide", "dataloader_pin_memory", "dataloader_persistent_workers"),
    **_no_effect("Morph's data workers decide", "dataloader_prefetch_factor", "dataloader_in_order"),
    **_no_effect("Morph's data workers decide", "dataloader_multiprocessing_context"),
    **_no_effect("there is no DistributedDataParallel", "ddp_find_unused_parameters", "ddp_bucket_cap_mb"),
    **_no_effect("there is no DistributedDataParallel", "ddp_broadcast_buffers", "ddp_static_graph"),
    **_no_effect("there is no DistributedDataParallel", "ddp_backend", "ddp_timeout", "local_rank"),
    **_no_effect("a loss by token is divided once, by the weight of the whole batch", "average_tokens_across_devices"),
    **_no_effect("each worker moves its sections to its device", "use_cpu", "no_cuda"),
    **_no_effect("the model does not generate in training", "use_cache"),
    **_no_effect(
        "the manager gathers means, and logits only for `compute_metrics`",
        "eval_accumulation_steps",
        "eval_do_concat_batches",
        "eval_use_gather_object",
        "prediction_loss_only",
    ),
    **_no_effect(
        "Morph neither reports nor empties the device's memory", "skip_memory_metrics", "torch_empty_cache_steps"
    ),
    **_no_effect("generation is no part of training; refused if the Trainer evaluates", "predict_with_generate"),
    **_no_effect("used with `predict_with_generate`", "generation_max_length", "generation_num_beams"),
    **_no_effect("used with `predict_with_generate`", "generation_config"),
    **_no_effect("used with `fsdp`", "fsdp_config"),
    **_no_effect("used with `push_to_hub`", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo"),
    **_no_effect("used with `push_to_hub`", "hub_always_push", "hub_revision"),
    **_no_effect("used with `report_to='trackio'`", "trackio_space_id", "trackio_bucket_id"),
    **_no_effect("used with `report_to='trackio'`", "trackio_static_space_id"),
    **_refused("`morph export`, and `huggingface_hub.upload_file`", "push_to_hub"),
    **_refused("Morph deals whole sections to workers", "fsdp", "deepspeed", "parallelism_config"),
    **_refused("set `torch.backends` in the script, which every process runs", "tf32"),
    **_refused("Morph's batches are made from the Trainer's other arguments", "accelerator_config"),
    **_refused("`per_device_train_batch_size` that fits; the planner chooses the micro-batch", "auto_find_batch_size"),
    **_refused("evaluations use the weights as the model has them", "bf16_full_eval", "fp16_full_eval"),
    **_refused("noise that the model draws itself", "neftune_noise_alpha"),
    **_refused("kernels that the model itself has", "use_liger_kernel", "liger_kernel_config"),
    **_refused("optimizers that update each parameter by itself", "optim_target_modules"),
    **_refused(
        "`morph status` shows samples per second, trackers tokens per second",
        "include_num_input_tokens_seen",
        "include_tokens_per_second",
    ),
    **_refused(
        "metrics that the loss returns", "include_for_metrics", "include_inputs_for_metrics", "batch_eval_metrics"
    ),
    **_refused("an evaluation follows a number of steps", "eval_delay", "eval_on_start"),
    **_refused("the model runs in sections", "debug"),
    **_refused(GROUPED, "group_by_length", "sortish_sampler"),
}
"""Rules by argument; arguments of any version of transformers that are not listed here are refused as well."""


METHODS: Mapping[str, Rule] = {
    **dict.fromkeys(("compute_loss",), _honoured("`loss`")),
    **dict.fromkeys(("create_optimizer", "get_decay_parameter_names"), _honoured("`optimizer`")),
    **dict.fromkeys(("get_optimizer_cls_and_kwargs",), _honoured("`optimizer`")),
    **dict.fromkeys(("create_scheduler",), _honoured("`lr_scheduler`")),
    **dict.fromkeys(("get_train_dataloader", "_get_dataloader"), _honoured("`dataset`, `collate_fn` and `sampler`")),
    **dict.fromkeys(("_get_train_sampler",), _honoured("`sampler`")),
    **dict.fromkeys(("_remove_unused_columns", "_set_signature_columns_if_needed"), _honoured("`dataset`")),
    **dict.fromkeys(("_get_collator_with_removed_columns",), _honoured("`collate_fn`")),
    **dict.fromkeys(("get_eval_dataloader", "_get_eval_sampler"), _honoured("`eval_data`")),
    **dict.fromkeys(("__init__",), _honoured("the script calls it, in every process")),
    **_no_effect("values that it logs are not kept: return metrics with the loss", "log", "log_metrics"),
    **_no_effect("the run's page and journal have every step", "save_metrics", "metrics_format", "save_state"),
    **_no_effect("the run's page and journal have every step", "floating_point_ops", "store_flos"),
    **_no_effect("checkpoints are Morph's", "save_model", "_save", "_save_checkpoint", "_save_rng_state"),
    **_no_effect("checkpoints are Morph's", "_save_optimizer_and_scheduler", "_save_scaler", "_rotate_checkpoints"),
    **_no_effect("checkpoints are Morph's", "_sorted_checkpoints", "_load_from_checkpoint", "_load_best_model"),
    **_no_effect("checkpoints are Morph's", "_load_rng_state", "_load_optimizer_and_scheduler", "_load_scaler"),
    **_no_effect("checkpoints are Morph's", "_load_callback_state", "_issue_warnings_after_load", "_get_output_dir"),
    **_no_effect("nothing is uploaded", "push_to_hub", "create_model_card", "init_hf_repo", "_push_from_checkpoint"),
    **_no_effect("nothing is uploaded", "_finish_current_push"),
    **_no_effect("only the script calls it", "predict", "get_test_dataloader", "hyperparameter_search"),
    **_no_effect("only the script calls it", "get_num_trainable_parameters", "get_learning_rates", "num_examples"),
    **_no_effect("only the script calls it", "get_optimizer_group", "num_tokens", "call_model_init"),
    **_no_effect("only the script calls it", "add_callback", "pop_callback", "remove_callback"),
    **_no_effect("each worker moves its sections to its device", "_move_model_to_device"),
    **_no_effect("each worker moves its sections to its device", "is_local_process_zero", "is_world_process_zero"),
}
"""Rules by the name of a method that a subclass overrides, or that is set on the Trainer itself."""


def check_methods(trainer: Any) -> None:
    """Check that a Trainer overrides nothing that training calls and Morph does not, and has no unknown callback."""
    kind: Any = next(base for base in type(trainer).__mro__ if f"{base.__module__}.".startswith("transformers."))
    evaluates = trainer.args.eval_strategy != "no"
    own = [
        base for base in type(trainer).__mro__ if not f"{base.__module__}.".startswith(("transformers.", "builtins."))
    ]
    for holder in (trainer, *own):
        for name, value in vars(holder).items():
            there = getattr(kind, name, None)
            if not (callable(there) or isinstance(there, property)) or name == "__class__":
                continue
            rule = METHODS.get(name)
            if (rule is None or rule.how == "refused") and (evaluates or name not in OF_EVALUATIONS):
                owner = type(trainer).__name__ if holder is trainer else holder.__name__
                where = getattr(value, "__module__", None) or type(value).__name__
                raise refusal(f"{owner}.{name}", where, "the Trainer's own; or an override of compute_loss")
    for callback in trainer.callback_handler.callbacks:
        known = f"{type(callback).__module__}.".startswith(_CALLBACK_PACKAGES)
        name = type(callback).__name__
        if not known or name not in (*CALLBACKS, "EarlyStoppingCallback"):
            raise refusal("callbacks", type(callback), "EarlyStoppingCallback; for others, `callbacks` in the job file")


def check_arguments(args: Any) -> None:
    """Check that a Trainer's arguments can be honoured."""
    for field in fields(args):
        name, value = field.name, getattr(args, field.name)
        rule = ARGUMENTS.get(name, Rule("refused", "Morph does not know this argument"))
        if rule.how == "refused" and not _is_default(value, field):
            raise refusal(name, value, f"the default; instead: {rule.note}")
        if rule.allowed and value not in rule.allowed:
            choices = ", ".join(str(choice) for choice in rule.allowed)
            raise refusal(name, value, f"{choices}; or {rule.instead}" if rule.instead else choices)


def refusal(name: str, value: object, allowed: str) -> JobError:
    """Return the error that names an argument, or another part of a Trainer, that cannot be honoured."""
    shown = value if isinstance(value, int | float | str) else getattr(value, "__name__", None) or repr(value)
    return JobError("cannot be honoured", source=SOURCE, field=name, value=str(shown), allowed=allowed)


def _is_default(value: Any, field: Any) -> bool:
    """Whether an argument was not given; the Trainer may have turned a missing one into an empty or default value."""
    default = field.default if field.default_factory is MISSING else field.default_factory()
    empty = not value and not default
    kind: Any = type(value)
    return bool(empty or value == default or (default is None and is_dataclass(value) and value == kind()))
