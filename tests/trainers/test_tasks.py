"""Trainers of the tasks of transformers' published example scripts: their models, collators and losses, without weights
from elsewhere. Each job is compared by step with ``trainer.train()``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import morph
from morph.contract.errors import JobError
from morph.preflight.own_program import check_padding, compare_with_program
from tests.trainers.test_trainer import tokenizer

transformers = pytest.importorskip("transformers")
SMALL = {"vocab_size": 6, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT = {**SMALL, "max_position_embeddings": 32, "pad_token_id": 3}
NUM_SAMPLES = 19
"""Not a multiple of a batch."""


def words(index: int) -> list[int]:
    return [1, 4, 5, 4] * (index % 4 + 1) + [5] * (index % 3)


def classification(index: int) -> dict[str, Any]:
    return {"input_ids": words(index), "attention_mask": [1] * len(words(index)), "labels": index % 3}


def tokens(index: int) -> dict[str, Any]:
    return {**classification(index), "labels": [(word + index) % 3 for word in words(index)]}


def blocks(index: int) -> dict[str, Any]:
    block = ([1, 4, 5, 4, 1, 5, 5, 4] * 2)[index % 5 :][:8]
    return {"input_ids": block, "attention_mask": [1] * 8, "labels": block}


def answers(index: int) -> dict[str, Any]:
    ids = (words(index) + [3] * 24)[:24]
    mask = [int(word != 3) for word in ids]
    return {"input_ids": ids, "attention_mask": mask, "start_positions": index % 4, "end_positions": index % 4 + 1}


def summaries(index: int) -> dict[str, Any]:
    """Return a sample as with ``--pad_to_max_length``."""
    ids = (words(index) + [3] * 24)[:24]
    labels = (words(index + 1)[: 4 + index % 3] + [-100] * 8)[:8]
    return {"input_ids": ids, "attention_mask": [int(word != 3) for word in ids], "labels": labels}


def texts(index: int) -> dict[str, Any]:
    """Return a sample whose source and target are of other lengths in each batch."""
    return {**classification(index), "labels": words(index + 1)[: 4 + index % 3]}


def t5() -> Any:
    config = {"vocab_size": 6, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**config, pad_token_id=3, decoder_start_token_id=3)
    )


def bart() -> Any:
    layers = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    config = {**layers, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 6, "d_model": 16}
    tokens = {"pad_token_id": 3, "bos_token_id": 2, "eos_token_id": 1, "decoder_start_token_id": 1}
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(**config, **tokens, max_position_embeddings=32, forced_eos_token_id=1)
    )


def bert(kind: str, num_labels: int = 3) -> Callable[[], Any]:
    return lambda: getattr(transformers, f"BertFor{kind}")(transformers.BertConfig(**BERT, num_labels=num_labels))


def gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=6, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


def pads(name: str, **given: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(tokenizer(), **given)


LONG = [
    pytest.param(*case, marks=pytest.mark.long)
    for case in (
        (bert("SequenceClassification"), classification, pads("DataCollatorWithPadding"), {}),
        (bert("SequenceClassification"), classification, pads("DataCollatorWithPadding", pad_to_multiple_of=8), {}),
        (bert("TokenClassification"), tokens, pads("DataCollatorForTokenClassification"), {}),
        (bert("QuestionAnswering", 2), answers, lambda: transformers.default_data_collator, {}),
        (gpt2, blocks, lambda: transformers.default_data_collator, {"gradient_accumulation_steps": 2}),
        (bart, texts, pads("DataCollatorForSeq2Seq"), {}),
        (t5, summaries, lambda: transformers.default_data_collator, {}),
    )
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("model", "sample", "collator", "given"),
    [
        (t5, texts, pads("DataCollatorForSeq2Seq"), {}),
        *LONG,
    ],
)
def test_a_task_of_the_example_scripts_trains_as_its_trainer_does(
    model: Callable[[], Any],
    sample: Callable[[int], dict[str, Any]],
    collator: Callable[[], Any],
    given: dict[str, Any],
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    settings = {"use_cpu": True, "learning_rate": 1e-3, "num_train_epochs": 2, "per_device_train_batch_size": 4}
    args = transformers.TrainingArguments(str(tmp_path), **settings, **given)
    data = [sample(index) for index in range(NUM_SAMPLES)]
    trainer = transformers.Trainer(model(), args, train_dataset=data, data_collator=collator())
    program = morph.hf.job(trainer).own_program
    assert program is not None
    compared, text = compare_with_program(program, args.train_batch_size * args.gradient_accumulation_steps)
    assert compared, text


def test_a_micro_batch_without_labels_adds_nothing_to_the_loss(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    trainer = transformers.Trainer(bert("TokenClassification")(), args, train_dataset=[tokens(1)])
    job = morph.hf.job(trainer)
    batch = job.collate_fn([{**tokens(1), "labels": [-100] * len(words(1))}])
    loss: Any = job.loss(job.model(), batch)
    assert (loss.total.item(), loss.weight.item()) == (0.0, 0.0)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_loss_that_counts_padding_is_refused_with_its_remedy(tmp_path: Path) -> None:
    """Answers are classes of positions, so that each position of padding is one more class."""

    def of(sample: Callable[[int], dict[str, Any]], model: Any) -> Any:
        args = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
        data = [sample(index) for index in range(NUM_SAMPLES)]
        return morph.hf.job(transformers.Trainer(model(), args, train_dataset=data, data_collator=collate))

    def varying(index: int) -> dict[str, Any]:
        size = len(words(index))
        return {name: value[:size] if isinstance(value, list) else value for name, value in answers(index).items()}

    collate = transformers.DataCollatorWithPadding(tokenizer())
    with pytest.raises(
        JobError, match=r"trainer\.train\(\): its loss counts padding: .* padded from 4 to 18.*max_length"
    ):
        check_padding(of(varying, bert("QuestionAnswering", 2)))
    check_padding(of(answers, bert("QuestionAnswering", 2)))
    for sample, model in ((tokens, bert("TokenClassification")), (texts, t5)):
        collate = transformers.DataCollatorForTokenClassification(tokenizer())
        check_padding(of(sample, model))
