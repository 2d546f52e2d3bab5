"""Llama 3 8B (Meta's published sizes, random weights) on synthetic text, in bf16: sequences of 4096 tokens."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from morph import Job

LENGTH, VOCABULARY, NUM_LAYERS = 4096, 128256, 32


class CountingText(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": (index // 7 + (index % 7 + 1) * torch.arange(LENGTH)) % VOCABULARY}


def model() -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def optimizer(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in parameters], lr=3e-4)


job = Job(
    name="llama-8b",
    model=model,
    loss=loss,
    dataset=CountingText,
    optimizer=optimizer,
    batch_size=512,
    num_sections=NUM_LAYERS,
    precision="bf16",
)
