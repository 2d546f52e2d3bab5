"""How Morph treats each argument of a Trainer: honoured, without effect here, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, Literal

from morph.contract.errors import JobError

SOURCE = "morph.hf.job"


@dataclass(frozen=True)
class Rule:
    """How one argument is treated.

    Attributes:
        how: ``honoured``, ``no effect`` or ``refused``; the last holds for any value but the default.
        note: The field of the job that it sets, or the reason why it has no effect, or the alternative.
        allowed: If not empty, the only values that are honoured.
    """

    how: Literal["honoured", "no effect", "refused"]
    note: str
    allowed: tuple[object, ...] = ()


def _honoured(note: str, *allowed: object) -> Rule:
    return Rule("honoured", note, allowed)


def _no_effect(note: str, *names: str) -> dict[str, Rule]:
    return dict.fromkeys(names, Rule("no effect", note))


def _refused(note: str, *names: str) -> dict[str, Rule]:
    return dict.fromkeys(names, Rule("refused", note))


OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "adafactor", "sgd", "adagrad", "rmsprop")
SCHEDULES = (
    *("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"),
    *("cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay"),
)
_BATCH = "`batch_size` is `per_device_train_batch_size` times `gradient_accumulation_steps`, in every shape"
_TRACKERS = "`trackers` in the job file, `morph status` and the run's page"
_STEPS = "the length of the schedule; give the length of the run to `morph run`, as `--steps` or `--epochs`"

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
    "train_sampling_strategy": _honoured("the order of samples", "random", "sequential", "group_by_length"),
    "group_by_length": _honoured("the order of samples: similar lengths share a step"),
    "length_column_name": _honoured("`lengths`, and the order with `train_sampling_strategy='group_by_length'`"),
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
    "run_name": _honoured("`name`, or else the last part of `output_dir`"),
    "output_dir": _honoured("`name`, if there is no `run_name`; nothing is written there"),
    **_no_effect("the plan decides what is recomputed", "activation_checkpointing", "gradient_checkpointing"),
    **_no_effect(
        "the plan decides what is recomputed",
        "activation_checkpointing_kwargs",
        "gradient_checkpointing_kwargs",
    ),
    **_no_effect(
        _TRACKERS,
        "report_to",
        "project",
    ),
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
}
"""Rules by argument; arguments of any version of transformers that are not listed here are refused as well."""


def check_arguments(args: Any) -> None:
    """Check that a Trainer's arguments can be honoured.

    Raises:
        JobError: an argument cannot be honoured; the message names the first one.
    """
    for field in fields(args):
        name, value = field.name, getattr(args, field.name)
        rule = ARGUMENTS.get(name, Rule("refused", "Morph does not know this argument"))
        if rule.how == "refused" and not _is_default(value, field):
            raise refusal(name, value, f"the default; instead: {rule.note}")
        if rule.allowed and value not in rule.allowed:
            raise refusal(name, value, ", ".join(str(choice) for choice in rule.allowed))


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
