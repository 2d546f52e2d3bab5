"""The example script of transformers for text classification, on the statements of Python's own standard library.

Which kind of statement is it? Training ends when accuracy on a held-out file stops improving. Two lines differ from a
script for the Trainer alone: where the arguments are read, and where ``trainer.train()`` was. Its ``buckets`` let
micro-batches be padded to the nearest of a few lengths, as the Trainer's collator pads to the longest of a batch.
``morph cut configs/jobs/run_classification.py:main`` looks at the job.
"""

from __future__ import annotations

import ast
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from run_clm import train_tokenizer
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    EvalPrediction,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

import morph

LABELS = ("Assign", "Expr", "If", "Return", "FunctionDef", "For", "Raise", "With")
DEFAULTS = {
    "output_dir": "runs/classification",
    "per_device_train_batch_size": 32,
    "learning_rate": 1e-3,
    "eval_strategy": "steps",
    "eval_steps": 50,
    "save_strategy": "best",
    "load_best_model_at_end": True,
    "metric_for_best_model": "accuracy",
    "num_train_epochs": 10,
}


@dataclass
class ModelArguments:
    """The model, which is trained from scratch."""

    model_type: str = field(default="bert", metadata={"help": "Any model of transformers that classifies texts."})
    hidden_size: int = field(default=64, metadata={"help": "Width."})
    num_layers: int = field(default=4, metadata={"help": "Depth."})
    vocab_size: int = field(default=1000, metadata={"help": "Of the tokenizer that is trained on the text."})
    config_overrides: str = field(default="", metadata={"help": "As in 'hidden_dropout_prob=0.0'."})


@dataclass
class DataTrainingArguments:
    """The statements."""

    max_seq_length: int = field(default=64, metadata={"help": "Longer texts are cut off."})
    pad_to_max_length: bool = field(default=False, metadata={"help": "Otherwise each batch is padded to its longest."})
    early_stopping_patience: int = field(default=3, metadata={"help": "Evaluations that may be worse; 0: any number."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "None: all of the last file."})
    num_files: int = field(default=10, metadata={"help": "Of the standard library; the last is for validation."})


def main(**given: Any) -> morph.Job:
    """Read the arguments, tokenize the statements, and make the Trainer."""
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_dict({**DEFAULTS, **given})
    set_seed(training_args.seed)

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[: data_args.num_files]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    tokenizer = train_tokenizer(texts, model_args.vocab_size)

    def preprocess_function(text: str) -> list[dict[str, Any]]:
        padding = "max_length" if data_args.pad_to_max_length else False
        limits = {"padding": padding, "max_length": data_args.max_seq_length, "truncation": True}
        return [{**tokenizer(statement, **limits), "label": label} for statement, label in statements(text)]

    train_dataset = [sample for text in texts[:-1] for sample in preprocess_function(text)]
    eval_dataset = preprocess_function(texts[-1])[: data_args.max_eval_samples]

    config = AutoConfig.for_model(
        model_args.model_type,
        vocab_size=len(tokenizer),
        hidden_size=model_args.hidden_size,
        intermediate_size=4 * model_args.hidden_size,
        num_hidden_layers=model_args.num_layers,
        num_attention_heads=4,
        max_position_embeddings=data_args.max_seq_length,
        pad_token_id=tokenizer.pad_token_id,
        num_labels=len(LABELS),
    )
    if model_args.config_overrides:
        config.update_from_string(model_args.config_overrides)
    model = AutoModelForSequenceClassification.from_config(config)

    def compute_metrics(p: EvalPrediction) -> dict[str, float]:
        return {"accuracy": float((np.argmax(p.predictions, axis=1) == p.label_ids).mean())}

    patience = data_args.early_stopping_patience
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=default_data_collator if data_args.pad_to_max_length else DataCollatorWithPadding(tokenizer),
        callbacks=[EarlyStoppingCallback(patience)] if patience else [],
    )
    longest = data_args.max_seq_length
    return morph.hf.job(trainer, buckets=() if data_args.pad_to_max_length else (longest // 4, longest // 2, longest))


def statements(text: str) -> list[tuple[str, int]]:
    """The statements of a file, each with the number of its kind; parts of others too."""
    kinds = [(node, type(node).__name__) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    lines = text.splitlines()
    return [(lines[node.lineno - 1].strip(), LABELS.index(kind)) for node, kind in kinds if kind in LABELS]
