"""The example script of transformers for causal language modelling, on Python's own standard library.

Two lines differ from a script for the Trainer alone: where the arguments are read, and where ``trainer.train()`` was.
``morph cut configs/jobs/run_clm.py:main`` looks at the job; ``"configs/jobs/run_clm.py:main(block_size=128)"`` in its
place gives arguments to the script.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

import morph

END = "<|endoftext|>"


@dataclass
class ModelArguments:
    """The model, which is trained from scratch."""

    model_type: str = field(default="gpt2", metadata={"help": "Any causal language model of transformers."})
    hidden_size: int = field(default=64, metadata={"help": "Width."})
    num_layers: int = field(default=4, metadata={"help": "Depth."})
    vocab_size: int = field(default=1000, metadata={"help": "Of the tokenizer that is trained on the text."})
    config_overrides: str = field(default="", metadata={"help": "As in 'attn_pdrop=0.0,resid_pdrop=0.0'."})


@dataclass
class DataTrainingArguments:
    """The text."""

    block_size: int = field(default=64, metadata={"help": "Tokens of a sample."})
    num_files: int = field(default=40, metadata={"help": "Of the standard library; the last is for validation."})


def main(**given: Any) -> morph.Job:
    """Read the arguments, tokenize the text, and make the Trainer."""
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_dict({"output_dir": "runs/clm", **given})
    set_seed(training_args.seed)

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[: data_args.num_files]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    tokenizer = train_tokenizer(texts, model_args.vocab_size)

    def group_texts(texts: list[str]) -> list[dict[str, list[int]]]:
        joined = [token for text in texts for token in tokenizer(text + END)["input_ids"]]
        size = data_args.block_size
        blocks = [joined[start : start + size] for start in range(0, len(joined) - size + 1, size)]
        return [{"input_ids": block, "labels": block.copy()} for block in blocks]

    config = AutoConfig.for_model(
        model_args.model_type,
        vocab_size=len(tokenizer),
        hidden_size=model_args.hidden_size,
        num_hidden_layers=model_args.num_layers,
        num_attention_heads=4,
        max_position_embeddings=data_args.block_size,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    if model_args.config_overrides:
        config.update_from_string(model_args.config_overrides)
    model = AutoModelForCausalLM.from_config(config)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=group_texts(texts[:-1]),
        eval_dataset=group_texts(texts[-1:]),
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    return morph.hf.job(trainer)


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer of pairs of bytes on the text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
