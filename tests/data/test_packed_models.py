"""Models that keep the documents of a packed sample apart pass the check; those that mix them are refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import morph
from morph.contract.errors import JobError
from morph.data import Packed, document_mask
from morph.preflight.packed_check import check_packed

pytestmark = pytest.mark.slow

GUIDE = Path(__file__).parents[2] / "docs/guides/your-model.md"
DOCUMENTS = [torch.randint(2, 64, (n,), generator=torch.Generator().manual_seed(n)) for n in (7, 6, 9, 5)]
TINY = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "pad_token_id": 1}
PLAIN = TINY | {"intermediate_size": 64, "max_position_embeddings": 66, "bos_token_id": 0, "eos_token_id": 2}


def of(name: str, kind: str = "ForCausalLM", **sizes: Any) -> Callable[[], nn.Module]:
    config = getattr(transformers, f"{name}Config")(**PLAIN | sizes)
    return lambda: getattr(transformers, name + kind)(config)


GROUPED: dict[str, Any] = {"num_key_value_heads": 4}
APART = {
    "Gemma": of("Gemma", head_dim=8, **GROUPED),
    "GPT-2": of("GPT2", "LMHeadModel", n_positions=66),
    "GPT-NeoX": of("GPTNeoX"),
    "Llama": of("Llama", **GROUPED),
    "Mistral": of("Mistral", **GROUPED),
    "Mixtral": of("Mixtral", num_local_experts=4, **GROUPED),
    "Phi": of("Phi", **GROUPED),
    "Qwen2": of("Qwen2", **GROUPED),
}
MIXED = {
    "BERT": of("Bert", "ForMaskedLM"),
    "OPT": of("OPT", ffn_dim=64, word_embed_proj_dim=32),
    "RoBERTa": of("Roberta", "ForMaskedLM"),
}


class Documents(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return len(DOCUMENTS)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": DOCUMENTS[index], "labels": DOCUMENTS[index].clone()}


class Own(nn.Module):
    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.tokens, self.mix, self.head = nn.Embedding(64, 16), nn.Linear(16, 48), nn.Linear(16, 64)
        self.masked = masked

    def forward(self, input_ids: Tensor, position_ids: Tensor, **_: Any) -> Any:
        hidden = self.tokens(input_ids)
        query, key, value = self.mix(hidden)[:, None].chunk(3, -1)
        mask = document_mask(position_ids) if self.masked else None
        mixed = functional.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)
        return transformers.modeling_outputs.CausalLMOutput(logits=self.head(hidden + mixed[:, 0]))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> morph.Loss:
    takes = {} if type(model).__name__.endswith("MaskedLM") else {"use_cache": False}
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], **takes).logits
    return morph.losses.cross_entropy(logits[:, :-1], batch["labels"][:, 1:])


def packed(model: Callable[[], nn.Module]) -> morph.Job:
    lengths = [len(document) for document in DOCUMENTS]
    return morph.Job(
        name="packed",
        model=model,
        loss=loss,
        dataset=lambda: Packed(Documents(), 16, lengths),
        optimizer=lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.1),
        batch_size=2,
    )


@pytest.mark.parametrize("model", [*APART.values(), lambda: Own(masked=True)], ids=[*APART, "own"])
def test_a_model_that_masks_other_documents_passes(model: Callable[[], nn.Module]) -> None:
    check_packed(packed(model))


@pytest.mark.parametrize("model", [*MIXED.values(), lambda: Own(masked=False)], ids=[*MIXED, "own"])
def test_a_model_that_mixes_documents_is_refused_by_name(model: Callable[[], nn.Module]) -> None:
    with pytest.raises(JobError, match=rf"{type(model()).__name__} mixes the documents of a packed sample"):
        check_packed(packed(model))


def test_the_guide_names_the_models_that_pass_and_those_that_do_not() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    for names, beginning in ((APART, "These make the mask"), (MIXED, "These mix documents")):
        line = re.search(rf"^- {beginning}[^:]*: ([^.(]*)", text, re.MULTILINE)
        assert line[1].strip().split(", ") == list(names)
