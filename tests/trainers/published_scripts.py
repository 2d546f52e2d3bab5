"""Fetches transformers' example scripts, and writes small models and data for them.

``python -m tests.trainers.published_scripts FOLDER [URL]`` fetches the files that ``published_scripts.yaml`` names, and
checks them; another URL may be ``file:///folder``.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import yaml

ROOT = Path(__file__).parents[2]
TABLE: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
FETCH_S = 60
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNKNOWN, BEGIN, END, _ = range(len(SPECIAL))
NUM_TEXTS, NUM_WORDS, MOST_LABELS = 43, 24, 3
"""The number of texts is not a multiple of a batch."""
METRICS = ("accuracy", "seqeval", "squad", "rouge")


@dataclass(frozen=True)
class Run:
    """A script's run: its model's kind, its data, options in addition to those of the data, and how it is refused."""

    script: str
    model: str
    data: str
    given: Mapping[str, Any] = field(default_factory=dict)
    refused: str | None = None

    @property
    def name(self) -> str:
        return "-".join([Path(self.script).stem, self.model, *self.given])


RUNS = tuple(Run(**run) for run in TABLE["runs"])


def fetch(folder: Path, url: str = TABLE["url"]) -> None:
    """Fetch the scripts that are not there; one that is not as it was is an error."""
    for name, digest in TABLE["files"].items():
        path = folder / name
        if not path.is_file():
            try:
                with urlopen(f"{url}/{name}", timeout=FETCH_S) as answer:
                    text = answer.read()
            except OSError as error:
                raise SystemExit(f"error: {url}/{name}: {error}") from error
            if hashlib.sha256(text).hexdigest() != digest:
                raise SystemExit(f"error: {url}/{name} is not the script that was compared")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)


def texts() -> list[str]:
    """Return the first words of docstrings of the standard library."""
    found = []
    for name in ("argparse", "heapq", "random", "string", "textwrap", "calendar", "bisect"):
        tree = ast.parse(Path(json.__file__).parents[1].joinpath(f"{name}.py").read_text(encoding="utf-8"))
        nodes = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef))
        words = [(ast.get_docstring(node) or "").split()[:NUM_WORDS] for node in nodes]
        found += [" ".join(some) for some in words if len(some) > MOST_LABELS + 1]
    return found[:NUM_TEXTS]


def _answer(number: int, text: str) -> dict[str, Any]:
    words = text.split()
    answer = {"text": [words[4]], "answer_start": [len(" ".join(words[:4])) + 1]}
    return {"id": str(number), "question": " ".join(words[:3]), "context": text, "answers": answer}


def write_data(folder: Path) -> None:
    """Write the data, and stand-ins for the metrics that ``evaluate.load`` would fetch."""
    numbered = list(enumerate(texts()))
    rows: dict[str, list[dict[str, Any]]] = {
        "classes": [{"sentence": text, "label": "abc"[number % MOST_LABELS]} for number, text in numbered],
        "texts": [{"text": text} for _, text in numbered],
        "tokens": [
            {
                "tokens": text.split(),
                "ner_tags": [("O", "B-X", "B-Y")[len(word) % MOST_LABELS] for word in text.split()],
            }
            for _, text in numbered
        ],
        "summaries": [{"text": text, "summary": " ".join(text.split()[: 3 + number % 4])} for number, text in numbered],
    }
    for name, some in rows.items():
        (folder / f"{name}.json").write_text("\n".join(map(json.dumps, some)), encoding="utf-8")
    answers = {"data": [_answer(number, text) for number, text in numbered]}
    (folder / "answers.json").write_text(json.dumps(answers), encoding="utf-8")
    for metric in METRICS:
        (folder / metric).mkdir()
        (folder / metric / f"{metric}.py").write_text(_METRIC, encoding="utf-8")
    (folder / "nltk" / "tokenizers" / "punkt").mkdir(parents=True)


_METRIC = """
import datasets
import evaluate

NUMBERS = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})


class Own(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(description="", citation="", features=NUMBERS)

    def _compute(self, predictions, references):
        return {"accuracy": sum(map(int.__eq__, predictions, references)) / len(references)}
"""


def options(run: Run, output_dir: str) -> dict[str, Any]:
    """Return the options of a run, in a folder that has the data and the models."""
    file = f"{run.data}.json"
    given = {"model_name_or_path": run.model, "train_file": file, "output_dir": output_dir, "do_train": True}
    given |= {"use_cpu": True, "num_train_epochs": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-3}
    if run.data == "classes":
        given["validation_file"] = file
    if run.data in ("classes", "tokens", "answers"):
        given["max_seq_length"] = NUM_WORDS
    if run.data == "summaries":
        given |= {"max_source_length": NUM_WORDS, "max_target_length": 8}
    return {**given, "report_to": "none", **run.given}


def write_model(run: Run, folder: Path) -> None:
    """Write a model with random weights and without dropout, and a tokenizer of the texts' words."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = sorted({word for text in texts() for word in text.split()})[:200]
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[UNKNOWN]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", BEGIN), ("[SEP]", END)],
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    made = {**dict(zip(names, SPECIAL, strict=True)), "bos_token": SPECIAL[BEGIN], "eos_token": SPECIAL[END]}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **made).save_pretrained(
        folder / run.model
    )
    config = getattr(transformers, f"{run.model}Config")(vocab_size=len(vocabulary), **_CONFIGS[run.model])
    if run.data in ("classes", "tokens"):
        config.num_labels = MOST_LABELS
    torch.manual_seed(0)
    getattr(transformers, f"{run.model}{_HEADS.get((run.model, run.data), 'ForConditionalGeneration')}")(
        config
    ).save_pretrained(folder / run.model)


_HEADS = {
    ("Bert", "classes"): "ForSequenceClassification",
    ("Bert", "tokens"): "ForTokenClassification",
    ("Bert", "answers"): "ForQuestionAnswering",
    ("GPT2", "texts"): "LMHeadModel",
}
_TOKENS = {"pad_token_id": PAD, "bos_token_id": BEGIN, "eos_token_id": END}
_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "Bert": {
        **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"max_position_embeddings": 64, "pad_token_id": PAD},
        **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    },
    "GPT2": {
        **{"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "bos_token_id": BEGIN, "eos_token_id": END},
        **{"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    },
    "T5": {
        **{"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0},
        **{"pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": PAD},
    },
    "Bart": {
        **{"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
        **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 64, "dropout": 0.0},
        **{**_TOKENS, "decoder_start_token_id": END, "forced_eos_token_id": END},
    },
}


if __name__ == "__main__":
    fetch(Path(sys.argv[1]), *sys.argv[2:])
